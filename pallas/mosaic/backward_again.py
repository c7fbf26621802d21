"""The second backward kernels: they compute tiles again whose gradients aren't finite (`nonfinite.py`).

Consumers do what they did in the first, and set the gradients of hidden scores to 0. The loading warpgroup
makes columns finite, and something else of theirs NaN, in blocks that hold hidden pairs. So it waits for the
copies of a block itself, and hands over both operands together.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .backward_kernel import Barriers, Consumer, Results, Shared, drain_rows, load_rows
from .backward_problem import BackwardProblem, LseAndDelta, Pair
from .nonfinite import SpoiledTiles, is_partial, make_finite, some_marked
from .roles import divide, drain
from .tile_scheduler import int32, rem


def flash_backward_again(
    rows,
    columns,
    lse_and_delta,
    data,
    marks,
    out,
    shared,
    barriers,
    landed,
    first_full,
    *,
    scale: float,
    problem: BackwardProblem,
) -> None:
    """Refs as `flash_backward` has them. `out` is changed.

    Args:
      landed: a barrier: both operands of a block are in shared memory.
      first_full: see `SpoiledTiles`.
    """
    problem = dataclasses.replace(problem, data=data)
    config = problem.config
    spoiled = SpoiledTiles(marks, problem.scheduler, problem.rows_of_tile, first_full)

    @pl.when(some_marked(marks, config.warpgroups + 1))
    def _():
        divide(
            config.warpgroups,
            compute=lambda warpgroup: Consumer(
                warpgroup, Results(out), shared, barriers, scale, problem, spoiled
            ).run(),
            load=lambda: _load(rows, columns, lse_and_delta, shared, barriers, landed, spoiled, problem),
            changes=True,
        )


def _load(
    rows: Pair,
    columns: Pair,
    lse_and_delta: LseAndDelta,
    shared: Shared,
    barriers: Barriers,
    landed: Any,
    spoiled: SpoiledTiles,
    problem: BackwardProblem,
) -> None:
    """Fills the rows of each tile, and the rings of the columns that it visits."""
    config = problem.config

    def tile(tile, head, batch, carry):
        tiles_done, done = carry
        first = tile * problem.rows_of_tile
        load_rows(rows, lse_and_delta, shared, barriers, tiles_done, (batch, head, first), problem)
        blocks = problem.in_row(batch).block_range(first)

        def one_pass(of_pass, done):
            column_head = problem.column_head(head, of_pass)

            def block(i, done):
                own = pl.ds(i * config.columns, config.columns)
                slots = [rem(done, stages) for stages in config.rings]
                for source, ring, slot, stages, free in zip(
                    columns, shared.columns, slots, config.rings, barriers.free, strict=True
                ):
                    pl.when(done >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
                    plgpu.copy_gmem_to_smem(source.at[batch, own, column_head], ring.at[slot], landed.at[0])
                if problem.rows_are_keys:
                    for source, ring, slot in zip(lse_and_delta, shared.lse_and_delta, slots, strict=True):
                        if source is not None:
                            copied = source.at[batch, column_head, own]
                            plgpu.copy_gmem_to_smem(copied, ring.at[slot], landed.at[0])
                plgpu.barrier_wait(landed.at[0])
                pl.when(is_partial(blocks, i))(
                    functools.partial(_make_columns_finite, shared, slots, problem)
                )
                for full, slot in zip(barriers.full, slots, strict=True):
                    plgpu.barrier_arrive(full.at[slot])
                return done + np.int32(1)

            return lax.fori_loop(int32(blocks.first), int32(blocks.last), block, done)

        return tiles_done + 1, lax.fori_loop(np.int32(0), int32(problem.passes(head)), one_pass, done)

    tiles_done, done = spoiled.over(tile, (jnp.int32(0), jnp.int32(0)))
    # No barrier is left while others still arrive at it.
    for stages, free in zip(config.rings, barriers.free, strict=True):
        drain(done, stages, free)
    drain_rows(tiles_done, barriers, config)


def _make_columns_finite(shared: Shared, slots: list, problem: BackwardProblem) -> None:
    first, second = (ring.at[slot] for ring, slot in zip(shared.columns, slots, strict=True))
    if problem.rows_are_keys:
        make_finite([first, second], shared.lse_and_delta.lse.at[slots[0]])
    else:
        make_finite([first], second)
