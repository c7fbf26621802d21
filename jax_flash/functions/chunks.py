"""A user's function on chunks of sequences: it sees indices of the whole sequences.

A call on chunks counts its own queries and keys from 0. Where its chunks start differs between devices and
steps. So the function captures one more array, the starts of both chunks, and an index that it takes is

    start + stride * own index

Starts are operands, never constants, so one compiled function serves all chunks.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_flash.functions.graph import INT32, Graph, Node
from jax_flash.functions.static import StaticFunction
from jax_flash.functions.substitution import with_indices

STARTS = ("query", "key")
"""The arguments whose starts the further array has, in this order: int32 `(2,)`."""


def on_chunks(function: StaticFunction, stride: int) -> StaticFunction:
    """The function of indices within chunks, behind whose captured arrays there is that of `STARTS`.

    Args:
      stride: from one token of a chunk to its next one, in the whole sequence.
    """
    return with_indices(function, _WithinChunks(stride), f"on chunks, stride {stride}")


@dataclasses.dataclass(frozen=True)
class _WithinChunks:
    stride: int
    names = STARTS
    shapes = (jax.ShapeDtypeStruct((len(STARTS),), np.dtype(np.int32)),)

    def nodes(self, graph: Graph, first: int, own: Mapping[str, Node]) -> dict[str, Node]:
        def whole(axis: int, name: str) -> Node:
            start = graph.load(first, graph.integer(axis), INT32)
            return graph.add(start, graph.multiply(own[name], self.stride))

        return {name: whole(axis, name) for axis, name in enumerate(STARTS)}

    def values(self, arrays: Sequence[Any], own: Mapping[str, Any]) -> dict[str, Any]:
        (starts,) = arrays
        return {name: starts[axis] + self.stride * own[name] for axis, name in enumerate(STARTS)}
