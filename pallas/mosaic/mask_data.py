"""The part of a mask that is data, in Mosaic GPU kernels: lengths of batch rows, segments, varlen sequences.

A row of the scores sees a column only if their segment ids are equal. Ids are compared only in blocks that
hold pairs of different segments. Before a launch, XLA finds for each group of 64 rows which blocks of columns
may share a segment with it, and which have the same single segment, as most blocks of long documents have.

Varlen sequences stay packed. There each row sees columns side by side: those of its sequence that the window
leaves. XLA finds the first and the last of them, and the blocks that hold those of 64 rows.

XLA also sorts tiles by how many blocks they visit. In the order of their places, a block of a persistent grid
may have twice its share of the work. Sequences that are alike (`packed_rows.py`) are not sorted, and found
without a search, whose steps are kernels of their own.
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

from jax_flash._mask import (
    BlockRange,
    PositionMask,
    blocks_sharing_segments,
    keys_of_queries,
    segment_id_ranges,
)
from jax_flash._spec import AttentionSpec, Operands, sizes
from jax_flash._varlen_unpacking import token_axes

from .. import compat, packed_rows
from .registers import COLUMN, ROW, where_between
from .tile_scheduler import div
from .tiles import ROWS


def _of_groups(ranges: Any, blocks: BlockRange, first_row: Any, groups: int) -> BlockRange:
    """The blocks that `groups` of 64 rows from `first_row` on see, of those that they see by position.

    Those that are full may end before they begin, or lie beyond the others: then none is.

    Args:
      ranges: a ref, a `BlockRange` of each 64 rows, (groups of rows, 4).
    """
    first_group = div(first_row, ROWS)
    first, last, full_begin, full_end = (
        [ranges[first_group + np.int32(group), np.int32(i)] for group in range(groups)] for i in range(4)
    )
    own = blocks.within(functools.reduce(jnp.minimum, first), functools.reduce(jnp.maximum, last))
    return dataclasses.replace(
        own,
        full_begin=functools.reduce(jnp.maximum, full_begin, own.full_begin),
        full_end=functools.reduce(jnp.minimum, full_end, own.full_end),
    )


def _of_rows(ref: Any, first_row: Any) -> jax.Array:
    """Those of 64 rows, in the layout of a product's rows."""
    return compat.load(ref.at[pl.ds(first_row, ROWS)], ROW, optimized=False)


class Segments(NamedTuple):
    """Arrays `(B, ...)`, or refs in a kernel; of one batch row where `MaskData.in_row` gave them. Where
    `MaskData.of_rows` did, `rows` are those of 64 rows, in registers."""

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

    def of_rows(self, first_row: Any) -> "Segments":
        return self._replace(rows=_of_rows(self.rows, first_row))

    def masked(self, x: jax.Array, first_column: Any, otherwise: float) -> jax.Array:
        """`x (64, columns)` with `otherwise` for pairs of different segments."""
        own = self.columns.at[pl.ds(first_column, x.shape[1])]
        of_columns = compat.load(own, COLUMN, optimized=False)
        ids = (lax.broadcast_in_dim(self.rows, x.shape, [0]), lax.broadcast_in_dim(of_columns, x.shape, [1]))
        return jnp.where(ids[0] == ids[1], x, otherwise)


