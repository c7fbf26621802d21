"""A jaxpr, read into a graph of scalars.

Functions that it calls are inlined. Elementwise primitives apply to scalars; how arrays are taken apart and
put together is in `arrays.py`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jax_flash.functions import arrays, lazy
from jax_flash.functions.errors import GraphTooLargeError, UnsupportedPrimitiveError, user_line
from jax_flash.functions.graph import DTYPES, ELEMENTWISE, INT32, Graph, Node
from jax_flash.functions.lazy import Lazy

LARGEST_GRAPH = 2048
"""Nodes of the largest graph of a function of a score, and of its derivative. A product of a row and a matrix
of 32 x 32 would be 5000 nodes, and JAX takes milliseconds to differentiate each."""

LARGEST_MASK_GRAPH = 8192
"""Nodes of the largest graph of a mask function, which has no derivative. `MultiHeadMask` has a mask for each
head: 1700 nodes for 128 heads with a `BigBirdMask` each."""

_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
"""Primitives that call a function, and the parameter that has it."""


def read(
    graph: Graph,
    closed: ClosedJaxpr,
    captured: Sequence[Lazy],
    arguments: Sequence[Lazy],
    largest: int = LARGEST_GRAPH,
) -> list[Lazy]:
    """The results of a jaxpr.

    Args:
      captured: values of its constants, in their order.
      arguments: values of its arguments.
      largest: how many nodes the graph may have.

    Raises UnsupportedPrimitiveError at once, or when an element of a result is looked at.
    """
    return _Reader(graph, largest).read(closed.jaxpr, captured, arguments, ())


def called(equation: JaxprEqn) -> tuple[Any, list[Any]] | None:
    """The jaxpr that an equation calls, and its constants; None if it calls none."""
    name = _CALLS.get(equation.primitive.name)
    if name is None:
        return None
    function = equation.params[name if name in equation.params else "fun_jaxpr"]
    return (function.jaxpr, function.consts) if hasattr(function, "consts") else (function, [])


class _Reader:
    def __init__(self, graph: Graph, largest: int):
        self.graph, self.largest = graph, largest

    def read(self, jaxpr, captured, arguments, callers: tuple[JaxprEqn, ...]) -> list[Lazy]:
        values: dict[Any, Lazy] = {}

        def value_of(variable) -> Lazy:
            if isinstance(variable, Literal):
                return lazy.constant(
                    self.graph, np.asarray(variable.val, getattr(variable.aval, "dtype", None))
                )
            return values[variable]

        values.update(zip(jaxpr.constvars, captured, strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))
        for equation in jaxpr.eqns:
            results = self.equation(equation, [value_of(v) for v in equation.invars], callers)
            values.update(zip(equation.outvars, results, strict=True))
        return [value_of(v) for v in jaxpr.outvars]

    def equation(self, equation: JaxprEqn, operands: list[Lazy], callers) -> list[Lazy]:
        name, chain = equation.primitive.name, (*callers, equation)

        def refusal(reason: str) -> UnsupportedPrimitiveError:
            return UnsupportedPrimitiveError(name, user_line(chain), reason)

        if equation.effects:
            raise refusal("it has effects; code is written for pure functions")
        inner = called(equation)
        if inner is not None:
            constants = [lazy.constant(self.graph, constant) for constant in inner[1]]
            return self.read(inner[0], constants, operands, chain)
        if name == "cond":
            return self.cond(equation, operands, chain)
        form = arrays.FORMS.get(name)
        if form is not None:
            try:
                elements = form(self.graph, equation, operands)
            except arrays.TooLargeError as error:
                raise refusal(str(error)) from None
        else:
            elements = [lambda index: self.elementwise(equation, operands, index)]
            if len(equation.outvars) != 1:
                elements *= len(equation.outvars)

        def checked(element, dtype):
            def look_up(index: lazy.Index) -> Node:
                if self.graph.size > self.largest:
                    reason = f"with it there are more than {self.largest} scalar operations"
                    reason += "; code is written out for no more"
                    raise GraphTooLargeError(name, user_line(chain), reason)
                # Types that code can't be written for are refused where an element is used, as arrays of
                # these may come up where nothing of them is.
                if dtype not in DTYPES:
                    raise refusal(f"its result is {dtype.name}; code is written for 32 bits and fewer")
                try:
                    return element(index)
                except (arrays.TooLargeError, _CantWriteError, ValueError) as error:
                    raise refusal(str(error)) from None

            return look_up

        avals = [arrays.result_of(equation, number) for number in range(len(equation.outvars))]
        results = []
        for aval, element in zip(avals, elements, strict=True):
            dtype = np.dtype(getattr(aval, "dtype", object)) if _is_numeric(aval) else np.dtype(object)
            result = Lazy(aval.shape, dtype, checked(element, dtype))
            results.append(_looked_at(result) if aval.shape == () else result)
        return results

    def elementwise(self, equation: JaxprEqn, operands: list[Lazy], index: lazy.Index) -> Node:
        if equation.primitive.name not in ELEMENTWISE:
            dtypes = [operand.dtype for operand in operands]
            reason = self.graph.unsupported(equation.primitive.name, dtypes, np.dtype(bool))
            raise _CantWriteError(reason or "it isn't known to be a function of scalars")
        # A scalar stands beside arrays in `select_n` and `clamp`.
        arguments = [operand.at(index if operand.shape else ()) for operand in operands]
        dtype = np.dtype(arrays.result_of(equation).dtype)
        reason = self.graph.unsupported(
            equation.primitive.name, [argument.dtype for argument in arguments], dtype
        )
        if reason is not None:
            raise _CantWriteError(reason)
        bind = functools.partial(equation.primitive.bind, **equation.params)
        return self.graph.apply(equation.primitive.name, arguments, dtype, bind, equation.params)

    def cond(self, equation: JaxprEqn, operands: list[Lazy], chain) -> list[Lazy]:
        """All branches are computed, and a result is selected. That is safe, as loads stay within arrays."""
        which, *others = operands
        branches = [
            self.read(b.jaxpr, [lazy.constant(self.graph, c) for c in b.consts], others, chain)
            for b in equation.params["branches"]
        ]

        def select(results: tuple[Lazy, ...]) -> Lazy:
            def element(index: lazy.Index) -> Node:
                chosen = results[0].at(index)
                index_of_branch = self.graph.convert(which.at(()), INT32)
                for number, result in enumerate(results[1:], start=1):
                    is_this = self.graph.at_least(index_of_branch, number)
                    chosen = self.graph.select_branch(is_this, chosen, result.at(index))
                return chosen

            return Lazy(results[0].shape, results[0].dtype, element)

        return [select(results) for results in zip(*branches, strict=True)]


class _CantWriteError(Exception):
    """Why an elementwise primitive can't be written."""


def _is_numeric(aval) -> bool:
    try:
        np.dtype(aval.dtype)
    except TypeError:  # a type of JAX's own, as that of random keys
        return False
    return True


def _looked_at(result: Lazy) -> Lazy:
    """A scalar, computed now, so that looking at the last of many is no deep recursion. What it raises, it
    raises where it is used, as it may not be. But a graph that is too large is no longer read."""
    try:
        return lazy.scalar(result.at(()))
    except GraphTooLargeError:
        raise
    except UnsupportedPrimitiveError:
        return result
