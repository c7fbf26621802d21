"""The portable implementation: the shared suite, then what is its own: every feature at once, how it
cuts a call into blocks, its memory, and its loops inside of `shard_map`."""

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

from jax_flash import _dropout, _reference, xla
from jax_flash._device import CPU, H100
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.xla import blocks


@pytest.fixture(name="small_blocks")
def in_small_blocks():
    with small_blocks():
        yield


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


@pytest.fixture
def draw():
    return np.random.default_rng(0)


def normal(draw, *shape):
    return draw.standard_normal(shape).astype(np.float32)


def qkv(draw, B=2, T=70, S=70, N=4, K=2, H=16, V=8):
    return Operands(normal(draw, B, T, N, H), normal(draw, B, S, K, H), normal(draw, B, S, K, V))


def cotangents(draw, operands):
    B, T, N, _ = operands.query.shape
    return normal(draw, B, T, N, operands.value.shape[3]), normal(draw, B, N, T)


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def run(spec, operands, d_out, d_lse):
    out, lse = xla.forward(spec, operands)
    return out, lse, xla.backward(spec, operands, out, lse, d_out, d_lse)


def check(spec, operands, d_out, d_lse, tolerance=1e-5, dtype=np.float32):
    """Run it afresh (blocks may have been patched) and compare everything with the oracle."""
    run.clear_cache()
    got = run(spec, operands, d_out, d_lse)
    expected = _reference.reference_with_gradients(spec, operands, d_out, d_lse)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for result, exact in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        result = np.asarray(result)
        assert result.shape == exact.shape
        assert result.dtype == dtype
        np.testing.assert_array_equal(np.isneginf(result), np.isneginf(exact))
        result, exact = (np.where(np.isneginf(x), 0, x) for x in (result, exact))
        assert np.linalg.norm(result - exact) <= tolerance * (np.linalg.norm(exact) + 1e-3)


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


# How a call is cut.


def plan(B, T, S, N, right=None, device=CPU):
    query, key = (jax.ShapeDtypeStruct((B, length, N, 64), np.float32) for length in (T, S))
    return blocks.plan(AttentionSpec(1.0, right=right), Operands(query, key, key), device)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 2048, 2049, 5000])
