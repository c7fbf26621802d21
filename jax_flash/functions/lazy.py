"""Arrays of which only the elements that a function looks at are computed.

A user's function is one of scalars, but JAX writes an index as an array, and functions look at rows of
arrays that they capture. So a value of the function's jaxpr is a function from an index to a scalar `Node`.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np

from jax_flash.functions.graph import CONSTANT, Graph, Node

Index = tuple[Node, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy:
    """An array, element by element.

    Attributes:
      element: the scalar at an index whose parts are within the array's shape.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    element: Callable[[Index], Node]
    _known: dict[tuple[int, ...], Node] = dataclasses.field(default_factory=dict, repr=False)

    def at(self, index: Index) -> Node:
        assert len(index) == len(self.shape), (index, self.shape)
        key = tuple(part.number for part in index)
        if key not in self._known:
            self._known[key] = self.element(index)
        return self._known[key]

    def view(self, shape: tuple[int, ...], index: Callable[[Index], Index]) -> "Lazy":
        """An array of such a shape, whose element at i is this one's at index(i)."""
        return Lazy(tuple(shape), self.dtype, lambda i: self.at(index(i)))


def scalar(node: Node) -> Lazy:
    return Lazy((), node.dtype, lambda _: node)


def operand(graph: Graph, name: Hashable, shape: tuple[int, ...], dtype: np.dtype) -> Lazy:
    """A dense array in memory."""
    return Lazy(tuple(shape), np.dtype(dtype), lambda i: graph.load(name, flat_index(graph, shape, i), dtype))


def constant(graph: Graph, value: Any) -> Lazy:
    """An array of numbers, looked up at constant indices alone."""
    value = np.asarray(value)

    def element(index: Index) -> Node:
        if any(part.operation != CONSTANT for part in index):
            raise ValueError("a constant array within a function, indexed by what isn't constant")
        return graph.constant(value[tuple(int(part.value) for part in index)], value.dtype)

    return Lazy(value.shape, value.dtype, element)


def flat_index(graph: Graph, shape: tuple[int, ...], index: Index) -> Node:
    """The place of an element in a dense array.

    The sum starts with what depends on fewest arguments, so that it can be computed ahead of the others.
    """
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    parts = [(part, step) for part, step, size in zip(index, steps, shape, strict=True) if size > 1]
    place = graph.integer(0)
    for part, step in sorted(parts, key=lambda x: (_scope_of_inputs(x[0].inputs), -x[1])):
        place = graph.add(place, graph.multiply(part, step))
    return place


def _scope_of_inputs(inputs: frozenset[str]) -> int:
    return 0 if inputs <= {"batch"} else 1 if not inputs & {"score", "key"} else 2


def index_of_place(graph: Graph, shape: tuple[int, ...], place: Node) -> Index:
    """The inverse of `flat_index`."""
    index = []
    for axis, size in enumerate(shape):
        step = math.prod(shape[axis + 1 :])
        part = graph.divide(place, step)
        index.append(graph.remainder(part, size) if axis > 0 else part)
    return tuple(index)


def all_indices(graph: Graph, shape: tuple[int, ...]) -> Iterator[Index]:
    for index in itertools.product(*map(range, shape)):
        yield tuple(graph.integer(part) for part in index)


def reshape(graph: Graph, x: Lazy, shape: tuple[int, ...]) -> Lazy:
    kept = [axis for axis, size in enumerate(shape) if size != 1]
    own = [axis for axis, size in enumerate(x.shape) if size != 1]
    if [shape[axis] for axis in kept] == [x.shape[axis] for axis in own]:
        source = dict(zip(own, kept, strict=True))
        zero = graph.integer(0)
        return x.view(
            shape, lambda i: tuple(i[source[a]] if a in source else zero for a in range(len(x.shape)))
        )
    return x.view(shape, lambda i: index_of_place(graph, x.shape, flat_index(graph, shape, i)))
