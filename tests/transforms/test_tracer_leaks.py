"""`jax_check_tracer_leaks` finds none in a gradient: what outlives a trace keeps none of its arrays."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_flash


def attend(x):
    out, lse = jax_flash.flash_attention(x, x, x, is_causal=True, return_residual=True)
    return jnp.sum(out) + jnp.sum(lse)


def varlen(x):
    offsets = jnp.array([0, 3, 8])
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_seqlen_q": 8, "max_seqlen_kv": 8}
    return jnp.sum(jax_flash.flash_attention_varlen(x[0], x[0], x[0], **lengths))


def scanned(x):
    return jax.lax.scan(lambda total, row: (total + attend(row[None]), None), 0.0, x)[0]


def sharded(x):
    mesh = Mesh(jax.devices()[:2], ("d",))
    return attend(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("d"))))


@pytest.mark.parametrize(
    "gradient",
    (
        jax.grad(attend),
        jax.jit(jax.grad(attend)),
        jax.vmap(jax.grad(lambda x: attend(x[None]))),
        jax.grad(jax.checkpoint(attend)),
        jax.grad(scanned),
        jax.jit(jax.grad(sharded)),
        jax.grad(varlen),
    ),
    ids=("eager", "jit", "vmap", "checkpoint", "scan", "sharded", "varlen"),
)
def test_no_tracer_leaks(gradient):
    with jax.checking_leaks():
        gradient(jnp.ones((2, 8, 2, 16)))
