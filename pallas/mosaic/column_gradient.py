"""How a kernel for the gradients of rows adds to that of its columns, of the first operand, as well.

The gradients of the scores are held by warpgroups of rows, and a column's gradient is a sum over all rows. So
warpgroups put them into shared memory, each multiplies those of all with its share of the width of the rows,
and TMA adds what comes of a block of columns to the sum in global memory. The order in which blocks of the
grid come there is not always the same, nor are the last bits of the sums.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import compat
from .product import issued_share


class ColumnGradient(NamedTuple):
    """Shared memory and barriers for it."""

    d_scores: Any  # (warpgroups, rows, columns), of each warpgroup's rows
    staged: Any  # (warpgroups, columns, width / warpgroups) float32
    written: Any  # d_scores, by all warpgroups
    read: Any

    @classmethod
    def scratch(cls, warpgroups: int, rows: int, columns: int, width: int, dtype: Any) -> "ColumnGradient":
        barrier = plgpu.Barrier(num_barriers=1, num_arrivals=warpgroups)
        return cls(
            compat.tiled_shared_memory((warpgroups, rows, columns), dtype),
            compat.tiled_shared_memory((warpgroups, columns, width // warpgroups), jnp.float32),
            barrier,
            barrier,
        )

    def put(self, d_scores: jax.Array, warpgroup: jax.Array, first: jax.Array) -> None:
        """Puts a warpgroup's part (rows, columns) where all read it; `first`: the first block of a tile."""
        self.wait_for_readers(~first)
        self.d_scores[warpgroup, :, :] = d_scores
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.written.at[0])

    def issued(self, rows: Sequence[Any]) -> jax.Array:
        """Issues a block's gradient (columns, width / warpgroups): this warpgroup's share of the width, from
        the `rows` (rows, width) of each."""
        plgpu.barrier_wait(self.written.at[0])
        return issued_share([self.d_scores.at[w] for w in range(len(rows))], rows)

    def add(self, landed: jax.Array, warpgroup: jax.Array, target: Any) -> None:
        """Issues the addition of a share to `target`, its place in global memory."""
        plgpu.barrier_arrive(self.read.at[0])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the block before
        self.staged[warpgroup, :, :] = landed
        plgpu.commit_smem()
        compat.add_to(self.staged.at[warpgroup], target)

    def wait_for_readers(self, some: jax.Array) -> None:
        """Of what was put last, and of the rows, if there are `some`: before either is written over."""
        pl.when(some)(lambda: plgpu.barrier_wait(self.read.at[0]))
