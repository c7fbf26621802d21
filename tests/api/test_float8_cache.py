"""Key-value caches in e4m3 through the public functions; tests/xla/test_xla_decoding.py has the values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import KVCache, PagedKVCache, _float8

B, K, N, H, S = 2, 2, 4, 32, 40
E4M3 = jnp.float8_e4m3fn
DESCALES = {"key_descale": jnp.array([0.5, 0.02]), "value_descale": jnp.array([0.01, 1.5])}
RANDOM = np.random.default_rng(0)


def draw(*shape, dtype=jnp.bfloat16):
    return jnp.asarray(RANDOM.normal(size=shape), dtype)


QUERY = draw(B, 1, N, H)
NEW = draw(B, 7, K, H), draw(B, 7, K, H)


def rounded(x, descale):
    """`x (B, U, K, H)` as the cache has it, in float32."""
    scale = descale[:, None]
    return _float8.converted(x.astype(jnp.float32) / scale).astype(jnp.float32) * scale


@pytest.mark.parametrize("paged", (False, True))
@pytest.mark.parametrize("layers", (None, 3))
def test_appends_and_attends(paged, layers):
    """What is appended is rounded, and attended to as it was rounded."""
    if paged:
        cache = PagedKVCache.create(B, 20, 4, 10, K, H, E4M3, layers=layers)
        cache = dataclasses.replace(
            cache, page_table=jnp.asarray(RANDOM.permutation(20).reshape(2, 10), jnp.int32)
        )
    else:
        cache = KVCache.create(B, S, K, H, E4M3, layers=layers)
    descales = (
        DESCALES if layers is None else {name: jnp.stack([x, 2 * x, x]) for name, x in DESCALES.items()}
    )
    cache = dataclasses.replace(cache, **descales)
    layer = None if layers is None else 1
    factor = 1 if layers is None else 2
    first, second = (tuple(x[:, part] for x in NEW) for part in (slice(0, 5), slice(5, 7)))
    cache = cache.append(*first, layer=layer)
    out, cache = jax_flash.flash_attention_with_cache(QUERY, cache, *second, layer=layer)
    names = ("key_pages", "value_pages") if paged else ("key", "value")
    assert {getattr(cache, name).dtype for name in names} == {np.dtype(E4M3)}
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(cache.key_descale, descales["key_descale"])
    lengths = cache.lengths if layers is None else cache.lengths[1]
    np.testing.assert_array_equal(lengths, [7, 7])
    whole = [
        rounded(x, factor * DESCALES[f"{name}_descale"])
        for name, x in zip(("key", "value"), NEW, strict=True)
    ]
    expected = jax_flash.flash_attention(QUERY.astype(jnp.float32), *whole)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=0.02, atol=0.02)
    again, _ = jax_flash.flash_attention_with_cache(QUERY, cache, layer=layer)
    np.testing.assert_array_equal(again, out)


def test_descales_are_one_by_default():
    cache = KVCache.create(B, S, K, H, E4M3)
    ones = dataclasses.replace(cache, key_descale=jnp.ones(K), value_descale=jnp.ones(K))
    (out, _), (expected, _) = (jax_flash.flash_attention_with_cache(QUERY, x, *NEW) for x in (cache, ones))
    np.testing.assert_array_equal(out, expected)
    large = KVCache.create(B, S, K, H, E4M3).append(1000 * NEW[0], jnp.full_like(NEW[1], jnp.inf))
    assert np.abs(np.asarray(large.key, np.float32)).max() == 448
    assert np.all(np.isnan(np.asarray(large.value, np.float32)[:, :7]))


def test_in_place_in_a_scan():
    # Copies, as they are donated.
    copies = {name: x + 0 for name, x in DESCALES.items()}
    cache = dataclasses.replace(KVCache.create(B, S, K, H, E4M3), **copies)

    def generate(cache):
        def step(cache, new):
            out, cache = jax_flash.flash_attention_with_cache(QUERY, cache, *new)
            return cache, out

        tokens = tuple(jnp.moveaxis(x, 1, 0)[:, :, None] for x in NEW)
        return jax.lax.scan(step, cache, tokens)

    def copies_of_caches(jitted):
        lines = jitted.lower(cache).compile().as_text().splitlines()
        return [line for line in lines if " copy(" in line and f"f8e4m3fn[{B},{S},{K},{H}]" in line]

    in_place = jax.jit(generate, donate_argnums=0)
    assert not copies_of_caches(in_place)
    assert copies_of_caches(jax.jit(generate))
    after, outs = in_place(cache)
    one_by_one = dataclasses.replace(KVCache.create(B, S, K, H, E4M3), **DESCALES)
    for i in range(7):
        out, one_by_one = jax_flash.flash_attention_with_cache(
            QUERY, one_by_one, *(x[:, i : i + 1] for x in NEW)
        )
        np.testing.assert_allclose(out.astype(jnp.float32), outs[i].astype(jnp.float32), atol=1e-2)
    np.testing.assert_array_equal(after.key, one_by_one.key)


def test_vmap_and_sharded_heads():
    cache = dataclasses.replace(KVCache.create(B, S, K, H, E4M3), **DESCALES).append(*NEW)
    attend = lambda query, cache: jax_flash.flash_attention_with_cache(query, cache)[0]  # noqa: E731
    expected = attend(QUERY, cache)
    caches = jax.tree.map(lambda x: jnp.stack([x, x]), cache)
    caches = dataclasses.replace(caches, key_descale=caches.key_descale * jnp.array([1, 2.0])[:, None])
    one_by_one = [attend(QUERY, jax.tree.map(lambda x, i=i: x[i], caches)) for i in range(2)]
    np.testing.assert_array_equal(jax.vmap(attend, (None, 0))(QUERY, caches), jnp.stack(one_by_one))
    assert np.any(one_by_one[0] != one_by_one[1])

    mesh = jax.make_mesh((2,), ("heads",), (jax.sharding.AxisType.Auto,))
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    sharded = dataclasses.replace(
        cache,
        key=place(cache.key, P(None, None, "heads")),
        value=place(cache.value, P(None, None, "heads")),
        key_descale=place(cache.key_descale, P("heads")),
        value_descale=place(cache.value_descale, P("heads")),
    )
    step = jax.jit(attend)
    query = place(QUERY, P(None, None, "heads"))
    assert "all-gather" not in step.lower(query, sharded).compile().as_text()
    np.testing.assert_array_equal(step(query, sharded), expected)


def test_which_implementations_run_it():
    cache = KVCache.create(B, S, K, 128, E4M3)
    query = draw(B, 1, N, 128)
    with jax_flash.planned_for("sm_90a"):
        explained = jax_flash.explain(query, cache)
    assert explained.picked == "cuda"
    assert [choice.reason for choice in explained.choices] == [None] * 3


CACHE = KVCache.create(B, S, K, H, E4M3)


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (TypeError, "key must have the dtype of query, bfloat16; got float32",
         {"key": NEW[0].astype(jnp.float32), "value": NEW[1].astype(jnp.float32)}),
        (TypeError, "value must have the dtype of key, bfloat16; got float32",
         {"key": NEW[0], "value": NEW[1].astype(jnp.float32)}),
        (TypeError, "key must have a floating dtype of 16 bits at least; got float8",
         {"key": NEW[0].astype(E4M3), "value": NEW[1].astype(E4M3)}),
        (TypeError, "query must have a floating dtype of 16 bits at least", {"query": QUERY.astype(E4M3)}),
        (ValueError, r"cache.key_descale must have shape \(K,\) = \(2,\)",
         {"cache": dataclasses.replace(CACHE, key_descale=jnp.ones(3))}),
        (TypeError, "cache.value_descale must have a floating dtype",
         {"cache": dataclasses.replace(CACHE, value_descale=jnp.ones(2, int))}),
        (ValueError, "cache.key_descale goes with a cache in float8_e4m3fn",
         {"cache": dataclasses.replace(KVCache.create(B, S, K, H), key_descale=jnp.ones(2))}),
    ],
)  # fmt: skip
def test_errors(error, text, call):
    with pytest.raises(error, match=text):
        jax_flash.flash_attention_with_cache(**{"query": QUERY, "cache": CACHE} | call)
