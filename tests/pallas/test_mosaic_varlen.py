"""Varlen sequences by Mosaic GPU, packed as they are: what rows see, and the kernels on awkward offsets."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import in_turn
from pallas_lowering import only_lowering
from test_mosaic import calls_lowered_for_hopper, interpreted_by_mosaic

import jax_flash
from jax_flash import _device, _reference, pallas
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.pallas import compat, lowering, packed_rows
from jax_flash.pallas.mosaic import backward as mosaic_backward
from jax_flash.pallas.mosaic.mask_data import ROWS, mask_of
from jax_flash.pallas.mosaic.tiles import BackwardConfig, BackwardConfigs

TILE, BLOCK = 128, 32
ALL, CAUSAL = (None, None), (None, 0)
CALLS = {
    "self": dict(
        offsets=[[0, 70, 70, 200]], key_offsets=[[0, 70, 70, 200]], longest=(130, 130), window=CAUSAL
    ),
    "window": dict(offsets=[[3, 20, 150]], key_offsets=[[0, 90, 190]], longest=(130, 130), window=(30, 5)),
    "clipped": dict(
        offsets=[[0, 100, 210], [0, 0, 9]],
        key_offsets=[[0, 9, 200], [1, 1, 1]],
        longest=(64, 150),
        window=ALL,
    ),
    "wide heads": dict(
        offsets=[[0, 90, 200]], key_offsets=[[0, 130, 200]], longest=(110, 130), window=CAUSAL, H=256, K=2
    ),
}


def call(offsets, key_offsets, longest, window, T, S, N=2, K=1, H=64):
    """With queries, keys and values in bfloat16."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (len(offsets), T, N, H), (len(offsets), S, K, H), (len(offsets), S, K, H)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    most = dict(zip(("max_query_length", "max_key_value_length"), longest, strict=True))
    spec = AttentionSpec(H**-0.5, *window, **most)
    packed = (jnp.asarray(x, jnp.int32) for x in (offsets, key_offsets))
    names = ("query_offsets", "key_value_offsets")
    return spec, Operands(*arrays, **dict(zip(names, packed, strict=True)))


def random_offsets(generator, rows, sequences, tokens):
    """The first sequence may begin after the first token, the last end before the last, and some be empty."""
    return np.sort(generator.integers(0, tokens + 1, (rows, sequences + 1)), axis=1)


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("window", ((None, None), (None, 0), (20, 3), (0, None), (-3, 9), (15, -4)), ids=str)
def test_rows_see_what_the_definition_says(window, transposed):
    generator = np.random.default_rng(7)
    for longest in ((300, 290), (40, 60)):
        T, S = 300, 290
        offsets, key_offsets = (random_offsets(generator, 2, 5, x) for x in (T, S))
        spec, operands = call(offsets, key_offsets, longest, window, T, S)
        dense = np.asarray(_reference._allowed(spec, operands))[:, 0]  # (B, T, S)
        dense = dense.swapaxes(1, 2) if transposed else dense
        mask, data = mask_of(spec, operands, TILE, BLOCK, transposed=transposed)
        assert mask.unbounded and (mask.rows, mask.columns) == dense.shape[1:]
        begin, end, ranges = (np.asarray(x) for x in data.intervals)
        column = np.arange(dense.shape[2])
        rows = begin.shape[1]
        assert rows % TILE == 0
        dense = np.pad(dense, ((0, 0), (0, rows - dense.shape[1]), (0, 0)))
        np.testing.assert_array_equal((begin[..., None] <= column) & (column < end[..., None]), dense)
        blocks = np.pad(dense, ((0, 0), (0, 0), (0, -dense.shape[2] % BLOCK))).reshape(2, -1, ROWS, 10, BLOCK)
        number = np.arange(10)
        first, last, full_begin, full_end = (ranges[..., i, None] for i in range(4))
        visited = (first <= number) & (number < last)
        assert (visited | ~blocks.any((2, 4))).all()
        is_full = (full_begin <= number) & (number < full_end)
        np.testing.assert_array_equal(is_full & visited, blocks.all((2, 4)))
        counts = of_tiles(first, last)
        in_order = np.take_along_axis(counts, np.asarray(data.order), axis=1)
        np.testing.assert_array_equal(in_order, -np.sort(-counts, axis=1))
        np.testing.assert_array_equal(
            np.sort(data.order), np.broadcast_to(np.arange(counts.shape[1]), counts.shape)
        )


