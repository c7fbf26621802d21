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


def standardised(kept):
    return ((kept - kept.mean()) / kept.std()).astype(np.float32)


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("lines", ["rows", "columns"])
def test_no_two_lines_are_correlated(rate, lines):
    """Of any two rows, or columns, of any two heads: how much correlations scatter, and the largest."""
    length = 2048
    kept = mask(3, rate, (2, length // 2, length) if lines == "rows" else (1, length, length))
    x = standardised(kept.reshape(length, length))
    products = (x @ x.T if lines == "rows" else x.T @ x) / np.sqrt(length)
    products = products[np.triu_indices(length, 1)]
    # Coins' own, of rate p: the product of two standardised ones has a fourth moment of ((1 - 3pq) / pq)^2.
    fourth = 3 + (((1 - 3 * rate * (1 - rate)) / (rate * (1 - rate))) ** 2 - 3) / length
    assert abs(products.mean()) < 5 / length
    assert abs(products.var() - 1) < 0.005
    assert abs((products**4).mean() / fourth - 1) < 0.05
    assert np.abs(products).max() < (12 if rate < 0.1 else 7)


def test_singular_values_are_those_of_independent_coins():
    """Any structure over many rows and columns at once would stand out from the bulk, that ends at 2."""
    size = 1024
    x = standardised(mask(5, 0.1, (1, size, size))[0])
    values = np.linalg.svd(x, compute_uv=False) / np.sqrt(size)
    assert abs(values[0] - 2) < 0.05
    # The distribution function at 1 of the quarter circle law.
    assert abs((values < 1).mean() - (1 / 3 + np.sqrt(3) / (2 * np.pi))) < 0.01


@pytest.mark.parametrize("count", [2**12, 2**16])
def test_words_are_odd_and_all_different(count):
    rows, columns = _dropout.words(jax.random.key(9), 3, 2, count, count)
    for words in (*rows.reshape(6, count), *columns):
        assert (words % 2 == 1).all() and np.unique(words).size == count


def test_hashes_are_evenly_distributed():
    """Over all values that a threshold tells apart."""
    rows, columns = _dropout.words(jax.random.key(2), 1, 1, 2048, 2048)
    bits = np.asarray(rows)[0, 0, :, None] * np.asarray(columns)
    counts = np.bincount((bits >> 16).ravel() % 2**15, minlength=2**15)
    expected = bits.size / 2**15
    # Pearson's statistic, of mean 1 here and of variance 2 / 2**15.
    assert abs(((counts - expected) ** 2 / expected).mean() - 1) < 5 * np.sqrt(2 / 2**15)


def test_a_block_is_the_same_alone_as_in_the_whole():
    rows, columns = _dropout.words(jax.random.key(0), 2, 3, 256, 512)
    whole = _dropout.keep(rows, columns[:, None], 0.3)
    block = _dropout.keep(rows[1:, :, 64:96], columns[1:, None, 500:], 0.3)
    np.testing.assert_array_equal(block, whole[1:, :, 64:96, 500:512])
    np.testing.assert_array_equal(whole, mask(rate=0.3))


def test_does_not_depend_on_the_lengths():
    np.testing.assert_array_equal(mask(shape=(2, 3, 40, 70)), mask()[:, :, :40, :70])


def test_rates_of_a_threshold():
    """What the kernels compare with; rates differ by 2**-15."""
    assert [_dropout.threshold(rate) for rate in (0, 2**-15, 0.5, np.nextafter(1, 0))] == [
        0,
        1,
        2**14,
        2**15 - 1,
    ]


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
