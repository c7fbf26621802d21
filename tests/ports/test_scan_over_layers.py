"""A decoder's layers by `scan`, each rematerialised by a policy, over a 4 × 2 mesh: batch by heads."""

import functools

import jax
import jax.numpy as jnp
import ports
import pytest
from exhaustive import thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

LAYERS, B, T, D, HEADS, KEY_HEADS, H = 3, 4, 16, 8, 4, 2, 4
POLICIES = {
    "none": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names("jax_flash_out", "jax_flash_lse"),
}
AXES = {
    "query": P(None, None, "model", None),
    "key": P(None, None, "model", None),
    "value": P(None, None, "model", None),
    "out": P(None, "model", None, None),
}


def weights():
    shapes = {
        "query": (D, HEADS, H),
        "key": (D, KEY_HEADS, H),
        "value": (D, KEY_HEADS, H),
        "out": (HEADS, H, D),
    }
    return {name: ports.normal(i, LAYERS, *shape) / 4 for i, (name, shape) in enumerate(shapes.items())}


def decoder(attention, policy, weights, x):
    """`x (B, T, D)` after all layers."""

    def layer(x, weights):
        normed = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        query, key, value = (
            jnp.einsum("btd,dnh->btnh", normed, weights[name]) for name in ("query", "key", "value")
        )
        return x + jnp.einsum("btnh,nhd->btd", attention(query, key, value), weights["out"]), None

    if POLICIES[policy] is not None:
        layer = jax.checkpoint(layer, policy=POLICIES[policy])
    return jax.lax.scan(layer, x, weights)[0]


def ours(query, key, value):
    return jax_flash.flash_attention(query, key, value, local_window_size=(6, 0))


def plain(query, key, value):
    return ports.plain_attention(query, key, value, ports.near(T, 6))


@pytest.fixture(scope="module")
def arguments():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in AXES.items()}
    x = jax.device_put(ports.normal(9, B, T, D), NamedSharding(mesh, P("data")))
    return jax.device_put(weights(), shardings), x


@pytest.mark.parametrize("policy", ["attention", *thorough("none", "nothing", "dots")])
def test_on_a_mesh(policy, arguments):
    pair = [functools.partial(decoder, attention, policy) for attention in (ours, plain)]
    ports.assert_alike(*pair, *arguments)


@pytest.mark.parametrize(("policy", "runs"), [("none", 1), ("nothing", 2), ("dots", 2), ("attention", 1)])
def test_how_often_the_forward_pass_runs(policy, runs, arguments):
    """A step with gradients runs it twice if the policy doesn't keep its results, else once."""
    program = ports.compiled_with_custom_calls(functools.partial(decoder, ours, policy), *arguments)
    assert ports.attention_calls(program) == runs + 1
