"""The oracle, against the definition done by hand one number at a time, and against derivatives
taken by difference quotients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import _dropout, _reference
from jax_flash._spec import DIFFERENTIABLE, AttentionSpec, Operands, sizes

B, T, S, N, K, H, V = 2, 5, 7, 4, 2, 3, 2
EVERYTHING = AttentionSpec(0.7, left=3, right=1, logits_soft_cap=2.0, dropout_rate=0.3)


@pytest.fixture
def draw():
    return np.random.default_rng(0)


def plain_operands(draw, T=T, S=S, dtype=np.float64):
    def normal(*shape):
        return draw.standard_normal(shape).astype(dtype)

    return Operands(normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, V))


def all_operands(draw):
    rows, columns = jax.tree.map(np.asarray, _dropout.hashes(jax.random.key(0), B, N, T, S))
    return plain_operands(draw).replace(
        bias=draw.standard_normal((1, N, T, S)),
        mask=draw.random((B, 1, 1, S)) < 0.8,
        alibi_slopes=draw.uniform(0.1, 0.5, (1, N)),
        sinks=draw.standard_normal((1, N)),
        query_seq_lengths=np.array([5, 4], np.int32),
        key_value_seq_lengths=np.array([6, 7], np.int32),
        query_segment_ids=draw.integers(0, 2, (B, T), np.int32),
        key_value_segment_ids=draw.integers(0, 2, (B, S), np.int32),
        dropout_rows=rows,
        dropout_columns=columns,
        diagonal=np.array([[1], [-2]], np.int32),
    )


def by_hand(spec, operands):
    """What `flash_attention`'s docstring says, pair by pair, in Python numbers."""
    size = sizes(operands)
    out = np.zeros((size.B, size.T, size.N, size.V))
    lse = np.full((size.B, size.N, size.T), -np.inf)
    kept = None
    if spec.dropout_rate:
        products = operands.dropout_rows[..., None] * operands.dropout_columns[:, None, None, :]
        kept = (products >> 16) % 2**15 >= round(spec.dropout_rate * 2**15)
    per_row = {
        name: np.broadcast_to(x, (size.B, size.N, size.T, size.S))
        for name, x in operands.present().items()
        if name in ("bias", "mask")
    }
    for b, n, i in np.ndindex(size.B, size.N, size.T):
        q_start, k_start = 0, 0
        q_length = size.T if operands.query_seq_lengths is None else operands.query_seq_lengths[b]
        k_length = size.S if operands.key_value_seq_lengths is None else operands.key_value_seq_lengths[b]
        if operands.query_offsets is not None:
            q_offsets, k_offsets = operands.query_offsets[b], operands.key_value_offsets[b]
            own = [p for p in range(len(q_offsets) - 1) if q_offsets[p] <= i < q_offsets[p + 1]]
            if not own:
                continue
            (p,) = own
            q_start, k_start = q_offsets[p], k_offsets[p]
            q_length = min(q_offsets[p + 1] - q_start, spec.max_query_length)
            k_length = min(k_offsets[p + 1] - k_start, spec.max_key_value_length)
        logits = {}
        for j in range(size.S):
            x = spec.scale * float(operands.query[b, i, n] @ operands.key[b, j, n // size.group])
            if spec.logits_soft_cap is not None:
                x = spec.logits_soft_cap * math.tanh(x / spec.logits_soft_cap)
            if "bias" in per_row:
                x += per_row["bias"][b, n, i, j]
            diagonal = k_start + i - q_start + k_length - q_length
            if operands.diagonal is not None:
                of_row = operands.diagonal[b % len(operands.diagonal)]
                diagonal += of_row[i * len(of_row) // size.T]
            if operands.alibi_slopes is not None:
                x -= operands.alibi_slopes[0, n] * abs(diagonal - j)
            attends = i < q_start + q_length and k_start <= j < k_start + k_length
            attends &= spec.left is None or j >= diagonal - spec.left
            attends &= spec.right is None or j <= diagonal + spec.right
            attends &= "mask" not in per_row or bool(per_row["mask"][b, n, i, j])
            if operands.query_segment_ids is not None:
                attends &= operands.query_segment_ids[b, i] == operands.key_value_segment_ids[b, j]
            if attends:
                logits[j] = x
        if not logits:
            continue
        total = sum(map(math.exp, logits.values()))
        if operands.sinks is not None:
            total += math.exp(operands.sinks[0, n])
        lse[b, n, i] = math.log(total)
        for j, x in logits.items():
            p = math.exp(x) / total
            if kept is not None:
                p *= kept[b, n, i, j] / _dropout.keep_probability(spec.dropout_rate)
            out[b, i, n] += p * operands.value[b, j, n // size.group]
    return out, lse


def reference(spec, operands):
    d_out = np.zeros((*operands.query.shape[:3], operands.value.shape[3]))
    return _reference.reference_with_gradients(spec, operands, d_out)[:2]


ONE_AT_A_TIME = {
    "nothing": (AttentionSpec(0.5), ()),
    "causal": (AttentionSpec(0.5, right=0), ()),
    "window": (AttentionSpec(0.5, left=1, right=2), ()),
    "window by lengths": (
        AttentionSpec(0.5, left=2, right=0),
        ("query_seq_lengths", "key_value_seq_lengths"),
    ),
    "key lengths": (AttentionSpec(0.5, right=0), ("key_value_seq_lengths",)),
    "query lengths": (AttentionSpec(0.5, right=0), ("query_seq_lengths",)),
    "soft cap": (AttentionSpec(0.5, logits_soft_cap=1.5), ()),
    "dropout": (AttentionSpec(0.5, dropout_rate=0.4), ("dropout_rows", "dropout_columns")),
    "bias": (AttentionSpec(0.5), ("bias",)),
    "mask": (AttentionSpec(0.5), ("mask",)),
    "alibi": (AttentionSpec(0.5), ("alibi_slopes",)),
    "sinks": (AttentionSpec(0.5), ("sinks",)),
    "segments": (AttentionSpec(0.5), ("query_segment_ids", "key_value_segment_ids")),
    "diagonal": (AttentionSpec(0.5, left=1, right=0), ("diagonal", "alibi_slopes")),
    "diagonal and lengths": (
        AttentionSpec(0.5, left=2, right=0),
        ("diagonal", "query_seq_lengths", "key_value_seq_lengths"),
    ),
    "everything": (EVERYTHING, tuple(all_operands(np.random.default_rng(0)).present())),
}


@pytest.mark.parametrize("feature", ONE_AT_A_TIME)
def test_is_the_definition(draw, feature):
    spec, names = ONE_AT_A_TIME[feature]
    operands = all_operands(draw)
    optional = {
        name: None
        for name in operands.present()
        if name not in ("query", "key", "value") and name not in names
    }
    operands = operands.replace(**optional)
    for got, expected in zip(reference(spec, operands), by_hand(spec, operands), strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-14)


def test_diagonals_of_parts_are_the_definition(draw):
    diagonal = np.array([[-3, -1, 0, 0, 4], [0, 0, 0, 0, 2]], np.int32)  # each query is a part
    operands = plain_operands(draw).replace(diagonal=diagonal, alibi_slopes=all_operands(draw).alibi_slopes)
    spec = AttentionSpec(0.5, left=3, right=1)
    for got, expected in zip(reference(spec, operands), by_hand(spec, operands), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("longest", [(T, S), (2, 3)])
@pytest.mark.parametrize("options", [{}, {"right": 0}, {"left": 1, "right": 1, "dropout_rate": 0.3}], ids=str)
def test_varlen_sequences_are_the_definition(draw, options, longest):
    operands = all_operands(draw)
    others = ("alibi_slopes", "sinks", "dropout_rows", "dropout_columns", "query", "key", "value")
    operands = operands.replace(
        **{name: None for name in operands.present() if name not in others},
        query_offsets=np.array([[0, 3, 3, 5], [1, 1, 2, 4]], np.int32),
        key_value_offsets=np.array([[1, 3, 5, 6], [0, 0, 4, 7]], np.int32),
    )
    spec = AttentionSpec(0.5, **options, max_query_length=longest[0], max_key_value_length=longest[1])
    for got, expected in zip(reference(spec, operands), by_hand(spec, operands), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_derivatives(draw, name):
    """Along a random direction of each operand, against a central difference."""
    operands = all_operands(draw)
    d_out = draw.standard_normal((B, T, N, V))
    d_lse = draw.standard_normal((B, N, T))
    _, lse, gradients = _reference.reference_with_gradients(EVERYTHING, operands, d_out, d_lse)
    operand = getattr(operands, name)
    direction = draw.standard_normal(operand.shape)

    def loss(step):
        moved = operands.replace(**{name: operand + step * direction})
        out, lse = reference(EVERYTHING, moved)
        return (out * d_out).sum() + (np.where(np.isneginf(lse), 0, lse) * d_lse).sum()

    assert np.isneginf(lse).any()
    step = 1e-5
    quotient = (loss(step) - loss(-step)) / (2 * step)
    gradient = getattr(gradients, name)
    assert gradient.shape == operand.shape
    np.testing.assert_allclose((gradient * direction).sum(), quotient, rtol=1e-7)


def test_a_row_with_nothing_to_attend_to_is_zero_and_has_no_gradient(draw):
    operands = plain_operands(draw, T=7, S=4).replace(sinks=draw.standard_normal((1, N)))
    d_out = draw.standard_normal((B, 7, N, V))
    d_lse = np.ones((B, N, 7))
    d_lse[:, :, :3] = 1e6  # must reach nothing
    out, lse, gradients = _reference.reference_with_gradients(
        AttentionSpec(0.5, right=0), operands, d_out, d_lse
    )
    assert np.all(out[:, :3] == 0)
    assert np.all(np.isneginf(lse[:, :, :3]))
    assert np.all(np.isfinite(lse[:, :, 3:]))
    assert np.all(gradients.query[:, :3] == 0)
    for gradient in (gradients.query, gradients.key, gradients.value, gradients.sinks):
        assert np.all(np.abs(gradient) < 1e3)


def test_agrees_with_jax(draw):
    operands = plain_operands(draw, T=6, S=6, dtype=np.float32)
    out, _ = _reference.reference(AttentionSpec(0.5, right=0), operands)
    value = jnp.pad(operands.value, [(0, 0)] * 3 + [(0, H - V)])  # theirs has one head dim
    theirs = jax.nn.dot_product_attention(
        jnp.asarray(operands.query), jnp.asarray(operands.key), value, scale=0.5, is_causal=True
    )
    np.testing.assert_allclose(out, theirs[..., :V], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_plain_attention_is_as_good_as_its_dtype(draw, dtype):
    """The yardstick is neither better than rounding allows nor much worse."""
    operands = Operands(*(draw.standard_normal((1, 64, 2, 16)).astype(dtype) for _ in range(3)))
    d_out = draw.standard_normal((1, 64, 2, 16)).astype(dtype)
    spec = AttentionSpec(0.25, right=0)
    out, lse, gradients = _reference.plain_with_gradients(spec, operands, d_out)
    exact_out, exact_lse, exact_gradients = _reference.reference_with_gradients(spec, operands, d_out)
    roundoff = float(jnp.finfo(dtype).eps) / 2
    pairs = {"out": (out, exact_out)} | {
        name: (getattr(gradients, name), getattr(exact_gradients, name)) for name in ("query", "key", "value")
    }
    for name, (result, exact) in pairs.items():
        assert result.dtype == dtype, name
        error = np.linalg.norm(result.astype(np.float64) - exact) / np.linalg.norm(exact)
        assert 0.1 * roundoff < error < 4 * roundoff, name
    assert lse.dtype == np.float32
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-6)
