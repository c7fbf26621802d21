"""Trees of tokens, as speculative decoding verifies them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import _validate
from jax_flash._validate import INT32_MAX
from jax_flash.masks.arguments import (
    Array,
    check_axis,
    check_length,
    clipped,
    element,
    frozen,
    of_rows,
    ranked,
    row_of,
)
from jax_flash.masks.mask import Mask

ROOT = -1
"""In place of a parent: the token follows the context."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TreeMask(Mask):
    """Tree attention: a token attends to the context, to its ancestors and to itself.

    Miao et al., "SpecInfer", 2024, section 4.2; Cai et al., "Medusa", 2024, section 2.1.2. The queries are
    the T tokens of a tree. The keys are the context, and after it the same tokens: S is `context_length + T`,
    or more, and keys behind the tokens are hidden. The mask captures a table of T × T bools.

    Bounds decide the blocks of the context. All pairs of the T × T others are looked at.

    On a key-value cache that the tokens are appended to, queries come by their positions:

        mask = TreeMask(parents, cache.lengths, takes_positions=True)
        out, cache = flash_attention_with_cache(query, cache, key, value, mask_mod=mask)

    Attributes:
      parents: integers `(T,)`, or `(B, T)` for a tree in each batch row, an array or a list: for each token
        the index of its parent, which comes before it; -1 for one that follows the context. May be traced.
      context_length: keys ahead of the tree: an int, or an int32 array, `()` or `(B,)`, one of each batch
        row.
      takes_positions: query indices are positions in the sequence: token t comes as `context_length + t`, and
        not as t. At other positions a query attends to the context alone.

    Raises:
      TypeError: parents isn't an array or a list of integers; context_length isn't one or an array of them;
        takes_positions isn't a bool.
      ValueError: an array has other axes; a parent doesn't come before its child or is less than -1 (not of
        traced arrays); context_length is negative.
    """

    parents: Any
    context_length: int | Array = 0
    takes_positions: bool = False
    _of_rows = ("context_length",)
    _ancestors: Array = dataclasses.field(init=False, repr=False, compare=False)  # (T, T) or (B, T, T)

    def __post_init__(self):
        parents = ranked("parents", _validate.listed("parents", self.parents), _RANKS, "integer")
        known = _validate.known(parents)
        if known is not None:
            _check_parents(known)
        parents = clipped(parents if known is None else known, ROOT, INT32_MAX)
        self._set(
            parents=parents,
            context_length=of_rows("context_length", self.context_length, least=0),
            takes_positions=_validate.flag("takes_positions", self.takes_positions),
            _ancestors=_ancestors(parents),
        )

    def _sees(self, batch, head, query, key) -> jax.Array:
        first, size = row_of(self.context_length, batch), self.parents.shape[-1]
        token = key - first
        is_token = token < size
        if self.takes_positions:
            query -= first
            is_token &= (query >= 0) & (query < size)
        return (token < 0) | (is_token & element(jnp.asarray(self._ancestors), batch, query, token))

    def check_sizes(self, B: int | None, N: int | None, T: int, S: int) -> None:
        super().check_sizes(B, N, T, S)
        check_axis("parents", self.parents, -2, "B", B)
        if not self.takes_positions:
            advice = "; where query indices are positions, as on a key-value cache, set takes_positions=True"
            check_length("parents", self.parents, -1, "T", T, advice)


_RANKS = {"(T,)": 1, "(B, T)": 2}


def _check_parents(parents: np.ndarray) -> None:
    is_wrong = (parents < ROOT) | (parents >= np.arange(parents.shape[-1]))
    if is_wrong.any():
        at = tuple(map(int, np.argwhere(is_wrong)[0]))
        raise ValueError(
            f"parents must hold -1 or the index of an earlier token; got {parents[at]} of token {at[-1]}"
        )


def _ancestors(parents: Array) -> Array:
    """For each token, which tokens are its ancestors or itself."""
    size = parents.shape[-1]
    if isinstance(parents, np.ndarray):
        found = np.zeros((*parents.shape, size), bool)
        found[..., np.arange(size), np.arange(size)] = True
        for token in range(size):
            parent = parents[..., token, None]
            of_parent = np.take_along_axis(found, np.maximum(parent, 0)[..., None], axis=-2)[..., 0, :]
            found[..., token, :] |= of_parent & (parent >= 0)
        return frozen(found, bool)

    def add(token: jax.Array, found: jax.Array) -> jax.Array:
        parent = parents[..., token, None]
        of_parent = jnp.take_along_axis(found, jnp.maximum(parent, 0)[..., None], axis=-2)[..., 0, :]
        own = jnp.arange(size, dtype=jnp.int32) == token
        row = (of_parent & (parent >= 0)) | own.reshape((1,) * (parents.ndim - 1) + (size,))
        return found.at[..., token, :].set(row)

    return jax.lax.fori_loop(0, size, add, jnp.zeros((*parents.shape, size), bool))
