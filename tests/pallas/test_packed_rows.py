"""Batch rows of odd lengths by Mosaic GPU: packed as varlen sequences, not padded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import thorough
from pallas_lowering import only_lowering
from test_mosaic import calls_lowered_for_hopper, interpreted_by_mosaic

import jax_flash
from jax_flash import _device, pallas
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.pallas import compat, lowering, packed_rows


def shapes(B=8, T=65, S=77, N=2, K=1, H=64, sinks=None, **others) -> Operands[jax.ShapeDtypeStruct]:
    of_arrays = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in of_arrays]
    if sinks is not None:
        others["sinks"] = jax.ShapeDtypeStruct(sinks, jnp.float32)
    return Operands(*arrays, **others)


@pytest.mark.parametrize(
    "given, suits",
    [
        ({}, True),
        (dict(T=64), True),
        (dict(T=64, S=80), False),  # nothing to pad
        (dict(B=1), False),
        (dict(B=4), False),  # 260 rows in all
        (dict(T=513), False),  # long
        (dict(sinks=(1, 2)), True),
        (dict(sinks=(8, 2)), False),
        (dict(query_seq_lengths=jax.ShapeDtypeStruct((8,), jnp.int32)), False),
    ],
    ids=str,
)
def test_which_calls_it_suits(given, suits):
    assert packed_rows.suits(shapes(**given)) == suits


def pads_heads(function, *args) -> bool:
    """Whether XLA pads arrays `(B, rows, heads, width)`."""
    jaxpr = jax.make_jaxpr(function)(*args)
    return any("= pad[" in x and x.split("=")[0].count(",") == 3 for x in str(jaxpr).splitlines())


@pytest.mark.parametrize("T, S", [(65, 77), (64, 80)])
def test_nothing_is_copied(T, S, monkeypatch):
    monkeypatch.setattr(_device, "current", lambda: _device.H100)
    operands = shapes(T=T, S=S)
    with only_lowering(lowering.MOSAIC):
        run = functools.partial(pallas.forward, AttentionSpec(0.125, None, 0))
        assert not pads_heads(run, operands)
        assert pads_heads(run, shapes(B=4)), "which can't be packed"


@pytest.mark.every_turn
@pytest.mark.parametrize("is_causal", (True, *thorough(False)))
def test_lowers_with_64_bit_types_and_in_shard_map(is_causal):
    def gradients(*arrays):
        def loss(*arrays):
            out = jax_flash.flash_attention(*arrays, is_causal=is_causal, implementation="pallas")
            return out.astype(jnp.float32).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(*arrays)

    operands = shapes(B=16)
    arrays = operands.query, operands.key, operands.value
    device = jax.sharding.AbstractDevice(_device.H100.kind, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh(
        (2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device
    )
    split = jax.sharding.PartitionSpec("batch")
    with only_lowering(lowering.MOSAIC):
        with jax.enable_x64(True):
            mosaic, triton = calls_lowered_for_hopper(gradients, *arrays)
        assert mosaic >= 3 and not triton
        in_shards = jax.shard_map(gradients, mesh=mesh, in_specs=split, out_specs=split)
        assert calls_lowered_for_hopper(in_shards, *arrays) == (mosaic, 0)


@pytest.mark.skipif(not compat.mosaic_interprets(), reason="this JAX interprets no Mosaic GPU kernels")
@pytest.mark.parametrize(
    "sizes, options",
    [
        (dict(T=65, S=77), dict(is_causal=True, sinks=jnp.array([0.5, -1.0]), logits_soft_cap=3.0)),
        (dict(T=130, S=65, B=8, H=80), dict(local_window_size=(20, 9))),
    ],
    ids=("causal", "window"),
)
def test_agrees_with_xla(sizes, options):
    operands = shapes(**sizes)
    leaves = operands.query, operands.key, operands.value
    keys = jax.random.split(jax.random.key(0), 5)
    given = (*leaves, leaves[0])
    *arrays, d_out = (jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, given, strict=False))
    d_lse = jax.random.normal(keys[4], leaves[0].shape[:3], jnp.float32)

    def run(implementation):
        def attend(*arrays):
            options_of_call = dict(options, return_residual=True, implementation=implementation)
            return jax_flash.flash_attention(*arrays, **options_of_call)

        results, vjp = jax.vjp(attend, *arrays)
        return (*results, *vjp((d_out, d_lse)))

    expected = jax.jit(run, static_argnums=0)("xla")
    with interpreted_by_mosaic():
        assert packed_rows.suits(operands)
        got = jax.jit(run, static_argnums=0)("pallas")
    for name, x, right in zip(("out", "lse", "query", "key", "value"), got, expected, strict=True):
        x, right = (np.asarray(y).astype(np.float32) for y in (x, right))
        np.testing.assert_allclose(x, right, atol=0.05, rtol=0.03, err_msg=name)
