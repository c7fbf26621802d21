"""The portable implementation: the shared suite, then what is its own: every feature at once, its memory, its
loops inside of `shard_map`, and sums of a million keys."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pairwise_suite
import pytest
from implementation_suite import FEATURES, ImplementationSuite
from jax.sharding import PartitionSpec as P
from nonfinite_suite import NonFiniteSuite
from pairwise_suite import PairwiseSuite
from small_blocks import small_blocks
from xla_calls import check, cotangents, normal, qkv, run

from jax_flash import _dropout, _reference, xla
from jax_flash._device import CPU
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.xla import blocks


@pytest.mark.usefixtures("small_blocks")
class TestXla(ImplementationSuite):
    implementation = "xla"
    p_is_converted = False
    dtypes = ("float32", "bfloat16", "float16")
    lengths = (1, 7, 65, 127)
    typical_length = 65
    head_dims = (40,)
    heads = ((3, 1), (8, 2))
    features = FEATURES
    reports_errors = False


class TestXlaPairwise(PairwiseSuite):
    implementation = "xla"
    p_is_converted = False
    dtypes = ("float32", "bfloat16", "float16")
    # Most of the time goes into compiling: without optimisation half as much.
    compiler_options = {"xla_backend_optimization_level": 0}  # noqa: RUF012
    reports_errors = False

    def environment(self):
        return small_blocks()

    def test_refuses_nothing(self):
        assert pairwise_suite.cases(self, self.factors())[1] == []


class TestXlaNonFinite(NonFiniteSuite):
    implementation = "xla"
    compiler_options = {"xla_backend_optimization_level": 0}  # noqa: RUF012

    def environment(self):
        return small_blocks()


# Ten features, each on in three of five calls, no two in the same three: so every pair of them meets
# in a call, and every one of a pair is somewhere on without the other.
TEN = (
    "bias mask window seq_lengths segment_ids logits_soft_cap alibi_slopes sinks dropout batch_of_one".split()
)
FIVE = [
    [name for name, calls in zip(TEN, itertools.combinations(range(5), 3), strict=True) if call in calls]
    for call in range(5)
]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("features", FIVE, ids="+".join)
def test_every_pair_of_features(draw, features):
    B, N = 2, 4
    T, S = (70, 129) if "window" in features else (129, 70)
    rows = 1 if "batch_of_one" in features else B  # of the operands that may be shared by all rows
    operands, spec = qkv(draw, B, T, S, N), {"scale": 0.3}
    for feature in features:
        match feature:
            case "bias":
                operands = operands.replace(bias=normal(draw, rows, N, T, S))
            case "mask":
                operands = operands.replace(mask=draw.random((rows, 1, T, S)) < 0.7)
            case "window":
                spec |= {"left": 40, "right": 5}
            case "seq_lengths":
                operands = operands.replace(
                    query_seq_lengths=np.array([T - 9, 3], np.int32),
                    key_value_seq_lengths=np.array([S - 30, S], np.int32),
                )
            case "segment_ids":
                operands = operands.replace(
                    query_segment_ids=np.sort(draw.integers(0, 3, (B, T), np.int32)),
                    key_value_segment_ids=np.sort(draw.integers(0, 3, (B, S), np.int32)),
                )
            case "logits_soft_cap":
                spec |= {"logits_soft_cap": 2.0}
            case "alibi_slopes":
                slopes = draw.uniform(0.01, 0.5, (rows, N)).astype(np.float32)
                operands = operands.replace(alibi_slopes=slopes)
            case "sinks":
                operands = operands.replace(sinks=normal(draw, rows, N))
            case "dropout":
                spec |= {"dropout_rate": 0.3}
                rows, columns = _dropout.hashes(jax.random.key(1), B, N, T, S)
                operands = operands.replace(dropout_rows=rows, dropout_columns=columns)
    check(AttentionSpec(**spec), operands, *cotangents(draw, operands))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("shape", "batch_at_a_time"),
    [("BNTS", 1), ("1111", 1), ("B1T1", 1), ("1N1S", 1), ("1NTS", 1), ("B11S", 4), ("1N1S", 4)],
)
def test_gradient_of_bias_sums_over_its_broadcast_axes(draw, monkeypatch, shape, batch_at_a_time):
    monkeypatch.setitem(blocks.LOGITS_PER_BLOCK, "cpu", batch_at_a_time * 4 * 32 * 48)
    operands = qkv(draw, B=4, T=65, S=97)
    lengths = {"B": 4, "N": 4, "T": 65, "S": 97, "1": 1}
    operands = operands.replace(
        bias=normal(draw, *(lengths[letter] for letter in shape)),
        alibi_slopes=normal(draw, lengths[shape[0]], 4) * 0.1,
        sinks=normal(draw, lengths[shape[0]], 4),
    )
    spec = AttentionSpec(0.3, right=0)
    assert blocks.plan(spec, operands, CPU).batch.size == batch_at_a_time
    check(spec, operands, *cotangents(draw, operands))


@pytest.mark.parametrize("right", [None, 0], ids=["full", "causal"])
def test_blocks_of_the_usual_size(draw, right):
    operands, spec = qkv(draw, B=1, T=700, S=600, N=2, K=1), AttentionSpec(0.3, right=right)
    cut = blocks.plan(spec, operands, CPU)
    assert cut.queries.count > 1
    assert cut.keys.count > 1
    check(spec, operands, *cotangents(draw, operands))


@pytest.mark.usefixtures("small_blocks")
def test_float64(draw):
    operands = jax.tree.map(lambda x: x.astype(np.float64), qkv(draw))
    d_out, d_lse = (x.astype(np.float64) for x in cotangents(draw, operands))
    with jax.enable_x64(True):
        check(AttentionSpec(0.3, right=0), operands, d_out, d_lse, tolerance=1e-13, dtype=np.float64)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("how", ["mask", "causal", "seq_lengths", "segment_ids", "bias"])
def test_a_row_with_nothing_to_attend_to(draw, how):
    """Zeros, −inf and no gradient, whatever rules the row out and whatever its cotangents are."""
    operands = qkv(draw, T=70, S=50).replace(sinks=normal(draw, 1, 4))
    nothing = np.zeros((2, 70), bool)
    nothing[0, :20] = True
    right = None
    match how:
        case "mask":
            operands = operands.replace(mask=~nothing[:, None, :, None])
        case "causal":
            nothing[:, :20], right = True, 0
        case "seq_lengths":
            nothing = nothing[:, ::-1]
            operands = operands.replace(query_seq_lengths=np.array([50, 70], np.int32))
        case "segment_ids":
            operands = operands.replace(
                query_segment_ids=nothing.astype(np.int32), key_value_segment_ids=np.zeros((2, 50), np.int32)
            )
        case "bias":
            bias = np.where(nothing, -np.inf, 0).astype(np.float32)
            operands = operands.replace(bias=bias[:, None, :, None])
    d_out, d_lse = cotangents(draw, operands)
    d_lse = np.where(nothing[:, None], np.inf, d_lse)
    run.clear_cache()
    out, lse, gradients = run(AttentionSpec(0.3, right=right), operands, d_out, d_lse)
    assert np.all(np.asarray(out)[nothing] == 0)
    np.testing.assert_array_equal(np.isneginf(lse), np.broadcast_to(nothing[:, None], lse.shape))
    assert np.all(np.asarray(gradients.query)[nothing] == 0)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(gradients))


@pytest.mark.usefixtures("small_blocks")
def test_large_finite_numbers_never_give_nan(draw):
    """Logits beyond float32's range of exp, and a bias of the least finite number for a mask."""
    operands = jax.tree.map(lambda x: 1e4 * x, qkv(draw))
    bias = np.where(draw.random((1, 1, 70, 70)) < 0.5, np.finfo(np.float32).min, 0).astype(np.float32)
    bias[:, :, :10] = np.finfo(np.float32).min
    operands = operands.replace(bias=bias, sinks=normal(draw, 1, 4))
    run.clear_cache()
    for x in jax.tree.leaves(run(AttentionSpec(1.0), operands, *cotangents(draw, operands))):
        assert np.all(np.isfinite(x))


