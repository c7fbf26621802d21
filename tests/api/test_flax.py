"""`jax_flash.flax` beside Flax's own attention, inside of Flax's layers."""

import functools
import inspect
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_flash
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


LENGTH = 12
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
SINKS = np.array([0.5, -1.0, 0.0, 2.0], np.float32)
LENGTHS = np.array([9, 12], np.int32)
IDS = np.array([[0] * 5 + [7] * 7, [3] * 2 + [2**31 - 1] * 8 + [-(2**31)] * 2])
SEGMENTS = {"query_segment_ids": IDS, "key_value_segment_ids": IDS}
# More than Flax's own attention_fn takes.
BOUND = {
    "scale": {"scale": 0.2},
    "window": {"local_window_size": (2, 1)},
    "window without a side": {"local_window_size": (None, 1)},
    "soft cap": {"logits_soft_cap": 0.5},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": SINKS},
    "segments": SEGMENTS,
    "lengths": {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": [5, 12]},
    "lengths and window": {"key_value_seq_lengths": LENGTHS, "local_window_size": 3},
    "lengths and alibi": {"key_value_seq_lengths": LENGTHS, "alibi_slopes": SLOPES},
    "lengths, segments and window": {"key_value_seq_lengths": LENGTHS, **SEGMENTS, "local_window_size": 3},
}


def defined_attention(
    query,
    key,
    value,
    mask=None,
    is_causal=False,
    scale=None,
    local_window_size=None,
    logits_soft_cap=None,
    alibi_slopes=None,
    sinks=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
):
    """Attention by its definition, aligned to the top left; arrays `(B, LENGTH, HEADS, H)`."""
    i, j = np.ogrid[:LENGTH, :LENGTH]
    sees = np.ones((B, 1, LENGTH, LENGTH), bool) & ((j <= i) | (not is_causal))
    sees = sees if mask is None else sees & (mask != 0)
    if local_window_size is not None:
        left, right = np.broadcast_to(local_window_size, 2)
        sees = sees & (j >= i - (LENGTH if left is None else left)) & (j <= i + right)
    if query_segment_ids is not None:
        sees = sees & (query_segment_ids[:, None, :, None] == key_value_segment_ids[:, None, None, :])
    for lengths, position in ((query_seq_lengths, i), (key_value_seq_lengths, j)):
        if lengths is not None:
            sees = sees & (position < np.reshape(lengths, (B, 1, 1, 1)))
    logits = jnp.einsum("bTNH,bSNH->bNTS", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    if alibi_slopes is not None:
        logits = logits - alibi_slopes[:, None, None] * np.abs(i - j)
    weights = jnp.where(sees, jnp.exp(logits), 0)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks)[:, None, None]
    return jnp.einsum("bNTS,bSNH->bTNH", weights / jnp.where(total == 0, 1, total), value)


def value_and_gradients(attention, *arrays):
    """The output and the gradients, compiled as one."""

    def loss(*arrays):
        out = attention(*arrays)
        return jnp.sum(jnp.sin(out)), out

    argnums = tuple(range(len(arrays)))
    return jax.jit(jax.value_and_grad(loss, argnums=argnums, has_aux=True))(*arrays)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bound", BOUND)
def test_what_flax_has_no_argument_for_is_bound(bound, is_causal):
    arrays = [normal(seed, B, LENGTH, HEADS, 8) for seed in range(3)]
    ours, definition = (
        functools.partial(attention, is_causal=is_causal, **BOUND[bound])
        for attention in (dot_product_attention, defined_attention)
    )
    assert_close(
        value_and_gradients(ours, *arrays), value_and_gradients(definition, *arrays), rtol=2e-4, atol=5e-5
    )


def test_a_linen_layer_of_packed_documents():
    """Segment ids are traced and bound where the layer is made. The program holds no matrix of T × T."""

    class Packed(nn.Module):
        @nn.compact
        def __call__(self, x, ids):
            attention = functools.partial(
                dot_product_attention,
                query_segment_ids=ids,
                key_value_segment_ids=ids,
                local_window_size=(6, 0),
            )
            return nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=attention)(x)

    length = 2048
    x, ids = normal(0, 1, length, FEATURES), jnp.arange(length)[None] // 700
    variables = Packed().init(jax.random.key(1), x[:, :4], ids[:, :4])
    program = jax.jit(jax.grad(lambda variables, x, ids: jnp.sum(Packed().apply(variables, x, ids) ** 2)))
    assert f"{length}x{length}" not in program.lower(variables, x, ids).as_text()
    near = nn.make_attention_mask(*[jnp.arange(T)[None]] * 2, lambda i, j: (j <= i) & (j >= i - 6))
    x, ids = x[:, :T], ids[:, :T] + (jnp.arange(T) > 3)
    mask = nn.combine_masks(nn.make_attention_mask(ids, ids, jnp.equal), near)
    layer = nn.MultiHeadDotProductAttention(num_heads=HEADS)
    params = {"params": variables["params"]["MultiHeadDotProductAttention_0"]}
    out = jax.jit(Packed().apply)(variables, x, ids)
    assert_close(out, layer.apply(params, x, mask=mask))


