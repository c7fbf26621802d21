"""The order in which blocks of a Mosaic GPU kernel take tiles: each once, and about equally much for all."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash._mask import keys_of_queries
from jax_flash._spec import AttentionSpec, Operands, sizes
from jax_flash.pallas.mosaic import backward_problem as mosaic_backward_problem
from jax_flash.pallas.mosaic import forward_problem as mosaic_forward_problem
from jax_flash.pallas.mosaic import tiles as mosaic_tiles
from jax_flash.pallas.mosaic.mask_data import MaskData, Segments, longest_first

MULTIPROCESSORS = 132
KERNELS = ("forward", "queries", "keys_and_values")


def problem_of(kernel, B, T, N, H, K=None, is_causal=True, persistent=True):
    query, key = (jax.ShapeDtypeStruct((B, T, heads, H), jnp.bfloat16) for heads in (N, K or N))
    size = sizes(Operands(query, key, key))
    mask = keys_of_queries(AttentionSpec(scale=1.0, right=0 if is_causal else None), size)
    if kernel == "forward":
        config = dataclasses.replace(mosaic_tiles.forward(size), persistent=persistent)
        return mosaic_forward_problem.ForwardProblem(size, mask, config, MULTIPROCESSORS)
    config = mosaic_tiles.backward(size, together=False).kernels[kernel]
    config = dataclasses.replace(config, persistent=persistent)
    kernel = mosaic_backward_problem.KERNELS[kernel]
    mask = mask.transposed() if kernel.rows_are_keys else mask
    return mosaic_backward_problem.BackwardProblem(size, mask, config, kernel, MULTIPROCESSORS)


def tiles_of(scheduler):
    """(tile, head, batch row) of each item, in their order; of a pair one after the other."""
    none = jnp.full((2, 3), -1)

    def item(index):
        def body(tile, head, batch, carry):
            count, found = carry
            return count + 1, found.at[count].set(jnp.stack([tile, head, batch]))

        return scheduler._item(index, body, (0, none))[1]

    found = np.asarray(jax.vmap(item)(jnp.arange(scheduler.items, dtype=jnp.int32)))
    return [[tuple(tile.tolist()) for tile in of_item if tile[0] >= 0] for of_item in found]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("persistent", (False, True))
@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize(
    "shape", [(2, 1024, 16, 128), (1, 4096, 6, 64), (3, 640, 5, 64), (1, 100, 3, 128), (1, 2048, 24, 128)]
)
def test_every_tile_is_taken_once(kernel, shape, is_causal, persistent):
    scheduler = problem_of(kernel, *shape, is_causal=is_causal, persistent=persistent).scheduler
    taken = [tile for item in tiles_of(scheduler) for tile in item]
    assert len(taken) == len(set(taken))
    assert set(taken) == set(np.ndindex(scheduler.tiles, scheduler.heads, scheduler.batch))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "shape",
    [
        (4, 4096, 16, 128),
        (1, 16384, 16, 128),
        (4, 4096, 32, 64),
        (16, 1024, 16, 128),
        (2, 3000, 12, 128),
        (1, 4096, 7, 64),
        (4, 4096, 32, 128, 8),
    ],
)
def test_blocks_have_equally_much_to_do(kernel, shape):
    scheduler = problem_of(kernel, *shape).scheduler
    work = np.zeros(scheduler.grid)
    for item, tiles in enumerate(tiles_of(scheduler)):
        work[item % scheduler.grid] += sum(scheduler.lengths[tile] + 1 for tile, *_ in tiles)
    waves = scheduler.tiles * scheduler.heads * scheduler.batch / scheduler.grid
    assert work.max() <= (1.05 if waves > 4 else 1.15) * work.mean()


@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_are_as_long_as_their_blocks(kernel):
    problem = problem_of(kernel, 1, 3000, 2, 128)
    block = problem.config.keys if kernel == "forward" else problem.config.columns
    rows = problem.config.queries if kernel == "forward" else problem.rows_of_tile
    blocks = [problem.mask.block_range(tile * rows, rows, block) for tile in range(problem.scheduler.tiles)]
    assert problem.scheduler.lengths == tuple(int(found.last - found.first) for found in blocks)


def test_tiles_alike_are_scheduled_head_by_head():
    scheduler = problem_of("forward", 2, 1024, 4, 128, is_causal=False).scheduler
    taken = [tile for item in tiles_of(scheduler) for tile in item]
    assert taken == sorted(taken, key=lambda tile: (tile[2], tile[1], tile[0]))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("persistent", (False, True))
@pytest.mark.parametrize(
    "shape", [(1, 16384, 32, 128, 8), (2, 8192, 32, 128, 8), (1, 9000, 6, 64), (1, 4096, 3, 64)]
)
def test_tiles_in_an_order_by_data(kernel, shape, persistent):
    problem = problem_of(kernel, *shape, persistent=persistent)
    B, T = shape[:2]
    rows, block = (
        (problem.config.queries, problem.config.keys)
        if kernel == "forward"
        else (problem.rows_of_tile, problem.config.columns)
    )
    ids = np.repeat(np.arange(10), np.array([20, 20, 15, 10, 10, 8, 7, 5, 3, 2]) * T // 100)
    ids = jnp.asarray(np.broadcast_to(np.pad(ids, (0, T - ids.size), mode="edge"), (B, T)), jnp.int32)
    ids = ids.at[-1].set(ids[-1, ::-1])  # each batch row has an order of its own
    segments = Segments.of(ids, ids, rows, block)
    order = longest_first(problem.mask, segments.ranges, rows, block)
    problem = dataclasses.replace(problem, data=MaskData(segments=segments, order=order))
    scheduler = problem.scheduler
    assert scheduler.by_data
    places = [tile for item in tiles_of(scheduler) for tile in item]
    assert len(places) == len(set(places))
    assert set(places) == set(np.ndindex(scheduler.tiles, scheduler.heads, B))

    visited = problem.mask.block_range(np.arange(scheduler.tiles) * rows, rows, block)
    of_tiles = np.asarray(segments.ranges).reshape(B, scheduler.tiles, -1, 4)
    visited = visited.within(of_tiles[..., 0].min(2), of_tiles[..., 1].max(2))
    counts = np.take_along_axis(np.asarray(visited.last - visited.first), np.asarray(order), axis=1)
    assert (np.diff(counts, axis=1) <= 0).all()
    if persistent and len(places) >= 6 * scheduler.grid:
        work = np.zeros(scheduler.grid)
        for item, (place, _, batch) in enumerate(places):
            work[item % scheduler.grid] += counts[batch, place] + 1
        assert work.max() <= 1.15 * work.mean()
