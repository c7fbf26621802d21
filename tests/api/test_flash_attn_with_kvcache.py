"""`flash_attn.flash_attn_with_kvcache` against attention of each sequence alone."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import thinned
from seeds import seed_of

import jax_flash
from jax_flash.flash_attn import apply_rotary_emb, flash_attn_with_kvcache

B, S, N, K, H = 3, 40, 4, 2, 16


def rotated(x, cos, sin, first, interleaved, at_one_position=False):
    """`x (T, heads, H)` from position `first` on."""
    if at_one_position:
        cos, sin = (jnp.repeat(table[first : first + 1], len(x), axis=0) for table in (cos, sin))
        first = 0
    return apply_rotary_emb(x[None], cos, sin, interleaved, seqlen_offsets=int(first))[0]


def expected(q, k_cache, v_cache, k, v, lengths, rows, padding, cos, sin, interleaved, options):
    """out, softmax_lse and caches, sequence by sequence."""
    k_cache, v_cache = np.array(k_cache), np.array(v_cache)
    outs, sums = [], []
    is_local = options["causal"] or any(0 <= side < S for side in options["window_size"])
    for b in range(len(q)):
        length, query = int(lengths[b]), q[b]
        if cos is not None:
            query = rotated(query, cos, sin, length, interleaved, at_one_position=not is_local)
        if k is not None:
            key = k[b] if cos is None else rotated(k[b], cos, sin, length, interleaved)
            k_cache[rows[b], length : length + len(key)] = key
            v_cache[rows[b], length : length + len(key)] = v[b]
            length += len(key)
        visible = slice(int(padding[b]), length)
        left, right = (None if side < 0 else side for side in options["window_size"])
        slopes = options["alibi_slopes"]
        out, lse = jax_flash.flash_attention(
            query,
            k_cache[rows[b], visible],
            v_cache[rows[b], visible],
            is_causal=options["causal"],
            local_window_size=(left, right),
            logits_soft_cap=options["softcap"] or None,
            alibi_slopes=slopes if slopes is None or slopes.ndim == 1 else slopes[b],
            return_residual=True,
        )
        outs.append(out)
        sums.append(lse.T)
    return np.stack(outs), np.stack(sums), k_cache, v_cache


OPTIONS = [
    {"causal": causal, "window_size": window, "softcap": softcap, "alibi_slopes": None}
    for causal, window, softcap in ((False, (-1, -1), 0.0), (True, (-1, -1), 0.0), (False, (7, 2), 2.0))
]
OPTIONS.append(
    {"causal": True, "window_size": (9, -1), "softcap": 0.0, "alibi_slopes": np.ones(N, np.float32)}
)
LAYOUTS = ("contiguous", "batch index", "padding", "paged")
NEW = (None, 1, 4)


CASES = [
    case
    for case in itertools.product((None, "interleaved", "halves"), range(len(OPTIONS)), LAYOUTS, NEW)
    if case[0] is None or case[3] is not None  # tables rotate what is appended
]


def pairs(case):
    return set(itertools.combinations(enumerate(case), 2))


@pytest.mark.parametrize("rotary,options,layout,new", thinned(CASES, pairs))
def test_equals_attention_of_each_sequence(rotary, options, layout, new):
    options = OPTIONS[options]
    random = np.random.default_rng(seed_of((rotary, str(options), layout, new)))
    T = new or 2

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    rows = random.permutation(B + 2)[:B] if layout == "batch index" else np.arange(B)
    sequences = B + 2 * (layout == "batch index")
    k_cache, v_cache = normal(sequences, S, K, H), normal(sequences, S, K, H)
    lengths = random.integers(T, S - T + 1, B)
    padding = random.integers(0, lengths // 2 + 1) if layout == "padding" else np.zeros(B, int)
    q = normal(B, T, N, H)
    k, v = (None, None) if new is None else (normal(B, new, K, H), normal(B, new, K, H))
    cos = sin = None
    if rotary:
        angles = normal(S, 4)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
    want = expected(
        q, k_cache, v_cache, k, v, lengths, rows, padding, cos, sin, rotary == "interleaved", options
    )

    where = {}
    caches = [k_cache, v_cache]
    if layout == "batch index":
        where["cache_batch_idx"] = jnp.asarray(rows, jnp.int32)
    if layout == "padding":
        where["cache_leftpad"] = jnp.asarray(padding, jnp.int32)
    if layout == "paged":
        table = random.permutation(B * S // 8).reshape(B, S // 8)
        where["block_table"] = jnp.asarray(table, jnp.int32)
        caches = [
            jnp.zeros((table.size, 8, K, H)).at[table.ravel()].set(x.reshape(-1, 8, K, H)) for x in caches
        ]
    results = flash_attn_with_kvcache(
        q, *caches, k, v, cos, sin, jnp.asarray(lengths, jnp.int32),
        rotary_interleaved=rotary != "halves", return_softmax_lse=True, **options, **where,
    )  # fmt: skip
    assert len(results) == (2 if new is None else 4)
    out, lse, *after = results
    np.testing.assert_allclose(out, want[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, want[1], rtol=1e-4, atol=1e-5)
    if layout == "paged":
        after = [x[table.ravel()].reshape(B, S, K, H) for x in after]
    for got, right in zip(after, want[2:], strict=bool(after)):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)


def arguments(**changes):
    random = np.random.default_rng(0)
    shapes = {"q": (B, 1, N, H), "k_cache": (B, S, K, H), "v_cache": (B, S, K, H)}
    return {name: random.normal(size=x).astype(np.float32) for name, x in shapes.items()} | changes


def test_lengths_may_be_one_number_or_left_out():
    whole = flash_attn_with_kvcache(**arguments())
    for lengths in (S, np.int32(S), jnp.int32(S), [S] * B, np.full(B, S)):
        np.testing.assert_array_equal(flash_attn_with_kvcache(**arguments(cache_seqlens=lengths)), whole)


CAPACITY = 8


def rotating(T=2, is_paged=False, **options):
    """out of a call that rotates T queries, on a cache for 8 keys that holds 3."""
    random = np.random.default_rng(1)
    q, k, v = (random.normal(size=(1, T, heads, H)).astype(np.float32) for heads in (N, K, K))
    caches = random.normal(size=(2, 1, CAPACITY, K, H)).astype(np.float32)
    table = None
    if is_paged:
        caches, table = caches.reshape(2, CAPACITY // 2, 2, K, H), np.arange(CAPACITY // 2)[None]
    angles = random.normal(size=(CAPACITY, 4)).astype(np.float32)
    given = {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles), "cache_seqlens": 3}
    return flash_attn_with_kvcache(q, *caches, k, v, block_table=table, **given | options)[0]


@pytest.mark.parametrize("is_paged", (False, True))
def test_a_window_of_the_cache_s_length_is_none(is_paged):
    """The call isn't local then: all queries are rotated at one position."""
    whole = rotating(is_paged=is_paged)
    for window in ((100, -1), (8, 8), (100, 100), (-1, 8), (8, -1)):
        np.testing.assert_array_equal(rotating(is_paged=is_paged, window_size=window), whole)
    local = rotating(is_paged=is_paged, window_size=(7, 7))
    np.testing.assert_array_equal(rotating(is_paged=is_paged, window_size=(7, 100)), local)
    np.testing.assert_allclose(local[:, 0], whole[:, 0], rtol=1e-5)
    assert np.abs(local[:, 1] - whole[:, 1]).max() > 1e-2  # it has a position of its own


