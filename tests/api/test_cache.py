"""Key-value caches through the public functions: what they mean, and what they refuse."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import KVCache, PagedKVCache

B, S, N, K, H = 2, 24, 4, 2, 16


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def filled(lengths=(5, 0)):
    """A cache, and the keys and values of each sequence as arrays of S rows."""
    key, value = normal(0, B, S, K, H), normal(1, B, S, K, H)
    return KVCache(key, value, jnp.asarray(lengths, jnp.int32))


def as_pages(cache, page=4):
    """The same sequences in permuted pages, of which some are no sequence's."""
    pages = B * S // page
    order = jax.random.permutation(jax.random.key(9), pages + 3)[:pages]
    key, value = (
        jnp.full((pages + 3, page, K, H), jnp.nan).at[order].set(x.reshape(pages, page, K, H))
        for x in (cache.key, cache.value)
    )
    return PagedKVCache(key, value, order.reshape(B, -1).astype(jnp.int32), cache.lengths)


def test_an_empty_cache():
    cache = KVCache.create(B, S, K, H, layers=3, value_dim=8)
    assert cache.key.shape == (3, B, S, K, H) and cache.value.shape == (3, B, S, K, 8)
    assert cache.key.dtype == jnp.bfloat16 and cache.lengths.shape == (3, B)
    paged = PagedKVCache.create(B, 7, 4, 6, K, H, jnp.float32)
    assert paged.key_pages.shape == (7, 4, K, H) and (paged.page_table == -1).all()
    assert paged.page_table.shape == (B, 6) and paged.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("make", [lambda x: x, as_pages], ids=["contiguous", "paged"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": False},
        {"local_window_size": (3, None)},
        {"is_causal": False, "local_window_size": (3, 1)},
        {"logits_soft_cap": 2.0, "scale": 0.4},
        {"alibi_slopes": np.linspace(0.1, 0.5, N, dtype=np.float32)},
        {"sinks": np.linspace(-1, 1, N, dtype=np.float32)},
    ],
    ids=lambda x: "-".join(x) or "plain",
)
def test_is_append_and_attention_with_lengths(options, make):
    cache, T = filled(), 3
    query, key, value = normal(2, B, T, N, H), normal(3, B, T, K, H), normal(4, B, T, K, H)
    (out, lse), after = jax_flash.flash_attention_with_cache(
        query, make(cache), key, value, return_residual=True, **options
    )
    appended = cache.append(key, value)
    want, want_lse = jax_flash.flash_attention(
        query,
        appended.key,
        appended.value,
        **{"is_causal": True} | options,
        key_value_seq_lengths=appended.lengths,
        return_residual=True,
    )
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, after, make(cache).append(key, value))
    assert after.lengths.tolist() == [8, 3]


def test_decoding_step_by_step_is_attention_to_the_whole_sequence():
    T = 9
    query, key, value = normal(2, B, T, N, H), normal(3, B, T, K, H), normal(4, B, T, K, H)
    angles = normal(5, S, H // 2)
    tables = {"rotary_cos": jnp.cos(angles), "rotary_sin": jnp.sin(angles)}
    cache, outs = KVCache.create(B, S, K, H, jnp.float32), []
    for start, end in ((0, 4), (4, 5), (5, 6), (6, 9)):
        rows = slice(start, end)
        out, cache = jax_flash.flash_attention_with_cache(
            query[:, rows], cache, key[:, rows], value[:, rows], **tables
        )
        outs.append(out)
    rotate = lambda x: jax_flash.apply_rotary(x, jnp.cos(angles), jnp.sin(angles))  # noqa: E731
    want = jax_flash.flash_attention(rotate(query), rotate(key), value, is_causal=True)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), want, rtol=1e-4, atol=1e-5)


def test_a_full_cache_drops_what_does_not_fit():
    cache = filled((S - 1, S))
    key, value = normal(3, B, 2, K, H), normal(4, B, 2, K, H)
    after = cache.append(key, value)
    assert after.lengths.tolist() == [S, S]
    np.testing.assert_array_equal(after.key[0, -1], key[0, 0])
    np.testing.assert_array_equal(after.key[1], cache.key[1])
    beyond = dataclasses.replace(cache, lengths=jnp.asarray([1000, S], jnp.int32))
    query = normal(2, B, 1, N, H)
    full = dataclasses.replace(cache, lengths=jnp.asarray([S, S], jnp.int32))
    got, want = (jax_flash.flash_attention_with_cache(query, x)[0] for x in (beyond, full))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("layers", (None, 2))
