"""Which blocks of columns a block of rows meets: the band of a causal or windowed call.

Rows are queries and columns keys, or, transposed, the other way round. Everything static is a Python int,
so that a loop that can't be entered is never written; with lengths, how many rows and columns there are and
where the band lies are data.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash._spec import AttentionSpec, Sizes

Index = int | jax.Array  # an int where static, else an int32 scalar


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks `[start, stop)` hold all that is met; those in `[full_start, full_stop)` are met whole."""

    start: Index
    full_start: Index
    full_stop: Index
    stop: Index

    def backwards(self) -> "Blocks":
        """The same from the last one to the first: block `b` becomes `start + stop - 1 - b`."""
        ends = self.start + self.stop
        return Blocks(self.start, ends - self.full_stop, ends - self.full_start, self.stop)

    def within(self, start: Index, stop: Index) -> "Blocks":
        """Those of `[start, stop)` among them."""
        own_start = clipped(self.start, start, stop)
        own_stop = clipped(self.stop, own_start, stop)
        full_start = clipped(self.full_start, own_start, own_stop)
        return Blocks(own_start, full_start, clipped(self.full_stop, full_start, own_stop), own_stop)

    def whole_in(self, others: "Blocks") -> "Blocks":
        """All of `others`, those that are met whole here told from the rest."""
        full_start = clipped(self.full_start, others.start, others.stop)
        full_stop = clipped(self.full_stop, full_start, others.stop)
        return Blocks(others.start, full_start, full_stop, others.stop)


@dataclasses.dataclass(frozen=True)
class Band:
    """Row `r` meets the columns `r + low <= c <= r + high` of `0 <= c < columns`; None is unbounded."""

    rows: Index
    columns: Index
    low: Index | None
    high: Index | None

    def transposed(self) -> "Band":
        low = None if self.high is None else -self.high
        high = None if self.low is None else -self.low
        return Band(self.columns, self.rows, low, high)

    def blocks(self, first_row: Index, row_count: int, block: int) -> Blocks:
        """The blocks of `block` columns that rows `[first_row, first_row + row_count)` meet."""
        last_row = first_row + row_count - 1
        start, full_start = 0, 0
        stop, full_stop = _over(self.columns + (block - 1), block), _over(self.columns, block)
        if self.high is not None:
            met = jnp.clip(last_row + self.high + 1, 0, self.columns)
            met_by_all = jnp.clip(first_row + self.high + 1, 0, self.columns)
            stop, full_stop = _over(met + (block - 1), block), _over(met_by_all, block)
        if not isinstance(self.rows, int):
            stop = jnp.where(first_row < self.rows, _traced(stop), 0)
            full_stop = jnp.where(last_row < self.rows, _traced(full_stop), 0)
        if self.low is not None:
            met = jnp.clip(first_row + self.low, 0, self.columns)
            met_by_all = jnp.clip(last_row + self.low, 0, self.columns)
            start = jnp.minimum(_over(met, block), stop)
            full_start = jnp.clip(_over(met_by_all + (block - 1), block), start, stop)
            full_stop = jnp.clip(full_stop, full_start, stop)
        return Blocks(start, full_start, full_stop, stop)

    def lengths(self, row_count: int, block: int) -> tuple[int, ...] | None:
        """How many blocks each tile of `row_count` rows meets, one at least, where that grows or shrinks from
        the first to the last; None where tiles are about alike. Static lengths alone."""
        if (self.low is None) == (self.high is None):
            return None
        assert isinstance(self.rows, int) and isinstance(self.columns, int)
        first = np.arange(0, self.rows, row_count)
        start, stop = np.zeros_like(first), np.full_like(first, -(-self.columns // block))
        if isinstance(self.high, int):
            stop = -(-np.clip(first + row_count + self.high, 0, self.columns) // block)
        if isinstance(self.low, int):
            start = np.clip(first + self.low, 0, self.columns) // block
        return tuple(np.maximum(stop - start, 1).tolist())

    def mean_columns(self) -> float:
        """How many columns a row meets, in the mean; static lengths alone."""
        assert isinstance(self.rows, int) and isinstance(self.columns, int)
        rows = np.arange(self.rows)
        first = 0 if self.low is None else np.clip(rows + self.low, 0, self.columns)
        end = self.columns if self.high is None else np.clip(rows + self.high + 1, 0, self.columns)
        return float(np.mean(np.maximum(end - first, 0)))

    def columns_of(self, rows: jax.Array, tail: bool) -> tuple[jax.Array | None, jax.Array | None]:
        """The columns `[first, end)` that each row meets, None where it meets all; static lengths alone.

        Args:
          tail: whether columns that are not there are to be told from the others.
        """
        first = None if self.low is None else rows + self.low
        end = None if self.high is None else rows + (self.high + 1)
        if tail:
            end = (
                jnp.full(rows.shape, self.columns, jnp.int32)
                if end is None
                else jnp.minimum(end, self.columns)
            )
        return first, end

    def meets(self, rows: jax.Array, columns: jax.Array, end: int | None = None) -> jax.Array | None:
        """Whether each row meets each column, for indices that broadcast; None where nothing bounds them.

        How many rows and columns there are is not looked at where that is static, but for columns where their
        `end` is given.
        """
        met = None
        if self.low is not None:
            met = columns - rows >= self.low
        if self.high is not None:
            met = both(met, columns - rows <= self.high)
        for indices, count in ((rows, self.rows), (columns, self.columns)):
            if not isinstance(count, int):
                met = both(met, indices < count)
        if end is not None and isinstance(self.columns, int):
            met = both(met, columns < end)
        return met


def clipped(index: Index, low: Index, high: Index) -> Index:
    """The nearest to `index` of `[low, high]`, static where all are."""
    if isinstance(index, int) and isinstance(low, int) and isinstance(high, int):
        return min(max(index, low), high)
    return jnp.clip(index, low, high)


def both(one: jax.Array | None, other: jax.Array | None) -> jax.Array | None:
    """Where both hold, None being everywhere."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _traced(index: Index) -> jax.Array:
    """The lowering takes no choice between two static numbers."""
    return lax.full((), index, jnp.int32) if isinstance(index, int) else index


def _over(index: Index, block: int) -> Index:
    return index // block if isinstance(index, int) else lax.div(index, np.int32(block))


def keys_of_queries(
    spec: AttentionSpec, size: Sizes, queries: jax.Array | None = None, keys: jax.Array | None = None
) -> Band:
    """The keys that each query sees, without bounds that bind nowhere.

    Args:
      queries: how many of T there are, where that is data.
      keys: and of S.
    """
    if queries is not None or keys is not None:
        rows = size.T if queries is None else queries
        columns = size.S if keys is None else keys
        low = None if spec.left is None or spec.left >= size.S - 1 else columns - rows - spec.left
        high = None if spec.right is None or spec.right >= size.T - 1 else columns - rows + spec.right
        return Band(rows, columns, low, high)
    aligned = size.S - size.T
    low = None if spec.left is None else aligned - spec.left
    high = None if spec.right is None else aligned + spec.right
    if low is not None and size.T - 1 + low <= 0:
        low = None
    if high is not None and high >= size.S - 1:
        high = None
    return Band(size.T, size.S, low, high)
