"""Which blocks of columns a block of rows meets: the band of a causal or windowed call.

Rows are queries and columns keys, or, transposed, the other way round. Everything static is a Python int,
so that a loop that can't be entered is never written.
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


@dataclasses.dataclass(frozen=True)
class Band:
    """Row `r` meets the columns `r + low <= c <= r + high` of `0 <= c < columns`; None is unbounded."""

    rows: int
    columns: int
    low: int | None
    high: int | None

    def transposed(self) -> "Band":
        low = None if self.high is None else -self.high
        high = None if self.low is None else -self.low
        return Band(self.columns, self.rows, low, high)

    def blocks(self, first_row: Index, row_count: int, block: int) -> Blocks:
        """The blocks of `block` columns that rows `[first_row, first_row + row_count)` meet."""
        last_row = first_row + row_count - 1
        start, full_start = 0, 0
        stop, full_stop = -(-self.columns // block), self.columns // block
        if self.high is not None:
            met = jnp.clip(last_row + self.high + 1, 0, self.columns)
            met_by_all = jnp.clip(first_row + self.high + 1, 0, self.columns)
            stop, full_stop = _over(met + (block - 1), block), _over(met_by_all, block)
        if self.low is not None:
            met = jnp.clip(first_row + self.low, 0, self.columns)
            met_by_all = jnp.clip(last_row + self.low, 0, self.columns)
            start = jnp.minimum(_over(met, block), stop)
            full_start = jnp.clip(_over(met_by_all + (block - 1), block), start, stop)
            full_stop = jnp.clip(full_stop, full_start, stop)
        return Blocks(start, full_start, full_stop, stop)

    def meets(self, rows: jax.Array, columns: jax.Array) -> jax.Array | None:
        """Whether each row meets each column, for indices that broadcast; None where nothing bounds them.

        Columns at `columns` and beyond are not looked at.
        """
        met = None
        if self.low is not None:
            met = columns - rows >= self.low
        if self.high is not None:
            below = columns - rows <= self.high
            met = below if met is None else met & below
        return met


def _over(index: jax.Array, block: int) -> jax.Array:
    return lax.div(index, np.int32(block))


def keys_of_queries(spec: AttentionSpec, size: Sizes) -> Band:
    """The keys that each query sees, without bounds that bind nowhere."""
    aligned = size.S - size.T
    low = None if spec.left is None else aligned - spec.left
    high = None if spec.right is None else aligned + spec.right
    if low is not None and size.T - 1 + low <= 0:
        low = None
    if high is not None and high >= size.S - 1:
        high = None
    return Band(size.T, size.S, low, high)