def test_an_append_clips_lengths(layers):
    """Lengths may be any int32: below 0 they count as 0, and beyond the capacity as that."""
    cache, layer = filled((5, 0)), None
    odd = jnp.asarray([-3, S + 2], jnp.int32)
    if layers is not None:
        cache, layer, odd = (
            jax.tree.map(lambda x: jnp.stack([x] * layers), cache),
            1,
            jnp.stack([odd[::-1], odd]),
        )
    key, value = normal(3, B, 2, K, H), normal(4, B, 2, K, H)
    after = dataclasses.replace(cache, lengths=odd).append(key, value, layer=layer)
    before = cache.key if layers is None else cache.key[1]
    own, own_lengths = (after.key, after.lengths) if layers is None else (after.key[1], after.lengths[1])
    assert own_lengths.tolist() == [2, S]
    np.testing.assert_array_equal(own[0, :2], key[0])
    np.testing.assert_array_equal(own[0, 2:], before[0, 2:])
    np.testing.assert_array_equal(own[1], before[1])
    if layers is not None:
        np.testing.assert_array_equal(after.lengths[0], odd[0])
        np.testing.assert_array_equal(after.key[0], cache.key[0])


def test_layers_have_lengths_of_their_own():
    cache = KVCache.create(B, S, K, H, jnp.float32, layers=2)
    key, value = normal(3, B, 2, K, H), normal(4, B, 2, K, H)
    after = cache.append(key, value, layer=1)
    assert after.lengths.tolist() == [[0, 0], [2, 2]]
    assert not after.key[0].any()
    one = KVCache(*(x[1] for x in (after.key, after.value, after.lengths)))
    query = normal(2, B, 1, N, H)
    want, _ = jax_flash.flash_attention_with_cache(query, one)
    got, same = jax_flash.flash_attention_with_cache(query, after, layer=jnp.int32(1))
    np.testing.assert_array_equal(got, want)
    assert same is after  # as nothing was appended


@pytest.mark.parametrize("table_of_each_layer", [True, False])
def test_layers_of_pages(table_of_each_layer):
    cache = as_pages(filled())
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), cache)
    if not table_of_each_layer:
        stacked = dataclasses.replace(stacked, page_table=cache.page_table)
    arguments = normal(2, B, 1, N, H), normal(3, B, 1, K, H), normal(4, B, 1, K, H)
    want, after = jax_flash.flash_attention_with_cache(arguments[0], cache, *arguments[1:])
    got, stacked = jax_flash.flash_attention_with_cache(arguments[0], stacked, *arguments[1:], layer=0)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(stacked.key_pages[0], after.key_pages)
    assert stacked.lengths.tolist() == [[6, 1], [5, 0]]


@pytest.mark.parametrize(
    "dtype", [jnp.int8, jnp.uint8, jnp.int32, jnp.uint32], ids=lambda x: jnp.dtype(x).name
)
def test_lengths_of_any_integers(dtype):
    cache = dataclasses.replace(filled(), lengths=jnp.asarray([5, 0], dtype))
    query, key, value = normal(2, B, 1, N, H), normal(3, B, 1, K, H), normal(4, B, 1, K, H)
    got, after = jax_flash.flash_attention_with_cache(query, cache, key, value)
    want, _ = jax_flash.flash_attention_with_cache(query, filled(), key, value)
    np.testing.assert_array_equal(got, want)
    assert after.lengths.dtype == dtype and after.lengths.tolist() == [6, 1]


def test_nothing_to_attend_to():
    query = normal(2, B, 3, N, H)
    (out, lse), _ = jax_flash.flash_attention_with_cache(query, filled((0, 0)), return_residual=True)
    assert not out.any() and np.isneginf(lse).all()
    empty = KVCache.create(B, 0, K, H, jnp.float32)
    assert not jax_flash.flash_attention_with_cache(query, empty)[0].any()
    none, _ = jax_flash.flash_attention_with_cache(query[:, :0], filled())
    assert none.shape == (B, 0, N, H)
    nobody = KVCache.create(0, S, K, H, jnp.float32)
    assert jax_flash.flash_attention_with_cache(query[:0], nobody)[0].shape == (0, 3, N, H)
    _, after = jax_flash.flash_attention_with_cache(
        query[:, :0], filled((0, 0)), normal(3, B, 2, K, H), normal(4, B, 2, K, H)
    )
    assert after.lengths.tolist() == [2, 2] and (after.key[:, :2] == normal(3, B, 2, K, H)).all()


