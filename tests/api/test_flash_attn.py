"""The official package's functions, by what its documentation says of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import dropout_mask, flash_attn

B, N, K, H = 2, 4, 2, 8
TOLERANCE = dict(rtol=2e-5, atol=2e-5)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def inputs(seqlen_q, seqlen_k):
    return normal(0, B, seqlen_q, N, H), normal(1, B, seqlen_k, K, H), normal(2, B, seqlen_k, K, H)


def softmax_attention(q, k, v, allowed, added=0.0, scale=H**-0.5, softcap=0.0, keep=None, dropout_p=0.0):
    """out (B, seqlen_q, N, H) and lse (B, N, seqlen_q), where every row has something to attend to."""
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    x = jnp.einsum("btnh,bsnh->bnts", q, k) * scale
    if softcap:
        x = softcap * jnp.tanh(x / softcap)
    x = jnp.where(allowed, x + added, -jnp.inf)
    p = jax.nn.softmax(x)
    if keep is not None:
        p = p * keep / (1 - dropout_p)
    return jnp.einsum("bnts,bsnh->btnh", p, v), jax.nn.logsumexp(x, axis=-1)


def attends(seqlen_q, seqlen_k, **options):
    """Which keys each query attends to, read off a call whose values are one-hot."""
    q, k = jnp.zeros((1, seqlen_q, 1, seqlen_k)), jnp.zeros((1, seqlen_k, 1, seqlen_k))
    v = jnp.eye(seqlen_k)[None, :, None]
    return np.asarray(flash_attn.flash_attn_func(q, k, v, **options)[0, :, 0] > 0).astype(int)


def test_causal_tables():
    np.testing.assert_array_equal(attends(2, 5, causal=True), [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(attends(5, 2, causal=True), [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]])


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(4, 7), (7, 4)])
@pytest.mark.parametrize(
    "window_size", [(-1, -1), (1, 2), (0, 0), (2, -1), (-1, 1), (-7, 0), (3, 3), (2, 4), (9, 7)], ids=str
)
def test_window_formula(seqlen_q, seqlen_k, window_size):
    left, right = window_size
    i, j = np.ogrid[:seqlen_q, :seqlen_k]
    expected = np.ones((seqlen_q, seqlen_k), bool)
    if 0 <= left < seqlen_k:
        expected &= j >= i + seqlen_k - seqlen_q - left
    if 0 <= right < seqlen_k:
        expected &= j <= i + seqlen_k - seqlen_q + right
    np.testing.assert_array_equal(attends(seqlen_q, seqlen_k, window_size=window_size), expected)


@pytest.mark.parametrize(("max_seqlen_k", "is_unbounded"), [(4, True), (5, False)])
def test_a_window_of_the_longest_varlen_sequence_is_none(max_seqlen_k, is_unbounded):
    q, k, v = normal(0, 9, 1, H), normal(1, 4, 1, H), normal(2, 4, 1, H)
    offsets = jnp.array([0, 9]), jnp.array([0, 4])

    def attend(right):
        window = dict(window_size=(-1, right))
        return flash_attn.flash_attn_varlen_func(q, k, v, *offsets, 9, max_seqlen_k, **window)

    # The first query's diagonal is 5 keys before the first key.
    assert np.array_equal(attend(4), attend(-1)) == is_unbounded
    assert np.any(attend(4)[0]) == is_unbounded


def test_rows_with_nothing_to_attend_to_give_0():
    q, k, v = inputs(5, 2)
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    np.testing.assert_array_equal(out[:, :3], 0)
    np.testing.assert_array_equal(lse[:, :, :3], -np.inf)
    assert np.isfinite(lse[:, :, 3:]).all()


@pytest.mark.parametrize("per_batch", [False, True])
def test_all_options_at_once(per_batch):
    q, k, v = inputs(4, 6)
    i, j = np.ogrid[:4, :6]
    slopes = jnp.abs(normal(3, *((B, N) if per_batch else (N,))))
    key = jax.random.key(1)
    out, lse, third = flash_attn.flash_attn_func(
        q, k, v, 0.3, 0.5, True, (4, 0), 2.0, slopes, True, True, dropout_key=key
    )
    expected, expected_lse = softmax_attention(
        q,
        k,
        v,
        (j <= i + 2) & (j >= i + 2 - 4),
        -slopes[..., None, None] * np.abs(i + 2 - j),
        scale=0.5,
        softcap=2.0,
        keep=dropout_mask(key, 0.3, (B, N, 4, 6)),
        dropout_p=0.3,
    )
    np.testing.assert_allclose(out, expected, **TOLERANCE)
    np.testing.assert_allclose(lse, expected_lse, **TOLERANCE)
    assert (lse.shape, lse.dtype, third) == ((B, N, 4), jnp.float32, None)


def test_gradients():
    arrays = inputs(4, 6)
    i, j = np.ogrid[:4, :6]

    def gradients(function):
        def loss(*arrays):
            out, lse = function(*arrays)
            return jnp.sum(out * normal(5, *out.shape)) + jnp.sum(lse * normal(6, *lse.shape))

        return jax.grad(loss, argnums=(0, 1, 2))(*arrays)

    ours = gradients(lambda *x: flash_attn.flash_attn_func(*x, causal=True, return_attn_probs=True)[:2])
    theirs = gradients(lambda *x: softmax_attention(*x, j <= i + 2))
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_packed_arguments():
    q, k, v = inputs(6, 6)
    options = dict(causal=True, softcap=1.5, return_attn_probs=True)
    expected = flash_attn.flash_attn_func(q, k, v, **options)
    kv = jnp.stack([k, v], axis=2)
    for x, y in zip(flash_attn.flash_attn_kvpacked_func(q, kv, **options)[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(x, y)
    qkv = jnp.stack([q, jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)], axis=2)
    for x, y in zip(flash_attn.flash_attn_qkvpacked_func(qkv, **options)[:2], expected[:2], strict=True):
        np.testing.assert_allclose(x, y, **TOLERANCE)


def test_varlen_sequences():
    lengths = np.array([3, 0, 5])
    offsets = np.cumsum([0, *lengths])
    q, k, v = normal(0, 8, N, H), normal(1, 8, K, H), normal(2, 8, K, H)
    options = dict(causal=True, window_size=(2, 0), return_attn_probs=True)
    out, lse, third = flash_attn.flash_attn_varlen_func(q, k, v, offsets, offsets, 5, 5, **options)
    assert (lse.shape, lse.dtype, third) == ((N, 8), jnp.float32, None)
    for start, end in ((0, 3), (3, 8)):
        rows = slice(start, end)
        expected = flash_attn.flash_attn_func(q[None, rows], k[None, rows], v[None, rows], **options)
        np.testing.assert_allclose(out[rows], expected[0][0], **TOLERANCE)
        np.testing.assert_allclose(lse[:, rows], expected[1][0], **TOLERANCE)

    kv = jnp.stack([k, v], axis=1)
    packed = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, 5, 5, **options)
    np.testing.assert_array_equal(packed[0], out)
    qkv = jnp.stack([q, jnp.repeat(k, 2, axis=1), jnp.repeat(v, 2, axis=1)], axis=1)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, offsets, 5, **options)
    np.testing.assert_allclose(packed[0], out, **TOLERANCE)
    np.testing.assert_allclose(packed[1], lse, **TOLERANCE)


def test_unpad_and_pad():
    states = normal(0, 3, 4, 2, 5)
    mask = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]])
    tokens, indices, offsets, longest, used = flash_attn.unpad_input(states, mask)
    np.testing.assert_array_equal(tokens, np.asarray(states)[mask == 1])
    np.testing.assert_array_equal(indices, [0, 1, 8, 10, 11])
    np.testing.assert_array_equal(offsets, [0, 2, 2, 5])
    np.testing.assert_array_equal(used, [2, 0, 3])
    assert longest == 3 and isinstance(longest, int)
    padded = flash_attn.pad_input(tokens, indices, 3, 4)
    np.testing.assert_array_equal(padded, states * mask[..., None, None])


def test_unpad_with_room_for_unused_tokens():
    states = normal(0, 2, 3, 5)
    mask, unused = np.array([[1, 0, 0], [1, 1, 0]], bool), np.array([[0, 1, 0], [0, 0, 1]], bool)
    tokens, _, offsets, longest, used = flash_attn.unpad_input(states, mask, unused)
    np.testing.assert_array_equal(tokens, np.asarray(states)[mask | unused])
    np.testing.assert_array_equal(offsets, [0, 2, 5])
    np.testing.assert_array_equal(used, [1, 2])
    assert longest == 3


def test_unpad_attend_and_pad_under_jit():
    """The way that padded batches go through the packed functions, its sizes static."""
    q, k, v = inputs(6, 6)
    mask = np.arange(6) < np.array([[4], [5]])

    @jax.jit
    def attend(q, k, v, mask):
        q_tokens, indices, offsets, longest, _ = flash_attn.unpad_input(q, mask, size=11)
        k_tokens, v_tokens = (flash_attn.unpad_input(x, mask, size=11)[0] for x in (k, v))
        assert longest == 6
        out = flash_attn.flash_attn_varlen_func(
            q_tokens, k_tokens, v_tokens, offsets, offsets, longest, longest, causal=True
        )
        return flash_attn.pad_input(out, indices, B, 6)

    out = attend(q, k, v, mask)
    expected = flash_attn.flash_attn_func(q, k, v, causal=True) * mask[..., None, None]
    np.testing.assert_allclose(out, expected, **TOLERANCE)
    gradient = jax.grad(lambda q: attend(q, k, v, mask).sum())(q)
    assert np.isfinite(gradient).all() and (gradient[0, 4:] == 0).all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            dict(dropout_p=0.1),
            ValueError,
            "dropout_key must be a key, as from jax.random.key, when dropout_p is 0.1",
        ),
        (dict(dropout_p=1.0), ValueError, "dropout_p must be at least 0 and less than 1; got 1.0"),
        (dict(softmax_scale="x"), TypeError, "softmax_scale must be a number; got 'x'"),
        (dict(causal=1), TypeError, "causal must be True or False"),
        (dict(window_size=(1, 2, 3)), ValueError, "window_size must be None, an int or a pair (left, right)"),
        (dict(window_size=(1, 0.5)), TypeError, "window_size must be a Python integer"),
        (dict(softcap=None), TypeError, "softcap must be a number; got None"),
        (
            dict(alibi_slopes=jnp.ones(3)),
            ValueError,
            "alibi_slopes must have shape (N,) = (4,) or (*B, N) = (2, 4)",
        ),
        (dict(return_attn_probs=None), TypeError, "return_attn_probs must be True or False"),
        (dict(k=jnp.ones((B, 6, 3, H))), ValueError, "v must have shape"),
    ],
    ids=str,
)
def test_errors(changes, error, message):
    arguments = dict(zip("qkv", inputs(4, 6), strict=True)) | changes
    with pytest.raises(error) as raised:
        flash_attn.flash_attn_func(**arguments)
    assert message in str(raised.value)


def test_errors_of_packed_arguments():
    with pytest.raises(ValueError, match=r"qkv must have shape \(batch_size, seqlen, 3, nheads, headdim\)"):
        flash_attn.flash_attn_qkvpacked_func(jnp.ones((B, 4, 2, N, H)))
    with pytest.raises(ValueError, match=r"kv must have shape \(total_k, 2, nheads_k, headdim\)"):
        flash_attn.flash_attn_varlen_kvpacked_func(
            jnp.ones((4, N, H)), jnp.ones((4, N, H)), np.array([0, 4]), np.array([0, 4]), 4, 4
        )


def test_errors_of_padding():
    states, mask = jnp.ones((2, 3, 5)), np.ones((2, 3), bool)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(batch, seqlen\) = \(2, 3\)"):
        flash_attn.unpad_input(states, mask[:, :2])
    with pytest.raises(TypeError, match="attention_mask must have a bool or integer dtype"):
        flash_attn.unpad_input(states, np.ones((2, 3), np.float32))
    with pytest.raises(ValueError, match="size must be an int when attention_mask is traced, as under jit"):
        jax.jit(flash_attn.unpad_input)(states, mask)
    with pytest.raises(ValueError, match=r"hidden_states and indices must have shapes"):
        flash_attn.pad_input(states[0], jnp.arange(2), 2, 3)
    with pytest.raises(ValueError, match="batch must be at least 0; got -1"):
        flash_attn.pad_input(jnp.zeros((2, 4)), jnp.arange(2), -1, 3)
