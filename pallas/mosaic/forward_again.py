"""The second forward kernel: it computes tiles again whose output isn't finite (`nonfinite.py`).

Consumers do what they did in the first. The loading warpgroup makes values finite, and the keys of such
values NaN, in blocks that hold hidden pairs. So it waits for the copies of a block itself, and hands over
keys and values together.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .forward_kernel import Consumer, Results
from .forward_problem import ForwardProblem
from .nonfinite import SpoiledTiles, is_partial, make_finite, some_marked
from .roles import divide, drain
from .tile_scheduler import div, int32, rem
from .tiles import ROWS


def flash_forward_again(
    query,
    key,
    value,
    data,
    sinks,
    marks,
    out,
    shared,
    barriers,
    landed,
    first_full,
    *,
    scale: float,
    problem: ForwardProblem,
) -> None:
    """Refs as `flash_forward` has them. `out` is changed.

    Args:
      landed: a barrier: keys and values of a block are in shared memory.
      first_full: see `SpoiledTiles`.
    """
    problem = dataclasses.replace(problem, data=data)
    config = problem.config
    spoiled = SpoiledTiles(marks, problem.scheduler, config.queries, first_full)

    @pl.when(some_marked(marks, config.warpgroups + 1))
    def _():
        divide(
            config.warpgroups,
            compute=lambda warpgroup: Consumer(
                warpgroup, Results(out), shared, barriers, scale, problem, spoiled, sinks
            ).run(),
            load=lambda: _load(query, key, value, shared, barriers, landed, spoiled, problem),
            changes=True,
        )


def _load(query, key, value, shared, barriers, landed, spoiled, problem: ForwardProblem) -> None:
    """Fills the queries of each tile, and the rings of its keys and values."""
    config, group = problem.config, problem.size.group

    def tile(tile, head, batch, carry):
        tiles_done, blocks_done = carry
        first = tile * config.queries
        keys = problem.in_row(batch).keys_of_tile(first)
        start, stop = int32(keys.first), int32(keys.last)
        for w in range(config.warpgroups):
            pl.when(tiles_done > 0)(functools.partial(plgpu.barrier_wait, barriers.query_free.at[w]))
            rows = pl.ds(first + w * ROWS, ROWS)
            source, full = query.at[batch, rows, head], barriers.query_full.at[w]
            plgpu.copy_gmem_to_smem(source, shared.query.at[w], full)

        def block(i, blocks_done):
            slot, own = rem(blocks_done, config.stages), start + stop - 1 - i
            rows, key_head = pl.ds(own * config.keys, config.keys), div(head, group)
            for source, ring, free in (
                (key, shared.key, barriers.key_free),
                (value, shared.value, barriers.value_free),
            ):
                refilled = functools.partial(plgpu.barrier_wait, free.at[slot])
                pl.when(blocks_done >= config.stages)(refilled)
                plgpu.copy_gmem_to_smem(source.at[batch, rows, key_head], ring.at[slot], landed.at[0])
            plgpu.barrier_wait(landed.at[0])
            keys_of_block, values = shared.key.at[slot], shared.value.at[slot]
            pl.when(is_partial(keys, own))(lambda: make_finite([values], keys_of_block))
            plgpu.barrier_arrive(barriers.key_full.at[slot])
            plgpu.barrier_arrive(barriers.value_full.at[slot])
            return blocks_done + np.int32(1)

        return tiles_done + 1, lax.fori_loop(start, stop, block, blocks_done)

    tiles_done, blocks_done = spoiled.over(tile, (jnp.int32(0), jnp.int32(0)))
    # No barrier is left while others still arrive at it.
    drain(blocks_done, config.stages, barriers.key_free, barriers.value_free)
    for w in range(config.warpgroups):
        pl.when(tiles_done > 0)(functools.partial(plgpu.barrier_wait, barriers.query_free.at[w]))
