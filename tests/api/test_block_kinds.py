"""Kinds of blocks against each value of the mask function, and that bounds decide where they can."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import thorough
from seeds import seed_of

from jax_flash import _block_kinds
from jax_flash._block_kinds import Kind, block_kinds, lists
from jax_flash.functions.static import static_mask_mod

T, S = 330, 270
B, N = 2, 3
BLOCK = (64, 32)
RANDOM = np.random.default_rng(0)
DOCUMENTS = jnp.asarray(np.sort(RANDOM.integers(0, 5, (B, max(T, S))), axis=-1), jnp.int32)
WINDOWS = jnp.asarray([3, 40, 200], jnp.int32)
TABLE = jnp.asarray(RANDOM.normal(size=(N, 2 * max(T, S))), jnp.float32)
SEEN = jnp.asarray(RANDOM.random((T, S)) < 0.01)
PREFIX = jnp.asarray([100, 0], jnp.int32)

MASKS = {
    "all": lambda b, h, q, k: True,
    "nothing": lambda b, h, q, k: k < 0,
    "causal": lambda b, h, q, k: q >= k,
    "bottom right": lambda b, h, q, k: q + S - T >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 50),
    "window of a head": lambda b, h, q, k: jnp.abs(q - k) <= WINDOWS[h],
    "prefix": lambda b, h, q, k: (k < PREFIX[b]) | (k <= q),
    "documents": lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b, k],
    "causal documents": lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (q >= k),
    "chunks": lambda b, h, q, k: q // 48 == k // 48,
    "strided": lambda b, h, q, k: (q - k) % 7 == 0,
    "dilated window": lambda b, h, q, k: (jnp.abs(q - k) < 90) & ((q - k) % 2 == 0),
    "neighbours": lambda b, h, q, k: (abs(q // 20 - k // 20) <= 2) & (abs(q % 20 - k % 20) <= 2),
    "floats": lambda b, h, q, k: jnp.exp(-0.01 * jnp.abs(q - k).astype(jnp.float32)) > 0.3,
    "half floats": lambda b, h, q, k: (q - k).astype(jnp.bfloat16) * 0.1 < 3.0,
    "table": lambda b, h, q, k: TABLE[h, q + k] > 1.0,
    "NaN": lambda b, h, q, k: ~(jnp.log(q - 100.0) < k),
    "tanh of NaN": lambda b, h, q, k: jnp.tanh(jnp.log(q - 100.0)) <= 2.0,
    "clamped NaN": lambda b, h, q, k: jax.lax.clamp(-1.0, jnp.log(q - 100.0), 1.0) <= 2.0,
    "maximum of NaN": lambda b, h, q, k: jnp.minimum(jnp.maximum(jnp.log(q - 100.0), 0.0), k) <= k,
    "bytes": lambda b, h, q, k: (q + 1).astype(jnp.uint8) <= k.astype(jnp.int8),
    "cut": lambda b, h, q, k: jnp.where(q < 100, q >= k, jnp.clip(k, 50, 200) != 50),
    "not": lambda b, h, q, k: ~((q < 150) & (k >= 100)) ^ (k == 3),
    "any": lambda b, h, q, k: SEEN[q, k],
    "wraps": lambda b, h, q, k: q * 123456789 > k * 987654321,
    "bits": lambda b, h, q, k: (q >> 4) == (k >> 4),
    "sorted": lambda b, h, q, k: jnp.sort(jnp.stack([q, k, 100]))[1] == 100,
}
BY_BOUNDS = ("all", "nothing", "causal", "bottom right", "window", "window of a head", "prefix", "bits")


def dense(mask_mod) -> np.ndarray:
    batch, head, query, key = np.ogrid[:B, :N, :T, :S]
    every = np.broadcast_arrays(batch, head, query, key)
    pairs = (jnp.asarray(x.reshape(-1), jnp.int32) for x in every)
    return np.asarray(jax.vmap(mask_mod)(*pairs)).reshape(B, N, T, S)


def expected_kinds(sees: np.ndarray, block=BLOCK) -> np.ndarray:
    grid = (-(-length // size) for length, size in zip(sees.shape[2:], block, strict=True))
    found = np.zeros((*sees.shape[:2], *grid))
    for i, j in np.ndindex(*found.shape[2:]):
        part = sees[..., i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        found[..., i, j] = np.where(part.all((-1, -2)), Kind.FULL, part.any((-1, -2)))
    return found


@pytest.mark.parametrize("is_jitted", (False, True))
@pytest.mark.parametrize("name", MASKS)
def test_kinds(name, is_jitted):
    run = functools.partial(block_kinds, MASKS[name], B, N, T, S, BLOCK)
    kinds = jax.jit(run)() if is_jitted else run()
    assert kinds.dtype == jnp.int8
    np.testing.assert_array_equal(kinds, expected_kinds(dense(MASKS[name])))


@pytest.mark.parametrize("name", MASKS)
def test_bounds_hold(name):
    shape = (B, N, -(-T // BLOCK[0]), -(-S // BLOCK[1]))
    function, captured = static_mask_mod(MASKS[name])
    bounds = _block_kinds._bounds(function, captured, shape, (T, S), BLOCK)
    low, high = (np.broadcast_to(x, shape) for x in bounds)
    kinds = expected_kinds(dense(MASKS[name]))
    assert (kinds[low] == Kind.FULL).all() and (kinds[~high] == Kind.HIDDEN).all()
    if name in BY_BOUNDS:
        assert (low == (kinds == Kind.FULL)).all() and (high == (kinds != Kind.HIDDEN)).all()
    if "documents" in name:  # blocks of two documents that miss one
        assert np.mean(low == high) > 0.6


def test_captured_arrays_may_be_traced():
    @jax.jit
    def kinds(documents):
        return block_kinds(lambda b, h, q, k: documents[b, q] == documents[b, k], B, 1, T, S, BLOCK)

    np.testing.assert_array_equal(kinds(DOCUMENTS), expected_kinds(dense(MASKS["documents"])[:, :1]))


@pytest.mark.parametrize("number", [*range(8), *thorough(*range(8, 80))])
def test_random_functions(number):
    mask_mod = drawn(np.random.default_rng(seed_of(f"kinds of blocks {number}")))
    kinds = block_kinds(mask_mod, B, N, T, S, BLOCK)
    np.testing.assert_array_equal(kinds, expected_kinds(dense(mask_mod)))


def drawn(random):
    """A comparison of two sums of what mask functions are made of, or two of them."""
    numbers = [int(x) for x in random.integers(-9, 40, 4)]

    def part(choice, b, h, q, k):
        return (
            q * numbers[0],
            k - numbers[1],
            (q - k) % (abs(numbers[2]) + 1),
            q // (abs(numbers[3]) + 1),
            DOCUMENTS[b, jnp.minimum(k, q)],
            WINDOWS[h] * k,
            jnp.maximum(q, k) >> 2,
            (TABLE[h, q] * numbers[0]).astype(jnp.int32),
            (q + numbers[0]).astype(jnp.uint8).astype(jnp.int32),
            jnp.tanh(jnp.log(k - 3.0 * numbers[1])) * 9,
        )[choice]

    choices, compare = random.integers(0, 10, 4), random.integers(0, 4)
    combine = (jnp.logical_and, jnp.logical_or, jnp.not_equal)[random.integers(0, 3)]
    relation = (jnp.less, jnp.less_equal, jnp.equal, jnp.not_equal)[compare]

    def mask_mod(*indices):
        a, b, c, d = (part(choice, *indices) for choice in choices)
        return combine(relation(a, b), c >= d)

    return mask_mod


def test_a_million_tokens_without_an_array_of_all_pairs():
    length, documents = 1 << 20, 64
    ends = jnp.asarray(np.arange(length) // (length // documents), jnp.int32)
    evaluated = []
    by_pairs = _block_kinds._kind_by_pairs
    with mock.patch.object(_block_kinds, "_kind_by_pairs", lambda *x: evaluated.append(x) or by_pairs(*x)):
        size = (256, 256)
        causal = block_kinds(lambda b, h, q, k: q >= k, 1, 1, length, length, size)
        of_documents = block_kinds(lambda b, h, q, k: ends[q] == ends[k], 1, 1, length, length, size)
    row = np.arange(length // size[0])
    np.testing.assert_array_equal(causal[0, 0], np.where(row[:, None] > row, 2, row[:, None] == row))
    per = length // documents // size[0]
    np.testing.assert_array_equal(of_documents[0, 0], 2 * (row[:, None] // per == row // per))
    assert evaluated, "the diagonal is looked at"


@pytest.mark.parametrize("name", ("causal", "nothing", "documents", "any"))
def test_lists(name):
    kinds = np.asarray(block_kinds(MASKS[name], B, N, T, S, BLOCK))
    for found, grid in zip(lists(jnp.asarray(kinds)), (kinds, kinds.swapaxes(-1, -2)), strict=True):
        assert found.counts.dtype == found.blocks.dtype == jnp.int32
        for at in np.ndindex(*grid.shape[:3]):
            count, blocks = int(found.counts[at]), np.asarray(found.blocks[at])
            visited = np.flatnonzero(grid[at])
            np.testing.assert_array_equal(blocks[:count] // 2, visited)
            np.testing.assert_array_equal(blocks[:count] % 2, grid[at][visited] == Kind.PARTIAL)
            assert not blocks[count:].any()


@pytest.mark.parametrize("name", ("causal", "documents", "table", "half floats", "sorted"))
def test_under_strict_settings(name):
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        kinds = block_kinds(MASKS[name], B, N, T, S, BLOCK)
        found = lists(kinds)
    np.testing.assert_array_equal(kinds, expected_kinds(dense(MASKS[name])))
    assert all(x.dtype == jnp.int32 for x in jax.tree.leaves(found))


def test_no_blocks():
    assert block_kinds(MASKS["causal"], 1, 1, 0, S).shape == (1, 1, 0, 3)
    assert block_kinds(MASKS["causal"], 1, 1, T, 0).shape == (1, 1, 3, 0)
