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
    """Of any two rows, or columns, of any two heads: how much correlations scatter, and the largest.

    With one key in about 24 some pair has hashes whose ratio is one of small numbers (`_dropout.py`).
    """
    length = 2048
    kept = mask(4, rate, (2, length // 2, length) if lines == "rows" else (1, length, length))
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


@pytest.mark.parametrize("length", [777, 4096])
@pytest.mark.parametrize("axis", range(4), ids=["batch", "head", "row", "column"])
def test_patterns_along_an_axis_are_equally_frequent(axis, length):
    """Pearson's statistic of all patterns of eight decisions that follow each other."""
    kept = mask(11, 0.5, (8, 8, *((length, 128) if axis == 2 else (128, length))))
    kept = np.moveaxis(kept, axis, -1)
    kept = kept[..., : kept.shape[-1] // 8 * 8].reshape(-1, 8)
    counts = np.bincount(np.packbits(kept, axis=1)[:, 0], minlength=256)
    expected = kept.shape[0] / 256
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert abs(statistic - 255) < 5 * np.sqrt(2 * 255)


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("axis", [2, 3], ids=["row", "column"])
def test_runs_are_as_long_as_those_of_coins(axis, rate):
    """Of runs of kept probabilities, a share of rate * (1 - rate)^(n - 1) has length n."""
    kept = np.moveaxis(mask(13, rate, (2, 4, 1024, 1024)), axis, -1).reshape(-1)
    starts = np.flatnonzero(kept & ~np.roll(kept, 1))
    ends = np.flatnonzero(kept & ~np.roll(kept, -1))
    lengths = ends - starts + 1 if starts[0] <= ends[0] else ends[1:] - starts[:-1] + 1
    longest = int(
        np.log(100 / lengths.size) / np.log(1 - rate)
    )  # up to here there are about a hundred or more
    counts = np.bincount(np.minimum(lengths, longest), minlength=longest + 1)[1:]
    share = rate * (1 - rate) ** np.arange(longest)
    share[-1] = (1 - rate) ** (longest - 1)
    expected = share * lengths.size
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert abs(statistic - (longest - 1)) < 5 * np.sqrt(2 * longest)


def test_no_head_is_another_shifted():
    """Of any two heads of any two batch rows, at every distance of their rows: the correlation of rows that
    then coincide, over the first columns alone."""
    batch, heads, length, columns = 4, 4, 4096, 32
    x = standardised(mask(17, 0.5, (batch, heads, length, columns))).reshape(batch * heads, length, columns)
    spectra = np.fft.rfft(x, axis=1)
    pairs = np.stack(np.triu_indices(batch * heads, 1), axis=1)
    for one, other in pairs:
        cross = np.fft.irfft((spectra[one] * spectra[other].conj()).sum(-1), length)
        assert np.abs(cross).max() / np.sqrt(length * columns) < 6.5


@pytest.mark.parametrize(
    ("batch", "heads", "length", "seed"),
    [(8, 32, 16384, 2), (8, 32, 16384, 5), (3, 5, 1000, 0), (1, 1, 2**20, 0), (2**16, 1, 7, 0)],
)
def test_no_two_rows_of_a_batch_row_have_the_same_hash_and_no_two_columns(batch, heads, length, seed):
    rows, columns = _dropout.hashes(jax.random.key(seed), batch, heads, length, length)
    for hashes in *np.asarray(rows), np.asarray(columns):
        assert (hashes % 2 == 1).all()
        # The product's bit 31, the only one that a hash's bit 31 has a part in, is not looked at.
        assert np.unique(hashes & 2**31 - 1).size == hashes.size


def unpermute(x, round_keys):
    """The inverse of `_dropout._permute`."""

    def unshift(x, shift):
        y = x
        for _ in range(30 // shift):
            y = x ^ y >> shift
        return y

    x = unshift(np.asarray(x, np.int64), _dropout._LAST_SHIFT)
    for round_key, (shift, multiplier) in zip(round_keys[::-1], _dropout._ROUNDS[::-1], strict=True):
        x = unshift(x * pow(multiplier, -1, 2**30) % 2**30, shift) ^ int(round_key) % 2**30
    return x


def test_permutation_is_a_bijection_of_30_bits():
    x = np.random.default_rng(0).integers(2**30, size=2**16, dtype=np.uint32)
    round_keys = jax.random.bits(jax.random.key(1), (3,), jnp.uint32)
    y = np.asarray(_dropout._permute(jnp.asarray(x), round_keys))
    assert y.max() < 2**30
    np.testing.assert_array_equal(unpermute(y, round_keys), x)


@pytest.mark.parametrize("index_bits", [1, 7, 20, 29])
def test_positions_differ_as_long_as_line_and_index_fit_into_30_bits(index_bits):
    random = np.random.default_rng(0)
    line = random.integers(2 ** (30 - index_bits), size=2**14, dtype=np.uint32)
    index = random.integers(2**index_bits, size=2**14, dtype=np.uint32)
    position = np.asarray(_dropout._position(jnp.asarray(line), jnp.asarray(index)))
    np.testing.assert_array_equal(position % 2**index_bits, index)
    reversed_line = [int(f"{x:030b}"[::-1], 2) for x in line]
    np.testing.assert_array_equal(position - index, reversed_line)


def test_no_key_gives_another_keys_hashes_shifted():
    """Where one key's hashes are found among another's: each at a distance of its own."""
    length = 2**14
    index = np.arange(length)
    for seed in range(4):
        rows, _ = _dropout.hashes(jax.random.key(seed), 1, 1, length, 1)
        other = _dropout._round_keys(jax.random.fold_in(jax.random.split(jax.random.key(seed + 1))[0], 0))
        found = unpermute(np.asarray(rows)[0, 0] // 2, other)
        for distance in found - index, found ^ index:
            assert np.unique(distance).size > length - 5


@pytest.mark.parametrize(
    "setting", ["rank_promotion", "dtype_promotion", "x64", "disable_jit", "transfer_guard"]
)
def test_hashes_are_the_same_under_any_setting(setting):
    key = jax.random.key(4)
    expected = jax.tree.map(np.asarray, _dropout.hashes(key, 2, 3, 40, 70))
    jax.clear_caches()
    strict = {
        "rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
        "dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
        "x64": lambda: jax.enable_x64(True),
        "disable_jit": jax.disable_jit,
        "transfer_guard": lambda: jax.transfer_guard("disallow"),
    }
    with strict[setting]():
        hashes = _dropout.hashes(key, 2, 3, 40, 70)
        kept = jax_flash.dropout_mask(key, 0.3, (2, 3, 40, 70))
    jax.tree.map(np.testing.assert_array_equal, hashes, expected)
    assert all(x.dtype == jnp.uint32 for x in hashes)
    np.testing.assert_array_equal(kept, mask(4, 0.3, (2, 3, 40, 70)))


def test_keys_under_vmap_are_keys_alone():
    keys = jax.random.split(jax.random.key(5), 3)
    mapped = jax.vmap(lambda key: jax_flash.dropout_mask(key, 0.3, (2, 8, 9)))(keys)
    np.testing.assert_array_equal(mapped, [jax_flash.dropout_mask(key, 0.3, (2, 8, 9)) for key in keys])


def test_hashes_are_evenly_distributed():
    """Over all values that a threshold tells apart."""
    rows, columns = _dropout.hashes(jax.random.key(2), 1, 1, 2048, 2048)
    bits = np.asarray(rows)[0, 0, :, None] * np.asarray(columns)
    counts = np.bincount((bits >> 16).ravel() % 2**15, minlength=2**15)
    expected = bits.size / 2**15
    # Pearson's statistic, of mean 1 here and of variance 2 / 2**15.
    assert abs(((counts - expected) ** 2 / expected).mean() - 1) < 5 * np.sqrt(2 / 2**15)


def test_a_block_is_the_same_alone_as_in_the_whole():
    rows, columns = _dropout.hashes(jax.random.key(0), 2, 3, 256, 512)
    whole = _dropout.keep(rows, columns[:, None], 0.3)
    some = jnp.array([2, 0]), jnp.array([5, 255, 7]), jnp.array([500, 3])
    of_some = _dropout.hashes_at(jax.random.key(0), 2, *some)
    np.testing.assert_array_equal(of_some[0], rows[:, some[0]][:, :, some[1]])
    np.testing.assert_array_equal(of_some[1], columns[:, some[2]])
    block = _dropout.keep(rows[1:, :, 64:96], columns[1:, None, 500:], 0.3)
    np.testing.assert_array_equal(block, whole[1:, :, 64:96, 500:512])
    np.testing.assert_array_equal(whole, mask(rate=0.3))


def test_does_not_depend_on_the_lengths_the_batch_or_the_heads():
    np.testing.assert_array_equal(mask(shape=(2, 3, 40, 70)), mask()[:, :, :40, :70])
    np.testing.assert_array_equal(mask(shape=(1, 2, 40, 70)), mask()[:1, :2, :40, :70])
    np.testing.assert_array_equal(mask(shape=(2, 2, 40, 70)), mask()[:, :2, :40, :70])


def test_rates_of_a_threshold():
    """What the kernels compare with; rates differ by 2**-15."""
    assert [_dropout.threshold(rate) for rate in (0, 2**-15, 0.5, np.nextafter(1, 0))] == [
        0,
        1,
        2**14,
        2**15 - 1,
    ]


@pytest.mark.parametrize(
    ("rate", "probability"),
    [
        (0, 1),
        (2**-17, 1),
        (2**-15, 1 - 2**-15),
        (0.1, 1 - 3277 / 2**15),
        (0.5, 0.5),
        (0.99999, 2**-15),
        (np.nextafter(1, 0), 2**-15),
    ],
)
def test_probability_of_being_kept(rate, probability):
    assert _dropout.keep_probability(rate) == probability
    kept = mask(7, rate, (1, 4096, 4096))
    deviation = np.sqrt(probability * (1 - probability) / kept.size)
    assert abs(kept.mean() - probability) <= 5 * deviation


@pytest.mark.parametrize("rate", [1e-6, 0.3, 0.9999, 0.99999])
def test_what_is_kept_is_divided_by_its_probability(rate):
    """So the mean stays. All values are 1 and all logits 0: without dropout out and d_value are 1."""
    T = S = 2048
    query, key, value = jnp.zeros((T, 1, 8)), jnp.zeros((S, 1, 8)), jnp.ones((S, 1, 1))
    dropout_key = jax.random.key(3)
    kept = np.asarray(jax_flash.dropout_mask(dropout_key, rate, (1, T, S)))[0]
    probability = _dropout.keep_probability(rate)

    def attend(value):
        return jax_flash.flash_attention(
            query, key, value, dropout_rate=rate, dropout_key=dropout_key, implementation="xla"
        )

    out, vjp = jax.vjp(attend, value)
    (d_value,) = vjp(jnp.ones_like(out))
    np.testing.assert_allclose(out[:, 0, 0], kept.mean(1) / probability, rtol=1e-5)
    np.testing.assert_allclose(d_value[:, 0, 0], kept.mean(0) / probability, rtol=1e-5)
    deviation = np.sqrt((1 - probability) / probability / (T * S))
    assert abs(out.mean() - 1) < 5 * deviation + 1e-6


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
    expected = kept / (S * _dropout.keep_probability(0.4))
    np.testing.assert_allclose(out.transpose(0, 2, 1, 3), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("rate", "shape", "message"),
    [
        (1.0, SHAPE, "rate must be at least 0 and less than 1; got 1.0"),
        (-0.1, SHAPE, "rate must be at least 0 and less than 1; got -0.1"),
        (0.5, (8, 8), r"shape must be \(\*B, N, T, S\), .*; got \(8, 8\)"),
    ],
)
def test_refuses(rate, shape, message):
    with pytest.raises(ValueError, match=message):
        mask(rate=rate, shape=shape)
