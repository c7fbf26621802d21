"""A user's function on varlen sequences: of a token it sees the sequence, and the position in that.

A varlen call counts queries and keys from the first packed token. So the function captures three more arrays,
which say of each query what sequence it is of and its position there, and of each key its position. What they
say of tokens of no sequence, and of pairs of two sequences, doesn't matter: no query attends there.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_flash.functions.graph import INT32, Graph, Node
from jax_flash.functions.static import StaticFunction
from jax_flash.functions.substitution import with_indices

LOOKED_UP = {"batch": "query", "query": "query", "key": "key"}
"""The arguments that are looked up, and the index, of a query or of a key, by which each is. There is a
captured int32 array for each, in this order: `(T,)`, `(T,)` and `(S,)`."""


def on_varlen_tokens(function: StaticFunction, queries: int, keys: int) -> StaticFunction:
    """The function of packed tokens, behind whose captured arrays there are those of `LOOKED_UP`.

    It may be called for these tokens alone: nothing keeps a look-up within the arrays.

    Args:
      queries: T, all packed tokens.
      keys: S.
    """
    tokens = {"query": queries, "key": keys}
    shapes = tuple(jax.ShapeDtypeStruct((tokens[by],), np.dtype(np.int32)) for by in LOOKED_UP.values())
    return with_indices(function, _ByToken(shapes), f"on varlen tokens, {queries} and {keys}")


@dataclasses.dataclass(frozen=True)
class _ByToken:
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    names = tuple(LOOKED_UP)

    def nodes(self, graph: Graph, first: int, own: Mapping[str, Node]) -> dict[str, Node]:
        numbered = enumerate(LOOKED_UP.items(), first)
        return {name: graph.load(number, own[by], INT32) for number, (name, by) in numbered}

    def values(self, arrays: Sequence[Any], own: Mapping[str, Any]) -> dict[str, Any]:
        found = zip(arrays, LOOKED_UP.items(), strict=True)
        return {name: x.at[own[by]].get(mode="promise_in_bounds") for x, (name, by) in found}
