"""Calls on key-value caches under JAX's transforms: the same results, and caches changed in place."""

import dataclasses
import functools
import re

import cache_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_case import CacheCase, Draw, as_jax, check
from cache_programs import LAYERS, append, copied, step
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import KVCache, PagedKVCache
from jax_flash._cache_spec import CacheOperands
from jax_flash.transforms import decoding as decoding_transform
from jax_flash.xla import decoding

B, S, N, K, H = 4, 64, 4, 2, 16
KINDS = (AxisType.Auto, AxisType.Explicit)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of keys that are smaller than a device's part of the cache."""
    monkeypatch.setattr(decoding, "KEYS_PER_BLOCK", 16)


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def query(dtype=jnp.float32):
    return normal(0, B, 1, N, H, dtype=dtype)


def new(dtype=jnp.float32):
    return normal(1, B, 1, K, H, dtype=dtype), normal(2, B, 1, K, H, dtype=dtype)


def contiguous(dtype=jnp.float32, layers=None):
    lead = () if layers is None else (layers,)
    rows = normal(3, *lead, B, S, K, H, dtype=dtype), normal(4, *lead, B, S, K, H, dtype=dtype)
    lengths = jnp.asarray([0, 5, 40, S - 1], jnp.int32)
    return KVCache(*rows, jnp.broadcast_to(lengths, (*lead, B)))


def paged(dtype=jnp.float32, layers=None):
    lead = () if layers is None else (layers,)
    pages = normal(3, *lead, 40, 8, K, H, dtype=dtype), normal(4, *lead, 40, 8, K, H, dtype=dtype)
    table = jax.random.permutation(jax.random.key(5), 40)[: B * 8].reshape(B, 8).astype(jnp.int32)
    lengths = jnp.asarray([0, 5, 40, S - 1], jnp.int32)
    return PagedKVCache(*pages, table, jnp.broadcast_to(lengths, (*lead, B)))


CACHES = (contiguous, paged)


def assert_same(got, want):
    """Caches are the same bits, outputs equal but for rounding."""
    (cache, out), (right_cache, right_out) = got, want
    jax.tree.map(np.testing.assert_array_equal, cache, right_cache)
    np.testing.assert_allclose(out, right_out, rtol=1e-4, atol=1e-5)


FORMS = {**cache_programs.FORMS, "append": (append, None)}
# XLA's CPU compiler of these versions computes whole arrays in float32 where some of bfloat16 change.
KEEPS_BFLOAT16 = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)


@pytest.mark.parametrize("dtype", [jnp.float32, *([jnp.bfloat16] if KEEPS_BFLOAT16 else [])])
@pytest.mark.parametrize("make", CACHES)
@pytest.mark.parametrize("form", FORMS)
def test_a_donated_cache_is_changed_in_place(form, make, dtype):
    function, layers = FORMS[form]
    cache = make(dtype, layers)
    compiled = jax.jit(function, donate_argnums=0).lower(cache, query(dtype), *new(dtype)).compile()
    assert copied(compiled, cache) == []
    assert len(re.findall(r"(?:may|must)-alias", compiled.as_text())) >= 2  # keys and values


def test_a_copy_would_be_found():
    cache = contiguous()
    compiled = (
        jax.jit(lambda cache, *rest: (cache, step(cache, *rest))).lower(cache, query(), *new()).compile()
    )
    assert copied(compiled, cache)


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(kind,) * 2, devices=jax.devices()[:4])


