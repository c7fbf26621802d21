"""A user's function on packed sequences: of a token it sees the sequence, and the position in that.

A call on packed sequences counts queries and keys from the first packed token. So the function captures three
more arrays, which say of each query what sequence it is of and its position there, and of each key its
position. What they say of tokens of no sequence, and of pairs of two sequences, doesn't matter: no query
attends there.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_flash.functions.graph import INT32, Graph, Node
from jax_flash.functions.static import StaticFunction
from jax_flash.functions.substitution import of_indices

PLACES = {"batch": "query", "query": "query", "key": "key"}
"""The arguments that the further arrays have, in this order, and of what token each: int32 `(T,)`, `(T,)` and
`(S,)`."""


def on_packed_tokens(function: StaticFunction, queries: int, keys: int) -> StaticFunction:
    """The function of packed tokens, behind whose captured arrays there are those of `PLACES`.

    Args:
      queries: T, all packed tokens.
      keys: S.
    """
    tokens = {"query": queries, "key": keys}
    shapes = tuple(jax.ShapeDtypeStruct((tokens[of],), np.dtype(np.int32)) for of in PLACES.values())
    return of_indices(function, _OfTokens(shapes), f"on packed tokens, {queries} and {keys}")


@dataclasses.dataclass(frozen=True)
class _OfTokens:
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    names = tuple(PLACES)

    def nodes(self, graph: Graph, first: int, own: Mapping[str, Node]) -> dict[str, Node]:
        places = enumerate(PLACES.items(), first)
        return {name: graph.load(number, own[of], INT32) for number, (name, of) in places}

    def values(self, arrays: Sequence[Any], own: Mapping[str, Any]) -> dict[str, Any]:
        places = zip(arrays, PLACES.items(), strict=True)
        return {name: x.at[own[of]].get(mode="promise_in_bounds") for x, (name, of) in places}
