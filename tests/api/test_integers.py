"""Lengths, segment ids, offsets and windows of any integer dtype and size mean what they say: none wraps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _sequence_arguments, flash_attn
from jax_flash._call import Arguments, prepare

B, T, S, N, H = 2, 4, 5, 2, 8


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


QUERY, KEY, VALUE = normal(0, B, T, N, H), normal(1, B, S, N, H), normal(2, B, S, N, H)


def attention(**options):
    return jax_flash.flash_attention(QUERY, KEY, VALUE, **options)


def integers(values, dtype, traced):
    """A NumPy array, or a JAX array under x64."""
    values = np.asarray(values, dtype)
    return jnp.asarray(values) if traced else values


LENGTHS = {
    "uint32": [3, 2**32 - 1],
    "int64": [3, 2**32 + 1],
    "uint64": [3, 2**64 - 1],
    "int64 below": [3 - 2**33, 2**40],
    "int8": [3, -128],
    "uint8": [3, 255],
}


@pytest.mark.parametrize("traced", [False, True], ids=["NumPy", "traced"])
@pytest.mark.parametrize("case", LENGTHS)
def test_lengths_are_clipped_before_they_are_narrowed(case, traced):
    def canonical(lengths):
        operands = prepare(Arguments(QUERY, KEY, VALUE, key_value_seq_lengths=lengths)).operands
        return operands.key_value_seq_lengths

    values = LENGTHS[case]
    with jax.enable_x64(traced):
        lengths = (jax.jit(canonical) if traced else canonical)(integers(values, case.split()[0], traced))
    assert lengths.dtype == jnp.int32
    np.testing.assert_array_equal(lengths, [min(max(x, 0), S) for x in values])


def test_lengths_of_few_bits_for_long_sequences():
    x = jnp.ones((1, 300, 1, 8))
    for dtype in ("int8", "uint8"):
        lengths = np.array([100], dtype)
        out = jax_flash.flash_attention(x, x, x, query_seq_lengths=lengths)
        np.testing.assert_array_equal(out[:, :100], 1)
        np.testing.assert_array_equal(out[:, 100:], 0)


SEGMENTS = {
    "int64 in two halves": ("int64", [1, 1, 2**32 + 1, 2**33 + 1], [1, 2**32 + 1, 2**33 + 1, 2**40, 1]),
    "uint64": ("uint64", [0, 2**64 - 1, 2**32 - 1, 2**63], [0, 2**32 - 1, 2**64 - 1, 2**63, 2**31]),
    "int64, negative": ("int64", [-1, -(2**40), 2**32 - 1, 0], [2**32 - 1, -1, 0, 2**40, -(2**40)]),
    "uint32": ("uint32", [0, 2**31, 2**32 - 1, 1], [2**32 - 1, 2**31, 0, 0, 1]),
    "small": ("int64", [0, 0, 1, 1], [0, 0, 1, 1, 2]),
}


@pytest.mark.parametrize("traced", [False, True], ids=["NumPy", "traced"])
@pytest.mark.parametrize("case", SEGMENTS)
def test_segment_ids_are_compared_before_they_are_narrowed(case, traced):
    dtype, queries, keys = SEGMENTS[case]
    mask = np.array(queries, object)[:, None] == np.array(keys, object)
    expected = attention(mask=mask.astype(bool))

    def run(queries, keys):
        return attention(query_segment_ids=queries, key_value_segment_ids=keys)

    with jax.enable_x64(traced):
        ids = [integers([x, x], dtype, traced) for x in (queries, keys)]
        out = (jax.jit(run) if traced else run)(*ids)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_lengths_and_segment_ids_without_tokens():
    x, ids = jnp.ones((2, 0, 2, 8)), jnp.zeros((2, 0), jnp.int32)
    out = jax_flash.flash_attention(
        *(x, x, x),
        is_causal=True,
        alignment="top_left",
        key_value_seq_lengths=jnp.zeros(2, jnp.int32),
        query_segment_ids=ids,
        key_value_segment_ids=ids,
    )
    assert out.shape == x.shape


def test_segment_ids_of_different_dtypes():
    """The bits of -1 and of 2**32 - 1 are alike."""
    queries, keys = np.array([[-1, 7, 2**31 - 1]], np.int32), np.array([[2**32 - 1, 7, 2**31]], np.uint32)
    ranks = _sequence_arguments.segment_ids(jnp.asarray(queries), jnp.asarray(keys), (1, 3), (1, 3))
    equal = ranks[0][0][:, None] == ranks[1][0]
    np.testing.assert_array_equal(equal, queries.astype(int)[0][:, None] == keys.astype(int)[0])
    assert ranks[0].dtype == ranks[1].dtype == jnp.int32


@pytest.mark.parametrize("window", [2**31, 2**40, 10**400])
def test_windows_beyond_32_bits_are_unbounded(window):
    np.testing.assert_array_equal(attention(local_window_size=window), attention())
    np.testing.assert_array_equal(attention(local_window_size=(window, 0)), attention(is_causal=True))
    np.testing.assert_array_equal(
        flash_attn.flash_attn_func(QUERY, KEY, VALUE, window_size=(window, -window)), attention()
    )


@pytest.mark.parametrize("side", [-(2**31) - 1, -(2**40), -(10**400)])
def test_windows_below_32_bits_hide_all(side):
    for window in ((None, side), (side, None)):
        out, lse = jax_flash.dot_product_attention(
            QUERY, KEY, VALUE, local_window_size=window, return_residual=True
        )
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_array_equal(lse, -np.inf)


@pytest.mark.parametrize("cap", [3e38, 1.2e-38])
def test_extreme_soft_caps_give_no_nan(cap):
    def loss(query):
        return jax_flash.flash_attention(query, KEY, VALUE, logits_soft_cap=cap).sum()

    value, gradient = jax.value_and_grad(loss)(QUERY)
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_token_masks_are_compared_before_they_are_narrowed():
    tokens, indices, *_ = flash_attn.unpad_input(normal(0, 1, 3, 2), np.array([[2**32, 0, 2**40]]))
    np.testing.assert_array_equal(indices, [0, 2])
    padded = flash_attn.pad_input(tokens, np.array([0, 2**32 + 1]), 1, 3)
    np.testing.assert_array_equal(padded[0, 1:], 0)
