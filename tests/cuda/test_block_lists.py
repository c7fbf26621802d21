"""Lists of the blocks that a kernel's tiles visit, against the pairs that see each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _function_arguments
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.cuda import block_mask
from jax_flash.cuda.block_mask import Grid
from jax_flash.cuda.sm90 import backward_plan, forward_plan

B, T, S, N, K = 2, 230, 270, 4, 2
WINDOWS = ((None, 0), (None, None), (50, 10), (-3, 90))
# Tiles that divide the mask's blocks, are divided by them, or neither.
TILES = ((64, 64), (128, 96), (40, 32), (192, 176))


def own_masks(b, h, q, k):
    return (abs(q - k) < 20 + 60 * h) | (k % 97 < b)


def blocks(random, rows=B, heads=N):
    return jnp.asarray(random.random((rows, heads, 6, 6)) < 0.4)


MASKS = {
    "causal": lambda random: jax_flash.create_block_mask(
        lambda b, h, q, k: q + S - T >= k, None, None, T, S, block_size=64
    ),
    "own": lambda random: jax_flash.create_block_mask(own_masks, B, N, T, S, block_size=(40, 32)),
    "layout": lambda random: jax_flash.BlockMask.from_blocks(
        blocks(random), lengths=(T, S), block_size=(40, 48)
    ),
    "nothing": lambda random: jax_flash.BlockMask.from_blocks(jnp.zeros((1, 1, 2, 3), bool), lengths=(T, S)),
}


def call(name, window, random):
    """A call's spec and operands, and which pairs its mask and window let see each other, (B, N, T, S)."""
    mask = MASKS[name](random)
    _, static, arrays = _function_arguments.operands(None, mask, (B,), (T, S, N))
    shapes = {"query": (B, T, N, 8), "key": (B, S, K, 8), "value": (B, S, K, 8)}
    rows = {x: jnp.zeros(shape, jnp.bfloat16) for x, shape in shapes.items()}
    spec = AttentionSpec(1.0, *window, block_mask=static)
    b, h, q, k = np.ogrid[:B, :N, :T, :S]
    if mask.mask_mod is None:
        kinds = np.broadcast_to(mask.kinds, (B, N, *mask.kinds.shape[2:]))
        sees = kinds[b, h, q // mask.block_size[0], k // mask.block_size[1]] == 2
    else:
        sees = own_masks(b, h, q, k) if name == "own" else np.broadcast_to(q + S - T >= k, (B, N, T, S))
    left, right = (2 * S if side is None else side for side in window)
    distance = k - q - (S - T)
    sees = sees & (distance >= -left) & (distance <= right)
    return spec, Operands.of(rows | arrays), sees


def of_block(sees, row, column, tile):
    """The pairs of a block, (B, N, queries, keys)."""
    first_query, first_key = row * tile[0], column * tile[1]
    return sees[:, :, first_query : first_query + tile[0], first_key : first_key + tile[1]]


@pytest.mark.parametrize("tile, window", list(zip(TILES, WINDOWS, strict=True)), ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_forward(name, window, tile):
    """Each visible pair lies in a listed block, and each block that is listed as full is."""
    spec, operands, sees = call(name, window, np.random.default_rng(0))
    grid = Grid(*tile)
    found = block_mask.lists(spec, operands, {}, grid)
    buffers = {x.name: x.shape for x in block_mask.list_buffers(spec, operands, grid)}
    assert {x: y.shape for x, y in found.items()} == buffers
    lists, counts = np.asarray(found["block_blocks"]), np.asarray(found["block_counts"])
    rows, heads, tiles, columns = lists.shape
    for b, h, row in np.ndindex(B, N, tiles):
        at = b % rows, h % heads, row
        full, count = counts[at]
        assert sorted(set(lists[at][:count])) == sorted(lists[at][:count])
        for column in range(columns):
            pairs = of_block(sees, row, column, tile)[b, h]
            listed = column in lists[at][:count]
            assert listed or not pairs.any()
            if column in lists[at][:full]:
                assert pairs.all() and pairs.shape[1] == tile[1]


@pytest.mark.parametrize("tile, window", list(zip(TILES, WINDOWS, strict=True)), ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_backward(name, window, tile):
    """Each visible pair lies in a listed block; those not marked are hidden by nothing but the window."""
    spec, operands, sees = call(name, window, np.random.default_rng(0))
    _, _, by_mask = call(name, (None, None), np.random.default_rng(0))
    grid, span = Grid(*tile, by_columns=True), 2
    found = block_mask.lists(spec, operands, {}, grid, span)
    buffers = {x.name: x.shape for x in block_mask.list_buffers(spec, operands, grid, span)}
    assert {x: y.shape for x, y in found.items()} == buffers
    lists, counts = np.asarray(found["block_blocks"]), np.asarray(found["block_counts"])
    rows, heads, tiles, blocks_of_queries = lists.shape
    visits = np.zeros((rows, heads, tiles, blocks_of_queries), bool)
    for b, h, column in np.ndindex(B, N, tiles):
        at = b % rows, (h * K // N) % heads, column
        assert counts[at][0] == 0
        entries = lists[at][: counts[at][1]]
        assert np.array_equal(entries, np.sort(entries))
        visits[at][entries // 2] = True
        for row in range(blocks_of_queries):
            assert row in entries // 2 or not of_block(sees, row, column, tile)[b, h].any()
            if 2 * row in entries:
                assert of_block(by_mask, row, column, tile)[b, h].all()
    padded = np.pad(visits, [(0, 0)] * 3 + [(0, -blocks_of_queries % span)])
    by_span = padded.reshape(rows, heads, tiles, -1, span).any(-1).sum(2)
    assert np.array_equal(found["block_visitors"], by_span)


def test_blocks_of_the_masks_own_size_are_listed_exactly():
    """Where tiles are the mask's blocks, nothing hidden is visited."""
    spec, operands, sees = call("own", (None, None), np.random.default_rng(0))
    found = block_mask.lists(spec, operands, {}, Grid(40, 32))
    for b, h, row in np.ndindex(B, N, 6):
        full, count = np.asarray(found["block_counts"])[b, h, row]
        pairs = [of_block(sees, row, column, (40, 32))[b, h] for column in range(9)]
        assert count == sum(x.any() for x in pairs)
        assert full == sum(x.all() for x in pairs[:8])  # the last one has fewer than 32 keys


def test_in_a_fixed_order_there_are_no_lists():
    spec, operands, _ = call("causal", (None, None), np.random.default_rng(0))
    spec = dataclasses.replace(spec, deterministic=True)
    assert backward_plan.backward_block_lists(spec, operands, {}, jax_flash._device.H100) == {}
    assert forward_plan.forward_block_lists(spec, operands, {})


@pytest.mark.parametrize("differs", (False, True))
def test_heads_with_masks_of_their_own_share_no_tile(differs):
    mask = jax_flash.BlockMask.from_blocks(jnp.ones((1, N if differs else 1, 2, 3), bool), lengths=(T, S))
    _, static, arrays = _function_arguments.operands(None, mask, (B,), (T, S, N))
    shapes = {"query": (B, 3, N, 64), "key": (B, S, K, 64), "value": (B, S, K, 64)}
    rows = {x: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for x, shape in shapes.items()}
    arrays = {x: jax.ShapeDtypeStruct(y.shape, y.dtype) for x, y in arrays.items()}
    chosen = forward_plan.configure(AttentionSpec(1.0, block_mask=static), Operands.of(rows | arrays))
    assert (chosen.pack_gqa == 1) == differs