class Intervals(NamedTuple):
    """Arrays `(B, ...)`, or refs in a kernel; of one batch row where `MaskData.in_row` gave them. Where
    `MaskData.of_rows` did, the first two are those of 64 rows, in registers."""

    begin: Any  # the first column that each row sees, (B, rows), in whole tiles
    end: Any  # the one behind the last; 0, as `begin`, of rows that see none
    ranges: Any  # a `BlockRange` of each 64 rows, (B, groups of rows, 4)

    @classmethod
    def of_sequences(
        cls, spec: AttentionSpec, operands: Operands, tile: int, block: int, *, transposed: bool
    ) -> "Intervals":
        """Those of a varlen call, in tiles of rows and blocks of columns."""
        axes = token_axes(spec, operands)
        of_rows, of_columns = axes[::-1] if transposed else axes
        lengths: Any  # of queries and keys of each row's sequence
        if packed_rows.are_alike(operands):
            row = jnp.arange(of_rows.tokens, dtype=jnp.int32)[None]
            sequence, is_there = div(row, of_rows.longest), True
            position, start = row - sequence * of_rows.longest, sequence * of_columns.longest
            lengths = [axis.longest for axis in axes]
        else:
            sequence, position, is_there = of_rows.places()

            def of_tokens(of_sequences: jax.Array) -> jax.Array:
                return jnp.take_along_axis(of_sequences, sequence, axis=1, mode="clip")

            start = of_tokens(of_columns.offsets[:, :-1])
            lengths = [of_tokens(axis.lengths().reshape(axis.offsets.shape[0], -1)) for axis in axes]
        mask = keys_of_queries(spec, sizes(operands), *lengths)
        begin, end = (mask.transposed() if transposed else mask).visible_columns(position, True)
        begin = jnp.zeros_like(position) if begin is None else jnp.maximum(begin, 0)
        assert end is not None  # there is a last column
        is_seen = is_there & (begin < end)
        return cls.of(*(jnp.where(is_seen, start + x, 0) for x in (begin, end)), tile, block)

    @classmethod
    def of(cls, begin: jax.Array, end: jax.Array, tile: int, block: int) -> "Intervals":
        begin, end = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % tile))) for x in (begin, end))
        begins, ends = (x.reshape(x.shape[0], -1, ROWS) for x in (begin, end))
        sees = begins < ends
        first = jnp.min(begins // block, axis=2, where=sees, initial=np.iinfo(np.int32).max)
        last = jnp.max(-(-ends // block), axis=2)
        full_begin, full_end = jnp.max(-(-begins // block), axis=2), jnp.min(ends // block, axis=2)
        return cls(begin, end, jnp.stack([first, last, full_begin, full_end], axis=-1).astype(jnp.int32))

    def of_rows(self, first_row: Any) -> "Intervals":
        return self._replace(begin=_of_rows(self.begin, first_row), end=_of_rows(self.end, first_row))

    def masked(self, x: jax.Array, first_column: Any, otherwise: float) -> jax.Array:
        """`x (64, columns)` with `otherwise` for pairs of a row and a column that it doesn't see."""
        return where_between(x, self.begin - first_column, self.end - first_column, otherwise)


def longest_first(mask: PositionMask, ranges: jax.Array, tile: int, block: int) -> jax.Array:
    """The tiles of each batch row by how many blocks they visit, `(B, tiles)`.

    Args:
      mask: by position, of the longest possible batch row.
      ranges: a `BlockRange` of each 64 rows, (B, groups of rows, 4).
    """
    batch, groups, _ = ranges.shape
    of_tiles = ranges.reshape(batch, groups * ROWS // tile, tile // ROWS, 4)
    first_row = jnp.arange(of_tiles.shape[1], dtype=jnp.int32) * tile
    visited = mask.block_range(first_row, tile, block)
    visited = visited.within(of_tiles[..., 0].min(axis=2), of_tiles[..., 1].max(axis=2))
    return (visited.first - visited.last).argsort(axis=1).astype(jnp.int32)


class MaskData(NamedTuple):
    """Arrays, or refs in a kernel; None for what a call doesn't have."""

    row_lengths: Any = None  # (B,): how many rows of scores a batch row has, clipped to what the arrays have
    column_lengths: Any = None
    segments: Segments | None = None
    intervals: Intervals | None = None
    order: Any = None  # the tiles of each batch row by how many blocks they visit, (B, tiles)

    @property
    def is_given(self) -> bool:
        """Whether the call has any of it."""
        return any(x is not None for x in self)

    def in_row(self, batch: Any) -> "MaskData":
        """That of a batch row; its lengths are in its `mask`."""

        def own(arrays: Any) -> Any:
            return None if arrays is None else type(arrays)(*(ref.at[batch] for ref in arrays))

        return self._replace(segments=own(self.segments), intervals=own(self.intervals))

    def of_rows(self, first_row: Any) -> "MaskData":
        """That of a batch row, with what 64 rows of it have: for `masked`."""

        def own(arrays: Any) -> Any:
            return None if arrays is None else arrays.of_rows(first_row)

        return self._replace(segments=own(self.segments), intervals=own(self.intervals))

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
        """The blocks that `groups` of 64 rows from `first_row` on see, of those that they see by position."""
        found = self.segments if self.intervals is None else self.intervals
        return blocks if found is None else _of_groups(found.ranges, blocks, first_row, groups)

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
        """A block `x (64, columns)` with `otherwise` for hidden pairs: for what `of_rows` returns.

        Args:
          mask: of the batch row.
          has_tail: whether the block may have columns beyond the last one.
          masks_rows: whether rows beyond the last one see nothing; else they may see anything.
        """
        if self.intervals is not None:
            return self.intervals.masked(x, first_column, otherwise)
        rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) + first_row
        seen = mask.visible_columns(rows, has_tail)
        begin, end = (None if bound is None else bound - first_column for bound in seen)
        if masks_rows:
            # Numbers of 32 bits, also where 64-bit types are on.
            every = np.int32(x.shape[1]) if end is None else end
            end = jnp.where(rows < mask.rows, every, np.int32(0))
        if begin is not None or end is not None:
            x = where_between(x, begin, end, otherwise)
        return x if self.segments is None else self.segments.masked(x, first_column, otherwise)


BY_POSITION = MaskData()
"""Of a call whose mask depends on positions and the longest lengths alone."""


def mask_of(
    spec: AttentionSpec, operands: Operands, tile: int, block: int, *, transposed: bool = False
) -> tuple[PositionMask, MaskData]:
    """The mask of a call by position, of the longest possible batch row, and what of it is data.

    Args:
      tile: so many rows are a tile. Rows are queries, or keys if `transposed`.
      block: so many columns are a block.
    """
    size = sizes(operands)
    if operands.query_offsets is not None:
        rows, columns = (size.S, size.T) if transposed else (size.T, size.S)
        intervals = Intervals.of_sequences(spec, operands, tile, block, transposed=transposed)
        mask = PositionMask(rows, columns, None, None)
        if packed_rows.are_alike(operands):
            return mask, MaskData(intervals=intervals)
        order = longest_first(mask, intervals.ranges, tile, block)
        return mask, MaskData(intervals=intervals, order=order)
    mask = keys_of_queries(spec, size)
    lengths = (operands.query_seq_lengths, operands.key_value_seq_lengths)
    ids = (operands.query_segment_ids, operands.key_value_segment_ids)
    if transposed:
        mask, lengths, ids = mask.transposed(), lengths[::-1], ids[::-1]
    if ids[0] is None or ids[1] is None:
        return mask, MaskData(*lengths)
    segments = Segments.of(*ids, tile, block)
    return mask, MaskData(*lengths, segments, order=longest_first(mask, segments.ranges, tile, block))
