"""What of a call's mask is data, in Mosaic GPU kernels: lengths of batch rows, and segments.

Whether a row of the scores sees a column of another segment is a comparison of their ids. It is made in
blocks alone that hold pairs of different segments: before a launch, XLA finds for each group of 64 rows which
blocks of columns may share a segment with it, and which are of the same single segment, as most are of long
documents.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash._mask import BlockRange, PositionMask, blocks_sharing_segments, segment_id_ranges
from jax_flash._spec import Operands

from .. import compat
from .registers import COLUMN, ROW, where_between
from .tile_scheduler import div
from .tiles import ROWS


class Segments(NamedTuple):
    """Arrays `(B, ...)`, or refs in a kernel; of one batch row where `MaskData.in_row` gave them."""

    rows: Any  # ids (B, rows), in whole tiles
    columns: Any  # ids (B, columns), in whole blocks
    ranges: Any  # a `BlockRange` of each 64 rows, (B, groups of rows, 4)

    @classmethod
    def of(cls, rows: jax.Array, columns: jax.Array, tile: int, block: int) -> "Segments":
        """Those of ids `(B, rows)` and `(B, columns)`, in tiles and blocks of so many."""

        def padded(ids: jax.Array, size: int) -> jax.Array:
            return jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % size)), mode="edge")

        rows, columns = padded(rows, tile), padded(columns, block)
        least, greatest = (x[..., None] for x in segment_id_ranges(rows, ROWS))
        block_least, block_greatest = (x[:, None] for x in segment_id_ranges(columns, block))
        first, last = blocks_sharing_segments(least[..., 0], greatest[..., 0], block_least, block_greatest)
        is_full = (least == greatest) & (block_least == least) & (block_greatest == least)
        # The first run of such blocks: of one document, which lie side by side, all of them.
        number = lax.broadcasted_iota(jnp.int32, is_full.shape, 2)
        count = is_full.shape[2]
        full_begin = jnp.min(number, axis=2, where=is_full, initial=count)
        ends = ~is_full & (number >= full_begin[..., None])
        full_end = jnp.min(number, axis=2, where=ends, initial=count)
        return cls(rows, columns, jnp.stack([first, last, full_begin, full_end], axis=-1))

    def narrowed(self, blocks: BlockRange, first_row: Any, groups: int) -> BlockRange:
        """The blocks that `groups` of 64 rows from `first_row` on see, of those that they see by position.

        Those that are full may end before they begin, or lie beyond the others: then none is.
        """
        first_group = div(first_row, ROWS)
        first, last, full_begin, full_end = (
            [self.ranges[first_group + np.int32(group), np.int32(i)] for group in range(groups)]
            for i in range(4)
        )
        own = blocks.within(functools.reduce(jnp.minimum, first), functools.reduce(jnp.maximum, last))
        return dataclasses.replace(
            own,
            full_begin=functools.reduce(jnp.maximum, full_begin, own.full_begin),
            full_end=functools.reduce(jnp.minimum, full_end, own.full_end),
        )

    def masked(self, x: jax.Array, first_row: Any, first_column: Any, otherwise: float) -> jax.Array:
        """`x (64, columns)` with `otherwise` for pairs of different segments."""
        of_rows = compat.load(self.rows.at[pl.ds(first_row, ROWS)], ROW, optimized=False)
        own = self.columns.at[pl.ds(first_column, x.shape[1])]
        of_columns = compat.load(own, COLUMN, optimized=False)
        ids = (lax.broadcast_in_dim(of_rows, x.shape, [0]), lax.broadcast_in_dim(of_columns, x.shape, [1]))
        return jnp.where(ids[0] == ids[1], x, otherwise)


class MaskData(NamedTuple):
    """Arrays, or refs in a kernel; None for what a call doesn't have."""

    row_lengths: Any = None  # (B,): how many rows of scores a batch row has, clipped to what the arrays have
    column_lengths: Any = None
    segments: Segments | None = None

    @property
    def is_given(self) -> bool:
        """Whether the call has any of it."""
        return any(x is not None for x in self)

    @classmethod
    def of(cls, operands: Operands, tile: int, block: int, *, transposed: bool = False) -> "MaskData":
        """That of a call, in tiles of rows and blocks of columns. Queries are rows, keys if `transposed`."""
        lengths = (operands.query_seq_lengths, operands.key_value_seq_lengths)
        ids = (operands.query_segment_ids, operands.key_value_segment_ids)
        if transposed:
            lengths, ids = lengths[::-1], ids[::-1]
        segments = None if ids[0] is None or ids[1] is None else Segments.of(*ids, tile, block)
        return cls(*lengths, segments)

    def in_row(self, batch: Any) -> "MaskData":
        """That of a batch row; its lengths are in its `mask`."""
        if self.segments is None:
            return self
        return self._replace(segments=Segments(*(ref.at[batch] for ref in self.segments)))

    def mask(self, longest: PositionMask, batch: Any) -> PositionMask:
        """The mask of a batch row by position, from that of the longest possible one."""
        lengths = self.row_lengths, self.column_lengths
        if all(ref is None for ref in lengths):
            return longest
        counts = (
            most if ref is None else jnp.minimum(jnp.maximum(ref[batch], 0), most)
            for ref, most in zip(lengths, (longest.rows, longest.columns), strict=True)
        )
        return longest.of_lengths(*counts)

    def narrowed(self, blocks: BlockRange, first_row: Any, groups: int) -> BlockRange:
        """`Segments.narrowed`, or all blocks."""
        return blocks if self.segments is None else self.segments.narrowed(blocks, first_row, groups)

    def masked(
        self,
        x: jax.Array,
        mask: PositionMask,
        first_row: Any,
        first_column: Any,
        otherwise: float,
        *,
        has_tail: bool,
        masks_rows: bool,
    ) -> jax.Array:
        """A block `x (64, columns)` with `otherwise` for hidden pairs.

        Args:
          mask: of the batch row.
          has_tail: whether the block may have columns beyond the last one.
          masks_rows: whether rows beyond the last one see nothing; else they may see anything.
        """
        rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) + first_row
        seen = mask.visible_columns(rows, has_tail)
        begin, end = (None if bound is None else bound - first_column for bound in seen)
        if masks_rows:
            # Numbers of 32 bits, also where 64-bit types are on.
            every = np.int32(x.shape[1]) if end is None else end
            end = jnp.where(rows < mask.rows, every, np.int32(0))
        if begin is not None or end is not None:
            x = where_between(x, begin, end, otherwise)
        return x if self.segments is None else self.segments.masked(x, first_row, first_column, otherwise)


BY_POSITION = MaskData()
"""Of a call whose mask depends on positions and the longest lengths alone."""
