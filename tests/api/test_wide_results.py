"""Float32 results of 16-bit calls, which sharded sequences add up: what implementations give, and a ring."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_case import Case, draw
from exhaustive import in_turn
from jax.sharding import PartitionSpec as P
from pallas_lowering import only_lowering

import jax_flash
from jax_flash import _device, _dispatch
from jax_flash._device import H100
from jax_flash._spec import shapes_of
from jax_flash.pallas import compat, lowering

CASES = (
    Case("plain", "bfloat16", T=70, S=100, N=4, K=2, H=32, B=2, is_causal=True),
    Case(
        "options",
        "float16",
        T=65,
        S=70,
        N=2,
        K=1,
        H=32,
        B=2,
        features=("bias", "alibi_slopes", "seq_lengths"),
    ),
)


def results(name, case, wide):
    """Output and gradients, by an implementation itself."""
    _, spec, operands, d_out, d_lse = draw(case)
    spec = dataclasses.replace(spec, wide_results=wide)
    operands = jax.tree.map(jnp.asarray, operands)
    implementation = _dispatch.get(name, spec.operation)
    with compat.interpret(), only_lowering(lowering.TRITON):
        out, lse = implementation.forward(spec, operands)
        d_lse = None if d_lse is None else d_lse.transpose(0, 2, 1)
        # Of the rounded output, which the backward pass takes.
        rest = out.astype(operands.query.dtype), lse, jnp.asarray(d_out), d_lse
        gradients = implementation.backward(spec, operands, *rest)
    return {"out": out, **gradients.present()}, operands


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("case, name", in_turn(CASES, ("xla", "pallas")), ids=str)
def test_are_what_is_rounded_otherwise(name, case):
    usual, operands = results(name, case, wide=None)
    wide, _ = results(name, case, wide="all")
    assert {x.dtype for x in wide.values()} == {np.dtype(np.float32)}
    for result, x in usual.items():
        np.testing.assert_array_equal(wide[result].astype(x.dtype), x, err_msg=result)
    assert {usual[x].dtype for x in ("out", "query", "key", "value")} == {operands.query.dtype}
    of_shared_keys, _ = results(name, case, wide="shared")
    own = "out", "query"
    for result, x in of_shared_keys.items():
        expected = usual if result in own else wide
        assert x.dtype == expected[result].dtype
        np.testing.assert_array_equal(x, expected[result], err_msg=result)


def test_kernels_for_hopper_by_pallas_have_none():
    _, spec, operands, *_ = draw(CASES[0])
    spec = dataclasses.replace(spec, wide_results="all")
    with _device.assume(H100):
        assert "no float32 results" in (lowering.mosaic_reason(spec, shapes_of(operands), H100) or "")


def test_a_ring_asks_for_them():
    """Kernels for Hopper by Pallas run no step, if they alone are allowed."""
    x = jnp.ones((1, 128, 4, 64), jnp.bfloat16)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("s",))
    of_shards = functools.partial(
        jax_flash.context_parallel_attention, axis_name="s", strategy="ring", implementation="pallas"
    )
    ring = jax.shard_map(of_shards, mesh=mesh, in_specs=P(None, "s"), out_specs=P(None, "s"))
    with (
        _device.assume(H100),
        only_lowering(lowering.MOSAIC),
        pytest.raises(NotImplementedError, match="no float32 results, as steps of a ring have"),
    ):
        jax.eval_shape(ring, x, x, x)


@pytest.mark.parametrize("shards", (4, 8))
def test_a_ring_is_as_exact_as_one_device(shards):
    """Its steps' results are added up before they are rounded."""
    generator = np.random.default_rng(shards)
    shapes = (1, 512, 4, 32), (1, 512, 2, 32), (1, 512, 2, 32)
    arrays = [jnp.asarray(generator.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    d_out = jnp.asarray(generator.standard_normal(shapes[0]), jnp.bfloat16)
    alone = functools.partial(jax_flash.flash_attention, implementation="xla")
    of_shards = functools.partial(
        jax_flash.context_parallel_attention, axis_name="s", strategy="ring", implementation="xla"
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:shards]), ("s",))
    by_tokens = P(None, "s")
    ring = jax.jit(jax.shard_map(of_shards, mesh=mesh, in_specs=by_tokens, out_specs=by_tokens))

    def run(attend, arrays, d_out):
        out, vjp = jax.vjp(attend, *arrays)
        return [np.asarray(x, np.float64) for x in (out, *vjp(d_out))]

    with jax.enable_x64(True):
        right = run(alone, [x.astype(jnp.float64) for x in arrays], d_out.astype(jnp.float64))
    errors = [
        [np.linalg.norm(x - y) for x, y in zip(run(attend, arrays, d_out), right, strict=True)]
        for attend in (ring, alone)
    ]
    for of_ring, of_one in zip(*errors, strict=True):
        assert of_ring <= 1.05 * of_one
