"""A user's function of scalars, traced."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_flash.functions import lazy, reading
from jax_flash.functions.graph import BOOL, DTYPES, FLOAT32, INT32, Graph, Node, Unsupported, nothing

INDICES = ("batch", "head", "query", "key")
"""Arguments of every function, int32. A function of a score has `score`, float32, ahead of them."""


@dataclasses.dataclass(frozen=True)
class ScalarFunction:
    """A function of a score, or of indices alone, as JAX traced it and as a graph of scalars.

    Attributes:
      jaxpr: with a constant for each captured array.
      captured: the arrays that it captures, in the order of the jaxpr's constants. They may be tracers. Code
        that is written for the function reads them as operands of these numbers.
      graph: what `output` is a node of.
    """

    jaxpr: ClosedJaxpr
    captured: tuple[Any, ...]
    arguments: tuple[str, ...]
    graph: Graph
    output: Node

    @property
    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the captured arrays."""
        return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.captured)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function as JAX traced it, with a constant for each captured array.

    Attributes:
      name: of the user's function.
      passed_as: the argument of a call that it came by, for errors.
      result: the dtype that its graph has.
    """

    jaxpr: ClosedJaxpr
    arguments: tuple[str, ...]
    name: str
    passed_as: str
    result: np.dtype


def traced_score_mod(function: Callable[..., Any]) -> Traced:
    """Traces `function(score, batch, head, query_index, key_index) -> score`.

    Raises ValueError or TypeError if its result isn't a scalar, or isn't a float.
    """
    return _traced("score_mod", function, ("score", *INDICES), FLOAT32)


def traced_mask_mod(function: Callable[..., Any]) -> Traced:
    """Traces `function(batch, head, query_index, key_index) -> bool`. Raises as `traced_score_mod`."""
    return _traced("mask_mod", function, INDICES, BOOL)


def traced_masked_score(score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any]) -> Traced:
    """The function of a score that is -inf where `mask_mod` is False, and else what `score_mod` makes of the
    score. Without a `score_mod` it is the score. Raises as `traced_score_mod` and `traced_mask_mod`."""
    of_indices = traced_mask_mod(mask_mod)
    of_score = None if score_mod is None else traced_score_mod(score_mod)

    def masked(score: jax.Array, *indices: jax.Array) -> jax.Array:
        (sees,) = jaxpr_as_fun(of_indices.jaxpr)(*indices)
        if of_score is not None:
            (score,) = jaxpr_as_fun(of_score.jaxpr)(score, *indices)
        return jax.numpy.where(sees, jax.numpy.asarray(score).astype(FLOAT32), -np.inf)

    functions = [x for x in (of_score, of_indices) if x is not None]
    return dataclasses.replace(
        traced_score_mod(masked),
        name=" & ".join(x.name for x in functions),
        passed_as=" or ".join(x.passed_as for x in functions),
    )


def trace_score_mod(function: Callable[..., Any], unsupported: Unsupported = nothing) -> ScalarFunction:
    """Traces `function(score, batch, head, query_index, key_index) -> score`.

    Raises:
      UnsupportedPrimitiveError: it has a primitive that no graph can have, or that `unsupported` refuses.
      ValueError, TypeError: its result isn't a scalar, or isn't a float.
    """
    return as_graph(traced_score_mod(function), unsupported)


def trace_mask_mod(function: Callable[..., Any], unsupported: Unsupported = nothing) -> ScalarFunction:
    """Traces `function(batch, head, query_index, key_index) -> bool`. Raises as `trace_score_mod`."""
    return as_graph(traced_mask_mod(function), unsupported)


def argument_shapes(arguments: Sequence[str]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((), FLOAT32 if name == "score" else INT32) for name in arguments]


def inputs(graph: Graph, arguments: Sequence[str]) -> list[lazy.Lazy]:
    return [
        lazy.scalar(graph.input(name, shape.dtype))
        for name, shape in zip(arguments, argument_shapes(arguments), strict=True)
    ]


def operands(graph: Graph, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[lazy.Lazy]:
    """Arrays that code reads as operands 0, 1, …"""
    return [lazy.operand(graph, number, x.shape, np.dtype(x.dtype)) for number, x in enumerate(shapes)]


def _check_takes(name: str, function: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Raises TypeError if it can't be called with as many arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function that isn't Python's
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{name} must take ({', '.join(arguments)}); it has {signature}: {error}") from None


def _traced(
    argument: str, function: Callable[..., Any], arguments: tuple[str, ...], result: np.dtype
) -> Traced:
    name = f"{argument} ({getattr(function, '__name__', repr(function))})"
    _check_takes(name, function, arguments)
    # An inner `jit` would keep arrays that it captures to itself. Without it they are constants of the
    # whole. Loops of a static length are written out too.
    trace = functools.partial(jax.make_jaxpr(function, return_shape=True), *argument_shapes(arguments))
    try:
        with jax.disable_jit():
            closed, shape = trace()
    except ValueError as error:
        # JAX can't write out a loop of no steps. As a primitive it is one that graphs have.
        if "zero-length scan" not in str(error):
            raise
        closed, shape = trace()
    if not isinstance(shape, jax.ShapeDtypeStruct) or shape.shape != ():
        raise ValueError(f"{name} returns {shape}; it must return a scalar")
    given = np.dtype(shape.dtype)
    if given != result and (result == BOOL or not jax.numpy.issubdtype(given, jax.numpy.floating)):
        raise TypeError(f"{name} returns {given.name}; it must return {result.name}")
    for x in map(jax.typeof, closed.consts):
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise TypeError(f"{name} captures random keys; it may capture their jax.random.key_data")
        if jax.numpy.issubdtype(x.dtype, jax.numpy.complexfloating):
            raise TypeError(
                f"{name} captures an array of {x.dtype}; it may capture its real and imaginary part"
            )
        # Indices of elements are int32.
        if isinstance(x.size, int) and x.size >= 2**31:
            raise ValueError(
                f"{name} captures an array of shape {x.shape}; it may have 2**31 - 1 elements at most"
            )
    return Traced(closed, arguments, getattr(function, "__name__", argument), argument, result)


def as_graph(traced: Traced, unsupported: Unsupported = nothing) -> ScalarFunction:
    """The function as a graph of scalars.

    Raises:
      UnsupportedPrimitiveError: it has a primitive that no graph can have, or that `unsupported` refuses.
      TypeError: it captures an array of a dtype that no graph has, or of symbolic shape.
    """
    graph, closed, arguments = Graph(unsupported), traced.jaxpr, traced.arguments
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in map(jax.typeof, closed.consts)]
    for shape in shapes:
        if (reason := limit_of_captured(shape, DTYPES)) is not None:
            raise TypeError(f"{traced.passed_as} {reason}")
    largest = reading.LARGEST_MASK_GRAPH if traced.result == BOOL else reading.LARGEST_GRAPH
    (output,) = reading.read(graph, closed, operands(graph, shapes), inputs(graph, arguments), largest)
    output = graph.convert(output.at(()), traced.result)
    return ScalarFunction(closed, tuple(closed.consts), arguments, graph, output)


def limit_of_captured(shape: jax.ShapeDtypeStruct, loadable: Sequence[np.dtype]) -> str | None:
    """Why code that loads elements of these dtypes can't read a captured array, after the function's name; or
    None."""
    if np.dtype(shape.dtype) not in loadable:
        return f"captures an array of {shape.dtype}; it may be {', '.join(x.name for x in loadable)}"
    if not all(isinstance(size, int) for size in shape.shape):
        return f"captures an array of symbolic shape {shape.shape}"
    return None