@pytest.mark.parametrize("T", [1, 3])
def test_nan_of_a_key_reaches_the_queries_that_see_it(T):
    """And no other: neither another sequence's, nor those before it."""
    cache = filled((6, 6))
    query, key, value = normal(2, B, T, N, H), normal(3, B, T, K, H), normal(4, B, T, K, H)
    value = value.at[0, -1].set(jnp.nan)
    out, _ = jax_flash.flash_attention_with_cache(query, cache, key, value)
    want, _ = jax_flash.flash_attention_with_cache(query, cache, key, normal(4, B, T, K, H))
    assert np.isnan(out[0, -1]).all()
    np.testing.assert_allclose(out[0, :-1], want[0, :-1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out[1], want[1], rtol=1e-5, atol=1e-6)


def valid():
    return {
        "query": normal(2, B, 1, N, H),
        "cache": filled(),
        "key": normal(3, B, 1, K, H),
        "value": normal(4, B, 1, K, H),
    }


def changed(**fields):
    return dataclasses.replace(filled(), **fields)


def paged_with(**fields):
    return dataclasses.replace(as_pages(filled()), **fields)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"cache": (1, 2)}, TypeError, "cache must be a KVCache or a PagedKVCache"),
        ({"cache": changed(key=normal(0, S, K, H))}, ValueError, "cache.key must have shape"),
        ({"cache": changed(value=normal(0, B, S - 1, K, H))}, ValueError, "cache.value must have the shape"),
        ({"cache": changed(value=normal(0, B, S, K, H, dtype=jnp.bfloat16))}, TypeError, "cache.value must"),
        ({"cache": changed(lengths=jnp.zeros(B + 1, jnp.int32))}, ValueError, "cache.lengths must"),
        ({"cache": changed(lengths=jnp.zeros(B))}, TypeError, "cache.lengths must have an integer dtype"),
        ({"cache": paged_with(page_table=jnp.zeros(B, jnp.int32))}, ValueError, "cache.page_table must have"),
        ({"cache": paged_with(page_table=jnp.zeros((B, 2)))}, TypeError, "cache.page_table must have an int"),
        ({"cache": paged_with(page_table=None)}, TypeError, "cache.page_table must be an int.* got None"),
        ({"cache": paged_with(**dict.fromkeys(("key_pages", "value_pages"), normal(0, 3, 0, K, H)))},
         ValueError, "rows in their pages"),
        ({"query": normal(2, B, 1, N, H, dtype=jnp.bfloat16)}, TypeError, "query must have the dtype of "),
        ({"query": normal(2, B + 1, 1, N, H)}, ValueError, "query must have shape"),
        ({"query": normal(2, B, N, H)}, ValueError, "query must have shape"),
        ({"query": normal(2, B, 1, 3, H)}, ValueError, "multiple of the heads of cache.key"),
        ({"key": None}, ValueError, "value goes with key"),
        ({"value": None}, ValueError, "key goes with value"),
        ({"key": normal(3, B, 1, K + 1, H)}, ValueError, "key must have shape"),
        ({"value": normal(3, B, 2, K, H)}, ValueError, "value must have as many rows as key"),
        ({"key": normal(3, B, 1, K, H, dtype=jnp.float16)}, TypeError, "key must have the cache's dtype"),
        ({"rotary_cos": normal(5, S, 8)}, ValueError, "rotary_cos goes with rotary_sin"),
        ({"rotary_cos": normal(5, S, 9), "rotary_sin": normal(5, S, 9)}, ValueError, "rotary_cos must have"),
        ({"rotary_cos": normal(5, S, 8), "rotary_sin": normal(5, S, 7)}, ValueError, "rotary_sin must have"),
        ({"layer": 0}, ValueError, "layer must be None"),
        ({"num_splits": 0}, ValueError, "num_splits must be None or at least 1"),
        ({"num_splits": 1.5}, TypeError, "num_splits must be a Python integer"),
        ({"alibi_slopes": jnp.ones(3)}, ValueError, "alibi_slopes must have shape"),
        ({"sinks": jnp.ones(3)}, ValueError, "sinks must have shape"),
        ({"is_causal": 1}, TypeError, "is_causal must be True or False"),
        ({"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap must be"),
        ({"implementation": "cudnn"}, ValueError, "implementation must be"),
    ],
)  # fmt: skip
def test_malformed_calls(changes, error, words):
    with pytest.raises(error, match=words):
        jax_flash.flash_attention_with_cache(**valid() | changes)


