"""Exports for every batch size and length: `jax.export` with symbolic shapes."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import transform_cases as cases

import jax_flash
from jax_flash import _device, flash_attn

B, T, S, N, K, H = 3, 70, 300, 4, 2, 8
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def integers(high, *shape):
    return jnp.asarray(RNG.integers(0, high, shape), jnp.int32)


# Of every argument that is an array: itself, and its shape in an export.
ARRAYS = {
    "query": (normal(B, T, N, H), f"b, t, {N}, {H}"),
    "key": (normal(B, S, K, H), f"b, s, {K}, {H}"),
    "value": (normal(B, S, K, H), f"b, s, {K}, {H}"),
    "bias": (normal(1, N, T, S), f"1, {N}, t, s"),
    "mask": (jnp.asarray(RNG.random((B, 1, 1, S)) < 0.8), "b, 1, 1, s"),
    "alibi_slopes": (0.1 * normal(N), f"{N}"),
    "sinks": (normal(N), f"{N}"),
    "query_seq_lengths": (integers(T + 1, B), "b"),
    "key_value_seq_lengths": (integers(S + 1, B), "b"),
    "query_segment_ids": (integers(3, B, T), "b, t"),
    "key_value_segment_ids": (integers(3, B, S), "b, s"),
}
QKV = ("query", "key", "value")


def exported(function, shapes):
    """`function(**arrays)` from a serialised export, for arrays like ARRAYS of these symbolic shapes."""
    specs = jax.export.symbolic_args_specs({name: ARRAYS[name][0] for name in shapes}, shapes)
    program = jax.export.export(jax.jit(lambda arrays: function(**arrays)))(specs)
    call = jax.export.deserialize(program.serialize()).call
    return lambda **arrays: call(arrays)


def with_gradients(**options):
    """`flash_attention`, and the gradients of a loss of all its results."""

    def attend(**arrays):
        results = jax_flash.flash_attention(**arrays, **options, return_residual=True, implementation="xla")
        finite = (jnp.where(jnp.isfinite(x), x, 0) for x in results)
        return sum(jnp.sum(jnp.sin(x)) for x in finite), results

    def run(**arrays):
        floating = {name: x for name, x in arrays.items() if x.dtype == jnp.float32}
        others = {name: x for name, x in arrays.items() if name not in floating}
        return jax.grad(lambda x: attend(**x, **others), has_aux=True)(floating)

    return run


@pytest.mark.parametrize(
    ("others", "options"),
    [
        (("bias", "mask", "alibi_slopes", "sinks"), dict(logits_soft_cap=3.0, local_window_size=(90, 2**40))),
        (
            tuple(name for name in ARRAYS if name.endswith(("lengths", "ids"))),
            dict(is_causal=True, dropout_rate=0.3, dropout_key=jax.random.key(0)),
        ),
    ],
    ids=["scores", "sequences"],
)
def test_batch_and_lengths(others, options):
    names = (*QKV, *others)
    function = with_gradients(**options)
    arrays = {name: ARRAYS[name][0] for name in names}
    call = exported(function, {name: ARRAYS[name][1] for name in names})
    cases.assert_close(call(**arrays), jax.jit(function)(**arrays), 1e-4)


def causal(**arrays):
    return jax_flash.flash_attention(**arrays, is_causal=True, return_residual=True, implementation="xla")


@pytest.mark.parametrize(
    "shapes",
    [("b, ...", "b, ...", "b, ..."), ("_, t, _, _", "...", "..."), ("...", "_, s, ...", "_, s, ...")],
    ids=["batch", "queries", "keys"],
)
def test_one_size(shapes):
    arrays = {name: ARRAYS[name][0] for name in QKV}
    call = exported(causal, dict(zip(QKV, shapes, strict=True)))
    cases.assert_close(call(**arrays), jax.jit(causal)(**arrays))


def test_one_program_runs_every_size():
    call = exported(causal, {name: ARRAYS[name][1] for name in QKV})
    for batch, queries, keys in ((1, 1, 1), (2, 256, 257)):
        shapes = (batch, queries, N, H), (batch, keys, K, H), (batch, keys, K, H)
        arrays = {name: normal(*shape) for name, shape in zip(QKV, shapes, strict=True)}
        cases.assert_close(call(**arrays), jax.jit(causal)(**arrays))


def test_memory_stays_linear():
    """No array of the program has both lengths as axes."""
    specs = [jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, t, 4, 8"), jnp.float32)] * 3
    function = jax.jit(lambda *x: jax.grad(lambda *x: jax_flash.flash_attention(*x).sum())(*x))
    program = jax.export.deserialize(jax.export.export(function)(*specs).serialize())
    arrays = [jnp.ones((1, 8192, 4, 8))] * 3
    temporaries = jax.jit(program.call).lower(*arrays).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < 8192 * 8192


@pytest.mark.parametrize("name", ["cuda", "pallas"])
def test_kernels_refuse(name):
    def attend(**arrays):
        return jax_flash.flash_attention(**arrays, implementation=name)

    message = "kernels are planned for shapes that are known, and b, t, s is symbolic"
    with _device.assume(_device.H100), pytest.raises(NotImplementedError, match=message):
        exported(attend, {name: ARRAYS[name][1] for name in QKV})


@pytest.mark.parametrize(
    ("shapes", "name"),
    [
        (("b, t, n, 8", "b, s, 2, 8", "b, s, 2, 8"), "query"),
        (("b, t, 4, h", "b, s, 2, h", "b, s, 2, 8"), "query"),
        (("b, t, 4, 8", "b, s, 2, 8", "b, s, 2, v"), "value"),
    ],
)
def test_heads_and_head_dims_must_be_known(shapes, name):
    with pytest.raises(ValueError, match=f"{name} must have a number of heads and head dim without symbols"):
        exported(jax_flash.flash_attention, dict(zip(QKV, shapes, strict=True)))


def test_varlen_sequences_must_be_known():
    def attend(query, key, value):
        offsets = jnp.asarray([0, 20])
        return jax_flash.flash_attention_varlen(
            query[0], key[0], value[0], cu_seqlens_q=offsets, cu_seqlens_kv=offsets,
            max_seqlen_q=20, max_seqlen_kv=20,
        )  # fmt: skip

    with pytest.raises(ValueError, match="query must have a shape without symbols"):
        exported(attend, {name: ARRAYS[name][1] for name in QKV})


def test_alignment_to_the_top_left():
    """Of queries and keys of one length it is that to the bottom right. Else it has to be known."""

    def attend(key, query=None):
        query = key if query is None else query
        return jax_flash.dot_product_attention(query, key, key, is_causal=True, implementation="xla")

    key, shape = ARRAYS["key"]
    cases.assert_close(exported(attend, {"key": shape})(key=key), attend(key))
    with pytest.raises(ValueError, match="aligned to the top left needs the difference"):
        exported(attend, {"key": shape, "query": ARRAYS["query"][1]})


def with_cache(query, cache, key, value):
    return jax_flash.flash_attention_with_cache(
        *(query, cache, key, value),
        local_window_size=(90, None),
        sinks=ARRAYS["sinks"][0],
        score_mod=lambda score, batch, head, query, key: score + 0.1 * batch * (query - key),
        return_residual=True,
        implementation="xla",
    )


CACHES = {
    "contiguous": (
        jax_flash.KVCache(normal(B, S, K, H), normal(B, S, K, H), integers(S - T, B)),
        jax_flash.KVCache("b, ...", "b, ...", "b"),
    ),
    "paged": (
        jax_flash.PagedKVCache(
            normal(3 * B, 100, K, H),
            normal(3 * B, 100, K, H),
            jnp.asarray(RNG.permutation(3 * B).reshape(B, 3), jnp.int32),
            integers(S - T, B),
        ),
        jax_flash.PagedKVCache("p, ...", "p, ...", "b, ...", "b"),
    ),
}


@pytest.mark.parametrize("sizes", ["b, ...", "b, t, ..."])
@pytest.mark.parametrize("kind", CACHES)
def test_a_cache(kind, sizes):
    cache, shapes = CACHES[kind]
    arguments = normal(B, T, N, H), cache, normal(B, T, K, H), normal(B, T, K, H)
    specs = jax.export.symbolic_args_specs(arguments, (sizes, shapes, sizes, sizes))
    program = jax.export.export(jax.jit(with_cache))(*specs)
    got = jax.export.deserialize(program.serialize()).call(*arguments)
    cases.assert_close(got, jax.jit(with_cache)(*arguments))


@pytest.mark.parametrize(
    ("kind", "shapes", "name"),
    [
        ("contiguous", jax_flash.KVCache("_, s, ...", "_, s, ...", "..."), "cache.key must have a capacity"),
        (
            "paged",
            jax_flash.PagedKVCache("_, n, ...", "_, n, ...", "...", "..."),
            "key_pages must have a page",
        ),
        ("paged", jax_flash.PagedKVCache("...", "...", "_, n", "..."), "cache.page_table must have a number"),
    ],
)
def test_the_capacity_of_a_cache_must_be_known(kind, shapes, name):
    arguments = normal(B, 1, N, H), CACHES[kind][0]
    specs = jax.export.symbolic_args_specs(arguments, ("...", shapes))
    with pytest.raises(ValueError, match=f"{name}.* without symbols"):
        jax.export.export(jax.jit(jax_flash.flash_attention_with_cache))(*specs)


def test_a_tree_on_a_cache():
    def verify(query, cache, key, value):
        tree = jax_flash.masks.TreeMask([-1, 0, 0], cache.lengths, takes_positions=True)
        return jax_flash.flash_attention_with_cache(
            query, cache, key, value, mask_mod=tree, implementation="xla"
        )

    cache, shapes = CACHES["contiguous"]
    arguments = normal(B, 3, N, H), cache, normal(B, 3, K, H), normal(B, 3, K, H)
    specs = jax.export.symbolic_args_specs(arguments, ("b, ...", shapes, "b, ...", "b, ..."))
    program = jax.export.export(jax.jit(verify))(*specs)
    cases.assert_close(program.call(*arguments), jax.jit(verify)(*arguments))


@pytest.mark.parametrize("lengths", [None, 150])
def test_flash_attn_with_kvcache(lengths):
    def attend(query, key, value):
        return flash_attn.flash_attn_with_kvcache(query, key, value, cache_seqlens=lengths, causal=True)

    cache = CACHES["contiguous"][0]
    arguments = normal(B, T, N, H), cache.key, cache.value
    specs = jax.export.symbolic_args_specs(arguments, "b, ...")
    program = jax.export.export(jax.jit(attend))(*specs)
    cases.assert_close(program.call(*arguments), jax.jit(attend)(*arguments))
