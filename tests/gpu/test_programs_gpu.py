"""Programs as model code makes them, through the kernels: exported, saved, differentiated twice, misused.

What they should give is checked on the CPU, in tests/api and tests/transforms; here, that kernels give it.
"""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

import jax_flash

KERNELS = pytest.mark.parametrize("implementation", ("cuda", "pallas"))
T, S = 130, 200


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.fixture(scope="module")
def tensors():
    return normal(0, 2, T, 4, 64), normal(1, 2, S, 2, 64), normal(2, 2, S, 2, 64)


def loss(implementation, query, key, value, **options):
    out = jax_flash.flash_attention(query, key, value, implementation=implementation, **options)
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))


def assert_near(got, expected, tolerance=0.03):
    """Each array by its norm: the two round at different places."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y)


def in_float32(function, *arrays):
    return function("xla", *(x.astype(jnp.float32) for x in arrays))


@KERNELS
def test_second_derivatives(implementation, tensors):
    def product(implementation, *tensors):
        """Of the Hessian with cosines, by reverse mode twice and by forward over reverse."""
        gradient = jax.grad(functools.partial(loss, implementation, is_causal=True), argnums=(0, 1, 2))
        directions = tuple(jnp.cos(x) for x in tensors)

        def along(*tensors):
            pairs = zip(gradient(*tensors), directions, strict=True)
            return sum(jnp.vdot(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in pairs)

        return jax.grad(along, argnums=(0, 1, 2))(*tensors), jax.jvp(gradient, tensors, directions)[1]

    got = jax.jit(functools.partial(product, implementation))(*tensors)
    assert_near(got, in_float32(jax.jit(product, static_argnums=0), *tensors))


@KERNELS
def test_a_learned_scale(implementation, tensors):
    def gradient(implementation, *tensors):
        def loss(
            scale,
        ):  # which grows with the scale in each row, so that its derivative is no small difference
            out = jax_flash.flash_attention(*tensors, scale=scale, implementation=implementation)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.grad(loss)(0.1)

    got = jax.jit(functools.partial(gradient, implementation))(*tensors)
    assert_near(got, in_float32(jax.jit(gradient, static_argnums=0), *tensors))


@KERNELS
def test_alignment_to_the_top_left(implementation, tensors):
    options = dict(is_causal=True, local_window_size=(90, 0), logits_soft_cap=5.0, alignment="top_left")
    lengths = dict(query_seq_lengths=jnp.array([T, 100]), key_value_seq_lengths=jnp.array([90, S]))

    def gradients(implementation, *tensors):
        return jax.grad(functools.partial(loss, implementation, **options, **lengths), argnums=(0, 1, 2))(
            *tensors
        )

    got = jax.jit(functools.partial(gradients, implementation))(*tensors)
    assert_near(got, in_float32(jax.jit(gradients, static_argnums=0), *tensors))


def gradients_in_order(*tensors):
    function = functools.partial(loss, "cuda", is_causal=True, deterministic=True)
    return jax.value_and_grad(function, argnums=(0, 1, 2))(*tensors)


def test_a_program_exported_where_there_is_no_gpu(tensors):
    calls = ("jax_flash_forward", "jax_flash_backward")
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in calls]
    with jax_flash.planned_for("sm_90a"):
        exported = jax.export.export(jax.jit(gradients_in_order), platforms=["cuda"], disabled_checks=checks)(
            *tensors
        )
    got = jax.export.deserialize(exported.serialize()).call(*tensors)
    assert_near(got, jax.jit(gradients_in_order)(*tensors), 1e-3)


def test_an_executable_that_was_saved(tensors):
    compiled = jax.jit(gradients_in_order).lower(*tensors).compile()
    loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
    jax.tree.map(np.testing.assert_array_equal, loaded(*tensors), compiled(*tensors))


@pytest.mark.parametrize(
    "offsets", ([0, 150, 40, 130], [-5, 20, 1000, 2**31 - 1], [130, 130, 130, 130]), ids=str
)
def test_traced_offsets_that_make_no_sense_read_nothing_out_of_bounds(offsets, tensors):
    query, key, value = tensors[0][0], tensors[1][0, :T], tensors[2][0, :T]

    @jax.jit
    def run(offsets, *tensors):
        def attend(*tensors):
            packed = dict(cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=90, max_seqlen_kv=90)
            return jax_flash.flash_attention_varlen(*tensors, **packed, is_causal=True, implementation="cuda")

        out, vjp = jax.vjp(attend, *tensors)
        return out, vjp(jnp.ones_like(out))

    for x in jax.tree.leaves(run(jnp.array(offsets, jnp.int32), query, key, value)):
        assert np.isfinite(np.asarray(x, np.float32)).all()


def test_a_flax_layer_with_packed_documents(tensors):
    attention = pytest.importorskip("jax_flash.flax", exc_type=ImportError).dot_product_attention
    query, key, value = tensors[0], tensors[1][:, :T], tensors[2][:, :T]
    ids = jnp.arange(T)[None] // jnp.array([[50], [70]])
    options = dict(query_segment_ids=ids, key_value_segment_ids=ids, local_window_size=(40, 0))
    lengths = dict(query_seq_lengths=jnp.array([T, 90]), key_value_seq_lengths=jnp.array([T, 90]))

    def attend(implementation, *tensors):
        return attention(*tensors, **options, **lengths, is_causal=True, implementation=implementation)

    got = jax.jit(functools.partial(attend, "cuda"))(query, key, value)
    assert_near(got, in_float32(jax.jit(attend, static_argnums=0), query, key, value))
