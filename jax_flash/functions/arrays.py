"""Primitives that take arrays apart or put them together.

Each function here takes an equation of a jaxpr and its operands, and returns for each result the function
from an index to the element there.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jax_flash.functions import lazy
from jax_flash.functions.graph import BFLOAT16, CONSTANT, FLOAT16, FLOAT32, INT32, UINT32, Graph, Node
from jax_flash.functions.lazy import Index, Lazy

LONGEST_SUM = 256
"""Terms of a sum, or of another reduction, that code is written out for."""

Element = Callable[[Index], Node]


def result_of(equation: JaxprEqn, number: int = 0) -> Any:
    """What type JAX gives a result: it has `shape` and `dtype`."""
    return equation.outvars[number].aval


class TooLargeError(Exception):
    """More of something, as terms of a reduction, than code is written out for."""


def _broadcast_in_dim(graph: Graph, equation: JaxprEqn, operands: list[Lazy]) -> list[Element]:
    x, axes, zero = operands[0], equation.params["broadcast_dimensions"], graph.integer(0)

    def element(index: Index) -> Node:
        own = (index[axis] if size > 1 else zero for axis, size in zip(axes, x.shape, strict=True))
        return x.at(tuple(own))

    return [element]


def _reshape(graph: Graph, equation: JaxprEqn, operands: list[Lazy]) -> list[Element]:
    """reshape, squeeze and expand_dims: elements keep their order."""
    return [lazy.reshape(graph, operands[0], result_of(equation).shape).at]


def _transpose(graph: Graph, equation: JaxprEqn, operands: list[Lazy]) -> list[Element]:
    places = np.argsort(equation.params["permutation"])
    return [lambda index: operands[0].at(tuple(index[place] for place in places))]


def _slice(graph: Graph, equation: JaxprEqn, operands: list[Lazy]) -> list[Element]:
    starts = equation.params["start_indices"]
    steps = equation.params["strides"] or (1,) * len(starts)

    def element(index: Index) -> Node:
        own = (
            graph.add(graph.multiply(i, step), graph.integer(start))
            for i, start, step in zip(index, starts, steps, strict=True)
        )
        return operands[0].at(tuple(own))

    return [element]


def _reverse(graph: Graph, equation: JaxprEqn, operands: list[Lazy]) -> list[Element]:
    x, axes = operands[0], equation.params["dimensions"]

    def element(index: Index) -> Node:
        own = (
            graph.add(graph.multiply(i, -1), graph.integer(size - 1)) if axis in axes else i
            for axis, (i, size) in enumerate(zip(index, x.shape, strict=True))
        )
        return x.at(tuple(own))

    return [element]


def _concatenate(graph: Graph, equation: JaxprEqn, operands: list[Lazy]) -> list[Element]:
    axis = equation.params["dimension"]
    ends = np.cumsum([x.shape[axis] for x in operands])

    def element(index: Index) -> Node:
        chosen = None
        for x, end in reversed([(x, end) for x, end in zip(operands, ends, strict=True) if x.shape[axis]]):
            size = x.shape[axis]
            within = graph.clip(graph.add(index[axis], graph.integer(size - int(end))), size - 1)
            is_here = graph.is_within(index[axis], int(end) - 1)
            if chosen is not None and is_here is graph.constant(False, np.dtype(bool)):
                continue
            here = x.at((*index[:axis], within, *index[axis + 1 :]))
            chosen = here if chosen is None else graph.select(is_here, chosen, here)
        assert chosen is not None, "an element of an array without any"
        return chosen

    return [element]


def _split(graph: Graph, equation: JaxprEqn, operands: list[Lazy]) -> list[Element]:
    axis, ends = equation.params["axis"], np.cumsum(equation.params["sizes"])

    def part(start: int) -> Element:
        def element(index: Index) -> Node:
            own = graph.add(index[axis], graph.integer(start))
            return operands[0].at((*index[:axis], own, *index[axis + 1 :]))

        return element

    return [part(int(end) - size) for end, size in zip(ends, equation.params["sizes"], strict=True)]


def _stack(graph: Graph, equation: JaxprEqn, operands: list[Lazy]) -> list[Element]:
    axis = equation.params["axis"]

    def element(index: Index) -> Node:
        own, which = (*index[:axis], *index[axis + 1 :]), index[axis]
        if which.operation == CONSTANT:
            return operands[int(which.value)].at(own)
        chosen = operands[0].at(own)
        for number, x in enumerate(operands[1:], start=1):
            chosen = graph.select(graph.at_least(which, number), chosen, x.at(own))
        return chosen

    return [element]


def _unstack(graph: Graph, equation: JaxprEqn, operands: list[Lazy]) -> list[Element]:
    axis = equation.params["axis"]

    def part(number: int) -> Element:
        return lambda index: operands[0].at((*index[:axis], graph.integer(number), *index[axis:]))

    return [part(number) for number in range(len(equation.outvars))]


def _iota(graph: Graph, equation: JaxprEqn, operands: list[Lazy]) -> list[Element]:
    axis = equation.params["dimension"]
    return [lambda index: graph.convert(index[axis], result_of(equation).dtype)]


def _empty(graph: Graph, equation: JaxprEqn, operands: list[Lazy]) -> list[Element]:
    """What a branch has for values of the other one, which its derivative needs: nobody reads it."""
    return [lambda index: graph.constant(0, result_of(equation).dtype)]


def _dynamic_slice(graph: Graph, equation: JaxprEqn, operands: list[Lazy]) -> list[Element]:
    """A slice is moved until it is within the array."""
    x, *starts = operands
    sizes = equation.params["slice_sizes"]

    def element(index: Index) -> Node:
        own = (
            graph.add(graph.clip(_as_index(graph, start.at(())), whole - size), i)
            for i, start, whole, size in zip(index, starts, x.shape, sizes, strict=True)
        )
        return x.at(tuple(own))

    return [element]


def _gather(graph: Graph, equation: JaxprEqn, operands: list[Lazy]) -> list[Element]:
    """Elements of slices, each of which starts where the last axis of the indices says.

    Slices that aren't within the array are moved until they are, or their elements are the fill value.
    """
    x, indices = operands
    params = equation.params
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    mode = lax.GatherScatterMode.from_any(params["mode"])
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    within_slice = [
        axis
        for axis in range(len(x.shape))
        if axis not in numbers.collapsed_slice_dims and axis not in numbers.operand_batching_dims
    ]
    batch_axes = [axis for axis in range(len(result_of(equation).shape)) if axis not in numbers.offset_dims]

    def element(index: Index) -> Node:
        batch = tuple(index[axis] for axis in batch_axes)
        own = [graph.integer(0)] * len(x.shape)
        is_inside = graph.constant(True, np.dtype(bool))
        for place, axis in enumerate(numbers.start_index_map):
            start, last = (
                _as_index(graph, indices.at((*batch, graph.integer(place)))),
                x.shape[axis] - sizes[axis],
            )
            own[axis] = graph.clip(start, last)
            if fills:
                is_inside = graph.both(is_inside, graph.is_within(start, last))
        batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        for axis, of_indices in batching:
            own[axis] = batch[of_indices]
        for axis, out_axis in zip(within_slice, numbers.offset_dims, strict=True):
            own[axis] = graph.add(own[axis], index[out_axis])
        found = x.at(tuple(own))
        if not fills:
            return found
        fill = graph.constant(_fill_value(params["fill_value"], x.dtype), x.dtype)
        return graph.select(is_inside, fill, found)

    return [element]


def _fill_value(given, dtype: np.dtype):
    if given is not None:
        return given
    if dtype.kind in "iu":
        return np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max
    return True if dtype.kind == "b" else np.nan


def _as_index(graph: Graph, x: Node) -> Node:
    """An index as int32. What is too large for that is too large for any array."""
    if x.dtype == UINT32:
        largest = graph.constant(np.iinfo(np.int32).max, UINT32)
        x = graph.minimum(x, largest)
    if x.dtype.itemsize > 4:
        raise ValueError(f"an index is {x.dtype.name}; code is written for 32 bits and fewer")
    return graph.convert(x, INT32)


def _scan_of_no_steps(graph: Graph, equation: JaxprEqn, operands: list[Lazy]) -> list[Element]:
    """A loop that leaves what it carries as it is, and whose other results have no element. Other loops of a
    static length are written out before."""
    params = equation.params
    if params["length"] != 0:
        raise TooLargeError("beside a loop of no steps, loops aren't written out")
    carried = operands[params["num_consts"] :][: params["num_carry"]]
    return [x.at for x in carried] + [_no_element] * (len(equation.outvars) - len(carried))


def _no_element(index: Index) -> Node:
    raise ValueError("an element of an array without any")


def _reduction(name: str, bind, graph: Graph, equation: JaxprEqn, operands: list[Lazy]) -> list[Element]:
    x, axes = operands[0], equation.params["axes"]
    sizes = tuple(x.shape[axis] for axis in axes)
    _check_terms(math.prod(sizes))

    def element(index: Index) -> Node:
        terms = []
        for summed in lazy.all_indices(graph, sizes):
            kept, inside = iter(index), dict(zip(axes, summed, strict=True))
            terms.append(
                x.at(tuple(inside[axis] if axis in inside else next(kept) for axis in range(len(x.shape))))
            )
        dtype = x.dtype
        if dtype in (BFLOAT16, FLOAT16):  # as XLA, which rounds sums, not their terms
            terms = [graph.convert(term, FLOAT32) for term in terms]
        total = functools.reduce(lambda a, b: graph.apply(name, (a, b), a.dtype, bind), terms)
        return graph.convert(total, dtype)

    return [element]


def _dot_general(graph: Graph, equation: JaxprEqn, operands: list[Lazy]) -> list[Element]:
    a, b = operands
    (a_summed, b_summed), (a_batch, b_batch) = equation.params["dimension_numbers"]
    sizes = tuple(a.shape[axis] for axis in a_summed)
    _check_terms(math.prod(sizes))
    a_free = [axis for axis in range(len(a.shape)) if axis not in (*a_summed, *a_batch)]
    b_free = [axis for axis in range(len(b.shape)) if axis not in (*b_summed, *b_batch)]
    result = np.dtype(result_of(equation).dtype)
    dtype = FLOAT32 if result in (BFLOAT16, FLOAT16) else result

    def element(index: Index) -> Node:
        batch, index = index[: len(a_batch)], index[len(a_batch) :]
        total = None
        for summed in lazy.all_indices(graph, sizes):
            a_own = dict(zip((*a_summed, *a_batch, *a_free), (*summed, *batch, *index), strict=False))
            b_own = dict(
                zip((*b_summed, *b_batch, *b_free), (*summed, *batch, *index[len(a_free) :]), strict=True)
            )
            factors = [
                graph.convert(x.at(tuple(own[axis] for axis in range(len(x.shape)))), dtype)
                for x, own in ((a, a_own), (b, b_own))
            ]
            term = graph.product(*factors)
            total = term if total is None else graph.add(total, term)
        assert total is not None
        return graph.convert(total, result)

    return [element]


def _check_terms(terms: int):
    if not 1 <= terms <= LONGEST_SUM:
        raise TooLargeError(f"it has {terms} terms; code is written out for 1 to {LONGEST_SUM}")


def _reduce(name: str, bind: Callable) -> Callable[[Graph, JaxprEqn, list[Lazy]], list[Element]]:
    return functools.partial(_reduction, name, bind)


FORMS: dict[str, Callable[[Graph, JaxprEqn, list[Lazy]], list[Element]]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "slice": _slice,
    "rev": _reverse,
    "concatenate": _concatenate,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
    "iota": _iota,
    "empty": _empty,
    "empty2": _empty,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "scan": _scan_of_no_steps,
    "reduce_sum": _reduce("add", lax.add),
    "reduce_prod": _reduce("mul", lax.mul),
    "reduce_max": _reduce("max", lax.max),
    "reduce_min": _reduce("min", lax.min),
    "reduce_and": _reduce("and", lax.bitwise_and),
    "reduce_or": _reduce("or", lax.bitwise_or),
    "dot_general": _dot_general,
}
"""How the elements of results are found, by primitive."""
