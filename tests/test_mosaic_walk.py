"""The order in which blocks of a Mosaic GPU kernel take tiles: each once, and about equally much for all."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash._spec import AttentionSpec, Operands, sizes
from jax_flash.pallas import mosaic_tiles
from jax_flash.pallas.band import keys_of_queries
from jax_flash.pallas.mosaic_walk import Walk

MULTIPROCESSORS = 132


def walk_of(B, T, N, H, S=None, is_causal=True, **changes):
    query, key = (jax.ShapeDtypeStruct((B, length, N, H), jnp.bfloat16) for length in (T, S or T))
    size = sizes(Operands(query, key, key))
    spec = AttentionSpec(scale=1.0, right=0 if is_causal else None)
    config = dataclasses.replace(mosaic_tiles.forward(size), **changes)
    return Walk(size, keys_of_queries(spec, size), config, MULTIPROCESSORS)


def tiles_of(walk):
    """(first query, head, batch row) and blocks of keys of each tile, in the order of items."""
    turns = 2 if walk.paired else 1
    items, turn = (x.ravel() for x in np.mgrid[: walk.items, :turns].astype(np.int32))

    def tile(item, of_pair):
        def body(first, head, batch, keys, _):
            return first, head, batch, jnp.asarray(keys.stop - keys.start)

        return walk._tile(item, of_pair, body, None)

    *places, blocks = map(np.asarray, jax.vmap(tile)(jnp.asarray(items), jnp.asarray(turn)))
    return items, list(zip(*places, strict=True)), blocks


@pytest.mark.parametrize("persistent", (False, True))
@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize(
    "shape", [(2, 1024, 16, 128), (1, 4096, 6, 64), (3, 640, 5, 64), (1, 100, 3, 128), (1, 2048, 24, 256)]
)
def test_every_tile_is_taken(shape, is_causal, persistent):
    walk = walk_of(*shape, is_causal=is_causal, persistent=persistent)
    _, places, _ = tiles_of(walk)
    B, _, N, _ = shape
    tiles = np.ndindex(walk.tiles_of_head, N, B)
    assert set(places) == {(tile * walk.config.queries, head, row) for tile, head, row in tiles}
    # Of an odd number of tiles in pairs the middle one is its own other.
    twice = B * N if walk.paired and walk.tiles_of_head % 2 else 0
    assert len(places) == len(set(places)) + twice


@pytest.mark.parametrize(
    "shape",
    [
        (4, 4096, 16, 128),
        (1, 16384, 16, 128),
        (4, 4096, 32, 64),
        (4, 4096, 8, 256),
        (16, 1024, 16, 128),
        (2, 3000, 12, 128),
        (1, 4096, 7, 64),
    ],
)
def test_blocks_have_equally_much_to_do(shape):
    walk = walk_of(*shape)
    items, _, lengths = tiles_of(walk)
    work = np.bincount(items % walk.blocks, weights=lengths)
    assert work.max() <= 1.05 * work.mean()


def test_tiles_alike_are_walked_head_by_head():
    walk = walk_of(2, 1024, 4, 128, is_causal=False)
    _, places, _ = tiles_of(walk)
    assert places == sorted(places, key=lambda place: (place[2], place[1], place[0]))