@pytest.mark.parametrize(("dtype", "size"), [("float32", 1e8), ("float32", 1e18), ("bfloat16", 3e38)])
def test_huge_logits_pick_a_key(draw, dtype, size):
    """Logits whose rounding is beyond the range of exp, and logits that overflow."""
    T, S = 5, 6
    operands = qkv(draw, B=2, T=T, S=S)
    signs = np.where(np.arange(S) == 3, 1, -1)[None, :, None, None]
    query = np.full_like(operands.query, size)
    operands = operands.replace(query=query, key=np.broadcast_to(size * signs, operands.key.shape))
    operands = jax.tree.map(lambda x: jax.numpy.asarray(x, dtype), operands)
    d_out, _ = cotangents(draw, operands)
    out, lse, gradients = run(AttentionSpec(0.3), operands, d_out.astype(dtype), None)
    group = query.shape[2] // operands.value.shape[2]
    np.testing.assert_array_equal(out, np.repeat(operands.value[:, 3:4], group, 2).repeat(T, 1))
    for x in (lse, *jax.tree.leaves(gradients)):
        assert np.all(np.isfinite(np.asarray(x, np.float32)))


# Memory and size of the program.


def forward_and_backward(spec, operands, d_out):
    out, lse = xla.forward(spec, operands)
    return xla.backward(spec, operands, out, lse, d_out, None)


