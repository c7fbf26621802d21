"""`ragged_paged_attention`, against the plain form of JAX's TPU kernel of that name."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as tpu
from seeds import seed_of

import jax_flash

N, K, H, PAGE, PAGES_OF_ONE, MAX_SEQS = 4, 2, 16, 4, 6, 7


def draw(name, lengths, queries, dtype=jnp.float32):
    """Arguments of a call: more places for sequences than there are, and tokens after the last."""
    random = np.random.default_rng(seed_of(name))

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape), dtype)

    pool = MAX_SEQS * PAGES_OF_ONE + 3
    table = random.permutation(pool)[: MAX_SEQS * PAGES_OF_ONE].reshape(MAX_SEQS, PAGES_OF_ONE)
    kv_lens = random.integers(0, 99, MAX_SEQS)  # what isn't of a sequence may be anything
    kv_lens[: len(lengths)] = lengths
    cu_q_lens = np.full(MAX_SEQS + 1, 12345)
    cu_q_lens[: len(queries) + 1] = np.cumsum([0, *queries])
    arguments = (kv_lens, table, cu_q_lens, [len(lengths)])
    return (
        normal(sum(queries) + 3, N, H),
        normal(pool, PAGE, 2 * K, H),
        *(jnp.asarray(x, jnp.int32) for x in arguments),
    )


CASES = {
    "decoding": ((5, 24, 1), (1, 1, 1)),
    "mixed": ((5, 24, 13, 9), (5, 1, 6, 9)),
    "one": ((17,), (3,)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "options",
    [
        {"sm_scale": H**-0.5},
        {"sliding_window": 5},
        {"soft_cap": 3.0, "sm_scale": 0.5},
        {"k_scale": 0.5, "v_scale": 3.0},
    ],
    ids=lambda x: "-".join(x),
)
def test_equals_the_plain_form(case, options):
    lengths, queries = CASES[case]
    arguments = draw((case, str(options)), lengths, queries)
    got = jax.jit(lambda *x: jax_flash.ragged_paged_attention(*x, **options))(*arguments)
    want = tpu.kernel.ref_ragged_paged_attention(*arguments, **options)
    tokens = sum(queries)
    np.testing.assert_allclose(got[:tokens], want, rtol=1e-4, atol=1e-5)
    assert not got[tokens:].any()


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))
def test_pages_in_8_bits(dtype):
    """Their numbers times the scales are keys and values."""
    q, pages, *rest = draw("8 bits", *CASES["mixed"], dtype)
    pages, options = pages.astype(jnp.float8_e4m3fn), {"k_scale": 0.3, "v_scale": 1.7}
    got = jax_flash.ragged_paged_attention(q, pages, *rest, **options)
    want = jax_flash.ragged_paged_attention(q, pages.astype(dtype), *rest, **options)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)


def test_no_sequence():
    arguments = draw("none", (), ())
    assert not jax_flash.ragged_paged_attention(*arguments).any()


def test_a_page_that_is_not_there_hides_its_keys():
    lengths, queries = CASES["mixed"]
    q, pages, kv_lens, table, *rest = draw("pages", lengths, queries)
    want = jax_flash.ragged_paged_attention(q, pages, kv_lens, table, *rest)
    for invalid in (-1, pages.shape[0], 2**31 - 1):
        changed = table.at[1, 2].set(invalid)
        got = jax_flash.ragged_paged_attention(q, pages, kv_lens, changed, *rest)
        assert np.isfinite(got).all() and (got[5] != want[5]).any()
        np.testing.assert_array_equal(np.delete(got, 5, 0), np.delete(want, 5, 0))


def test_what_no_sequence_has_is_not_read():
    lengths, queries = CASES["mixed"]
    q, pages, kv_lens, table, *rest = draw("unused", lengths, queries)
    used = np.zeros(pages.shape[:2], bool)
    for sequence, length in enumerate(lengths):
        for j in range(length):
            used[table[sequence, j // PAGE], j % PAGE] = True
    poisoned = jnp.where(used[..., None, None], pages, jnp.nan)
    got = jax_flash.ragged_paged_attention(q, poisoned, kv_lens, table, *rest)
    np.testing.assert_array_equal(got, jax_flash.ragged_paged_attention(q, pages, kv_lens, table, *rest))


def test_offsets_that_do_not_ascend_read_nothing_out_of_bounds():
    q, pages, kv_lens, table, _, _ = draw("offsets", (5, 9), (2, 3))
    offsets = jnp.asarray([3, -5, 2**31 - 1, 1, 0, 0, 7, 2], jnp.int32)
    traced = jax.jit(lambda *of: jax_flash.ragged_paged_attention(q, pages, kv_lens, table, *of))
    for count in (-3, 0, 2, 2**31 - 1):
        assert traced(offsets, jnp.asarray([count])).shape == q.shape


OFFSETS = [[0, 4, 2], [1, 2, 5], [0, -1, 5], [0, 2, 9]]


@pytest.mark.parametrize(
    ("kind", "offsets"),
    [*itertools.product((np.asarray, jnp.asarray), OFFSETS), (np.asarray, [0, 2, 2**32])],
    ids=lambda x: x.__module__ if callable(x) else str(x),
)
def test_known_offsets_are_checked(kind, offsets):
    """As far as there are sequences."""
    q, pages, kv_lens, table, _, _ = draw("known", (5, 9), (2, 3))
    rest = [-7] * (MAX_SEQS - 2)
    arguments = q, pages, kv_lens, table, kind(np.concatenate([offsets, rest]))
    with pytest.raises(ValueError, match="cu_q_lens must ascend from 0 to at most 8, the tokens of q"):
        jax_flash.ragged_paged_attention(*arguments, kind([2]))
    # None is checked where it isn't known how many there are, and of one sequence only the first two.
    traced = jax.jit(lambda count: jax_flash.ragged_paged_attention(*arguments, count))
    assert traced(jnp.asarray([2])).shape == q.shape
    if offsets[:2] in ([0, 4], [0, 2]):
        assert jax_flash.ragged_paged_attention(*arguments, kind([1])).shape == q.shape


@pytest.mark.parametrize("count", (-1, MAX_SEQS + 1, 2**31 - 1))
@pytest.mark.parametrize("kind", (np.asarray, jnp.asarray))
def test_a_known_number_of_sequences_is_checked(kind, count):
    *arguments, _ = draw("count", (5, 9), (2, 3))
    words = rf"num_seqs must be from 0 to 7, the rows of page_indices; got \[{count}\]"
    with pytest.raises(ValueError, match=words):
        jax_flash.ragged_paged_attention(*arguments, kind([count]))
    with pytest.raises(ValueError, match=words):  # though offsets are traced
        jax.jit(lambda x: jax_flash.ragged_paged_attention(*arguments[:4], x, np.array([count])))(
            arguments[4]
        )


@pytest.mark.parametrize(
    ("index", "value", "error", "words"),
    [
        (0, jnp.ones((N, H)), ValueError, "q must have shape"),
        (1, jnp.ones((3, PAGE, 3, H)), ValueError, "kv_pages must have shape"),
        (
            1,
            jnp.ones((3, PAGE, 2 * K, H), jnp.bfloat16),
            TypeError,
            "q must have the dtype of kv_pages, bfloat16",
        ),
        (2, jnp.ones(3, jnp.int32), ValueError, "kv_lens must have shape"),
        (3, jnp.ones(3, jnp.int32), ValueError, "page_indices must have shape"),
        (4, jnp.ones(3, jnp.int32), ValueError, "cu_q_lens must have shape"),
        (5, jnp.ones((), jnp.int32), ValueError, "num_seqs must have shape"),
        (5, jnp.ones(1), TypeError, "num_seqs must have an integer dtype"),
    ],
)
def test_malformed_calls(index, value, error, words):
    arguments = list(draw("malformed", (5, 9), (2, 3)))
    arguments[index] = value
    with pytest.raises(error, match=words):
        jax_flash.ragged_paged_attention(*arguments)


def test_a_window_sees_at_least_one_key():
    with pytest.raises(ValueError, match="sliding_window must be None or at least 1"):
        jax_flash.ragged_paged_attention(*draw("window", (5,), (2,)), sliding_window=0)
