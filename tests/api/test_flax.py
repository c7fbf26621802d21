"""`jax_flash.flax` beside Flax's own attention, inside of Flax's layers."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_flash
import jax_flash.flax
from jax_flash import _device
from jax_flash.flax import dot_product_attention

B, T, S, HEADS, FEATURES = 2, 7, 11, 4, 16
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def linen_pair(**options):
    """The same layer with our attention and with Flax's."""
    layer = functools.partial(
        nn.MultiHeadDotProductAttention, num_heads=HEADS, qkv_features=FEATURES, **options
    )
    return layer(attention_fn=dot_product_attention), layer()


def nnx_pair(**options):
    options = {"num_heads": HEADS, "in_features": FEATURES, "decode": False} | options
    ours = nnx.MultiHeadAttention(attention_fn=dot_product_attention, rngs=nnx.Rngs(0), **options)
    return ours, nnx.MultiHeadAttention(rngs=nnx.Rngs(0), **options)


def assert_close(ours, theirs, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **(TOLERANCE | tolerance)), ours, theirs)


MASKS = {
    "none": None,
    "bool": np.tril(np.ones((1, 1, T, S), bool)),
    "numbers": np.tril(np.ones((B, 1, T, S), np.float32)),
    "each head": (np.arange(B * HEADS * T * S).reshape(B, HEADS, T, S) % 3 > 0) | (np.arange(S) == 0),
}


@pytest.mark.parametrize("mask", MASKS)
def test_linen_cross_attention(mask):
    ours, theirs = linen_pair()
    query, key, value = normal(0, B, T, FEATURES), normal(1, B, S, FEATURES), normal(2, B, S, FEATURES)
    variables = theirs.init(jax.random.key(3), query, key, value)

    def loss(layer, variables, query, key, value):
        out = layer.apply(variables, query, key, value, mask=MASKS[mask])
        return jnp.sum(out**2), out

    results = [
        jax.jit(jax.value_and_grad(functools.partial(loss, layer), argnums=(0, 1, 2, 3), has_aux=True))(
            variables, query, key, value
        )
        for layer in (ours, theirs)
    ]
    assert_close(*results, atol=5e-5)


def test_linen_self_attention_with_a_causal_mask_and_more_batch_axes():
    ours, theirs = linen_pair()
    x = normal(0, 2, 3, T, FEATURES)
    variables = theirs.init(jax.random.key(3), x)
    mask = nn.make_causal_mask(jnp.ones((2, 3, T)))
    assert_close(ours.apply(variables, x, mask=mask), theirs.apply(variables, x, mask=mask))


def test_linen_decodes_from_its_cache():
    ours, theirs = linen_pair(decode=True)
    x = normal(0, B, T, FEATURES)
    variables = theirs.init(jax.random.key(3), x)
    params, caches = variables["params"], [variables["cache"]] * 2
    steps = [
        jax.jit(
            lambda cache, x, layer=layer: layer.apply(
                {"params": params, "cache": cache}, x, mutable=["cache"]
            )
        )
        for layer in (ours, theirs)
    ]
    for i in range(3):
        outs = []
        for which, step in enumerate(steps):
            out, updated = step(caches[which], x[:, i : i + 1])
            caches[which] = updated["cache"]
            outs.append(out)
        assert_close(*outs)


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_nnx_self_attention(key_heads, is_causal):
    ours, theirs = nnx_pair(num_kv_heads=key_heads)
    x = normal(0, B, T, FEATURES)

    @functools.partial(nnx.jit, static_argnums=2)
    def value_and_grad(layer, x, is_causal):
        def loss(layer, x):
            return jnp.sum(layer(x, is_causal=is_causal) ** 2)

        return nnx.value_and_grad(loss, argnums=(0, 1))(layer, x)

    assert_close(value_and_grad(ours, x, is_causal), value_and_grad(theirs, x, is_causal), atol=5e-5)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_nnx_cross_attention(mask, is_causal):
    ours, theirs = nnx_pair()
    query, key = normal(0, B, T, FEATURES), normal(1, B, S, FEATURES)
    mask = MASKS[mask]
    if mask is not None and is_causal:
        mask = np.broadcast_to(mask, (B, HEADS, T, S))  # Flax's own wants it whole beside is_causal
    outs = [layer(query, key, mask=mask, is_causal=is_causal) for layer in (ours, theirs)]
    assert_close(*outs)


