"""score_mod and mask_mod on key-value caches: indices are positions, under JAX's transforms too."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_programs import copied
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import KVCache, PagedKVCache
from jax_flash.xla import decoding

B, S, N, K, H = 4, 24, 4, 2, 16
KINDS = (AxisType.Auto, AxisType.Explicit)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of keys that are smaller than a device's part of the cache."""
    monkeypatch.setattr(decoding, "KEYS_PER_BLOCK", 8)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def relative_position(table, score, batch, head, query, key):
    hidden = (batch == 1) & (key == 2)
    return jnp.where(hidden, -jnp.inf, score + table[head, jnp.clip(query - key, 0, 15)])


def near_or_marked(table, batch, head, query, key):
    return (query - key < 6 + batch + 2 * head) | (table[head, key % 16] > 1)


TABLE = normal(9, N, 16)


def step(cache, query, key, value, table=TABLE):
    out, cache = jax_flash.flash_attention_with_cache(
        query,
        cache,
        key,
        value,
        score_mod=functools.partial(relative_position, table),
        mask_mod=functools.partial(near_or_marked, table),
    )
    return cache, out


def contiguous(capacity=S):
    return KVCache(*jnp.zeros((2, B, capacity, K, H)), jnp.zeros(B, jnp.int32))


def paged():
    table = jax.random.permutation(jax.random.key(5), 30)[: B * 6].reshape(B, 6).astype(jnp.int32)
    return PagedKVCache(*jnp.zeros((2, 30, 4, K, H)), table, jnp.zeros(B, jnp.int32))


def filled():
    """A cache of sequences of different lengths, and arguments of a step."""
    cache = KVCache(*normal(1, 2, B, S, K, H), jnp.asarray([0, 5, 17, S - 1], jnp.int32))
    return cache, (normal(2, B, 1, N, H), *normal(3, 2, B, 1, K, H))


def assert_same(got, want):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("make", (contiguous, paged))
def test_decodes_as_a_function_says_of_the_whole_sequence(make):
    """A prompt, and then token after token."""
    arrays = normal(0, B, S, N, H), *normal(1, 2, B, S, K, H)
    whole = jax_flash.flash_attention(
        *arrays,
        is_causal=True,
        score_mod=functools.partial(relative_position, TABLE),
        block_mask=jax_flash.create_block_mask(functools.partial(near_or_marked, TABLE), B, N, S, S),
    )
    cache, run, prompt = make(), jax.jit(step), 10
    for begin, end in ((0, prompt), *((t, t + 1) for t in range(prompt, S))):
        cache, out = run(cache, *(x[:, begin:end] for x in arrays))
        assert_same(out, whole[:, begin:end])


def test_a_donated_cache_is_changed_in_place():
    cache, arguments = filled()

    def in_scan(cache, *arguments):
        return jax.lax.scan(lambda cache, _: step(cache, *arguments), cache, None, length=3)

    compiled = jax.jit(in_scan, donate_argnums=0).lower(cache, *arguments).compile()
    assert copied(compiled, cache) == []


@pytest.mark.parametrize("kind", KINDS)
def test_sharded(kind):
    """Sequences and key heads are partitioned, and a function sees indices of the whole call."""
    cache, arguments = filled()
    want = jax.jit(step)(cache, *arguments)
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), devices=jax.devices()[:4], axis_types=(kind,) * 2)

    def put(x):
        return jax.device_put(x, NamedSharding(mesh, P("batch", None, "heads") if x.ndim > 1 else P("batch")))

    with jax.set_mesh(mesh):
        sharded = jax.tree.map(put, (cache, *arguments))
        table = jax.device_put(TABLE, NamedSharding(mesh, P()))
        compiled = jax.jit(step).lower(*sharded, table).compile()
        assert not re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
        got = compiled(*sharded, table)
    assert_same(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_tree(kind):
    """Its mask captures the cache's lengths, which each device needs of all sequences."""
    cache, (query, *new) = filled()

    def verify(query, cache, key, value):
        lengths = cache.lengths
        if kind == AxisType.Explicit and not jax.sharding.get_abstract_mesh().empty:
            lengths = jax.sharding.reshard(lengths, P())
        tree = jax_flash.masks.TreeMask([-1], lengths, takes_positions=True)
        return jax_flash.flash_attention_with_cache(query, cache, key, value, mask_mod=tree)[0]

    want = jax.jit(verify)(query, cache, *new)
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), devices=jax.devices()[:4], axis_types=(kind,) * 2)

    def put(x):
        return jax.device_put(x, NamedSharding(mesh, P("batch", None, "heads") if x.ndim > 1 else P("batch")))

    with jax.set_mesh(mesh):
        got = jax.jit(verify)(*jax.tree.map(put, (query, cache, *new)))
    assert_same(got, want)


@pytest.mark.parametrize("mapped", ["queries", "caches", "what is captured"])
def test_vmap(mapped):
    cache, arguments = filled()
    twice = lambda x: jnp.stack([x, x[::-1]])  # noqa: E731
    axes = {
        "queries": (None, 0, None, None),
        "caches": (0, 0, 0, 0),
        "what is captured": (None, None, None, None),
    }[mapped]
    given = [
        x if a is None else jax.tree.map(twice, x) for x, a in zip((cache, *arguments), axes, strict=True)
    ]
    table_axis = 0 if mapped == "what is captured" else None
    table = TABLE if table_axis is None else jnp.stack([TABLE, 2 * TABLE])
    got = jax.jit(jax.vmap(step, (*axes, table_axis)))(*given, table)

    def of(i, x, axis):
        return x if axis is None else jax.tree.map(lambda y: y[i], x)

    for i in range(2):
        each = [of(i, x, a) for x, a in zip((*given, table), (*axes, table_axis), strict=True)]
        assert_same(of(i, got, 0), step(*each))


@pytest.mark.parametrize("make", (contiguous, paged))
def test_cuda_kernels_take_it(make):
    cache, arguments = make(), filled()[1]
    cache, arguments = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, (cache, arguments)
    )
    with jax_flash.planned_for("sm_90a"):
        found = jax_flash.explain(
            arguments[0],
            cache,
            *arguments[1:],
            score_mod=functools.partial(relative_position, TABLE),
            mask_mod=functools.partial(near_or_marked, TABLE),
        )
    assert found.picked == "cuda"
