"""How a kernel for dK and dV adds to dQ as well.

The gradient of a query is a sum over all keys, and each warpgroup holds the gradients of the scores of its
own keys. So warpgroups put those into shared memory. Each multiplies all of them with its share of the
columns of K, and TMA adds the product of a block of queries to dQ's sum in global memory. The order in which
blocks of the grid add is not always the same, so the last bits of dQ aren't either.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import compat
from .product import issue_share


class DQueryAccumulator(NamedTuple):
    """Shared memory and barriers for it."""

    d_scores: Any  # (warpgroups, rows, columns), of each warpgroup's rows
    staged: Any  # (warpgroups, columns, width / warpgroups) float32
    written: Any  # d_scores, by all warpgroups
    read: Any

    @classmethod
    def scratch(cls, warpgroups: int, rows: int, columns: int, width: int, dtype: Any) -> "DQueryAccumulator":
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

    def issue(self, keys: Sequence[Any]) -> jax.Array:
        """Issues dQ of a block (columns, width / warpgroups): this warpgroup's share of the width, from the
        `keys` (rows, width) of each warpgroup."""
        plgpu.barrier_wait(self.written.at[0])
        return issue_share([self.d_scores.at[w] for w in range(len(keys))], keys)

    def add(self, d_block: jax.Array, warpgroup: jax.Array, target: Any) -> None:
        """Issues the addition of a share of dQ to `target`, its place in global memory."""
        plgpu.barrier_arrive(self.read.at[0])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the block before
        self.staged[warpgroup, :, :] = d_block
        plgpu.commit_smem()
        compat.add_to(self.staged.at[warpgroup], target)

    def wait_for_readers(self, some: jax.Array) -> None:
        """Waits until all warpgroups have read what was put last, and the keys, so that both may be
        overwritten. Does nothing if there are not `some`."""
        pl.when(some)(lambda: plgpu.barrier_wait(self.read.at[0]))
