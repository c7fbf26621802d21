"""Varlen sequences: each gives what it gives by itself."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _device, _dispatch

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


def loss(function, arrays, **options):
    out, lse = function(*arrays, **options)
    return jnp.sum(out * normal(3, *out.shape)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0)), (out, lse)


def with_gradients(function, arrays, options):
    """Gradients of the inputs and of the options that are arrays, and results."""
    learnt = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
    fixed = {name: x for name, x in options.items() if name not in learnt}

    @jax.jit
    def run(arrays, learnt):
        def of_all(arrays, learnt):
            return loss(function, arrays, **learnt, **fixed)

        return jax.grad(of_all, (0, 1), has_aux=True)(arrays, learnt)

    return run(arrays, learnt)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"local_window_size": (1, 2), "scale": 0.5, "logits_soft_cap": 2.0},
        {"is_causal": True, "alibi_slopes": jnp.arange(1.0, N + 1) / 8, "sinks": jnp.arange(1.0, N + 1)},
        {"alibi_slopes": jnp.arange(1.0, 5 * N + 1).reshape(5, N) / 16, "sinks": jnp.arange(1.0, N + 1)},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_each_sequence_by_itself(options):
    def packed(*arrays, **options):
        return jax_flash.flash_attention_varlen(*arrays, **PACKING, **options, return_residual=True)

    ours, theirs = (with_gradients(function, inputs(), options) for function in (packed, one_by_one))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), ours, theirs)


def test_dropout_counts_packed_tokens():
    query, key, value = inputs()
    dropout_key = jax.random.key(7)
    out = jax_flash.flash_attention_varlen(
        query, key, value, **PACKING, dropout_rate=0.5, dropout_key=dropout_key
    )
    keep = jax_flash.dropout_mask(dropout_key, 0.5, (N, query.shape[0], key.shape[0]))
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
    """Before the first one only if the offsets are traced: as known values they are an error."""
    before, behind = 2, 3
    within = slice(before, -behind)
    arrays = tuple(jnp.pad(x, ((before, behind), (0, 0), (0, 0)), constant_values=9.0) for x in inputs())
    offsets = {"cu_seqlens_q": OFFSETS_Q + before, "cu_seqlens_kv": OFFSETS_KV + before}

    @jax.jit
    def run(arrays, offsets):
        def packed(*arrays):
            return jax_flash.flash_attention_varlen(*arrays, **PACKING | offsets, return_residual=True)

        return jax.grad(lambda arrays: loss(packed, arrays), has_aux=True)(arrays)

    gradients, (out, lse) = run(arrays, offsets)
    expected, expected_lse = jax.jit(one_by_one)(*inputs())
    np.testing.assert_allclose(out[within], expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse[within], expected_lse, rtol=2e-5, atol=2e-5)
    for x, padding in ((out, 0), (lse, -np.inf), *((gradient, 0) for gradient in gradients)):
        np.testing.assert_array_equal(x[:before], padding)
        np.testing.assert_array_equal(x[-behind:], padding)


@pytest.mark.parametrize("per_sequence", [False, True])
def test_tokens_beyond_the_longest_length_are_padding(per_sequence):
    """If the offsets are traced: as known values they are an error."""
    query, key, value = inputs()
    longest = {"max_seqlen_q": 3, "max_seqlen_kv": 2}
    slopes = jnp.ones((5, N) if per_sequence else N)

    offsets = {"cu_seqlens_q": OFFSETS_Q, "cu_seqlens_kv": OFFSETS_KV}

    @jax.jit
    def run(arrays, offsets):
        def packed(*arrays):
            packing = PACKING | longest | offsets
            return jax_flash.flash_attention_varlen(
                *arrays, **packing, is_causal=True, alibi_slopes=slopes, return_residual=True
            )

        return jax.grad(lambda x: loss(packed, x), has_aux=True)(arrays)

    gradients, (out, lse) = run((query, key, value), offsets)
    for b in range(5):
        starts = OFFSETS_Q[b], OFFSETS_KV[b]
        ends = [
            min(start + most, end)
            for start, most, end in zip(
                starts, longest.values(), (OFFSETS_Q[b + 1], OFFSETS_KV[b + 1]), strict=True
            )
        ]
        (q, kv), ends_of_sequence = map(slice, starts, ends), (OFFSETS_Q[b + 1], OFFSETS_KV[b + 1])
        expected, expected_lse = jax_flash.flash_attention(
            query[q], key[kv], value[kv], is_causal=True, alibi_slopes=jnp.ones(N), return_residual=True
        )
        np.testing.assert_allclose(out[q], expected, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(lse[q], expected_lse, rtol=2e-5, atol=2e-5)
        beyond_q, beyond_kv = map(slice, ends, ends_of_sequence)
        np.testing.assert_array_equal(lse[beyond_q], -np.inf)
        for x, beyond in zip((out, *gradients), (beyond_q, beyond_q, beyond_kv, beyond_kv), strict=True):
            np.testing.assert_array_equal(x[beyond], 0)


@pytest.mark.parametrize(
    "mapped", [(0, 0, 0, 0, 0), (None, 0, 0, None, 0), (0, None, None, 0, None)], ids=str
)
def test_vmap_over_packed_rows(mapped):
    """Rows that hold sequences of other lengths each, or keys that all of them share."""
    offsets = jnp.asarray([OFFSETS_Q, OFFSETS_Q[::-1].max() - OFFSETS_Q[::-1], OFFSETS_Q + 2])
    offsets_kv = jnp.asarray([OFFSETS_KV, OFFSETS_KV // 2, OFFSETS_KV])
    rows = (*(jnp.stack([x, -x, x + 1]) for x in inputs(padding=2)), offsets, offsets_kv)
    arguments = [x if axis == 0 else x[0] for x, axis in zip(rows, mapped, strict=True)]

    def run(query, key, value, cu_seqlens_q, cu_seqlens_kv):
        packing = PACKING | {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}

        def packed(*arrays):
            return jax_flash.flash_attention_varlen(*arrays, **packing, is_causal=True, return_residual=True)

        return jax.grad(lambda arrays: loss(packed, arrays), has_aux=True)((query, key, value))

    ours = jax.jit(jax.vmap(run, in_axes=mapped))(*arguments)
    each = [
        jax.jit(run)(*(x if axis is None else x[i] for x, axis in zip(arguments, mapped, strict=True)))
        for i in range(3)
    ]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *each)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), ours, expected)


def test_an_implementation_gets_the_sequences_as_they_are_packed():
    call = []

    def supports(spec, shapes, device):
        call.extend((spec, shapes))
        return "it has seen enough"

    with mock.patch.object(_dispatch.get("cuda"), "supports", supports):
        jax_flash.flash_attention_varlen(*inputs(), **PACKING, local_window_size=(5, 3))
    spec, shapes = call
    assert (spec.max_query_length, spec.max_key_value_length) == (5, 6)
    assert (spec.left, spec.right) == (None, 3)  # no sequence has keys further left
    assert shapes.query.shape == (1, 13, N, H) and shapes.key.shape == (1, 15, K, H)
    assert shapes.query_offsets.shape == shapes.key_value_offsets.shape == (1, 6)
    assert _dispatch.select(spec, shapes, _dispatch.IMPLEMENTATIONS, _device.H100)[-1] == "xla"


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
            "value must have shape (*B, S, K, V) with (*B, S, K) = (15, 2) as in key; got float32 (9, 2, 6)",
        ),
        (
            dict(cu_seqlens_q=jnp.zeros(6)),
            TypeError,
            "cu_seqlens_q must have an integer dtype; got float32 (6,)",
        ),
        (dict(cu_seqlens_kv=np.zeros((2, 3), int)), ValueError, "cu_seqlens_kv must have shape (B + 1,)"),
        (
            dict(cu_seqlens_kv=OFFSETS_KV[:-1]),
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


def call_with(**changes):
    return jax_flash.flash_attention_varlen(*inputs(), **PACKING | changes)


WRONG_OFFSETS = {
    "not from 0": (
        [*OFFSETS_Q[1:].tolist(), 13],
        "must ascend from 0 to at most 13, the number of tokens; got [4,",
    ),
    "descending": ([0, 4, 3, 5, 10, 13], "must ascend from 0 to at most 13"),
    "more than the tokens": ([0, 4, 4, 5, 10, 14], "must ascend from 0 to at most 13"),
    "lengths": ([4, 0, 1, 5, 3, 0], "(if these are lengths: pass their cumulative sum, with 0 in front)"),
}


@pytest.mark.parametrize("convert", [np.array, jnp.array], ids=["NumPy", "JAX"])
@pytest.mark.parametrize("wrong", WRONG_OFFSETS)
def test_known_offsets_are_checked(wrong, convert):
    offsets, message = WRONG_OFFSETS[wrong]
    offsets = convert(offsets)
    with pytest.raises(ValueError, match=re.escape(message)):
        call_with(cu_seqlens_q=offsets)
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.jit(lambda: call_with(cu_seqlens_q=offsets))()


@pytest.mark.parametrize(("side", "longest"), [("q", 5), ("kv", 6)])
def test_a_longest_length_below_a_known_one(side, longest):
    message = (
        f"max_seqlen_{side} must be at least {longest}, the longest sequence of cu_seqlens_{side}; got 4"
    )
    with pytest.raises(ValueError, match=message):
        call_with(**{f"max_seqlen_{side}": 4})


def test_known_offsets_are_read_under_a_transfer_guard():
    offsets = {"cu_seqlens_q": jnp.asarray(OFFSETS_Q), "cu_seqlens_kv": jnp.asarray(OFFSETS_KV)}
    with jax.transfer_guard_device_to_host("disallow_explicit"), pytest.raises(ValueError, match="longest"):
        call_with(**offsets, max_seqlen_q=1)


@pytest.mark.parametrize("wrong", [*WRONG_OFFSETS, "far beyond"])
def test_traced_offsets_read_nothing_out_of_bounds(wrong):
    offsets = np.array(
        WRONG_OFFSETS[wrong][0] if wrong in WRONG_OFFSETS else [-(2**31), 2**31 - 1, 9, -1, 0, 99]
    )
    out = jax.jit(lambda x, y: call_with(cu_seqlens_q=x, cu_seqlens_kv=y))(offsets, offsets)
    assert np.isfinite(out).all()


def test_a_traced_length():
    def call(longest):
        return jax_flash.flash_attention_varlen(*inputs(), **PACKING | {"max_seqlen_q": longest})

    with pytest.raises(
        TypeError, match="max_seqlen_q must be a Python integer, known when the call is traced"
    ):
        jax.jit(call)(5)