def test_nnx_causal_attention_is_aligned_to_the_top_left():
    query, key, value = (
        normal(0, B, S, 2, 8),
        normal(1, B, T, 2, 8),
        normal(2, B, T, 2, 8),
    )  # more queries than keys
    ours = dot_product_attention(query, key, value, is_causal=True)
    assert_close(ours, nnx.dot_product_attention(query, key, value, is_causal=True))


def test_nnx_decodes_from_its_cache():
    layers = nnx_pair(decode=True)
    x = normal(0, B, T, FEATURES)
    for layer in layers:
        layer.init_cache((B, T, FEATURES))
    for i in range(3):
        assert_close(*(layer(x[:, i : i + 1]) for layer in layers))


def test_bias_and_its_gradient():
    query, key, value = normal(0, B, T, 2, 8), normal(1, B, S, 2, 8), normal(2, B, S, 2, 8)
    bias = normal(3, 1, 2, T, S)

    def gradients(attention):
        return jax.grad(lambda *args: jnp.sum(attention(*args) ** 2), argnums=(0, 1, 2, 3))(
            query, key, value, bias
        )

    assert_close(gradients(dot_product_attention), gradients(nn.dot_product_attention), atol=5e-5)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float32])
def test_dtype_promotes_as_in_flax(dtype):
    query, key = normal(0, B, T, 2, 8, dtype=jnp.bfloat16), normal(1, B, S, 2, 8, dtype=jnp.bfloat16)
    value = normal(2, B, S, 2, 8)
    ours = dot_product_attention(query, key, value, dtype=dtype)
    theirs = nn.dot_product_attention(query, key, value, dtype=dtype)
    assert ours.dtype == theirs.dtype
    assert_close(ours.astype(jnp.float32), theirs.astype(jnp.float32), rtol=0, atol=0.05)


def test_promote_dtype_of_the_caller_takes_the_place_of_ours():
    x = normal(0, B, T, 2, 8)
    out = dot_product_attention(
        x, x, x, promote_dtype=lambda arrays, dtype: tuple(y.astype(jnp.float16) for y in arrays)
    )
    assert out.dtype == jnp.float16


def identity_attention(keys, heads, **options):
    """Attention that is uniform over `keys` and whose output is the probabilities: `(B, T, heads, keys)`."""
    zeros = jnp.zeros((B, T, heads, keys))
    value = jnp.broadcast_to(jnp.eye(keys)[None, :, None], (B, keys, heads, keys))
    return dot_product_attention(zeros, jnp.zeros((B, keys, heads, keys)), value, **options)


def test_dropout_is_that_of_dropout_mask():
    key = jax.random.key(1)
    out = identity_attention(64, 3, dropout_rng=key, dropout_rate=0.25, broadcast_dropout=False)
    keep = jax_flash.dropout_mask(key, 0.25, (B, 3, T, 64))
    np.testing.assert_allclose(out, jnp.swapaxes(keep, 1, 2) / 64 / 0.75, rtol=1e-6)
    assert abs(np.mean(keep) - 0.75) < 0.03


def test_broadcast_dropout_drops_the_same_pairs_in_each_row_and_head():
    key = jax.random.key(1)
    out = identity_attention(64, 3, dropout_rng=key, dropout_rate=0.25)
    keep = jax_flash.dropout_mask(key, 0.25, (1, T, 64))
    np.testing.assert_allclose(out, jnp.broadcast_to(keep[0][:, None], (B, T, 3, 64)) / 64 / 0.75, rtol=1e-6)


