"""`flash_attn_varlen_func` with a block_table: the results of the same keys and values without pages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from seeds import seed_of

from jax_flash import flash_attn

N, K, H, V = 4, 2, 16, 8
QUERIES, KEYS = (3, 0, 1, 5), (9, 4, 1, 30)
OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(4, 2)),
    "causal_window": dict(causal=True, window_size=(6, -1)),
    "soft_cap": dict(causal=True, softcap=3.0, softmax_scale=0.4),
    "alibi": dict(causal=True, alibi_slopes=np.linspace(0.1, 0.6, N, dtype=np.float32)),
    "alibi_of_each": dict(alibi_slopes=np.linspace(0.1, 0.9, 4 * N, dtype=np.float32).reshape(4, N)),
}


def drawn(page, dtype=jnp.float32):
    """q, packed keys and values, pages of these, offsets, and the block table. Unused rows are NaN."""
    generator = np.random.default_rng(seed_of(page))
    q, k, v = (
        generator.standard_normal((sum(lengths) + more, heads, dim)).astype(dtype)
        for lengths, more, heads, dim in ((QUERIES, 2, N, H), (KEYS, 0, K, H), (KEYS, 0, K, V))
    )
    pages_of = [-(-length // page) for length in KEYS]
    count = sum(pages_of) + 3
    places = iter(generator.permutation(count))
    table = np.full((len(KEYS), max(pages_of) + 1), -1, np.int32)
    k_pages, v_pages = (np.full((count, page, K, dim), np.nan, dtype) for dim in (H, V))
    starts = np.cumsum((0, *KEYS))
    for i, length in enumerate(KEYS):
        for j in range(length):
            if j % page == 0:
                table[i, j // page] = next(places)
            place = table[i, j // page], j % page
            k_pages[place], v_pages[place] = k[starts[i] + j], v[starts[i] + j]
    offsets = [np.cumsum((0, *lengths)).astype(np.int32) for lengths in (QUERIES, KEYS)]
    return q, (k, v), (k_pages, v_pages), offsets, table


@pytest.mark.parametrize("page", (1, 3, 16))
@pytest.mark.parametrize("options", OPTIONS)
def test_same_as_without_pages(options, page):
    q, packed, pages, offsets, table = drawn(page)
    lengths = max(QUERIES), max(KEYS)
    attend = functools.partial(flash_attn.flash_attn_varlen_func, **OPTIONS[options], return_attn_probs=True)
    expected = attend(q, *packed, *offsets, *lengths)
    found = jax.jit(lambda *x: attend(*x[:5], *lengths, block_table=x[5]))(q, *pages, *offsets, table)
    tokens = sum(QUERIES)
    assert found[0].shape == (tokens + 2, N, V) and found[1].shape == (N, tokens + 2) and found[2] is None
    np.testing.assert_allclose(found[0][:tokens], expected[0][:tokens], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(found[1][:, :tokens], expected[1][:, :tokens], rtol=2e-5, atol=2e-5)
    assert not found[0][tokens:].any()


def test_results_without_probabilities_and_lists():
    q, packed, pages, offsets, table = drawn(4, jnp.bfloat16)
    found = flash_attn.flash_attn_varlen_func(
        q, *pages, *(x.tolist() for x in offsets), 5, 30, causal=True, block_table=table.tolist()
    )
    expected = flash_attn.flash_attn_varlen_func(q, *packed, *offsets, 5, 30, causal=True)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found[:9].astype(np.float32), expected[:9].astype(np.float32), atol=0.03)


def test_a_page_that_is_not_there_hides_its_keys():
    q, _, pages, offsets, table = drawn(3)
    attend = functools.partial(flash_attn.flash_attn_varlen_func, causal=True)
    expected = attend(q, *pages, *offsets, 5, 30, block_table=table)
    for invalid in (-1, len(pages[0]), 2**31 - 1):
        changed = table.copy()
        changed[3, 2] = invalid
        found = attend(q, *pages, *offsets, 5, 30, block_table=changed)
        assert np.isfinite(found).all() and (found[4:9] != expected[4:9]).any()
        np.testing.assert_array_equal(found[:4], expected[:4])


def test_offsets_beyond_the_arrays_read_nothing_out_of_bounds():
    q, _, pages, _, table = drawn(3)
    wild = np.asarray([3, -5, 2**31 - 1, 1, 2**31 - 1], np.int32)
    attend = functools.partial(flash_attn.flash_attn_varlen_func, q, *pages, block_table=table)
    traced = jax.jit(lambda offsets: attend(offsets, offsets, 5, 30))
    assert traced(wild).shape == (len(q), N, V)


def test_traced_lengths_beyond_the_table_count_as_its_capacity():
    """Whatever the sum of the lengths: each is clipped by itself."""
    q, _, pages, offsets, table = drawn(3)
    capacity = table.shape[1] * 3

    def attend(of_keys):
        return flash_attn.flash_attn_varlen_func(q, *pages, offsets[0], of_keys, 5, 1000, block_table=table)

    far = np.asarray([0, 9, 13, 14, 1000], np.int32)
    full = np.asarray([0, 9, 13, 14, 14 + capacity], np.int32)
    np.testing.assert_array_equal(jax.jit(attend)(far), attend(full))


def call(**changes):
    q, _, pages, offsets, table = drawn(3)
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "block_table")
    given = dict(zip(names, (q, *pages, *offsets, table), strict=True), max_seqlen_q=5, max_seqlen_k=30)
    return flash_attn.flash_attn_varlen_func(**given | changes)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (dict(q=np.ones((2, 3, N, H), np.float32)), ValueError, r"q must have shape \(total_q, nheads"),
        (
            dict(k=np.ones((9, K, H), np.float32)),
            ValueError,
            r"k must have shape \(num_blocks, page_block_size",
        ),
        (dict(v=np.ones((2, 3, K, V), np.float32)), ValueError, "v must have the shape of k"),
        (dict(q=np.ones((11, N, H), np.float16)), TypeError, "q must have the dtype of k, float32"),
        (dict(cu_seqlens_q=np.zeros((2, 2), np.int32)), ValueError, "cu_seqlens_q must have shape"),
        (
            dict(cu_seqlens_k=np.zeros(4, np.int32)),
            ValueError,
            r"cu_seqlens_k must have shape \(batch_size \+ 1,\) = \(5,\) as cu_seqlens_q; got int32 \(4,\)",
        ),
        (dict(cu_seqlens_k=np.zeros(5, np.float32)), TypeError, "cu_seqlens_k must have an integer dtype"),
        (
            dict(block_table=np.zeros(4, np.int32)),
            ValueError,
            r"block_table must have shape \(batch_size, max_num",
        ),
        (dict(dropout_p=0.1), NotImplementedError, "dropout_p must be 0 with a block_table"),
        (dict(dropout_p=-0.5), ValueError, "dropout_p must be at least 0 and less than 1; got -0.5"),
        (dict(dropout_p=1.5), ValueError, "dropout_p must be at least 0 and less than 1; got 1.5"),
        (dict(dropout_key=3), TypeError, "dropout_key must be a key"),
        (dict(max_seqlen_q=-1), ValueError, "max_seqlen_q"),
        (dict(max_seqlen_q=4), ValueError, "max_seqlen_q must be at least 5, the longest .*cu_seqlens_q"),
        (dict(max_seqlen_k=29), ValueError, "max_seqlen_k must be at least 30, the longest .*cu_seqlens_k"),
        (dict(cu_seqlens_q=[0, 3, 3, 4, 12]), ValueError, "cu_seqlens_q must ascend from 0 to at most 11,"),
        (dict(cu_seqlens_q=[0, 5, 2, 4, 9]), ValueError, "cu_seqlens_q must ascend from 0"),
        (dict(cu_seqlens_q=jnp.asarray([1, 3, 3, 4, 9])), ValueError, "cu_seqlens_q must ascend from 0"),
        (dict(cu_seqlens_k=[0, 9, 3, 14, 44]), ValueError, "cu_seqlens_k must ascend from 0"),
        (dict(cu_seqlens_k=[1, 9, 13, 14, 44]), ValueError, "cu_seqlens_k must ascend from 0"),
        (
            dict(cu_seqlens_k=[0, 9, 13, 14, 48], max_seqlen_k=99),
            ValueError,
            r"cu_seqlens_k must leave each sequence at most 33 keys, .*; got \[0, 9, 13, 14, 48\]",
        ),
        (
            dict(cu_seqlens_k=[0, 9, 13, 14, 999], max_seqlen_k=999),
            ValueError,
            "cu_seqlens_k must ascend from 0 to at most 132,",
        ),
        (dict(deterministic=2), TypeError, "deterministic"),
    ],
)
def test_errors(changes, error, words):
    with pytest.raises(error, match=words):
        call(**changes)


def test_has_no_derivative():
    with pytest.raises(NotImplementedError, match="derivative"):
        jax.grad(lambda q: call(q=q).sum())(jnp.asarray(drawn(3)[0]))


def test_strict_settings():
    expected = call(causal=True)
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.enable_x64(True),
    ):
        np.testing.assert_array_equal(call(causal=True), expected)
