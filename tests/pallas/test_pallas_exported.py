"""Programs with Pallas kernels, exported on a machine without a GPU for one that has it."""

import jax
import jax.numpy as jnp
import pytest

import jax_flash
from jax_flash.pallas import compat

CHECKS = [
    jax.export.DisabledSafetyCheck.custom_call(name) for name in ("__gpu$xla.gpu.triton", "jax_flash_bounds")
]


def gradients(x):
    def loss(x):
        out = jax_flash.flash_attention(
            x, x, x, is_causal=True, logits_soft_cap=30.0, implementation="pallas"
        )
        return out.astype(jnp.float32).sum()

    return jax.grad(loss)(x)


def decoded(x):
    cache = jax_flash.KVCache.create(2, 512, 4, 64, dtype=x.dtype)
    return jax_flash.flash_attention_with_cache(x[:, :1], cache, x, x, implementation="pallas")[0]


def biased(x):
    bias = jnp.zeros((1, 1, 256, 256), x.dtype)
    return jax_flash.flash_attention(x, x, x, bias, implementation="pallas")


@pytest.mark.parametrize(
    ("function", "architecture", "compiler"),
    [
        (gradients, "sm_80", "xla.gpu.triton"),
        (gradients, "sm_90a", "mosaic_gpu_v2"),
        (biased, "sm_90a", "xla.gpu.triton"),
        (decoded, "sm_80", "xla.gpu.triton"),
        (decoded, "sm_90a", "xla.gpu.triton"),
    ],
)
def test_exported_without_a_gpu(function, architecture, compiler):
    """The program names the compiler that the planned GPU's support asks for, and that one alone."""
    x = jnp.ones((2, 256, 4, 64), jnp.bfloat16)
    with jax_flash.planned_for(architecture):
        exported = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=CHECKS)(x)
    kernels = {name for name in ("xla.gpu.triton", "mosaic_gpu_v2") if name in exported.mlir_module()}
    assert kernels == {compiler}
    assert exported.out_avals[0].dtype == x.dtype


def test_a_mesh_says_the_gpu_itself():
    """What is traced where a mesh is set stays as it is: JAX asks that mesh."""
    mesh = jax.sharding.AbstractMesh((2,), ("heads",))
    planned, on_mesh = jax_flash.planned_for("sm_90a"), jax.sharding.use_abstract_mesh(mesh)
    with planned, on_mesh, compat.lowering_for_planned():
        assert jax.sharding.get_abstract_mesh() == mesh
