"""A transformer in Flax linen and one in NNX, on packed documents, with a window and grouped heads."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import ports
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

LAYERS, B, T, D, HEADS, WINDOW = 2, 4, 16, 16, 4, 6
IDS = np.arange(T) // np.array([[5], [16], [9], [3]])  # the documents of each row
DENSE_MASK = ports.near(T, WINDOW) & jnp.asarray(IDS[:, None, :, None] == IDS[:, None, None, :])


class LinenBlock(nn.Module):
    is_plain: bool

    @nn.compact
    def __call__(self, x, ids):
        attention = functools.partial(
            jax_flash.flax.dot_product_attention,
            query_segment_ids=ids,
            key_value_segment_ids=ids,
            local_window_size=(WINDOW, 0),
        )
        layer = functools.partial(nn.MultiHeadDotProductAttention, HEADS, name="attention")
        normed = nn.LayerNorm(name="norm")(x)
        if self.is_plain:
            return x + layer()(normed, mask=DENSE_MASK), None
        return x + layer(attention_fn=attention)(normed), None


class LinenTransformer(nn.Module):
    """Layers by `nn.scan`, each rematerialised."""

    is_plain: bool = False

    @nn.compact
    def __call__(self, x, ids):
        block = nn.remat(LinenBlock, prevent_cse=False)
        layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=LAYERS,
        )
        return layers(self.is_plain, name="layers")(x, ids)[0]


def linen_pair():
    def model(is_plain):
        return lambda params, x: LinenTransformer(is_plain).apply(params, x, jnp.asarray(IDS))

    return model(is_plain=False), model(is_plain=True)


def linen_arguments():
    x = ports.normal(0, B, T, D)
    return jax.jit(LinenTransformer(True).init)(jax.random.key(1), x, jnp.asarray(IDS)), x


class NNXTransformer(nnx.Module):
    def __init__(self, **options):
        rngs = nnx.Rngs(0)
        self.norms = nnx.List([nnx.RMSNorm(D, rngs=rngs) for _ in range(LAYERS)])
        self.layers = nnx.List(
            [
                nnx.MultiHeadAttention(HEADS, D, num_kv_heads=2, decode=False, rngs=rngs, **options)
                for _ in range(LAYERS)
            ]
        )

    def __call__(self, x, mask):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x), mask=mask)
        return x


def segmented_attention(query, key, value, mask, **options):
    """The layer hands on its mask as it is: here, segment ids."""
    return jax_flash.flax.dot_product_attention(
        query, key, value, query_segment_ids=mask, key_value_segment_ids=mask, **options
    )


def nnx_pair():
    def model(mask, **options):
        graph = nnx.graphdef(NNXTransformer(**options))
        return lambda state, x: nnx.merge(graph, state)(x, mask)

    attention = functools.partial(segmented_attention, local_window_size=(WINDOW, 0))
    return model(jnp.asarray(IDS), attention_fn=attention), model(DENSE_MASK)


def nnx_arguments():
    return nnx.state(NNXTransformer()), ports.normal(0, B, T, D)


def sharded(arguments, mesh):
    """Weights by heads over "model", the batch over "data"."""

    def spec(path, x):
        name = jax.tree_util.keystr(path)
        heads = None
        if any(f"'{part}'" in name for part in ("query", "key", "value")):
            heads = x.ndim - 2
        elif "'out'" in name and "kernel" in name:
            heads = x.ndim - 3
        return NamedSharding(mesh, P(*("model" if axis == heads else None for axis in range(x.ndim))))

    weights, x = arguments
    weights = jax.device_put(weights, jax.tree_util.tree_map_with_path(spec, weights))
    return weights, jax.device_put(x, NamedSharding(mesh, P("data")))


MODELS = {"linen": (linen_pair, linen_arguments), "nnx": (nnx_pair, nnx_arguments)}


@pytest.mark.parametrize("model", MODELS)
def test_on_a_mesh(model):
    pair, arguments = MODELS[model]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    ports.assert_alike(*pair(), *sharded(arguments(), mesh))
