"""Mask functions against their definitions, and what bounds know of them."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mask_cases import (
    CASES,
    CONTEXTS,
    GLOBAL,
    IDS,
    LAYOUT,
    OFFSETS,
    PARENTS,
    PREFIXES,
    B,
    N,
    S,
    T,
    dense,
    kinds_of,
)

from jax_flash import _block_kinds, create_block_mask, functions, masks
from jax_flash._block_kinds import Kind, block_kinds
from jax_flash.functions.static import static_mask_mod

BLOCK = (16, 32)


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    case = CASES[name]
    expected = case.expected()
    np.testing.assert_array_equal(dense(case.mask, B, N, case.T, case.S), expected)
    value = case.mask(1, 0, 5, np.int64(7))
    assert (value.shape, value.dtype) == ((), bool) and value == expected[1, 0, 5, 7]


@pytest.mark.parametrize("name", CASES)
def test_kinds_under_strict_settings(name):
    case = CASES[name]
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        kinds = jax.jit(lambda: block_kinds(case.mask, B, N, case.T, case.S, BLOCK))()
    np.testing.assert_array_equal(kinds, kinds_of(case.expected(), BLOCK))


def test_a_tree_of_python_integers_under_a_transfer_guard():
    with jax.transfer_guard("disallow"):
        found = create_block_mask(masks.TreeMask([-1, 0, 0], 9), None, None, 3, 12, block_size=4)
    np.testing.assert_array_equal(found.kinds, [[[[Kind.FULL, Kind.FULL, Kind.PARTIAL]]]])


@pytest.mark.parametrize("name", CASES)
def test_are_graphs_of_scalars(name):
    """So that kernels evaluate them, and bounds are known."""
    functions.trace_mask_mod(CASES[name].mask)


MILLION, LARGE_BLOCK = 1 << 20, 4096
ROWS = MILLION // LARGE_BLOCK
ENDS = np.sort(np.random.default_rng(0).choice(MILLION, 63, replace=False))
DOCUMENTS = np.searchsorted(ENDS, np.arange(MILLION))
FIRST, LAST = DOCUMENTS[::LARGE_BLOCK], DOCUMENTS[LARGE_BLOCK - 1 :: LARGE_BLOCK]
OF_ONE = (FIRST == LAST) & (FIRST[:, None] == FIRST) & (FIRST == LAST)[:, None]
PARTIAL = ((FIRST[:, None] <= LAST) & (FIRST <= LAST[:, None]) & ~OF_ONE).sum()
# The most blocks of a million tokens, ROWS × ROWS of them, that bounds may leave open.
OPEN = {
    "causal": (masks.CausalMask(), ROWS),
    "causal with an offset": (masks.CausalMask(100), 2 * ROWS),
    "local": (masks.LocalMask((100_000, 0)), 3 * ROWS),
    "chunked": (masks.ChunkedCausalMask(2**15), ROWS),
    "chunked beside blocks": (masks.ChunkedCausalMask(10_000), 3 * ROWS),
    "prefix": (masks.PrefixLMMask(300_000), 2 * ROWS),
    "sorted documents": (masks.DocumentMask(DOCUMENTS), PARTIAL),
    "causal documents": (masks.DocumentMask(DOCUMENTS) & masks.CausalMask(), PARTIAL / 2 + ROWS),
    "dilated": (masks.DilatedMask(5000, 2), 7 * ROWS),
    "strided": (masks.StridedMask(2**16), ROWS * ROWS / 12),
    "fixed": (masks.FixedMask(2**16, 128), ROWS * ROWS / 30),
    "longformer": (masks.LongformerMask((4096, 4096), 512), 6 * ROWS),
    "bigbird": (masks.BigBirdMask(MILLION, block_size=LARGE_BLOCK), 0),
    "neighborhood": (masks.NeighborhoodMask((1024, 1024), 13), 5 * ROWS),
    "tree": (masks.TreeMask(np.arange(-1, 63), MILLION - 64), ROWS),
    "layout": (masks.BlockLayoutMask(np.arange(ROWS * ROWS).reshape(ROWS, ROWS) % 3 == 0, LARGE_BLOCK), 0),
}


@pytest.mark.parametrize("name", OPEN)
def test_bounds_decide_most_blocks(name):
    mask, most = OPEN[name]
    size, block = (MILLION, MILLION), (LARGE_BLOCK, LARGE_BLOCK)
    function, captured = static_mask_mod(mask)
    low, high = jax.jit(lambda: _block_kinds._bounds(function, captured, (1, 1, ROWS, ROWS), size, block))()
    is_open = np.broadcast_to(~low & high, (1, 1, ROWS, ROWS))
    assert is_open.sum() <= most
    assert high.any(), "something is seen"


def test_operators():
    is_even, local = lambda b, h, q, k: (q + k) % 2 == 0, masks.LocalMask(2)
    q, k = np.ogrid[:9, :9]
    near, even = abs(q - k) <= 2, (q + k) % 2 == 0
    for mask, expected in (
        (local & is_even, near & even),
        (is_even & local, near & even),
        (local | is_even, near | even),
        (is_even | local, near | even),
        (~local, ~near),
        (~~local, near),
        (~(local & is_even) | local, ~(near & even) | near),
        (masks.and_masks(is_even, local, masks.CausalMask()), near & even & (q >= k)),
        (masks.or_masks(is_even), even),
        (masks.and_masks(), np.ones_like(near)),
        (masks.or_masks(), np.zeros_like(near)),
        (masks.and_masks(lambda *_: True, lambda *_: np.bool_(True)), np.ones_like(near)),
    ):
        assert isinstance(mask, masks.Mask)
        np.testing.assert_array_equal(dense(mask, 1, 1, 9, 9)[0, 0], expected)


def test_combinations_of_what_is_no_mask():
    with pytest.raises(TypeError, match="unsupported operand"):
        masks.FullMask() & 3  # pyright: ignore
    with pytest.raises(TypeError, match="unsupported operand"):
        True | masks.FullMask()  # pyright: ignore
    with pytest.raises(TypeError, match=r"or_masks takes functions \(batch, head, .*; got 3 \(int\)"):
        masks.or_masks(masks.FullMask(), 3)
    with pytest.raises(TypeError, match="no truth value"):
        masks.FullMask() and masks.CausalMask()  # pyright: ignore
    for not_bool in (masks.and_masks(lambda b, h, q, k: q), masks.MultiHeadMask([lambda *_: 1])):
        with pytest.raises(TypeError, match=r"must return a bool; .* returned"):
            not_bool(0, 0, 0, 0)


def test_are_splash_attentions():
    splash = pytest.importorskip("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask")
    shape = (T, S)
    for own, other in (
        (masks.FullMask(), splash.FullMask(shape)),
        (masks.CausalMask(), splash.CausalMask(shape)),
        (masks.CausalMask(-7), splash.CausalMask(shape, -7)),
        (masks.LocalMask((5, 3), 2), splash.LocalMask(shape, (5, 3), 2)),
        (masks.LocalMask((None, 3), 0), splash.LocalMask(shape, (None, 3), 0)),
        (masks.ChunkedCausalMask(13), splash.ChunkedCausalMask(shape, 13)),
        (masks.NumpyMask(GLOBAL[:, :2].T), splash.NumpyMask(GLOBAL[:, :2].T)),
        (
            masks.MultiHeadMask([masks.CausalMask(), masks.LocalMask((2, 2))]),
            splash.MultiHeadMask([splash.CausalMask(shape), splash.LocalMask(shape, (2, 2), 0)]),
        ),
    ):
        *heads, rows, columns = other.shape
        every = (slice(0, n) for n in other.shape)
        found = dense(own, 1, *(heads or [1]), rows, columns)[0]
        np.testing.assert_array_equal(found, np.reshape(other[tuple(every)], found.shape))


TRACED = {
    "offset": (OFFSETS, lambda x: masks.CausalMask(x)),
    "scalar offset": (OFFSETS[0], lambda x: masks.ChunkedCausalMask(20, x)),
    "window's": (
        OFFSETS,
        lambda x: masks.DilatedMask(4, 2, x) | masks.StridedMask(7, x) | masks.FixedMask(7, 1, x),
    ),
    "prefixes": (PREFIXES, lambda x: masks.PrefixLMMask(x)),
    "tokens": (GLOBAL, lambda x: masks.LongformerMask(2, x)),
    "key": (jax.random.key(0), lambda x: masks.BigBirdMask(90, block_size=8, seed=x)),
    "parents": (PARENTS, lambda x: masks.TreeMask(x)),
    "one tree": (PARENTS[0], lambda x: masks.TreeMask(x)),
    "context": (CONTEXTS, lambda x: masks.TreeMask(PARENTS[0], x)),
    "ids": (IDS, lambda x: masks.DocumentMask(x, x[:, ::-1])),
    "layout": (LAYOUT, lambda x: masks.BlockLayoutMask(x, (16, 8))),
    "dense": (GLOBAL, lambda x: masks.NumpyMask(x)),
}


@pytest.mark.parametrize("name", TRACED)
def test_arrays_may_be_traced(name):
    array, mask_of = TRACED[name]

    @jax.jit
    def values(x):
        mask = mask_of(x)
        captured = functions.trace_mask_mod(mask).captured
        assert any(isinstance(x, jax.core.Tracer) for x in captured)
        return jax.vmap(lambda i: mask(i % 2, i % 3, i % T, 7 * i % S))(jnp.arange(100))

    mask = mask_of(array)
    expected = dense(mask, B, N, T, S)
    i = np.arange(100)
    found = values(array)
    np.testing.assert_array_equal(found, expected[i % 2, i % 3, i % T, 7 * i % S])
    assert 0 < np.mean(found) < 1


def test_are_built_inside_of_jit():
    """And used outside of it, as long as nothing they are made of is traced."""
    built = []

    @jax.jit
    def build():
        built.append(
            masks.BigBirdMask(90, block_size=8) & masks.TreeMask([-1, 0]) & masks.DocumentMask(IDS << 40)
        )

    build()
    assert dense(built[0], 1, 1, 2, 2).any()


def test_equality():
    ids = jnp.asarray(IDS)
    equal = (
        lambda: masks.CausalMask(OFFSETS),
        lambda: masks.LocalMask(3),
        lambda: masks.DocumentMask(IDS),
        lambda: masks.DocumentMask(ids),
        lambda: masks.BigBirdMask(90, block_size=8),
        lambda: masks.TreeMask([-1, 0]),
        lambda: masks.CausalMask(1) & masks.LocalMask(3) | ~masks.FullMask(),
    )
    for number, one in enumerate(equal):
        assert one() == one() and hash(one()) == hash(one())
        assert all(one() != other() for other in equal[number + 1 :])
        if one != equal[3]:  # of a JAX array, which copies don't share
            assert copy.deepcopy(one()) == one()
    of_jax = equal[3]()
    assert hash(of_jax) != hash(copy.deepcopy(of_jax)) and of_jax != copy.deepcopy(of_jax)
    assert masks.CausalMask(1) != masks.CausalMask(2) and masks.FullMask() != 3
    assert masks.DocumentMask(IDS) != masks.DocumentMask(IDS + 1)
    assert masks.BigBirdMask(90, block_size=8) != masks.BigBirdMask(90, block_size=8, seed=1)

    traces = []

    def value(mask, x):
        traces.append(mask)
        return mask(0, 0, x, x)

    jitted = jax.jit(value, static_argnums=0)
    assert jitted(masks.DocumentMask(IDS), 1) and jitted(masks.DocumentMask(IDS), 2) and len(traces) == 1


def test_are_immutable():
    given = np.zeros((4, 4), bool)
    mask = masks.NumpyMask(given)
    given[0, 0] = True
    assert not mask(0, 0, 0, 0)
    with pytest.raises(ValueError, match="read-only"):
        mask.array[0, 0] = True
    with pytest.raises(dataclasses.FrozenInstanceError):
        mask.array = given  # pyright: ignore


def test_repr():
    mask = (masks.DocumentMask(IDS[0]) & masks.LocalMask(3)) | ~masks.StridedMask(4, OFFSETS)
    assert repr(mask) == (
        "or_masks(and_masks(DocumentMask(ids=int32[61], key_ids=None), "
        "LocalMask(window_size=(3, 3), offset=0)), ~StridedMask(stride=4, offset=int32[2]))"
    )


@pytest.mark.parametrize("window_blocks,global_blocks,wanted", [(3, 1, 3), (5, 4, 2), (1, 0, 12), (3, 20, 1)])
def test_random_blocks(window_blocks, global_blocks, wanted):
    blocks, heads = 10, 40
    sizes = dict(window_blocks=window_blocks, global_blocks=global_blocks, random_blocks=wanted, heads=heads)
    mask = masks.BigBirdMask(8 * blocks - 3, block_size=8, seed=jax.random.key(1), **sizes)
    for row in range(blocks):
        others = {x for x in range(global_blocks, blocks) if abs(x - row) > window_blocks // 2}
        drawn = [[int(x) for x in mask._table[head, row] if x >= 0] for head in range(heads)]
        assert all(len(x) == len(set(x)) == min(wanted, len(others)) for x in drawn)
        # Of 9 blocks at most, 40 heads with at least one each miss a certain one with probability (8/9)^40.
        assert {x for each in drawn for x in each} <= others
        if row == 0:
            assert {x for each in drawn for x in each} == others


def test_random_blocks_are_uniform():
    mask = masks.BigBirdMask(12 * 8, block_size=8, random_blocks=3, heads=4000, global_blocks=2)
    pairs = np.asarray(mask._table)[:, 6]  # 3, 4 and 8 to 11 of which 3 are drawn: 2, 3, 4, 8, 9, 10, 11
    counts = np.bincount(pairs.reshape(-1), minlength=12)
    expected = 4000 * 3 / 7
    assert not counts[[0, 1, 5, 6, 7]].any()
    np.testing.assert_allclose(counts[[2, 3, 4, 8, 9, 10, 11]], expected, atol=5 * expected**0.5)


def test_ids_of_64_bits():
    ids = np.array([0, 1, 1 << 40, 1 << 41, 1 << 40])
    np.testing.assert_array_equal(dense(masks.DocumentMask(ids), 1, 1, 5, 5)[0, 0], ids[:, None] == ids)