@pytest.mark.parametrize("left", (8, 100))
def test_a_causal_call_with_a_window_of_the_cache_s_length_stays_causal(left):
    causal = rotating(causal=True)
    for right in (-1, 0, 100):
        np.testing.assert_array_equal(rotating(causal=True, window_size=(left, right)), causal)
        np.testing.assert_array_equal(rotating(window_size=(left, 0)), causal)
    assert np.abs(causal - rotating()).max() > 1e-2


def test_a_window_of_the_cache_s_length_shows_all_keys_to_more_queries_than_there_are_keys():
    random = np.random.default_rng(2)
    q = random.normal(size=(1, 2 * CAPACITY + 4, N, H)).astype(np.float32)
    caches = random.normal(size=(2, 1, CAPACITY, K, H)).astype(np.float32)
    whole = flash_attn_with_kvcache(q, *caches)
    np.testing.assert_array_equal(flash_attn_with_kvcache(q, *caches, window_size=(-1, CAPACITY)), whole)
    narrower = flash_attn_with_kvcache(q, *caches, window_size=(-1, CAPACITY - 1))
    assert not narrower[0, 0].any()


def test_lists_of_integers():
    rows, padding = [2, 0, 1], [3, 0, 1]
    for name, given in (("cache_batch_idx", rows), ("cache_leftpad", padding)):
        got = flash_attn_with_kvcache(**arguments(**{name: given}))
        want = flash_attn_with_kvcache(**arguments(**{name: np.array(given)}))
        np.testing.assert_array_equal(got, want)
    table = [[1], [0], [2]]
    want = flash_attn_with_kvcache(**arguments(cache_batch_idx=np.array([1, 0, 2])))
    np.testing.assert_allclose(flash_attn_with_kvcache(**arguments(block_table=table)), want, rtol=1e-6)


