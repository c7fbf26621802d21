"""Forward on e4m3 numbers by Mosaic GPU, on the CPU: in JAX's interpreter against "xla", and lowered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float8_arrays import arranged
from float8_bounds import check
from pallas_lowering import only_lowering
from test_mosaic import calls_lowered_for_hopper, interpreted_by_mosaic, shapes

import jax_flash
from jax_flash import _device, pallas
from jax_flash._spec import AttentionSpec, Operands, sizes
from jax_flash.pallas import compat, lowering
from jax_flash.pallas.mosaic import forward_float8, head_dims
from jax_flash.pallas.mosaic import tiles as mosaic_tiles

SINKS = np.asarray([0.5], np.float32)

interpreted = pytest.mark.skipif(
    not compat.mosaic_interprets(), reason="this JAX interprets no Mosaic GPU kernels"
)


def arrays(seed, T, S, N=2, K=1, H=64, V=None, dtype="bfloat16"):
    """Normal numbers; blocks of values differ in size."""
    rng = np.random.default_rng(seed)
    of_blocks = 4.0 ** rng.integers(-2, 3, (1, -(-S // 128), 1, 1)).repeat(128, 1)[:, :S]
    query, key, value = (rng.normal(size=x) for x in ((1, T, N, H), (1, S, K, H), (1, S, K, V or H)))
    return [jnp.asarray(x, dtype) for x in (query, key, value * of_blocks)]


def by_both(given, **options):
    """`(out, lse)` by Mosaic GPU in the interpreter, and by xla."""
    attend = functools.partial(jax_flash.flash_attention, **options, return_residual=True)
    with interpreted_by_mosaic():
        found = jax.jit(lambda *arrays: attend(*arrays, implementation="pallas"))(*given)
    return found, attend(*given, implementation="xla")


@interpreted
@pytest.mark.parametrize(
    "shape, options",
    [
        (dict(T=65, S=150), {}),
        (dict(T=150, S=300, N=4, K=2), {"is_causal": True}),
        (dict(T=70, S=270, N=1, H=128), {"is_causal": True, "scale": -0.1}),
        (dict(T=70, S=140, N=1, H=192, dtype="float16"), {"local_window_size": (40, 9)}),
        (dict(T=70, S=140, N=1, H=80, V=160), {}),  # values in parts, the last of fewer columns
        (dict(T=70, S=140, N=1, H=40, V=256), {"quantization_key": jax.random.key(3)}),
        (dict(T=70, S=140, N=1), {"logits_soft_cap": 2.0, "is_causal": True, "sinks": SINKS}),
    ],
    ids=str,
)
def test_equals_xla(shape, options):
    given = arrays(5, **shape)
    found, expected = by_both(given, quantization="fp8", **options)
    assert found[0].dtype == given[0].dtype
    scale = options.get("scale")
    check(found, expected, *given, scale=scale)


@interpreted
@pytest.mark.parametrize("scales", ("block", "head"))
def test_arrays_with_scales(scales):
    """Scales of any sign, and 0; of queries none."""
    given = jax_flash.quantize(*arrays(3, T=130, S=300, N=4, K=2), scales=scales, implementation="xla")
    given = given._asdict()
    del given["query_descale"]
    ones = (None,) * (given["key_descale"].ndim - 2)
    given["key_descale"] *= jnp.asarray([-1.3, 0.0])[None, :, *ones]
    given["value_descale"] *= jnp.asarray([0.7, -2.0])[None, :, *ones]
    names = ("query", "key", "value")
    others = {name: x for name, x in given.items() if name not in names}
    found, expected = by_both([given[x] for x in names], **others, out_dtype="float16", scale=0.05)
    assert found[0].dtype == jnp.float16
    one = jnp.ones(())
    wide = [given[x].astype(jnp.float32) * jnp.max(jnp.abs(given.get(f"{x}_descale", one))) for x in names]
    check(found, expected, *wide, scale=0.05)


@interpreted
def test_what_is_not_finite_reaches_those_that_see_it():
    query, key, value = arrays(7, T=100, S=100)
    spoiled = [query.at[0, 20].set(jnp.nan), key.at[0, 60].set(jnp.inf), value.at[0, 80, 0, 3].set(jnp.nan)]
    (out, lse), _ = by_both(spoiled, quantization="fp8", is_causal=True)
    (expected, expected_lse), _ = by_both((query, key, value), quantization="fp8", is_causal=True)
    seen = np.arange(100) >= 60
    seen[20] = True
    assert jnp.isnan(out[:, seen]).all() and jnp.isnan(lse[:, seen]).all()
    np.testing.assert_array_equal(out[:, ~seen], expected[:, ~seen])
    np.testing.assert_array_equal(lse[:, ~seen], expected_lse[:, ~seen])


def test_values_are_arranged_as_for_the_cuda_kernel():
    """Whose order of keys has run on GPUs."""
    names = ("query", "key", "value")
    given = jax_flash.quantize(*arrays(4, T=10, S=300, K=2), implementation="xla")
    operands = Operands(*(getattr(given, name) for name in names))
    found = forward_float8.arranged(operands, 128).value
    transposed = arranged(operands)["transposed_value"]  # (K, blocks, V, keys of a block)
    np.testing.assert_array_equal(
        found[0].astype(jnp.float32), transposed.swapaxes(1, 2).reshape(found.shape[1:]).astype(jnp.float32)
    )


@pytest.mark.every_turn
@pytest.mark.parametrize("H, V", [(64, 64), (128, 128), (192, 128), (256, 256), (40, 20), (80, 160)])
@pytest.mark.parametrize("gradients", (False, True))
def test_lowers_for_hopper(H, V, gradients):
    def attend(*arrays):
        out = jax_flash.flash_attention(*arrays, quantization="fp8", implementation="pallas")
        return out.astype(jnp.float32).sum()

    function = jax.grad(attend, argnums=(0, 1, 2)) if gradients else attend
    operands = shapes(H=H, V=V)
    with only_lowering(lowering.MOSAIC):
        backward = len(mosaic_tiles.backward(head_dims.padded_sizes(operands), together=False).kernels)
        kernels = calls_lowered_for_hopper(function, operands.query, operands.key, operands.value)
    assert kernels == (1 + backward * gradients, 0)


def test_describes_both_passes():
    operands = shapes()
    with _device.assume(_device.H100), only_lowering(lowering.MOSAIC):
        assert pallas.supports(AttentionSpec(0.1, quantization="fp8"), operands, _device.H100) is None
        described = pallas.describe(AttentionSpec(0.1, quantization="fp8"), operands, _device.H100)
        of_16_bits = pallas.describe(AttentionSpec(0.1), operands, _device.H100)
    assert described.startswith("Mosaic GPU forward in e4m3 (128 queries x 128 keys")
    _, _, backward = of_16_bits.partition("), ")
    assert backward.startswith("Mosaic GPU backward") and described.endswith(f"), {backward}")


@pytest.mark.parametrize(
    "changes, call, device, reason",
    [
        ({"dropout_rate": 0.1}, {}, _device.H100, "take no dropout_rate"),
        ({"out_dtype": "float32"}, {"dtype": "float8_e4m3fn"}, _device.H100, "out_dtype must be"),
        ({}, {"dtype": "float8_e4m3fn", "H": 512}, _device.H100, "at most 256"),
        ({"quantization": "fp8"}, {}, _device.Device("cuda", "NVIDIA A10", (8, 6), 72), "Hopper"),
    ],
)
def test_refuses_what_it_can_not_do(changes, call, device, reason):
    changes = {"quantization": None if "dtype" in call else "fp8"} | changes
    with only_lowering(lowering.MOSAIC):
        assert reason in pallas.supports(AttentionSpec(0.1, **changes), shapes(**call), device)


@pytest.mark.parametrize("spec, dtype", [({"quantization": "fp8"}, "bfloat16"), ({}, "float8_e4m3fn")])
def test_runs_by_mosaic_alone(spec, dtype):
    call = AttentionSpec(0.1, **spec), shapes(dtype=dtype), _device.H100
    assert pallas.supports(*call) is None
    with only_lowering(lowering.TRITON):
        assert "only triton is allowed" in pallas.supports(*call)


@pytest.mark.parametrize("value_head_dim", [None, 32, 128, 256])
@pytest.mark.parametrize("head_dim", range(32, 257, 32))
def test_what_the_table_has_fits_in_shared_memory(head_dim, value_head_dim):
    size = sizes(shapes(H=head_dim, V=value_head_dim))
    config = mosaic_tiles.forward(size, float8=True)
    assert config is not None
    assert mosaic_tiles.forward_fits(size, config, itemsize=1)


@pytest.mark.every_turn
def test_lowers_under_strict_settings_and_within_shard_map():
    """Arrays without scales, which every device has whole."""
    operands = shapes(B=2, dtype="float8_e4m3fn")
    device = jax.sharding.AbstractDevice(_device.H100.kind, num_cores=None, platform="gpu")
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((2, 2), ("batch", "heads"), axis_types=types, abstract_device=device)
    split = jax.sharding.PartitionSpec("batch", None, "heads", None)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=split, out_specs=split)
    def attend(*arrays):
        return jax_flash.flash_attention(*arrays, is_causal=True, implementation="pallas")

    with only_lowering(lowering.MOSAIC), jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        kernels = calls_lowered_for_hopper(attend, operands.query, operands.key, operands.value)
    assert kernels == (1, 0)