def on_mesh(mesh, cache, arguments, batch="batch"):
    """Arrays partitioned by sequences and key heads; pages by key heads alone."""

    def put(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    if isinstance(cache, KVCache):
        rows = P(batch, None, "heads")
        cache = KVCache(put(cache.key, rows), put(cache.value, rows), put(cache.lengths, P(batch)))
    else:
        pages = P(None, None, "heads")
        cache = PagedKVCache(
            put(cache.key_pages, pages),
            put(cache.value_pages, pages),
            put(cache.page_table, P()),
            put(cache.lengths, P()),
        )
        batch = None
    return cache, [put(x, P(batch, None, "heads")) for x in arguments]


@pytest.mark.parametrize("form", ["jit", "scan", "append"])
@pytest.mark.parametrize("make", CACHES)
@pytest.mark.parametrize("kind", KINDS)
def test_sharded(kind, make, form):
    function, _ = FORMS[form]
    cache, arguments = make(), [query(), *new()]
    want = jax.jit(function)(cache, *arguments)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        sharded, arguments = on_mesh(mesh, cache, arguments)
        compiled = jax.jit(function, donate_argnums=0).lower(sharded, *arguments).compile()
        text = compiled.as_text()
        assert not re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", text)
        assert copied(compiled, cache, parts=4 if make is contiguous else 2) == []
        got = compiled(sharded, *arguments)
    assert_same(got, want)
    for x, y in zip(jax.tree.leaves(got[0]), jax.tree.leaves(on_mesh(mesh, make(), [])[0]), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


@pytest.mark.parametrize(
    "key_heads, of_queries, of_pages, is_moved",
    [
        (4, "heads", "heads", False),
        (4, ("batch", "heads"), ("batch", "heads"), False),
        (1, ("batch", "heads"), None, False),
        (1, "heads", "heads", True),  # keys on one device, and values on another
        (2, ("batch", "heads"), ("batch", "heads"), True),
        (3, "heads", "heads", True),  # a device has one key head and a half
        (2, None, (None, "heads"), True),  # half of the columns
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_pages_that_hold_keys_and_values(kind, key_heads, of_queries, of_pages, is_moved):
    """They are partitioned by key heads."""
    arguments = (
        normal(0, 11, 12 if key_heads == 3 else 8, H),
        normal(1, 20, 8, 2 * key_heads, H),
        jnp.asarray([30, 9, 13], jnp.int32),
        jnp.arange(12, dtype=jnp.int32).reshape(3, 4)[:, ::-1],
        jnp.asarray([0, 1, 6, 9], jnp.int32),
        jnp.asarray([3], jnp.int32),
    )
    want = jax_flash.ragged_paged_attention(*arguments)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        pages = of_pages if isinstance(of_pages, tuple) and None in of_pages else (of_pages,)
        specs = P(None, of_queries), P(None, None, *pages), *4 * (P(),)
        sharded = [jax.device_put(x, NamedSharding(mesh, y)) for x, y in zip(arguments, specs, strict=True)]
        compiled = jax.jit(jax_flash.ragged_paged_attention).lower(*sharded).compile()
        moved = re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
        assert bool(moved) == is_moved
        got = compiled(*sharded)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert is_moved or got.sharding.is_equivalent_to(sharded[0].sharding, 3)


@pytest.mark.parametrize("heads", [None, "heads"])
@pytest.mark.parametrize("kind", KINDS)
def test_appends_to_pages_that_hold_keys_and_values(kind, heads):
    case = CacheCase(B=3, T=2, U=2, S=60, N=4, K=2, H=16, page=8, interleaved=True, right=0, dtype="float32")
    operands = Draw(case).operands
    attend = jax.jit(functools.partial(decoding_transform.attend, case.spec, ("xla",)))
    over_heads = {name: P(None, None, heads) for name in ("query", "key", "new_key", "new_value")}
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        sharded = {
            name: jax.device_put(x, NamedSharding(mesh, over_heads.get(name, P())))
            for name, x in as_jax(operands).present().items()
        }
        check(case, operands, attend(CacheOperands.of(sharded)))


def look_up(cache, query, *_):
    """A step that appends nothing."""
    out, cache = jax_flash.flash_attention_with_cache(query, cache)
    return cache, out


@pytest.mark.parametrize("function", [step, look_up])
@pytest.mark.parametrize("make", CACHES)
@pytest.mark.parametrize("kind", KINDS)
def test_queries_are_partitioned_further_than_a_single_key_head(kind, make, function):
    """Tensor parallelism of multi-query heads: each device has the cache, and its own query heads."""
    mesh = mesh_of(kind)
    cache = jax.tree.map(lambda x: x[:, :, :1] if x.ndim > 2 else x, make())
    key, value = (x[:, :, :1] for x in new())
    want = function(cache, query(), key, value)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(query(), NamedSharding(mesh, P(None, None, "heads")))
        replicated = jax.device_put((cache, key, value), NamedSharding(mesh, P()))
        compiled = jax.jit(function).lower(replicated[0], sharded, *replicated[1:]).compile()
        assert "all-gather" not in compiled.as_text()
        got = compiled(replicated[0], sharded, *replicated[1:])
    assert_same(got, want)
    assert got[1].sharding.is_equivalent_to(sharded.sharding, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_are_partitioned_and_pages_are_not(kind):
    mesh = mesh_of(kind)
    want = look_up(paged(), query())
    with jax.set_mesh(mesh):
        sharded = jax.device_put(query(), NamedSharding(mesh, P("batch")))
        cache = jax.device_put(paged(), NamedSharding(mesh, P()))
        compiled = jax.jit(look_up).lower(cache, sharded).compile()
        assert "all-gather" not in compiled.as_text()
        got = compiled(cache, sharded)
    assert_same(got, want)
    assert got[1].sharding.is_equivalent_to(sharded.sharding, 4)


def test_grouped_queries_are_not_partitioned_further_than_key_heads():
    """A device would need a copy of some of its cache."""
    mesh = mesh_of(AxisType.Auto)
    cache, arguments = contiguous(), [query(), *new()]
    want = step(cache, *arguments)
    with jax.set_mesh(mesh):
        put = jax.device_put(arguments[0], NamedSharding(mesh, P(None, None, ("batch", "heads"))))
        got = jax.jit(step)(cache, put, *arguments[1:])
    assert_same(got, want)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    mesh = mesh_of(AxisType.Auto)
    cache, arguments = contiguous(), [query(), *new()]
    rows = P("batch", None, "heads")
    specs = KVCache(rows, rows, P("batch"))  # type: ignore[arg-type]
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, rows, rows, rows), out_specs=(specs, rows), check_vma=check_vma
    )
    with jax.set_mesh(mesh):
        sharded, put = on_mesh(mesh, cache, arguments)
        compiled = jax.jit(mapped, donate_argnums=0).lower(sharded, *put).compile()
        assert copied(compiled, cache, parts=4) == []
        got = compiled(sharded, *put)
    assert_same(got, step(cache, *arguments))


@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("form", ["jit", "scan"])
@pytest.mark.parametrize("kind", KINDS)
def test_shard_map_that_leaves_an_axis(kind, form, key_heads):
    """Query heads are partitioned over it, also if all devices along it append to the same cache."""
    function, _ = FORMS[form]
    cache = jax.tree.map(lambda x: x[:, :, :key_heads] if x.ndim > 2 else x, contiguous())
    arguments = [query(), *(x[:, :, :key_heads] for x in new())]
    mesh = mesh_of(kind)
    varying = []

    def run(*inputs):
        results = function(*inputs)
        varying.extend(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(results))
        return results

    out_specs = P("batch"), P("batch") if form == "jit" else P(None, "batch")  # a scan stacks outputs
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=P("batch"), out_specs=out_specs, axis_names={"batch"}, check_vma=True
    )
    with jax.set_mesh(mesh):
        got = jax.jit(mapped)(*jax.device_put((cache, *arguments), NamedSharding(mesh, P("batch"))))
    assert set(varying) == {frozenset({"batch"})}
    assert_same(got, function(cache, *arguments))


def test_pmap():
    devices = 2
    cache, arguments = contiguous(), [query(), *new()]
    split = jax.tree.map(lambda x: x.reshape(devices, B // devices, *x.shape[1:]), (cache, *arguments))
    mapped = jax.pmap(step, donate_argnums=0, devices=jax.devices()[:devices])
    compiled = mapped.lower(*split).compile()
    assert copied(compiled, cache, parts=devices) == []
    got = jax.tree.map(lambda x: x.reshape(B, *x.shape[2:]), mapped(*split))
    assert_same(got, step(cache, *arguments))


def slices(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


@pytest.mark.parametrize("shared", ["nothing", "query", "new", "cache", "lengths"])
@pytest.mark.parametrize("make", CACHES)
def test_vmap(make, shared):
    """Any of the arguments may be the same for all mapped calls; a shared cache is not repeated."""
    cache, arguments = make(), [query(), *new()]
    caches = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]) if x.ndim > 3 else jnp.stack([x, x]), cache)
    both = [jnp.stack([x, 2 * x]) for x in arguments]
    axes = [0, 0, 0, 0]
    if shared == "query":
        both[0], axes[1] = arguments[0], None
    elif shared == "new":
        both[1:], axes[2:] = arguments[1:], [None, None]
    elif shared == "cache":
        caches, axes[0] = cache, None
    elif shared == "lengths":
        caches = dataclasses.replace(caches, lengths=cache.lengths)
        axes[0] = dataclasses.replace(jax.tree.map(lambda _: 0, caches), lengths=None)
    got = jax.jit(jax.vmap(step, axes))(caches, *both)
    for i in range(2):
        each = [
            x if a is None else slices(x, i) if isinstance(a, int) else
            dataclasses.replace(slices(x, i), lengths=cache.lengths)
            for x, a in zip((caches, *both), axes, strict=True)
        ]  # fmt: skip
        assert_same(slices(got, i), step(*each))


@pytest.mark.parametrize("make", CACHES)
def test_vmap_of_queries_alone_repeats_no_cache(make):
    cache = make()
    queries = normal(7, 2, B, 1, N, H)

    def attend(query):
        return jax_flash.flash_attention_with_cache(query, cache)[0]

    compiled = jax.jit(jax.vmap(attend)).lower(queries).compile()
    shapes = re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
    largest = max(np.prod([int(x) for x in shape.split(",")]) for shape in shapes)
    assert largest <= max(x.size for x in jax.tree.leaves(cache))
    for got, each in zip(compiled(queries), queries, strict=True):
        np.testing.assert_allclose(got, attend(each), rtol=1e-4, atol=1e-5)


def test_vmap_over_layers_of_caches():
    cache = contiguous(layers=LAYERS)
    caches = jax.tree.map(lambda x: jnp.stack([x, x + 1 if x.ndim > 3 else x]), cache)

    def attend(cache, query):
        out, cache = jax_flash.flash_attention_with_cache(query, cache, *new(), layer=1)
        return cache, out

    got = jax.vmap(attend, (0, None))(caches, query())
    for i in range(2):
        assert_same(slices(got, i), attend(slices(caches, i), query()))


def test_vmap_over_what_sequences_share():
    """The layer, rotary tables and sinks: calls run one after another."""
    cache = contiguous(layers=LAYERS)

    def attend(layer, angles, sinks):
        return jax_flash.flash_attention_with_cache(
            query(),
            cache,
            *new(),
            layer=layer,
            sinks=sinks,
            rotary_cos=jnp.cos(angles),
            rotary_sin=jnp.sin(angles),
        )[0]

    arguments = jnp.arange(2), normal(8, 2, S, H // 2), normal(9, 2, N)
    got = jax.vmap(attend)(*arguments)
    for i in range(2):
        np.testing.assert_allclose(got[i], attend(*slices(arguments, i)), rtol=1e-4, atol=1e-5)


def test_vmap_of_vmap():
    cache = contiguous()
    queries = normal(7, 2, 3, B, 1, N, H)

    def attend(query):
        return jax_flash.flash_attention_with_cache(query, cache)[0]

    got = jax.vmap(jax.vmap(attend))(queries)
    np.testing.assert_allclose(got[1, 2], attend(queries[1, 2]), rtol=1e-4, atol=1e-5)


def test_ragged_calls_are_mapped_one_after_another():
    pages = normal(1, 2, 12, 4, 2 * K, H)
    lengths, offsets = jnp.asarray([[7, 9], [3, 12]]), jnp.asarray([0, 2, 5])
    table = jax.random.permutation(jax.random.key(2), 12).reshape(2, 6)

    def attend(pages, lengths):
        return jax_flash.ragged_paged_attention(
            normal(0, 5, N, H), pages, lengths, table, offsets, jnp.asarray([2])
        )

    got = jax.vmap(attend)(pages, lengths)
    for i in range(2):
        np.testing.assert_allclose(got[i], attend(pages[i], lengths[i]), rtol=1e-4, atol=1e-5)


def test_it_has_no_derivative():
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda x: step(contiguous(), x, *new())[1].sum())(query())

    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda x: contiguous().append(x, x).key.sum())(new()[0])

    # But a program that is differentiated may have one, of what isn't differentiated.
    def loss(scale):
        out = step(contiguous(), query(), *new())[1]
        return jnp.sum(scale * jax.lax.stop_gradient(out))

    assert np.isfinite(jax.grad(loss)(2.0))


def test_export():
    """Shapes are known; the program holds plain JAX, or custom calls for a GPU."""
    cache, arguments = contiguous(), [query(), *new()]
    exported = jax.export.export(jax.jit(step))(cache, *arguments)
    got = jax.export.deserialize(exported.serialize()).call(cache, *arguments)
    assert_same(got, step(cache, *arguments))


@pytest.mark.parametrize("sharding", [P(), P("b", None, "n"), P(None, None, "n"), P(None, None, None, "n")])
@pytest.mark.parametrize("make", CACHES)
def test_a_cache_keeps_its_sharding_as_a_carry(make, sharding):
    """On Explicit axes, where types say it, and queries may be sharded otherwise."""
    mesh = jax.make_mesh((2, 2), ("b", "n"), (AxisType.Explicit,) * 2)

    def run(cache, query, key, value):
        def body(cache, _):
            return jax_flash.flash_attention_with_cache(query, cache, key, value)[::-1]

        return jax.lax.scan(body, cache, None, length=2)

    expected = run(make(), query(), *new())
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, NamedSharding(mesh, P("b", None, "n"))) for x in (query(), *new())]
        cache = jax.tree.map(
            lambda x: jax.device_put(x, NamedSharding(mesh, sharding if x.ndim == 4 else P())), make()
        )
        found = run(cache, *arrays)
    assert list(map(jax.typeof, jax.tree.leaves(found[0]))) == list(map(jax.typeof, jax.tree.leaves(cache)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, expected)