def test_an_nnx_layer_of_packed_documents():
    """The layer hands on its mask as it is: here, segment ids."""

    def packed_attention(query, key, value, mask, **options):
        return dot_product_attention(
            query, key, value, query_segment_ids=mask, key_value_segment_ids=mask, **options
        )

    options = {"num_heads": HEADS, "in_features": FEATURES, "decode": False}
    ours = nnx.MultiHeadAttention(attention_fn=packed_attention, rngs=nnx.Rngs(0), **options)
    theirs = nnx.MultiHeadAttention(rngs=nnx.Rngs(0), **options)
    x, ids = normal(0, B, LENGTH, FEATURES), jnp.asarray(np.arange(LENGTH) // 5 + np.zeros((B, 1), int))
    mask = nnx.combine_masks(nnx.make_attention_mask(ids, ids, jnp.equal), nnx.make_causal_mask(ids))
    out = nnx.jit(lambda layer, x, ids: layer(x, mask=ids, is_causal=True))(ours, x, ids)
    assert_close(out, theirs(x, mask=mask))


def test_a_layer_that_decodes_refuses_what_needs_positions():
    for options, name in (
        ({"local_window_size": (4, 0)}, "local_window_size"),
        ({"alibi_slopes": SLOPES}, "alibi"),
    ):
        attention = functools.partial(dot_product_attention, **options)
        layer = nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=attention, decode=True)
        variables = layer.init(jax.random.key(0), normal(0, B, T, FEATURES))
        with pytest.raises(ValueError, match=f"{name}.* must be None where"):
            layer.apply(variables, normal(0, B, 1, FEATURES), mutable=["cache"])


def test_is_an_attribute_of_the_package():
    code = (
        "import jax_flash; jax_flash.flax.dot_product_attention; import sys; assert 'flax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_flash_attention_in_a_linen_layer_raises():
    """Its `deterministic` isn't Flax's, and the layer has no dropout key for it."""
    layer = nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=jax_flash.flash_attention)
    with pytest.raises(TypeError, match=r"attention_fn is jax_flash\.flax\.dot_product_attention"):
        layer.init(jax.random.key(0), normal(0, B, T, FEATURES))


@pytest.mark.parametrize("deterministic", [False, True])
def test_other_attention_in_a_linen_layer_with_dropout_raises(deterministic):
    layer = nn.MultiHeadDotProductAttention(
        num_heads=HEADS, attention_fn=jax_flash.dot_product_attention, dropout_rate=0.1
    )
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    with pytest.raises(ValueError, match=r"dropout_rate is 0\.1.*jax_flash\.flax\.dot_product_attention"):
        layer.init(rngs, normal(0, B, T, FEATURES), deterministic=deterministic)


@pytest.mark.parametrize("attention", [jax_flash.dot_product_attention, jax_flash.flash_attention])
def test_other_attention_in_an_nnx_layer_raises(attention):
    layer = nnx.MultiHeadAttention(
        num_heads=HEADS, in_features=FEATURES, decode=False, attention_fn=attention, rngs=nnx.Rngs(0)
    )
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        layer(normal(0, B, T, FEATURES))


def test_other_attention_in_a_linen_layer_without_dropout_is_right():
    x = normal(0, B, T, FEATURES)
    layer = nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=jax_flash.dot_product_attention)
    mask = np.tril(np.ones((T, T), bool))
    variables = layer.init(jax.random.key(0), x, mask=mask)
    assert_close(
        layer.apply(variables, x, mask=mask),
        layer.clone(attention_fn=nn.dot_product_attention).apply(variables, x, mask=mask),
    )
