"""Which keys each query sees by its position: causality, the window and the lengths in one description.

This is the only place in Python that knows the alignment. The implementations ask it which keys a row sees
and which blocks a tile visits. (`_reference.py` says the same over whole matrices, independently, as the
oracle.)

**The alignment.** Queries are `rows` and keys are `columns`. The last row is aligned with the last column, so
row `r` has its *diagonal* at column `r + columns - rows`. A window of `(left, right)` lets a row see that
many columns on either side of its diagonal:

    r + low <= c <= r + high,   low = columns - rows - left,   high = columns - rows + right

Causal attention is `right = 0`. With lengths, `rows` and `columns` are the lengths of the batch row, so the
alignment follows them, and rows and columns beyond them are padding that sees and is seen by nothing. An
operand `diagonal` adds to the diagonal of every row, as `shift` here: rows and columns are parts of longer
sequences.

**One form for one meaning.** A side of the window that hides nothing is None, and one that hides everything
is clipped (`Window.normalised`), so that loops and kernels have no code for sides that don't bind, and
arithmetic on positions stays within 32 bits.

**Blocks.** A tile is an interval of rows. `PositionMask.block_range` gives the blocks of columns that it
visits as a `BlockRange`: blocks outside of `[first, last)` are *skipped*, as no row of the tile sees any of
their columns; blocks in `[full_begin, full_end)` are *full*, as every row sees all of their columns, and need
no masking; the others are *partial*. Columns that lie beyond the last one in a last block count as unseen, so
that such a block is partial.

**Transposed.** The backward pass asks which queries see each key. That is the same description with rows and
columns exchanged (`PositionMask.transposed`), and left and right with them.

**Static or data.** All of it works on Python ints, which are for planning, on NumPy arrays, and on JAX arrays
and tracers, inside of Pallas kernels and of loops. Results are as static as what goes in: with Python ints
they are Python ints. Lengths may be scalars, or arrays with a number for each batch row; `BlockRange.union`
then gives the blocks that any of them visits.

**Segments** compare data with data, so they are no interval of positions. `segment_id_ranges` and
`blocks_sharing_segments` give the blocks that may share a segment with a tile; `BlockRange.within`
intersects. Varlen sequences either become batch rows with lengths (`_varlen_unpacking.py`), or kernels take
them packed: the CUDA kernels look each token's sequence up (cuda/kernels/common/mask_metadata.cuh), those by
Mosaic GPU each token's interval (pallas/mosaic/mask_data.py).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash._spec import AttentionSpec, Sizes

Index = Any
"""A Python int where it is static, else a NumPy or JAX array of integers, or a tracer."""

LONGER_THAN_ANY = 1 << 30
"""A length that no sequence has, and 32 bits hold sums of."""


class Window(NamedTuple):
    """How many keys a query sees to the left and to the right of its diagonal; None on a side is unbounded.

    A negative side hides the diagonal too: with `right = -2`, a query sees keys up to two before it.
    """

    left: int | None = None
    right: int | None = None

    @property
    def unbounded(self) -> bool:
        return self.left is None and self.right is None

    @property
    def hides_all(self) -> bool:
        """Whether its sides leave no key between them."""
        return self.left is not None and self.right is not None and self.left + self.right < 0

    def causal(self) -> "Window":
        """The same window without the keys behind the diagonal."""
        return Window(self.left, 0 if self.right is None else min(self.right, 0))

    def from_top_left(self, queries: int, keys: int) -> "Window":
        """A window around the diagonal of the top left corner, query i at key i, as one around ours."""
        if not self.unbounded and not isinstance(keys - queries, int):
            raise ValueError(
                "a causal mask or window aligned to the top left needs the difference of the numbers of "
                f"keys and queries to be known; got the symbolic {keys - queries}"
            )
        left = None if self.left is None else self.left + keys - queries
        right = None if self.right is None else self.right + queries - keys
        return Window(left, right)

    def normalised(self, queries: int, keys: int) -> "Window":
        """The window that shows the same keys to at most `queries` queries of at most `keys` keys.

        The first query's diagonal is at key `keys - queries` and the last one's at `keys - 1`, so a right
        side of `queries - 1` or more, and a left side of `keys - 1` or more, hides nothing: it becomes None.
        A left side of `-queries` or a right side of `-keys` hides everything: lower ones are clipped to that.
        Lengths that are symbolic, as in an export, count as longer than any sequence is.
        """
        queries, keys = (n if isinstance(n, int) else LONGER_THAN_ANY for n in (queries, keys))
        left = None if self.left is None or self.left >= keys - 1 else max(self.left, -queries)
        right = None if self.right is None or self.right >= queries - 1 else max(self.right, -keys)
        return Window(left, right)


UNBOUNDED = Window()


def window_of(spec: AttentionSpec, size: Sizes, *, is_shifted: bool = False) -> Window:
    """The call's window, normalised; as it is if an operand shifts the diagonal by what shapes don't say."""
    window = Window(spec.left, spec.right)
    return window if is_shifted else window.normalised(size.T, size.S)


@dataclasses.dataclass(frozen=True)
class BlockRange:
    """The blocks `[first, last)` that a tile visits; those in `[full_begin, full_end)` need no masking."""

    first: Index
    last: Index
    full_begin: Index
    full_end: Index

    def reversed(self) -> "BlockRange":
        """The same range visited from its end: block `b` becomes `first + last - 1 - b`."""
        ends = self.first + self.last
        return BlockRange(self.first, self.last, ends - self.full_end, ends - self.full_begin)

    def within(self, first: Index, last: Index) -> "BlockRange":
        """The part of the range that lies in `[first, last)`."""
        own_first = clip(self.first, first, last)
        own_last = clip(self.last, own_first, last)
        full_begin = clip(self.full_begin, own_first, own_last)
        return BlockRange(own_first, own_last, full_begin, clip(self.full_end, full_begin, own_last))

    def full_within(self, tile: "BlockRange") -> "BlockRange":
        """All blocks of `tile`; full are those that are full here."""
        full_begin = clip(self.full_begin, tile.first, tile.last)
        full_end = clip(self.full_end, full_begin, tile.last)
        return BlockRange(tile.first, tile.last, full_begin, full_end)

    def union(self) -> tuple[Index, Index]:
        """`(first, last)` of the smallest range that holds the ranges of all batch rows."""
        if np.ndim(self.first) == np.ndim(self.last) == 0:
            return self.first, self.last
        first, last = jnp.broadcast_arrays(self.first, self.last)
        visits = first < last
        end = jnp.max(last, where=visits, initial=0)
        return jnp.minimum(jnp.min(first, where=visits, initial=jnp.iinfo(first.dtype).max), end), end


@dataclasses.dataclass(frozen=True)
class PositionMask:
    """Row `r < rows` sees the columns `r + low <= c <= r + high` of `0 <= c < columns`; None is unbounded.

    Made by `position_mask` from a window, and by `keys_of_queries` from a call.
    """

    rows: Index
    columns: Index
    low: Index | None
    high: Index | None
    has_negative_side: bool = False  # of the window, so that a row in the middle may see nothing
    shift: Index = 0  # by how many columns every diagonal lies further to the right

    @property
    def unbounded(self) -> bool:
        """Whether every row sees every column."""
        return self.low is None and self.high is None

    @property
    def diagonal(self) -> Index:
        """The column on the diagonal of row 0."""
        return self.columns - self.rows + self.shift

    def transposed(self) -> "PositionMask":
        """Which rows see each column, with columns as rows."""
        low = None if self.high is None else -self.high
        high = None if self.low is None else -self.low
        return PositionMask(self.columns, self.rows, low, high, self.has_negative_side, -self.shift)

    def of_lengths(self, rows: Index, columns: Index) -> "PositionMask":
        """The mask by the same window of so many rows and columns."""
        moved = columns - rows - (self.columns - self.rows)
        low = None if self.low is None else self.low + moved
        high = None if self.high is None else self.high + moved
        return dataclasses.replace(self, rows=rows, columns=columns, low=low, high=high)

    def with_axes(self, count: int) -> "PositionMask":
        """The mask whose numbers for each batch row, `(B,)`, have `count` more axes of 1, to meet scores."""

        def expanded(x: Index | None) -> Index | None:
            return x if x is None or np.ndim(x) == 0 else x.reshape(x.shape + (1,) * count)

        numbers = map(expanded, (self.rows, self.columns, self.low, self.high))
        return PositionMask(*numbers, self.has_negative_side, expanded(self.shift))

    def block_range(self, first_row: Index, row_count: Index, block: int) -> BlockRange:
        """The blocks of `block` columns that the rows `[first_row, first_row + row_count)` see."""
        last_row = first_row + row_count - 1
        first, full_begin = 0, 0
        last, full_end = _ceil_div(self.columns, block), _floor_div(self.columns, block)
        end = self.columns
        if self.high is not None:
            end = clip(last_row + self.high + 1, 0, self.columns)
            seen_by_all = clip(first_row + self.high + 1, 0, self.columns)
            last, full_end = _ceil_div(end, block), _floor_div(seen_by_all, block)
        if not isinstance(self.rows, int):
            last = _where(first_row < self.rows, last, 0)
            full_end = _where(last_row < self.rows, full_end, 0)
        if self.low is not None:
            begin = clip(first_row + self.low, 0, self.columns)
            seen_by_all = clip(last_row + self.low, 0, self.columns)
            if self.has_negative_side:
                last = _where(begin < end, last, 0)
            first = _minimum(_floor_div(begin, block), last)
            full_begin = clip(_ceil_div(seen_by_all, block), first, last)
            full_end = clip(full_end, full_begin, last)
        return BlockRange(first, last, full_begin, full_end)

    def block_counts(self, row_count: int, block: int) -> tuple[int, ...]:
        """How many blocks each tile of `row_count` rows visits. Static lengths alone."""
        first_row = np.arange(0, self.rows, row_count)
        tiles = self.block_range(first_row, np.minimum(row_count, self.rows - first_row), block)
        return tuple(np.broadcast_to(tiles.last - tiles.first, first_row.shape).tolist())

    def visible_columns(self, rows: Index, has_tail: bool = False) -> tuple[Index | None, Index | None]:
        """The columns `[begin, end)` that each row sees; None on a side where all up to there are seen.

        Args:
          has_tail: whether there are positions beyond the last column, which no row sees. Without them, `end`
            may lie beyond the last column.
        """
        begin = None if self.low is None else rows + self.low
        end = None if self.high is None else rows + (self.high + 1)
        if has_tail:
            if end is None:
                end = jnp.full(rows.shape, self.columns, jnp.int32)
            else:
                end = jnp.minimum(end, self.columns)
        return begin, end

    def visible(self, rows: Index, columns: Index, end: int | None = None) -> Index | None:
        """Whether each row sees each column, for indices that broadcast; None where all do.

        Rows and columns beyond static lengths count as seen, so that blocks without any need no comparison.
        With `end`, columns from there on don't, where the number of columns is static.
        """
        visible = None
        if self.low is not None:
            visible = columns - rows >= self.low
        if self.high is not None:
            visible = both(visible, columns - rows <= self.high)
        for indices, count in ((rows, self.rows), (columns, self.columns)):
            if not isinstance(count, int):
                visible = both(visible, indices < count)
        if end is not None and isinstance(self.columns, int):
            visible = both(visible, columns < end)
        return visible

    def mean_visible_columns(self) -> float:
        """How many columns a row sees, in the mean. Static lengths alone."""
        begin, end = self.visible_columns(np.arange(self.rows))
        begin = 0 if begin is None else np.clip(begin, 0, self.columns)
        end = self.columns if end is None else np.clip(end, 0, self.columns)
        return float(np.mean(np.maximum(end - begin, 0)))

    def every_row_sees_a_column(self) -> bool:
        """Whether no row is masked as a whole. Static lengths alone."""
        # The first row sees least on its right, the last one on its left.
        low = -self.rows if self.low is None else self.low
        high = self.columns if self.high is None else self.high
        return self.columns > 0 and high >= 0 and self.rows - 1 + low < self.columns and low <= high

    def rows_before_first_column(self) -> int:
        """How many rows in front see nothing, as all columns are to the right of their windows. Static
        lengths alone."""
        return 0 if self.high is None else clip(-self.high, 0, self.rows)


def position_mask(window: Window, queries: Index, keys: Index, shift: Index | None = None) -> PositionMask:
    """The keys that each query sees: queries are rows, keys are columns.

    Args:
      shift: of every diagonal. A row may then see nothing, wherever it is.
    """
    diagonal = keys - queries if shift is None else keys - queries + shift
    return PositionMask(
        queries,
        keys,
        low=None if window.left is None else diagonal - window.left,
        high=None if window.right is None else diagonal + window.right,
        has_negative_side=shift is not None or min(window.left or 0, window.right or 0) < 0,
        shift=0 if shift is None else shift,
    )


def keys_of_queries(
    spec: AttentionSpec,
    size: Sizes,
    query_lengths: Index | None = None,
    key_lengths: Index | None = None,
    shift: Index | None = None,
) -> PositionMask:
    """`position_mask` of a call.

    Args:
      query_lengths: how many of the T queries there are, where that is data: a scalar or `(B,)`.
      key_lengths: how many of the S keys there are.
      shift: the operand `diagonal`.
    """
    queries = size.T if query_lengths is None else query_lengths
    keys = size.S if key_lengths is None else key_lengths
    return position_mask(window_of(spec, size, is_shifted=shift is not None), queries, keys, shift)


def segment_id_ranges(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest of the ids `(B, positions)` in each block of positions, `(B, blocks)`."""
    limits = jnp.iinfo(ids.dtype)

    def blocks(fill: int) -> jax.Array:
        padded = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), constant_values=fill)
        return padded.reshape(ids.shape[0], -1, block)

    return blocks(limits.max).min(2), blocks(limits.min).max(2)