@pytest.mark.parametrize(
    ("layer", "error", "words"),
    [
        (None, ValueError, "layer must be the index of a layer"),
        (2, ValueError, r"layer must be in \[0, 2\)"),
        (-1, ValueError, r"layer must be in \[0, 2\)"),
        (0.5, TypeError, "layer must be an integer or an integer array"),
        (jnp.zeros(1, jnp.int32), ValueError, r"layer must have shape \(\)"),
    ],
)
def test_malformed_layers(layer, error, words):
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), filled())
    with pytest.raises(error, match=words):
        jax_flash.flash_attention_with_cache(normal(2, B, 1, N, H), stacked, layer=layer)


@pytest.mark.parametrize("layer", (None, 0, jnp.int32(0)))
def test_a_cache_of_no_layers(layer):
    shape = 0, B, S, K, H
    empty = KVCache(*(jnp.zeros(shape, jnp.bfloat16) for _ in "kv"), jnp.zeros((0, B), jnp.int32))
    with pytest.raises(
        ValueError, match=r"cache\.key must hold at least one layer; got none: bfloat16 \(0, "
    ):
        jax_flash.flash_attention_with_cache(normal(2, B, 1, N, H), empty, layer=layer)


def test_a_traced_layer_that_is_not_there_is_neither_read_nor_written():
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), filled())
    arguments = normal(2, B, 1, N, H), normal(3, B, 1, K, H), normal(4, B, 1, K, H)

    @jax.jit
    def step(layer):
        return jax_flash.flash_attention_with_cache(arguments[0], stacked, *arguments[1:], layer=layer)

    for layer in (-1, 2, 2**31 - 1):
        out, after = step(jnp.int32(layer))
        assert not out.any()
        jax.tree.map(np.testing.assert_array_equal, after, stacked)


def test_append_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="key must have shape"):
        filled().append(normal(3, B, 1, K, H + 1), normal(4, B, 1, K, H))
    with pytest.raises(TypeError, match="key and value must be arrays"):
        filled().append(normal(3, B, 1, K, H), None)
    with pytest.raises(ValueError, match="at least 0"):
        KVCache.create(-1, S, K, H)
    with pytest.raises(TypeError, match="dtype must be a floating dtype"):
        KVCache.create(B, S, K, H, jnp.int32)


SIZES = {"batch": B, "key_heads": K, "head_dim": H}


@pytest.mark.parametrize("name", ("key_heads", "head_dim", "value_dim", "layers"))
def test_no_cache_is_created_that_all_functions_refuse(name):
    with pytest.raises(ValueError, match=rf"{name} must be at least 1; got 0 \(int\)"):
        KVCache.create(**SIZES | {"max_length": S, name: 0})
    with pytest.raises(ValueError, match=f"{name} must be at least 1; got 0"):
        PagedKVCache.create(**SIZES | {"pages": 3, "page_size": 4, "pages_per_sequence": 2, name: 0})


def test_no_pages_of_no_tokens_are_created():
    with pytest.raises(ValueError, match="page_size must be at least 1; got 0"):
        PagedKVCache.create(**SIZES, pages=3, page_size=0, pages_per_sequence=2)
    assert PagedKVCache.create(**SIZES, pages=0, page_size=4, pages_per_sequence=0).key_pages.shape[0] == 0


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_lengths_of_few_bits_do_not_wrap(dtype):
    key = jnp.ones((1, 20, 1, 4))
    cache = KVCache.create(1, 70_000, 1, 4, jnp.float32)
    before = min(jnp.iinfo(dtype).max, 65_535)
    cache = dataclasses.replace(cache, lengths=jnp.array([before], dtype))
    assert cache.append(key, key).lengths == before + 20
    _, cache = jax_flash.flash_attention_with_cache(key[:, :1], cache, key, key)
    assert cache.lengths == before + 20


def test_caches_are_equal_to_themselves_alone():
    one, other = (KVCache.create(1, 8, 1, 4, jnp.float32) for _ in range(2))
    assert one == one and one != other
    assert len({one, other}) == 2


def test_debug_infs_looks_at_results_alone():
    """The lse of a sequence that is empty is -inf, and rows that no sequence has may hold anything."""
    query = jnp.ones((2, 1, 2, 4))
    cache = KVCache.create(2, 8, 2, 4, jnp.float32)
    cache = dataclasses.replace(cache, lengths=jnp.array([3, 0]), key=cache.key.at[:, 5].set(jnp.nan))
    with jax.debug_infs(True), jax.debug_nans(True):
        out, _ = jax_flash.flash_attention_with_cache(query, cache)
        assert not out[1].any()
        with pytest.raises(FloatingPointError):
            jax_flash.flash_attention_with_cache(query, cache, return_residual=True)