def test_blocks_cover_an_axis_once(length):
    axis = plan(1, length, length, 1, right=0).keys
    assert axis.size <= max(blocks.KEYS_PER_BLOCK, 256**2 // length)
    fresh = []
    for index in range(axis.count):
        positions = np.asarray(axis.positions(index))
        mask = axis.fresh(index)
        fresh.extend(positions if mask is None else positions[np.asarray(mask)])
        assert positions.min() >= 0
    np.testing.assert_array_equal(fresh, np.arange(length))


@pytest.mark.parametrize(("T", "S"), [(1, 10_000), (10_000, 1)])
def test_a_short_sequence_gets_long_blocks_of_the_other(T, S):
    cut = plan(1, T, S, 4)
    assert (cut.queries.count, cut.keys.count) == (1, 1)


@pytest.mark.parametrize("right", [None, 0], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("B", "N", "device", "in_parts"),
    [
        (1, 8, CPU, False),
        (64, 8, CPU, True),
        (17, 2, CPU, True),
        (16, 8, H100, False),
    ],
)
def test_a_large_batch_is_taken_in_parts(B, N, device, in_parts, right):
    cut = plan(B, 4096, 4096, N, right, device)
    assert B % cut.batch.size == 0
    assert (cut.batch.count > 1) == in_parts
    if device == CPU:
        at_once = cut.batch.size * N * cut.queries.size * cut.keys.size
        assert at_once <= 2 * blocks.LOGITS_PER_BLOCK["cpu"]


SEGMENTS = ("sorted", "descending", "interleaved", "shuffled", "nothing in common")


def with_segments(operands, how):
    """Ids of segments of uneven length; of two batch rows the second has fewer."""
    draw = np.random.default_rng(1)

    def ids(tokens):
        rows = [np.sort(draw.integers(0, count, tokens)) for count in (7, 3)]
        rows = np.array(rows, np.int32)
        match how:
            case "descending":
                rows = rows[:, ::-1]
            case "interleaved":
                rows = np.stack([np.arange(tokens) % 3, 5 - rows[1]]).astype(np.int32)
            case "shuffled":
                rows = draw.permuted(rows, axis=1)
        return rows

    apart = 100 * (how == "nothing in common")
    T, S = operands.query.shape[1], operands.key.shape[1]
    return operands.replace(query_segment_ids=ids(T) - apart, key_value_segment_ids=ids(S))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("diagonal", [(0, 64), (-130, 40), (31,)])
@pytest.mark.parametrize("window", [(None, 0), (5, 20), (40, None)])
@pytest.mark.parametrize("has_lengths", [False, True])
def test_a_diagonal_of_each_batch_row(draw, diagonal, window, has_lengths):
    operands = qkv(draw, T=97, S=130).replace(diagonal=np.array(diagonal, np.int32))
    operands = operands.replace(alibi_slopes=draw.uniform(0.01, 0.5, (1, 4)).astype(np.float32))
    if has_lengths:
        lengths = {name: np.array(x, np.int32) for name, x in (("query", (97, 60)), ("key_value", (90, 130)))}
        operands = operands.replace(**{f"{name}_seq_lengths": x for name, x in lengths.items()})
    check(AttentionSpec(0.3, *window, return_residual=True), operands, *cotangents(draw, operands))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("window", [(None, 0), (20, 0), (0, 30), (None, None)])
@pytest.mark.parametrize("lengths", [None, ((70, 100), (90, 90)), ((10, 0), (0, 33)), *SEGMENTS])
@pytest.mark.parametrize(("T", "S"), [(97, 130), (130, 97)])
def test_visits_the_blocks_that_are_needed_and_no_others(window, lengths, T, S):
    operands = qkv(np.random.default_rng(0), T=T, S=S)
    exact = lengths is None
    if isinstance(lengths, str):
        operands = with_segments(operands, lengths)
        exact = lengths == "sorted" and window == (None, None)
    elif lengths is not None:
        queries, keys = (np.minimum(np.array(x, np.int32), n) for x, n in zip(lengths, (T, S), strict=True))
        operands = operands.replace(query_seq_lengths=queries, key_value_seq_lengths=keys)
    spec = AttentionSpec(1.0, *window)
    allowed = np.asarray(_reference._allowed(spec, operands)).any((0, 1))
    cut = blocks.plan(spec, operands, CPU)
    for query_block in range(cut.queries.count):
        rows = allowed[np.asarray(cut.queries.positions(query_block))]
        columns = [cut.keys.positions(key_block) for key_block in range(cut.keys.count)]
        fresh = [cut.keys.fresh(key_block) for key_block in range(cut.keys.count)]
        needed = [
            index
            for index in range(cut.keys.count)
            if rows[:, np.asarray(columns[index])][:, np.asarray(fresh[index])].any()
        ]
        first, end = map(int, blocks.key_blocks(spec, operands, cut, query_block))
        assert all(first <= index < end for index in needed)
        if needed and exact:
            assert (first, end) == (needed[0], needed[-1] + 1)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("how", SEGMENTS)
@pytest.mark.parametrize("right", [None, 0], ids=["full", "causal"])
def test_segments_of_every_kind(draw, how, right):
    operands = with_segments(qkv(draw, T=130, S=150), how)
    check(AttentionSpec(0.3, right=right), operands, *cotangents(draw, operands))


@pytest.mark.usefixtures("small_blocks")
def test_key_blocks_of_other_segments_are_not_computed(draw):
    """Numbers that would spoil all they are multiplied with, be it by 0, have no effect."""
    operands = qkv(draw, T=64, S=4 * 48)
    query_ids = np.repeat([[2, 3], [2, 2]], 32, axis=1)
    key_ids = np.repeat([[1, 2, 3, 4], [1, 2, 2, 5]], 48, axis=1)
    poisoned = np.repeat([True, False, False, True], 48)[:, None, None]
    operands = operands.replace(query_segment_ids=query_ids, key_value_segment_ids=key_ids)
    spoilt = operands.replace(
        key=np.where(poisoned, np.nan, operands.key), value=np.where(poisoned, np.nan, operands.value)
    )
    d_out, d_lse = cotangents(draw, operands)
    run.clear_cache()
    spec = AttentionSpec(0.3)
    for result, expected in zip(
        jax.tree.leaves(run(spec, spoilt, d_out, d_lse)),
        jax.tree.leaves(run(spec, operands, d_out, d_lse)),
        strict=True,
    ):
        np.testing.assert_array_equal(result, expected)


def test_describes_its_blocks():
    operands = qkv(np.random.default_rng(0), T=1024, S=2048)
    assert xla.supports(AttentionSpec(1.0), operands, CPU) is None
    assert "256 queries by 256 keys" in xla.describe(AttentionSpec(1.0, right=0), operands, CPU)


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
