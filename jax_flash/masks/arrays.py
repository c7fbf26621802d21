"""Masks that arrays hold: of all pairs, of documents, of blocks; and one mask for each head."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import _sequence_arguments
from jax_flash._block_kinds import MaskMod
from jax_flash._validate import described, short
from jax_flash.masks.arguments import (
    Array,
    block_size,
    check_axis,
    check_length,
    element,
    frozen,
    quotient,
    ranked,
)
from jax_flash.masks.mask import Mask, check_sizes, value_of


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NumpyMask(Mask):
    """A dense mask: an element for each pair.

    All pairs are looked at, as bounds say little of an array of this kind.

    Attributes:
      array: bool, of NumPy or of JAX, `(T, S)`, `(N, T, S)` or `(B, N, T, S)`; B and N may be 1. True
        attends.

    Raises:
      TypeError: array isn't an array, or not of bools.
      ValueError: it has other axes.
    """

    array: Array

    def __post_init__(self):
        ranks = {"(T, S)": 2, "(N, T, S)": 3, "(B, N, T, S)": 4}
        self._set(array=ranked("array", self.array, ranks, "mask"))

    def _sees(self, *indices: jax.Array) -> jax.Array:
        return element(jnp.asarray(self.array), *indices)

    def check_sizes(self, B: int | None, N: int | None, T: int, S: int) -> None:
        check_length("array", self.array, -1, "S", S)
        check_length("array", self.array, -2, "T", T)
        check_axis("array", self.array, -3, "N", N)
        check_axis("array", self.array, -4, "B", B)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DocumentMask(Mask):
    """Packed documents: a query attends to the keys of its own document.

    Not causal by itself: `DocumentMask(ids) & CausalMask()` is. Where ids are sorted, bounds decide all
    blocks but those that have a document in common and aren't all of one. Blocks of unsorted ids are mostly
    left open, and all of their pairs are looked at.

    Attributes:
      ids: integers `(T,)` or `(B, T)`: the document of each query. May be traced.
      key_ids: likewise of each key, `(S,)` or `(B, S)`; None if keys have the documents of queries.

    Raises:
      TypeError: ids or key_ids isn't an array of integers.
      ValueError: it has other axes, or they aren't as many batch rows.
    """

    ids: Array
    key_ids: Array | None = None

    def __post_init__(self):
        ids = ranked("ids", self.ids, {"(T,)": 1, "(B, T)": 2}, "integer")
        if self.key_ids is None:
            self._set(ids=_as_int32(ids, ids)[0])
            return
        key_ids = ranked("key_ids", self.key_ids, {"(S,)": 1, "(B, S)": 2}, "integer")
        if ids.shape[:-1] != key_ids.shape[:-1]:
            raise ValueError(
                f"key_ids must have as many batch rows as ids, {described(ids)}; got {described(key_ids)}"
            )
        ids, key_ids = _as_int32(ids, key_ids)
        self._set(ids=ids, key_ids=key_ids)

    def _sees(self, batch, head, query, key) -> jax.Array:
        ids = jnp.asarray(self.ids)
        key_ids = ids if self.key_ids is None else jnp.asarray(self.key_ids)
        return element(ids, batch, query) == element(key_ids, batch, key)

    def check_sizes(self, B: int | None, N: int | None, T: int, S: int) -> None:
        check_axis("ids", self.ids, -2, "B", B)
        check_length("ids", self.ids, -1, "T", T)
        if self.key_ids is None:
            check_length("ids", self.ids, -1, "S", S)
        else:
            check_length("key_ids", self.key_ids, -1, "S", S)


def _as_int32(ids: Array, key_ids: Array) -> tuple[Array, Array]:
    """Equal where they were."""
    if not (isinstance(ids, np.ndarray) and isinstance(key_ids, np.ndarray)):
        return _sequence_arguments.segment_ids(ids, key_ids, ids.shape, key_ids.shape)
    with jax.ensure_compile_time_eval():
        ids, key_ids = _sequence_arguments.segment_ids(ids, key_ids, ids.shape, key_ids.shape)
    return frozen(np.asarray(ids), np.int32), frozen(np.asarray(key_ids), np.int32)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockLayoutMask(Mask):
    """A layout of blocks: every query of a block attends to every key of a block, or to none of them.

    The block-sparse attention of Dao et al., "FlashAttention", 2022, section 3.3. Bounds decide all blocks if
    block_size is a multiple of theirs, 128. Else all pairs of most blocks are looked at.

    Attributes:
      layout: bool `(T / q, S / k)`, `(N, T / q, S / k)` or `(B, N, T / q, S / k)`, rounded up; B and N may be
        1. True attends. May be traced.
      block_size: `(q, k)`, in queries and in keys, or one int for both.

    Raises:
      TypeError: layout isn't an array of bools; block_size isn't an integer, or two.
      ValueError: layout has other axes; block_size is less than 1 or more than int32 holds, or isn't one int
        or two.
    """

    layout: Array
    block_size: int | tuple[int, int] = 128

    def __post_init__(self):
        ranks = {"(T / q, S / k)": 2, "(N, T / q, S / k)": 3, "(B, N, T / q, S / k)": 4}
        self._set(
            layout=ranked("layout", self.layout, ranks, "mask"),
            block_size=block_size(self.block_size),
        )

    def _sees(self, batch, head, query, key) -> jax.Array:
        q, k = self._blocks
        return element(jnp.asarray(self.layout), batch, head, quotient(query, q), quotient(key, k))

    @property
    def _blocks(self) -> tuple[int, int]:
        assert isinstance(self.block_size, tuple)
        return self.block_size

    def check_sizes(self, B: int | None, N: int | None, T: int, S: int) -> None:
        q, k = self._blocks
        check_length("layout", self.layout, -1, "ceil(S / k)", -(-S // k))
        check_length("layout", self.layout, -2, "ceil(T / q)", -(-T // q))
        check_axis("layout", self.layout, -3, "N", N)
        check_axis("layout", self.layout, -4, "B", B)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MultiHeadMask(Mask):
    """A mask of its own for each query head, as splash attention has it.

    Costs what the masks do, together.

    Attributes:
      masks: N mask functions, of this module or not.

    Raises:
      TypeError: masks isn't a tuple or a list, or one of them can't be called.
      ValueError: there are none.
    """

    masks: Sequence[MaskMod]

    def __post_init__(self):
        if not isinstance(self.masks, tuple | list):
            raise TypeError(f"masks must be a tuple or a list of mask functions; got {short(self.masks)}")
        if not self.masks:
            raise ValueError("masks must have a mask for each head; got none")
        for mask in self.masks:
            if not callable(mask):
                raise TypeError(f"masks must hold functions; got {short(mask)}")
        self._set(masks=tuple(self.masks))

    def _sees(self, batch, head, query, key) -> jax.Array:
        sees = jnp.asarray(False)
        for number, mask in enumerate(self.masks):
            sees |= (head == number) & value_of(mask, batch, head, query, key)
        return sees

    def check_sizes(self, B: int | None, N: int | None, T: int, S: int) -> None:
        if N is None and len(self.masks) > 1:
            raise ValueError(f"N must be {len(self.masks)}, as masks are {len(self.masks)}; got None")
        if len(self.masks) != (1 if N is None else N):
            raise ValueError(f"masks are {len(self.masks)}; there must be N = {N}")
        for mask in self.masks:
            check_sizes(mask, B, N, T, S)