def blocks_sharing_segments(
    least: jax.Array, greatest: jax.Array, block_least: jax.Array, block_greatest: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The blocks `[first, last)` that may hold a segment id of a tile, int32 `(...)`.

    They are those whose ids, from the least to the greatest, overlap with the tile's. Where ids are sorted,
    as those of documents one behind the other are, that means that they share a segment.

    Args:
      least, greatest: of the ids of each tile, `(...)`.
      block_least, block_greatest: of the ids of each block, `(..., blocks)`; the leading axes broadcast.
    """
    share = (least[..., None] <= block_greatest) & (block_least <= greatest[..., None])
    block = lax.broadcasted_iota(jnp.int32, share.shape, share.ndim - 1)
    first = jnp.min(block, axis=-1, where=share, initial=share.shape[-1])
    last = jnp.max(block + 1, axis=-1, where=share, initial=0)
    return jnp.minimum(first, last), last


def both(one: Index | None, other: Index | None) -> Index | None:
    """Where both conditions hold; None is the condition that always holds."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def clip(index: Index, low: Index, high: Index) -> Index:
    """The number in `[low, high]` that is nearest to `index`."""
    if _static(index, low, high):
        return min(max(index, low), high)
    return _numpy_of(index, low, high).clip(index, low, high)


def _minimum(one: Index, other: Index) -> Index:
    return min(one, other) if _static(one, other) else _numpy_of(one, other).minimum(one, other)


def _where(condition: Index, index: Index, other: int) -> Index:
    if isinstance(condition, bool):
        return index if condition else other
    if not isinstance(condition, jax.Array):
        return np.where(condition, index, other)
    # Pallas lowers no choice between two static numbers.
    return jnp.where(condition, lax.full((), index, jnp.int32) if isinstance(index, int) else index, other)


def _floor_div(index: Index, block: int) -> Index:
    """`index // block` for `index >= 0`."""
    return lax.div(index, np.int32(block)) if isinstance(index, jax.Array) else index // block


def _ceil_div(index: Index, block: int) -> Index:
    return _floor_div(index + (block - 1), block)


def _static(*indices: Index) -> bool:
    return all(isinstance(index, int) for index in indices)


def _numpy_of(*indices: Index) -> Any:
    """The NumPy that computes with them."""
    return jnp if any(isinstance(index, jax.Array) for index in indices) else np