def test_an_error_about_rotary_tables_names_no_argument_of_another_function():
    with pytest.raises(ValueError, match=r"rotary_cos must have shape .* to the head dim, 16; got"):
        rotating(rotary_cos=np.ones((CAPACITY, 9), np.float32))


def test_the_first_sequences_of_a_larger_cache():
    given = arguments()
    more = {name: np.concatenate([given[name], given[name]]) for name in ("k_cache", "v_cache")}
    got = flash_attn_with_kvcache(**given | more)
    np.testing.assert_array_equal(got, flash_attn_with_kvcache(**given))


def test_the_number_of_splits_changes_no_result():
    whole = flash_attn_with_kvcache(**arguments())
    for splits in (1, 3):
        np.testing.assert_allclose(flash_attn_with_kvcache(**arguments(num_splits=splits)), whole, rtol=1e-5)


def test_it_runs_under_jit_with_donated_caches():
    given = arguments()
    new = np.ones((B, 1, K, H), np.float32)

    @jax.jit
    def step(q, k_cache, v_cache, lengths):
        return flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=lengths, causal=True)

    lengths = jnp.asarray([0, 5, S - 1], jnp.int32)
    donating = jax.jit(step, donate_argnums=(1, 2))
    got = donating(given["q"], jnp.array(given["k_cache"]), jnp.array(given["v_cache"]), lengths)
    for x, y in zip(got, step(*given.values(), lengths), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": np.ones((B, N, H), np.float32)}, ValueError, "q must have shape"),
        ({"k_cache": np.ones((B, S, H), np.float32)}, ValueError, "k_cache must have shape"),
        ({"k_cache": np.ones((B, S, K, H), np.float16)}, TypeError, "v_cache must have the dtype of k_cache"),
        ({"k": np.ones((B, 1, K, H), np.float32)}, ValueError, "k goes with v"),
        ({"rotary_cos": np.ones((S, 4), np.float32)}, ValueError, "rotary_cos goes with k and v"),
        ({"cache_batch_idx": np.zeros(B + 1, np.int32)}, ValueError, "cache_batch_idx must have shape"),
        ({"cache_seqlens": np.zeros(B)}, TypeError, "cache_seqlens must have an integer dtype"),
        ({"cache_seqlens": -1}, ValueError, "cache_seqlens must be at least 0"),
        ({"cache_leftpad": np.zeros(1, np.int32)}, ValueError, "cache_leftpad must have shape"),
        ({"block_table": np.zeros(B, np.int32)}, ValueError, "block_table must have shape"),
        ({"block_table": np.zeros((B, 1), np.int32), "cache_batch_idx": np.zeros(B, np.int32)}, ValueError,
         "cache_batch_idx must be None with a block_table"),
        ({"num_splits": -1}, ValueError, "num_splits must be at least 0"),
        ({"softcap": "x"}, TypeError, "softcap must be a number"),
    ],
)  # fmt: skip
def test_malformed_calls(changes, error, words):
    with pytest.raises(error, match=words):
        flash_attn_with_kvcache(**arguments(**changes))


def test_what_is_appended_needs_a_place():
    new = np.ones((B, 1, K, H), np.float32)
    with pytest.raises(ValueError, match="cache_seqlens must say where"):
        flash_attn_with_kvcache(**arguments(k=new, v=new))
