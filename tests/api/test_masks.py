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

from jax_flash import _block_kinds, functions, masks
from jax_flash._block_kinds import block_kinds
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


ERRORS = {
    "offset is a shape": (lambda: masks.CausalMask((8, 8)), TypeError, "offset must be a Python integer"),
    "huge offset": (
        lambda: masks.CausalMask(2**30),
        ValueError,
        "offset must be from -536870912 to 536870912; got 1073741824 (int)",
    ),
    "offset of floats": (
        lambda: masks.CausalMask(np.zeros(2)),
        TypeError,
        "offset must have an integer dtype; got float64 (2,)",
    ),
    "offset of pairs": (
        lambda: masks.LocalMask(3, np.zeros((2, 2), int)),
        ValueError,
        "offset must have shape () or (B,); got int64 (2, 2)",
    ),
    "window of three": (
        lambda: masks.LocalMask((1, 2, 3)),
        ValueError,
        "window_size must be None, an int or a pair",
    ),
    "window of a float": (lambda: masks.LocalMask(1.5), TypeError, "window_size must be a Python integer"),
    "negative window": (
        lambda: masks.DilatedMask((-2, 0), 2),
        ValueError,
        "window_size must hold sizes of at least 0, or None or -1 for unbounded; got (-2, 0) (tuple)",
    ),
    "no dilation": (lambda: masks.DilatedMask(2, 0), ValueError, "dilation must be at least 1; got 0 (int)"),
    "empty chunks": (lambda: masks.ChunkedCausalMask(0), ValueError, "chunk_size must be at least 1; got 0"),
    "chunks of a half": (
        lambda: masks.ChunkedCausalMask(0.5),
        TypeError,
        "chunk_size must be a Python integer",
    ),
    "negative prefix": (
        lambda: masks.PrefixLMMask(-1),
        ValueError,
        "prefix_length must be from 0 to 536870912; got -1",
    ),
    "prefix is a flag": (
        lambda: masks.PrefixLMMask(True),
        TypeError,
        "prefix_length must be a Python integer",
    ),
    "stride": (lambda: masks.StridedMask(0), ValueError, "stride must be at least 1; got 0"),
    "huge stride": (
        lambda: masks.FixedMask(2**30 + 1),
        ValueError,
        "stride must be at most 1073741824; got 1073741825",
    ),
    "summary": (lambda: masks.FixedMask(4, 5), ValueError, "summary must be at most stride = 4; got 5"),
    "negative tokens": (lambda: masks.GlobalMask(-1), ValueError, "tokens must be at least 0; got -1"),
    "tokens by index": (
        lambda: masks.LongformerMask(2, np.array([0, 5])),
        TypeError,
        "tokens must have a bool dtype",
    ),
    "tokens of heads": (
        lambda: masks.GlobalMask(np.zeros((1, 1, 4), bool)),
        ValueError,
        "tokens must have shape (S,) or (B, S); got bool (1, 1, 4)",
    ),
    "even window": (
        lambda: masks.BigBirdMask(9, window_blocks=2),
        ValueError,
        "window_blocks must be odd; got 2",
    ),
    "negative random blocks": (
        lambda: masks.BigBirdMask(9, random_blocks=-1),
        ValueError,
        "random_blocks must be at least 0; got -1",
    ),
    "seed": (
        lambda: masks.BigBirdMask(9, seed=0.5),
        TypeError,
        "seed must be an int or one key, as from jax.random.key; got 0.5 (float)",
    ),
    "several keys": (
        lambda: masks.BigBirdMask(9, seed=jax.random.split(jax.random.key(0))),
        TypeError,
        "one key",
    ),
    "grid": (
        lambda: masks.NeighborhoodMask(9, 3),
        TypeError,
        "shape must be a tuple of ints, as (height, width); got 9 (int)",
    ),
    "huge grid": (lambda: masks.NeighborhoodMask((2**16, 2**16), 3), ValueError, "fewer than 2**31 tokens"),
    "kernel of three axes": (
        lambda: masks.NeighborhoodMask((9, 9), (3, 3, 3)),
        ValueError,
        "kernel_size must be an int or 2 of them; got (3, 3, 3) (tuple)",
    ),
    "kernel": (
        lambda: masks.NeighborhoodMask((9, 9), 0),
        ValueError,
        "kernel_size must be at least 1; got 0",
    ),
    "dilation beyond the grid": (
        lambda: masks.NeighborhoodMask((9, 5), 3, 2),
        ValueError,
        "kernel_size times dilation must be at most shape = (9, 5) along each axis; "
        "got kernel_size (3, 3) and dilation (2, 2)",
    ),
    "a parent behind": (
        lambda: masks.TreeMask([-1, 0, 2]),
        ValueError,
        "parents must hold -1 or the index of an earlier token; got 2 of token 2",
    ),
    "a parent before all": (lambda: masks.TreeMask(jnp.array([-2])), ValueError, "got -2 of token 0"),
    "parents": (lambda: masks.TreeMask([0.5]), TypeError, "parents must have an integer dtype"),
    "context": (
        lambda: masks.TreeMask([-1], -1),
        ValueError,
        "context_length must be from 0 to 536870912; got -1",
    ),
    "a dense mask of numbers": (
        lambda: masks.NumpyMask(np.ones((2, 2))),
        TypeError,
        "array must have a bool dtype",
    ),
    "a dense mask of keys": (
        lambda: masks.NumpyMask(np.ones(2, bool)),
        ValueError,
        "array must have shape (T, S) or (N, T, S) or (B, N, T, S); got bool (2,)",
    ),
    "a dense mask is a list": (
        lambda: masks.NumpyMask([[True]]),
        TypeError,
        "array must be an array; got [[True]]",
    ),
    "ids of floats": (lambda: masks.DocumentMask(jnp.ones(3)), TypeError, "ids must have an integer dtype"),
    "ids of heads": (
        lambda: masks.DocumentMask(jnp.ones((1, 1, 3), int)),
        ValueError,
        "ids must have shape (T,) or (B, T); got int32 (1, 1, 3)",
    ),
    "rows of ids": (
        lambda: masks.DocumentMask(jnp.ones((2, 3), int), jnp.ones(4, int)),
        ValueError,
        "key_ids must have as many batch rows as ids, int32 (2, 3); got int32 (4,)",
    ),
    "layout": (
        lambda: masks.BlockLayoutMask(np.ones(3, bool)),
        ValueError,
        "layout must have shape (T / q, S / k) or (N, T / q, S / k) or (B, N, T / q, S / k); got bool (3,)",
    ),
    "blocks of three axes": (
        lambda: masks.BlockLayoutMask(LAYOUT, (8, 8, 8)),
        ValueError,
        "block_size must be an int or 2 of them; got (8, 8, 8) (tuple)",
    ),
    "one mask for heads": (
        lambda: masks.MultiHeadMask(masks.FullMask()),
        TypeError,
        "masks must be a tuple or a list",
    ),
    "no heads": (
        lambda: masks.MultiHeadMask([]),
        ValueError,
        "masks must have a mask for each head; got none",
    ),
    "a head without a mask": (
        lambda: masks.MultiHeadMask([None]),
        TypeError,
        "masks must hold functions; got None",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    make, kind, message = ERRORS[name]
    with pytest.raises(kind) as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize("name", CASES)
def test_sizes_that_fit(name):
    case = CASES[name]
    case.mask.check_sizes(B, N, case.T, case.S)


def test_ids_of_64_bits():
    ids = np.array([0, 1, 1 << 40, 1 << 41, 1 << 40])
    np.testing.assert_array_equal(dense(masks.DocumentMask(ids), 1, 1, 5, 5)[0, 0], ids[:, None] == ids)


SIZES = {  # of B, N, T, S other than those that the mask is for
    "offset": (
        masks.CausalMask(OFFSETS) & masks.FullMask(),
        (3, N, T, S),
        "offset is int32 (2,); its axis -1 must be B = 3",
    ),
    "prefix": (
        ~masks.PrefixLMMask(PREFIXES),
        (3, N, T, S),
        "prefix_length is int32 (2,); its axis -1 must be B = 3",
    ),
    "tokens": (
        masks.LongformerMask(1, GLOBAL),
        (B, N, T, S + 1),
        "tokens is bool (2, 83); its axis -1 must be S = 84",
    ),
    "length": (masks.BigBirdMask(9), (B, N, 9, 8), "length is 9; T and S must be that, and are 9 and 8"),
    "heads": (masks.BigBirdMask(9, heads=2), (B, 3, 9, 9), "heads is 2; it must be 1 or N = 3"),
    "grid": (
        masks.NeighborhoodMask((7, 9), 3),
        (B, N, 7, 9),
        "shape is (7, 9); T and S must be 63, and are 7 and 9",
    ),
    "tree": (masks.TreeMask(PARENTS), (B, N, 8, S), "parents is int32 (2, 9); its axis -1 must be T = 8"),
    "context": (
        masks.TreeMask([-1], CONTEXTS),
        (3, N, 1, S),
        "context_length is int32 (2,); its axis -1 must be B = 3",
    ),
    "queries": (masks.NumpyMask(np.ones((1, 3, T, S), bool)), (B, N, T + 1, S), "axis -2 must be T = 62"),
    "rows": (masks.NumpyMask(np.ones((3, 1, T, S), bool)), (B, N, T, S), "axis -4 must be B = 2"),
    "documents": (masks.DocumentMask(IDS), (B, N, T, S), "ids is int32 (2, 61); its axis -1 must be S = 83"),
    "keys": (
        masks.DocumentMask(IDS, IDS),
        (B, N, T, S),
        "key_ids is int32 (2, 61); its axis -1 must be S = 83",
    ),
    "layout": (masks.BlockLayoutMask(LAYOUT, (16, 8)), (B, N, 65, S), "axis -2 must be ceil(T / q) = 5"),
    "layout's heads": (masks.BlockLayoutMask(LAYOUT, (16, 8)), (B, 4, T, S), "axis -3 must be N = 4"),
    "masks": (masks.MultiHeadMask([masks.FullMask()]), (B, 2, T, S), "masks are 1; there must be N = 2"),
    "a head's": (masks.MultiHeadMask([masks.DocumentMask(IDS)]), (B, 1, 7, S), "must be T = 7"),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_do_not_fit(name):
    mask, sizes, message = SIZES[name]
    with pytest.raises(ValueError) as error:
        mask.check_sizes(*sizes)
    assert message in str(error.value)