def of_tiles(first, last):
    """How many blocks each tile visits, of the blocks that 64 rows visit."""
    first, last = (x.reshape(len(x), -1, TILE // ROWS) for x in (first, last))
    return np.maximum(last.max(2) - first.min(2), 0)


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("window", ((None, None), (None, 0), (20, 3), (-3, 9)), ids=str)
def test_rows_that_are_alike_see_what_others_do(window, transposed):
    offsets, key_offsets = np.arange(5)[None] * 50, np.arange(5)[None] * 70
    spec, operands = call(offsets, key_offsets, (50, 70), window, 200, 280)
    known = {name: np.asarray(getattr(operands, name)) for name in ("query_offsets", "key_value_offsets")}
    assert packed_rows.are_alike(operands.replace(**known)) and not packed_rows.are_alike(operands)
    mask, data = mask_of(spec, operands.replace(**known), TILE, BLOCK, transposed=transposed)
    expected_mask, expected = mask_of(spec, operands, TILE, BLOCK, transposed=transposed)
    assert mask == expected_mask and data.order is None
    for x, right in zip(data.intervals, expected.intervals, strict=True):
        np.testing.assert_array_equal(x, right)


@pytest.mark.skipif(not compat.mosaic_interprets(), reason="this JAX interprets no Mosaic GPU kernels")
@pytest.mark.parametrize("name", CALLS)
def test_agrees_with_the_definition(name):
    check(*call(**CALLS[name], T=210, S=200), run=pallas.backward)


@pytest.mark.skipif(not compat.mosaic_interprets(), reason="this JAX interprets no Mosaic GPU kernels")
@pytest.mark.skipif(not compat.adds_to_arrays(), reason="kernels of this JAX add to no array")
def test_agrees_with_the_definition_where_one_kernel_sums_all_gradients():
    given = dict(offsets=[[0, 90, 200]], key_offsets=[[0, 130, 390]], longest=(110, 260), window=CAUSAL)
    configs = BackwardConfigs(BackwardConfig(2, 64, 2, persistent=True))

    def run(spec, operands, out, lse, d_out, d_lse):
        return mosaic_backward.backward(spec, operands, out, lse, d_out, d_lse, configs, 1)

    check(*call(**given, T=200, S=400, H=128), run=run)


def check(spec, operands, run):
    B, T, N, _ = operands.query.shape
    d_out = jax.random.normal(jax.random.key(9), operands.query.shape, jnp.bfloat16)
    d_lse = jax.random.normal(jax.random.key(8), (B, N, T))
    right_out, right_lse, right = _reference.reference_with_gradients(spec, operands, d_out, d_lse)
    with interpreted_by_mosaic():
        assert lowering.takes_offsets(spec, operands, _device.current())
        out, lse = jax.jit(functools.partial(pallas.forward, spec))(operands)
        gradients = jax.jit(functools.partial(run, spec))(operands, out, lse, d_out, d_lse)
    np.testing.assert_allclose(lse, right_lse, atol=0.01)
    results = {"out": (out, right_out)}
    for name in ("query", "key", "value"):
        results[name] = getattr(gradients, name), getattr(right, name)
    for name, (x, expected) in results.items():
        x = np.asarray(x).astype(np.float32)
        np.testing.assert_allclose(x, expected, atol=0.05, rtol=0.02, err_msg=name)
        assert (x[(expected == 0).all(-1)] == 0).all(), name


@pytest.mark.every_turn
@pytest.mark.parametrize("of_sequences, is_causal", in_turn(("segments", "offsets"), (False, True)))
def test_lowers_in_a_jitted_call(of_sequences, is_causal):
    """What XLA computes of sequences holds no constant array: a partitioned call may have none."""
    H, T = 64, 700
    row = jax.ShapeDtypeStruct((1, T, 2, H), jnp.bfloat16)
    options = dict(is_causal=is_causal, implementation="pallas")

    def of_segments(query, key, value, ids):
        ids = dict(query_segment_ids=ids, key_value_segment_ids=ids)
        return jax_flash.flash_attention(query, key, value, **ids, **options)

    def of_offsets(query, key, value, offsets):
        offsets = dict(cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=300, max_seqlen_kv=300)
        return jax_flash.flash_attention_varlen(query[0], key[0], value[0], **offsets, **options)

    attend, data = {"segments": (of_segments, (1, T)), "offsets": (of_offsets, (5,))}[of_sequences]
    gradients = jax.grad(lambda *args: attend(*args).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    data = jax.ShapeDtypeStruct(data, jnp.int32)
    with only_lowering(lowering.MOSAIC):
        mosaic, triton = calls_lowered_for_hopper(gradients, row, row, row, data)
    assert mosaic >= 3 and not triton
