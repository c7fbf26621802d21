"""`BlockMask`: which blocks of queries and keys are visited, found once and used by many calls."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import _block_kinds, _settings, _validate
from jax_flash._block_kinds import Kind, Lists, MaskMod
from jax_flash.functions.static import StaticFunction, flat, static_mask_mod
from jax_flash.masks.mask import check_sizes

_BLOCK_SIZE = 128
"""Queries and keys of a block, by default."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no one truth value
class BlockMask:
    """Which queries see which keys, by blocks: the argument `block_mask` of `flash_attention`.

    Made by `create_block_mask`, `BlockMask.from_blocks` or `BlockMask.from_dense`. A pytree, which goes
    through `jit`, `scan` and others.

    Attributes:
      kinds: int8 `(B|1, N|1, blocks of queries, blocks of keys)`: of each block whether none of its pairs
        see each other (0), some (1) or all (2).
      key_blocks: for each block of queries the blocks of keys that it visits.
      query_blocks: for each block of keys the blocks of queries that visit it.
      captured: arrays that `mask_mod` reads, `(1, elements)` each.
      mask_mod: which pairs of a block of kind 1 see each other; None where there is no such block.
      lengths: T and S.
      block_size: of queries and of keys. Where it was given as more than 128 and more than the sequence is
        long, it is the larger of these.
    """

    kinds: jax.Array
    key_blocks: Lists
    query_blocks: Lists
    captured: tuple[jax.Array, ...]
    mask_mod: StaticFunction | None = dataclasses.field(metadata={"static": True})
    lengths: tuple[int, int] = dataclasses.field(metadata={"static": True})
    block_size: tuple[int, int] = dataclasses.field(metadata={"static": True})

    @staticmethod
    @_settings.as_written
    def from_blocks(
        blocks: Any, *, lengths: tuple[int, int] | None = None, block_size: Any = _BLOCK_SIZE
    ) -> "BlockMask":
        """The mask of a layout of blocks, as the first FlashAttention's block-sparse variant has it.

        Args:
          blocks: bool `(B|1, N|1, blocks of queries, blocks of keys)`; True where each query of a block sees
            each of its keys. B and N are 1 where it is the same for all.
          lengths: T and S; by default those of whole blocks.
          block_size: an int, or a pair for queries and keys. One longer than the sequence is one block.

        Raises:
          TypeError, ValueError: an argument has a dtype, shape or value that doesn't fit.
        """
        size = _block_size(block_size)
        blocks = _validate.array("blocks", blocks, "mask")
        if blocks.ndim != 4 or 0 in blocks.shape:
            raise ValueError(
                "blocks must have shape (B|1, N|1, blocks of queries, blocks of keys), none of them 0; "
                f"got {_validate.described(blocks)}"
            )
        counts = blocks.shape[2:]
        whole = counts[0] * size[0], counts[1] * size[1]
        lengths = whole if lengths is None else _lengths(lengths)
        for length, block, count in zip(lengths, size, counts, strict=True):
            if -(-length // block) != count:
                raise ValueError(
                    f"lengths must have {counts} blocks of {size} as blocks has; got lengths {lengths}"
                )
        kinds = jnp.where(blocks, jnp.int8(Kind.FULL), jnp.int8(Kind.HIDDEN))
        size = _within(lengths, size)
        return BlockMask(kinds, *_block_kinds.lists(kinds), (), None, lengths, size)

    @staticmethod
    def from_dense(mask: Any, *, block_size: Any = _BLOCK_SIZE) -> "BlockMask":
        """The mask that an array of all pairs describes. It keeps the array, so it is for tests.

        Args:
          mask: bool `(B|1, N|1, T, S)`; True attends.
          block_size: an int, or a pair for queries and keys. One longer than the sequence is one block.
        """
        mask = _validate.array("mask", mask, "mask")
        if mask.ndim != 4 or 0 in mask.shape:
            raise ValueError(
                f"mask must have shape (B|1, N|1, T, S), none of them 0; got {_validate.described(mask)}"
            )
        B, N, T, S = mask.shape

        def mask_mod(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return mask[batch if B > 1 else 0, head if N > 1 else 0, query, key]

        return create_block_mask(mask_mod, B, N, T, S, block_size=block_size)


@_settings.as_written
def create_block_mask(
    mask_mod: MaskMod, B: int | None, N: int | None, T: int, S: int, *, block_size: Any = _BLOCK_SIZE
) -> BlockMask:
    """Finds which blocks of queries and keys a mask function lets be seen: wholly, in part, or not at all.

    Exactly: where bounds of the function over a block don't decide, it is evaluated for each pair of the
    block, some blocks at a time. Memory is linear in the number of blocks, and so is time but for those
    pairs. Make it once and use it for all layers.

    Args:
      mask_mod: `(batch, head, query_index, key_index) -> bool` of int32 scalars, True attends. Any function
        that JAX can trace; it may read arrays that it captures. Indices count from 0. `jax_flash.masks` has
        many.
      B: batch rows for which it differs; None or 1 where it is the same for all. A mask_mod that depends on
        `batch` is for calls of just B batch rows.
      N: query heads likewise.
      T: queries.
      S: keys.
      block_size: an int, or a pair for queries and keys. One longer than the sequence is one block.

    Raises:
      TypeError, ValueError: an argument has a kind or value that doesn't fit, or mask_mod returns no bool
        scalar.

    References:
      FlexAttention (https://arxiv.org/abs/2412.05496); block-sparse FlashAttention
      (https://arxiv.org/abs/2205.14135, section 3.3).
    """
    if not callable(mask_mod):
        raise TypeError(
            "mask_mod must be a function of batch, head, query_index and key_index; "
            f"got {_validate.short(mask_mod)}"
        )
    size = _block_size(block_size)
    alike = [name for name, n in (("batch", B), ("head", N)) if n is None]
    B, N = (None if n is None else _validate.size(name, n) for name, n in (("B", B), ("N", N)))
    lengths = _lengths((T, S))
    size = _within(lengths, size)
    check_sizes(mask_mod, B, N, *lengths)
    B, N = (1 if n is None else n for n in (B, N))
    if 0 in (B, N, *lengths):  # no pair, and arrays that mask_mod looks up may have no element
        blocks = (-(-length // block) for length, block in zip(lengths, size, strict=True))
        kinds = jnp.zeros((B, N, *blocks), jnp.int8)
        return BlockMask(kinds, *_block_kinds.lists(kinds), (), None, lengths, size)
    function, captured = static_mask_mod(mask_mod)
    for index, given in (("batch", "B"), ("head", "N")):
        if index in alike and index in function.inputs:
            raise ValueError(
                f"{given} must be the number of them for which mask_mod differs, as it depends on {index}; "
                "got None"
            )
    arrays = tuple(flat(x) for x in captured)
    kinds = _block_kinds.kinds_of(function, (B, N), lengths, size, arrays)
    return BlockMask(kinds, *_block_kinds.lists(kinds), arrays, function, lengths, size)


def _lengths(lengths: Any) -> tuple[int, int]:
    if not isinstance(lengths, tuple | list):
        raise TypeError(f"lengths must be None or a pair of T and S; got {_validate.short(lengths)}")
    if len(lengths) != 2:
        raise ValueError(f"lengths must be None or a pair of T and S; got {_validate.short(lengths)}")
    T, S = (_validate.size(name, n) for name, n in zip("TS", lengths, strict=True))
    return T, S


def _block_size(value: Any) -> tuple[int, int]:
    sides = value if isinstance(value, tuple | list) else (value, value)
    if len(sides) != 2:
        raise ValueError(f"block_size must be an int or a pair; got {_validate.short(value)}")
    queries, keys = (_validate.integer("block_size", side) for side in sides)
    if min(queries, keys) < 1:
        raise ValueError(f"block_size must be at least 1; got {_validate.short(value)}")
    if max(queries, keys) > _validate.INT32_MAX:
        raise ValueError(f"block_size must be at most {_validate.INT32_MAX}; got {_validate.short(value)}")
    return queries, keys


def _within(lengths: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    """A block size whose blocks are the same, and no longer than the sequences or than the default block."""
    T, S = lengths
    return min(size[0], max(T, _BLOCK_SIZE)), min(size[1], max(S, _BLOCK_SIZE))
