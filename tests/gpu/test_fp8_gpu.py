"""Forward in 8 bits by the CUDA kernel, against "xla", which keeps probabilities in float32."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float8_bounds import check
from pallas_lowering import only_lowering
from seeds import seed_of

import jax_flash
from jax_flash import masks
from jax_flash.cuda.sm90 import forward_tiles
from jax_flash.pallas import lowering


def arrays(seed, B, T, S, N, K, H, V, dtype):
    """Normal numbers; blocks of values differ in size."""
    rng = np.random.default_rng(seed)
    sizes = 4.0 ** rng.integers(-2, 3, (B, -(-S // 128), 1, 1)).repeat(128, 1)[:, :S]
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, V)
    query, key, value = (rng.normal(size=shape) for shape in shapes)
    return [jnp.asarray(x, dtype) for x in (query, key, value * sizes)]


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (150, 20)},
    "soft cap": {"logits_soft_cap": 3.0, "is_causal": True},
    "lengths": {"lengths": True, "is_causal": True},
    "sinks": {"sinks": True},
    "bias": {"bias": True},
    "block mask": {"block_mask": True},
    "dropout": {"dropout_rate": 0.3, "dropout_key": jax.random.key(7), "is_causal": True},
}


def options_of(name, seed, B, T, S, N):
    rng = np.random.default_rng(seed + 1)
    options = dict(OPTIONS[name])
    if options.pop("lengths", False):
        options["query_seq_lengths"] = jnp.asarray(rng.integers(0, T + 1, B), jnp.int32)
        options["key_value_seq_lengths"] = jnp.asarray(rng.integers(0, S + 1, B), jnp.int32)
    if options.pop("sinks", False):
        options["sinks"] = jnp.asarray(rng.normal(size=N), jnp.float32)
    if options.pop("bias", False):
        options["bias"] = jnp.asarray(rng.normal(size=(1, N, T, S)), jnp.bfloat16)
    if options.pop("block_mask", False):
        options["block_mask"] = jax_flash.create_block_mask(masks.CausalMask(S - T), None, None, T, S)
    return options


CALLS = [
    (options, head_dims, heads, lengths)
    for (options, head_dims), (heads, lengths) in zip(
        itertools.product(OPTIONS, ((64, 64), (128, 128), (96, 96), (192, 128), (256, 256))),
        itertools.cycle(
            itertools.product(((4, 4), (8, 2), (6, 1)), ((1000, 1000), (257, 3001), (1, 4096), (129, 77)))
        ),
        strict=False,
    )
]


@pytest.mark.parametrize(("options", "head_dims", "heads", "lengths"), CALLS, ids=str)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_equals_xla(options, head_dims, heads, lengths, dtype):
    seed = seed_of((options, head_dims, heads, lengths, dtype))
    B, (N, K), (T, S), (H, V) = 2, heads, lengths, head_dims
    if options == "window" and S < T:
        pytest.skip("rows without a key")
    given = arrays(seed, B, T, S, N, K, H, V, dtype)
    attend = functools.partial(
        jax_flash.flash_attention,
        **options_of(options, seed, B, T, S, N),
        **{"quantization": "fp8", "return_residual": True},
    )
    found, expected = (attend(*given, implementation=name) for name in ("cuda", "xla"))
    assert found[0].dtype == dtype
    check(found, expected, *given)


@pytest.mark.parametrize("options", ("plain", "causal", "window"))
@pytest.mark.parametrize(
    "head_dims", ((64, 64), (128, 128), (96, 96), (192, 128), (80, 160), (256, 256)), ids=str
)
@pytest.mark.parametrize("heads, lengths", [((8, 2), (1000, 1000)), ((4, 4), (257, 3001))])
def test_pallas_equals_xla(options, head_dims, heads, lengths):
    seed = seed_of((options, head_dims, heads, lengths))
    (N, K), (T, S), (H, V) = heads, lengths, head_dims
    given = arrays(seed, 2, T, S, N, K, H, V, "bfloat16")
    attend = functools.partial(
        jax_flash.flash_attention, **OPTIONS[options], quantization="fp8", return_residual=True
    )
    with only_lowering(lowering.MOSAIC):
        found = attend(*given, implementation="pallas")
    check(found, attend(*given, implementation="xla"), *given)


def test_pallas_takes_arrays_with_scales_of_any_sign():
    given = jax_flash.quantize(*arrays(3, 2, 500, 700, 8, 2, 128, 128, "bfloat16"), implementation="xla")
    given = given._asdict()
    given["key_descale"] *= jnp.asarray([-1.3, 0.7])[None, :, None]
    attend = functools.partial(jax_flash.flash_attention, **given, return_residual=True)
    with only_lowering(lowering.MOSAIC):
        found = attend(implementation="pallas")
    names = ("query", "key", "value")
    wide = (given[x].astype(jnp.float32) * jnp.max(given[f"{x}_descale"]) for x in names)
    check(found, attend(implementation="xla"), *wide)


@pytest.mark.parametrize("out_dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("scales", ("block", "head"))
def test_float8_arrays(out_dtype, scales):
    in_32_bits = arrays(3, 2, 500, 700, 8, 2, 128, 128, "float32")
    given = jax_flash.quantize(*in_32_bits, scales=scales, implementation="xla")._asdict()
    given["key_descale"] *= jnp.asarray([-1.3, 0.7])[None, :, *(None,) * (given["key_descale"].ndim - 2)]
    attend = functools.partial(jax_flash.flash_attention, **given, out_dtype=out_dtype, return_residual=True)
    found, expected = attend(implementation="cuda"), attend(implementation="xla")
    assert found[0].dtype == out_dtype
    names = ("query", "key", "value")
    check(found, expected, *(given[x].astype(jnp.float32) * jnp.max(given[f"{x}_descale"]) for x in names))


@pytest.mark.parametrize("head_dims", ((64, 64), (128, 128), (100, 36), (192, 128), (256, 256)), ids=str)
@pytest.mark.parametrize("options", ({}, {"incoherent": False}, {"lengths": True}), ids=str)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_quantize_is_its_definition(dtype, options, head_dims):
    """Bit for bit, NaN aside, and without a copy beside the kernel."""
    given = arrays(6, 2, 500, 700, 8, 2, *head_dims, dtype)
    given = [x.at[1, 300, 0, 1].set(jnp.nan).at[0, 5, 1, 0].set(jnp.inf) for x in given]
    options = dict(options)
    if options.pop("lengths", False):
        options["query_seq_lengths"], options["key_value_seq_lengths"] = (
            jnp.array([130, 0]),
            jnp.array([1, 700]),
        )
    quantize = functools.partial(jax_flash.quantize, **options)
    found, expected = (quantize(*given, implementation=name) for name in ("cuda", "xla"))
    for name, one, other in zip(found._fields, found, expected, strict=True):
        one, other = (np.asarray(x.astype(jnp.float32)) for x in (one, other))
        np.testing.assert_array_equal(one, other, err_msg=name)
    if all(dim % 16 == 0 for dim in head_dims):
        text = jax.jit(quantize).lower(*given).compile().as_text()
        assert text.count('custom_call_target="jax_flash_quantize"') == 3


def test_varlen_sequences_and_gradients():
    query, key, value = (x[0] for x in arrays(4, 1, 900, 900, 4, 2, 128, 128, "bfloat16"))
    offsets = np.array([0, 100, 557, 900])
    attend = functools.partial(
        jax_flash.flash_attention_varlen,
        **{"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_seqlen_q": 457, "max_seqlen_kv": 457},
        **{"is_causal": True, "quantization": "fp8"},
    )

    def gradients(name):
        out, vjp = jax.vjp(functools.partial(attend, implementation=name), query, key, value)
        return out, *vjp(query)

    for found, expected in zip(gradients("cuda"), gradients("xla"), strict=True):
        found, expected = (np.asarray(x, np.float64) for x in (found, expected))
        assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize("sum_blocks", (None, 0, 16))
@pytest.mark.parametrize("keys", (4096, 131072))
def test_long_sequences(keys, sum_blocks, monkeypatch):
    """Sums over many keys: what wgmma keeps of float32 decides on the error.

    Errors with other numbers of blocks that wgmma sums by itself are only printed.
    """
    if sum_blocks is not None:
        tile = dataclasses.replace(forward_tiles.FP8_TILES[128], sum_blocks=sum_blocks)
        monkeypatch.setitem(forward_tiles.FP8_TILES, 128, tile)
    query, key, value = arrays(5, 1, 128, keys, 2, 2, 128, 128, "float32")
    value = 1 + value / jnp.max(jnp.abs(value))  # sums that grow
    given = jax_flash.quantize(query, key, value, implementation="xla")._asdict()
    attend = functools.partial(jax_flash.flash_attention, **given, out_dtype="float32")
    found, expected = (np.asarray(attend(implementation=name), np.float64) for name in ("cuda", "xla"))
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    print(f"{keys} keys, sums of {sum_blocks} blocks: {error:.2e}")
    assert sum_blocks is not None or error < 0.01