@pytest.mark.parametrize("broadcast_dropout", [False, True])
def test_linen_dropout_layer(broadcast_dropout):
    layer, _ = linen_pair(dropout_rate=0.5, broadcast_dropout=broadcast_dropout)
    x = normal(0, B, T, FEATURES)
    variables = layer.init(jax.random.key(3), x, deterministic=True)

    def apply(seed, deterministic=False):
        return layer.apply(variables, x, deterministic=deterministic, rngs={"dropout": jax.random.key(seed)})

    np.testing.assert_array_equal(apply(1), apply(1))
    assert np.abs(apply(1) - apply(2)).max() > 1e-3
    _, flax_layer = linen_pair()
    assert_close(apply(1, deterministic=True), flax_layer.apply(variables, x))


def test_nnx_dropout_layer_has_the_gradients_of_its_own_mask():
    layer, _ = nnx_pair(dropout_rate=0.5, deterministic=False)
    x = normal(0, B, T, FEATURES)

    def loss(x):
        return jnp.sum(layer(x, rngs=nnx.Rngs(dropout=5)) ** 2)

    direction = normal(1, B, T, FEATURES)
    slope = (loss(x + 1e-2 * direction) - loss(x - 1e-2 * direction)) / 2e-2
    np.testing.assert_allclose(jnp.vdot(jax.grad(loss)(x), direction), slope, rtol=2e-2)
    assert loss(x) == loss(x)


def test_a_row_with_nothing_to_attend_to_gives_zero():
    x = normal(0, B, T, 2, 8)
    mask = jnp.ones((T, T), bool).at[2].set(False)
    assert not dot_product_attention(x, x, x, mask=mask)[:, 2].any()


def test_implementation_can_be_bound():
    attention = functools.partial(dot_product_attention, implementation="cuda")
    layer = nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=attention)
    with pytest.raises(NotImplementedError, match="cuda"):
        layer.init(jax.random.key(0), normal(0, B, T, FEATURES))


@pytest.mark.parametrize("own", [nn.dot_product_attention, nnx.dot_product_attention])
def test_every_argument_of_flax_is_there(own):
    parameters = inspect.signature(own).parameters
    assert set(parameters) <= set(inspect.signature(dot_product_attention).parameters)
    shared = list(parameters)[:12]
    assert list(inspect.signature(dot_product_attention).parameters)[:12] == shared


def test_sow_weights_is_refused():
    ours, theirs = linen_pair()
    x = normal(0, B, T, FEATURES)
    variables = theirs.init(jax.random.key(3), x)
    with pytest.raises(
        NotImplementedError, match=r"module must be None, because the attention weights.*sow_weights"
    ):
        ours.apply(variables, x, sow_weights=True, mutable=["intermediates"])
    with pytest.raises(NotImplementedError, match="module must be None"):
        nnx_pair()[0](x, sow_weights=True)


@pytest.mark.parametrize(
    "name", ["einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"]
)
def test_einsums_are_refused(name):
    x = normal(0, B, T, 2, 8)
    with pytest.raises(NotImplementedError, match=f"{name} must be None.*got function"):
        dot_product_attention(x, x, x, **{name: lambda *_: None})


def test_active_dropout_needs_a_key():
    x = normal(0, B, T, 2, 8)
    with pytest.raises(ValueError, match="dropout_rng must be a key"):
        dot_product_attention(x, x, x, dropout_rate=0.1)
    dot_product_attention(x, x, x, dropout_rate=0.1, deterministic=True)


def test_precision_is_refused_where_it_would_not_be_honoured():
    x = normal(0, B, T, 2, 8)
    highest = jax.lax.Precision.HIGHEST
    dot_product_attention(x, x, x, precision=highest)
    with pytest.raises(NotImplementedError, match="precision must be None"):
        dot_product_attention(x, x, x, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)
    with (
        _device.assume(_device.H100),
        pytest.raises(NotImplementedError, match=r"precision must be None.*float32 on cuda"),
    ):
        dot_product_attention(x, x, x, precision=highest)
