"""Equinox's MultiheadAttention with its attention replaced. The batch is a `vmap` over a sharded axis."""

import equinox as eqx
import jax
import ports
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

B, T, D, HEADS, WINDOW = 8, 16, 16, 4, 6


class FlashMultiheadAttention(eqx.nn.MultiheadAttention):
    """Equinox's layer for one example `x (T, D)`, with a causal window in place of a mask."""

    window: int = eqx.field(static=True, default=WINDOW)

    def __call__(self, x):
        query, key, value = (
            jax.vmap(project)(x).reshape(len(x), self.num_heads, -1)
            for project in (self.query_proj, self.key_proj, self.value_proj)
        )
        out = jax_flash.flash_attention(query, key, value, local_window_size=(self.window, 0))
        return jax.vmap(self.output_proj)(out.reshape(len(x), -1))


def arguments(sharding=None):
    """Weights, which both layers share, and `x (B, T, D)`."""
    weights, _ = eqx.partition(eqx.nn.MultiheadAttention(HEADS, D, key=jax.random.key(0)), eqx.is_array)
    return jax.tree.leaves(weights), jax.device_put(ports.normal(1, B, T, D), sharding)


def batched(layer_type, *rest):
    """`x (B, T, D)` to the same, by weights."""
    arrays, static = eqx.partition(layer_type(HEADS, D, key=jax.random.key(0)), eqx.is_array)
    tree = jax.tree.structure(arrays)

    def apply(weights, x):
        layer = eqx.combine(tree.unflatten(weights), static)
        return jax.vmap(lambda x: layer(x, *rest) if not rest else layer(x, x, x, *rest))(x)

    return apply


OURS = batched(FlashMultiheadAttention)
PLAIN = batched(eqx.nn.MultiheadAttention, ports.near(T, WINDOW)[0, 0])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_on_a_mesh(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    weights, x = arguments(NamedSharding(mesh, P("data")))
    weights = jax.device_put(weights, NamedSharding(mesh, P()))
    ports.assert_alike(OURS, PLAIN, weights, x)