def shapes(length):
    x = jax.ShapeDtypeStruct((2, length, 4, 64), jnp.float32)
    return Operands(x, x, x, bias=jax.ShapeDtypeStruct((1, 4, 1, length), jnp.float32)), x


@pytest.mark.parametrize("right", [None, 0], ids=["full", "causal"])
@pytest.mark.parametrize("direction", ["forward", "forward and backward"])
def test_memory_is_linear_in_the_sequence(right, direction):
    spec = AttentionSpec(0.125, right=right)

    def temporary_bytes(length):
        operands, d_out = shapes(length)
        if direction == "forward":
            lowered = jax.jit(functools.partial(xla.forward, spec)).lower(operands)
        else:
            lowered = jax.jit(functools.partial(forward_and_backward, spec)).lower(operands, d_out)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    used = [temporary_bytes(length) for length in (2048, 4096, 8192)]
    assert used[1] <= 2.05 * used[0]
    assert used[2] <= 2.05 * used[1]
    one_matrix = 2 * 4 * 8192**2 * 4
    assert used[2] < one_matrix / 10


def test_program_does_not_grow_with_the_sequence():
    def equations(length):
        operands, d_out = shapes(length)
        spec = AttentionSpec(0.125, 300, 0)
        return str(jax.make_jaxpr(functools.partial(forward_and_backward, spec))(operands, d_out)).count(
            " = "
        )

    assert equations(1024) == equations(65536)


