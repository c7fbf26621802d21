"""Packed sequences: each gives what it gives by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

N, K, H, V = 4, 2, 8, 6
LENGTHS_Q, LENGTHS_KV = (4, 0, 1, 5, 3), (6, 2, 0, 5, 2)
OFFSETS_Q, OFFSETS_KV = np.cumsum((0, *LENGTHS_Q)), np.cumsum((0, *LENGTHS_KV))
PACKING = dict(
    cu_seqlens_q=OFFSETS_Q,
    cu_seqlens_kv=OFFSETS_KV,
    max_seqlen_q=max(LENGTHS_Q),
    max_seqlen_kv=max(LENGTHS_KV),
)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def inputs(padding=0):
    total_q, total_kv = OFFSETS_Q[-1] + padding, OFFSETS_KV[-1] + padding
    return normal(0, total_q, N, H), normal(1, total_kv, K, H), normal(2, total_kv, K, V)


def one_by_one(query, key, value, alibi_slopes=None, **options):
    outs, residuals = [], []
    for b in range(len(LENGTHS_Q)):
        q, kv = slice(*OFFSETS_Q[b : b + 2]), slice(*OFFSETS_KV[b : b + 2])
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.ndim == 1 else alibi_slopes[b]
        out, lse = jax_flash.flash_attention(
            query[q], key[kv], value[kv], alibi_slopes=slopes, **options, return_residual=True
        )
        outs.append(out)
        residuals.append(lse)
    return jnp.concatenate(outs), jnp.concatenate(residuals)


def loss(function, arrays):
    out, lse = function(*arrays)
    return jnp.sum(out * normal(3, *out.shape)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0)), (out, lse)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"local_window_size": (1, 2), "scale": 0.5, "logits_soft_cap": 2.0},
        {"is_causal": True, "alibi_slopes": jnp.arange(1.0, N + 1) / 8},
        {"alibi_slopes": jnp.arange(1.0, 5 * N + 1).reshape(5, N) / 16, "sinks": jnp.arange(1.0, N + 1)},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_each_sequence_by_itself(options):
    def packed(*arrays):
        return jax_flash.flash_attention_varlen(*arrays, **PACKING, **options, return_residual=True)

    def expected(*arrays):
        return one_by_one(*arrays, **options)

    gradients, results = jax.jit(jax.grad(lambda arrays: loss(packed, arrays), has_aux=True))(inputs())
    wanted, expected_results = jax.jit(jax.grad(lambda arrays: loss(expected, arrays), has_aux=True))(
        inputs()
    )
    for ours, theirs in zip((*results, *gradients), (*expected_results, *wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_dropout_counts_tokens_of_all_sequences():
    query, key, value = inputs()
    dropout_key = jax.random.key(7)
    out = jax_flash.flash_attention_varlen(
        query, key, value, **PACKING, dropout_rate=0.5, dropout_key=dropout_key
    )
    keep = jax_flash.dropout_mask(dropout_key, 0.5, (N, OFFSETS_Q[-1], OFFSETS_KV[-1]))
    b = 3
    q, kv = slice(*OFFSETS_Q[b : b + 2]), slice(*OFFSETS_KV[b : b + 2])
    logits = jnp.einsum("tnh,snh->nts", query[q], jnp.repeat(key[kv], N // K, axis=1)) / H**0.5
    p = jax.nn.softmax(logits) * keep[:, q, kv] * 2
    expected = jnp.einsum("nts,snv->tnv", p, jnp.repeat(value[kv], N // K, axis=1))
    np.testing.assert_allclose(out[q], expected, rtol=2e-5, atol=2e-5)


def test_offsets_are_data_and_lengths_beyond_the_longest_are_room():
    arrays = inputs()

    @jax.jit
    def packed(offsets_q, offsets_kv):
        return jax_flash.flash_attention_varlen(
            *arrays,
            cu_seqlens_q=offsets_q,
            cu_seqlens_kv=offsets_kv,
            max_seqlen_q=9,
            max_seqlen_kv=11,
            is_causal=True,
        )

    expected, _ = one_by_one(*arrays, is_causal=True)
    np.testing.assert_allclose(packed(OFFSETS_Q, OFFSETS_KV), expected, rtol=2e-5, atol=2e-5)


def test_tokens_outside_of_all_sequences_are_padding():
    before, behind = 2, 3
    within = slice(before, -behind)
    arrays = tuple(jnp.pad(x, ((before, behind), (0, 0), (0, 0)), constant_values=9.0) for x in inputs())
    packing = PACKING | {"cu_seqlens_q": OFFSETS_Q + before, "cu_seqlens_kv": OFFSETS_KV + before}

    def packed(*arrays):
        return jax_flash.flash_attention_varlen(*arrays, **packing, return_residual=True)

    gradients, (out, lse) = jax.jit(jax.grad(lambda arrays: loss(packed, arrays), has_aux=True))(arrays)
    expected, expected_lse = jax.jit(one_by_one)(*inputs())
    np.testing.assert_allclose(out[within], expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse[within], expected_lse, rtol=2e-5, atol=2e-5)
    for x, padding in ((out, 0), (lse, -np.inf), *((gradient, 0) for gradient in gradients)):
        np.testing.assert_array_equal(x[:before], padding)
        np.testing.assert_array_equal(x[-behind:], padding)


@pytest.mark.parametrize(
    ("tokens", "offsets", "longest"),
    [(0, [0, 0], 0), (0, [0], 4), (3, [0], 4), (3, [0, 0, 0], 0)],
    ids=["no token", "no sequence", "padding alone", "empty sequences"],
)
def test_nothing_to_do(tokens, offsets, longest):
    x = jnp.ones((tokens, 2, H))
    out, lse = jax_flash.flash_attention_varlen(
        x,
        x,
        x,
        cu_seqlens_q=np.array(offsets),
        cu_seqlens_kv=np.array(offsets),
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        return_residual=True,
    )
    assert out.shape == x.shape and lse.shape == x.shape[:2]
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            dict(query=jnp.ones((2, 3, N, H))),
            ValueError,
            "query must have shape (ΣT, N, H); got float32 (2, 3, 4, 8)",
        ),
        (dict(key=jnp.ones((15, K, H), int)), TypeError, "key must have a floating dtype; got int32"),
        (
            dict(value=jnp.ones((9, K, V))),
            ValueError,
            "value must have shape (ΣS, K, V) with ΣS = 15 as in key",
        ),
        (
            dict(cu_seqlens_q=jnp.zeros(6)),
            TypeError,
            "cu_seqlens_q must have an integer dtype; got float32 (6,)",
        ),
        (dict(cu_seqlens_kv=np.zeros((2, 3), int)), ValueError, "cu_seqlens_kv must have shape (B + 1,)"),
        (
            dict(cu_seqlens_kv=OFFSETS_KV[1:]),
            ValueError,
            "must have the same shape (B + 1,); got (6,) and (5,)",
        ),
        (dict(max_seqlen_q=-1), ValueError, "max_seqlen_q must be at least 0; got -1"),
        (dict(max_seqlen_kv=None), TypeError, "max_seqlen_kv must be a Python integer"),
        (dict(dropout_rate=0.5), ValueError, "dropout_key must be a key"),
        (dict(implementation="cudnn"), ValueError, "implementation must be None, one of"),
    ],
    ids=str,
)
def test_errors(changes, error, message):
    arguments = dict(zip(("query", "key", "value"), inputs(), strict=True)) | PACKING | changes
    with pytest.raises(error) as raised:
        jax_flash.flash_attention_varlen(**arguments)
    assert message in str(raised.value)


def test_a_traced_length():
    def call(longest):
        return jax_flash.flash_attention_varlen(*inputs(), **PACKING | {"max_seqlen_q": longest})

    with pytest.raises(
        TypeError, match="max_seqlen_q must be a Python integer, known when the call is traced"
    ):
        jax.jit(call)(5)
