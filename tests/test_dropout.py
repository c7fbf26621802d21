"""Dropout's mask: the right rate, nothing related to anything else, the same in every use."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _dropout

SHAPE = (2, 3, 256, 512)  # (B, N, T, S)


def mask(seed=0, rate=0.5, shape=SHAPE):
    return np.asarray(jax_flash.dropout_mask(jax.random.key(seed), rate, shape))


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_drops_at_the_rate(rate):
    dropped = 1 - mask(rate=rate).mean(axis=(2, 3))
    deviation = np.sqrt(rate * (1 - rate) / (SHAPE[2] * SHAPE[3]))
    assert np.all(np.abs(dropped - rate) < 5 * deviation)


def test_rate_of_zero_keeps_everything():
    assert mask(rate=0.0).all()


def test_rate_just_below_one_drops_nearly_everything():
    assert mask(rate=np.nextafter(1, 0)).mean() < 1e-4


@pytest.mark.parametrize("axis", range(4), ids=["batch", "head", "row", "column"])
def test_neighbours_along_an_axis_are_independent(axis):
    """Agreement of two fair coins is a fair coin: between any two positions of any axis."""
    kept = np.moveaxis(mask(), axis, 0)
    for distance in (1, 2, 16):
        if distance < len(kept):
            agree = kept[distance:] == kept[:-distance]
            deviation = 0.5 / np.sqrt(agree.size)
            assert abs(agree.mean() - 0.5) < 5 * deviation


def test_rows_and_columns_are_independent_in_fours():
    """A hash that only added what row and column contribute would fix the parity of a rectangle."""
    kept = mask()
    parity = kept[..., :-1, :-1] ^ kept[..., 1:, :-1] ^ kept[..., :-1, 1:] ^ kept[..., 1:, 1:]
    assert abs(parity.mean() - 0.5) < 5 * 0.5 / np.sqrt(parity.size)


def test_counts_in_rows_and_columns_scatter_as_those_of_independent_coins():
    kept = mask()
    for axis in (2, 3):
        counts = kept.sum(axis)
        expected = kept.shape[axis] / 4
        # The variance of a sample variance of m normal values is 2 / m of its square.
        assert abs(counts.var() / expected - 1) < 5 * np.sqrt(2 / counts.size)


def test_keys_give_different_masks():
    masks = [mask(seed) for seed in range(3)]
    for one, other in itertools.combinations(masks, 2):
        assert abs((one == other).mean() - 0.5) < 0.01
    np.testing.assert_array_equal(mask(1), masks[1])


def test_old_style_keys_are_keys():
    typed = jax_flash.dropout_mask(jax.random.key(3), 0.5, SHAPE)
    old = jax_flash.dropout_mask(jax.random.PRNGKey(3), 0.5, SHAPE)
    np.testing.assert_array_equal(typed, old)


def test_a_block_is_the_same_alone_as_in_the_whole():
    seeds = _dropout.seeds(jax.random.key(0), 2, 3)
    whole = _dropout.keep(seeds, jnp.arange(256), jnp.arange(512), 0.3)
    block = _dropout.keep(seeds[1:], jnp.arange(64, 96), jnp.arange(500, 512), 0.3)
    np.testing.assert_array_equal(block, whole[1:, :, 64:96, 500:512])
    np.testing.assert_array_equal(whole, mask(rate=0.3))


def test_leading_axes_are_batch_rows_in_order():
    flat = mask(shape=(6, 2, 8, 8))
    np.testing.assert_array_equal(mask(shape=(2, 3, 2, 8, 8)), flat.reshape(2, 3, 2, 8, 8))
    assert mask(shape=(2, 8, 8)).shape == (2, 8, 8)


def test_is_what_flash_attention_keeps():
    """With the identity for values, the output is the matrix of probabilities itself."""
    B, T, S, N = 2, 9, 12, 3
    query = jnp.ones((B, T, N, 4))
    key = jnp.ones((B, S, N, 4))
    value = jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, N, S))
    dropout_key = jax.random.key(7)
    out = jax_flash.flash_attention(query, key, value, dropout_rate=0.4, dropout_key=dropout_key)
    kept = jax_flash.dropout_mask(dropout_key, 0.4, (B, N, T, S))
    np.testing.assert_allclose(out.transpose(0, 2, 1, 3), kept / (S * 0.6), rtol=1e-5)


@pytest.mark.parametrize(
    ("rate", "shape", "message"),
    [
        (1.0, SHAPE, "rate must be at least 0 and below 1, but it is 1.0"),
        (-0.1, SHAPE, "rate must be at least 0 and below 1, but it is -0.1"),
        (0.5, (8, 8), r"shape must be \(\*batch, heads, queries, keys\), but it is \(8, 8\)"),
    ],
)
def test_refuses(rate, shape, message):
    with pytest.raises(ValueError, match=message):
        mask(rate=rate, shape=shape)