# Under shard_map, whose check of replication types every loop's carry.


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_inside_shard_map(draw, axis):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    operands = qkv(draw, B=4, T=65, S=97).replace(
        bias=normal(draw, 1, 4, 1, 97),
        alibi_slopes=np.full((1, 4), 0.1, np.float32),
        key_value_seq_lengths=np.array([97, 50, 3, 0], np.int32),
    )
    d_out, d_lse = cotangents(draw, operands)
    spec = AttentionSpec(0.3, 60, 0)
    if axis == "batch":
        rows, heads, lengths, whole = P("d"), P("d"), P("d"), P()
        specs = Operands(rows, rows, rows, bias=whole, alibi_slopes=whole, key_value_seq_lengths=lengths)
        residual = P("d")
    else:
        heads = P(None, None, "d")
        specs = Operands(
            heads, heads, heads, bias=P(None, "d"), alibi_slopes=P(None, "d"), key_value_seq_lengths=P()
        )
        residual = P(None, "d")

    def local(operands, d_out, d_lse):
        out, lse = xla.forward(spec, operands)
        gradients = xla.backward(spec, operands, out, lse, d_out, d_lse)
        bias, slopes = gradients.bias, gradients.alibi_slopes
        if axis == "batch":
            bias, slopes = jax.lax.psum((bias, slopes), "d")
        return out, lse, gradients.query, gradients.key, gradients.value, bias, slopes

    out_specs = (specs.query, residual, specs.query, specs.key, specs.value, specs.bias, specs.alibi_slopes)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(specs, specs.query, residual), out_specs=out_specs)
    got = jax.jit(sharded)(operands, d_out, d_lse)
    run.clear_cache()
    out, lse, gradients = run(spec, operands, d_out, d_lse)
    expected = (out, lse, *jax.tree.leaves(gradients))
    for result, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(result, other, rtol=1e-4, atol=1e-4)


def million_keys(draw, T):
    operands = qkv(draw, B=1, T=T, S=2**20, N=1, K=1, H=8, V=4)
    return jax.tree.map(lambda x: x.astype(np.float16), operands)


@pytest.mark.parametrize("name, d_out_scale", [("query", 1), ("value", 1000)])
def test_float16_gradients_keep_their_digits_with_a_million_keys(draw, name, d_out_scale):
    """Probabilities of 1e-6, and gradients of logits as small, are far below float16's normal numbers. The
    gradient itself is not, by the scale of its cotangent."""
    operands, spec = million_keys(draw, T=2), AttentionSpec(0.3)
    d_out = (cotangents(draw, operands)[0] * d_out_scale).astype(np.float16)
    out, lse = xla.forward(spec, operands)
    got = xla.backward(spec, operands, out, lse, d_out, None)
    *_, expected = _reference.reference_with_gradients(spec, operands, d_out)
    result, exact = np.asarray(getattr(got, name), np.float64), getattr(expected, name)
    assert np.linalg.norm(result - exact) <= 1e-3 * np.linalg.norm(exact)


def test_float16_out_has_the_share_of_a_million_small_probabilities(draw):
    operands = million_keys(draw, T=1)
    key, value = np.array(operands.key), np.ones_like(operands.value)
    query = np.ones_like(operands.query)
    key[:], key[:, 0], value[:, 0] = 0, 18 / 8, 0  # one logit of 18, all others 0
    operands = Operands(query, key, value)
    out, _ = xla.forward(AttentionSpec(1.0), operands)
    share = 2**20 / (2**20 + np.exp(18))
    np.testing.assert_allclose(out, np.full(out.shape, share), rtol=1e-3)


def test_lse_is_right_or_nan(draw):
    """NaN for a query that is NaN; and right for a row whose bias is very low but finite throughout."""
    bias = np.zeros((1, 1, 70, 70), np.float32)
    bias[:, :, 7] = np.finfo(np.float32).min
    operands = qkv(draw).replace(bias=bias)
    query = operands.query.copy()
    query[0, 5, 1] = np.nan
    out, lse = xla.forward(AttentionSpec(0.3), operands.replace(query=query))
    expected = np.zeros(lse.shape, bool)
    expected[0, 1, 5] = True
    np.testing.assert_array_equal(np.isnan(lse), expected)
    np.testing.assert_allclose(lse[:, :, 7], np.full((2, 4), bias.min()), rtol=1e-6)
    mean = np.repeat(operands.value.mean(1), 2, axis=1)
    np.testing.assert_allclose(out[:, 7], mean, atol=1e-5)
