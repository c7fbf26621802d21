"""The kernels for 8 bits as their compiler sees them, and their plans, with no GPU."""

import re

import jax
import jax.numpy as jnp
import pytest

from jax_flash import _float8
from jax_flash._device import H100
from jax_flash._quantize_spec import QuantizeOperands, QuantizeSpec
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.cuda import plan_check
from jax_flash.cuda.compile import compile_kernel, kernels_folder
from jax_flash.cuda.sm90 import forward_plan
from jax_flash.cuda.sm90.arrange_plan import plan_arrange
from jax_flash.cuda.sm90.quantize_plan import plan_quantize, plan_quantize_rows

pytestmark = pytest.mark.every_turn

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install 'jax_flash[test]'")

B, T, S, N, K = 2, 1000, 777, 8, 2
INTEGERS = jax.ShapeDtypeStruct((B,), jnp.int32)
LENGTHS = {"query_seq_lengths": INTEGERS, "key_value_seq_lengths": INTEGERS}
HEAD_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"right": 0}, {}),
    "window": ({"left": 100, "right": 30}, {}),
    "lengths": ({}, LENGTHS),
    "dropout": ({"dropout_rate": 0.1, "right": 0}, {}),
    "soft cap": ({"logits_soft_cap": 30.0, "right": 0}, {"sinks": jax.ShapeDtypeStruct((1, N), jnp.float32)}),
}


def arrays(dtype, H, V, **others):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, V)
    return Operands(*(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes), **others)


def check(plan):
    """The plan is accepted; its kernels' products aren't serialised, and nothing is spilled."""
    plan_check.check(plan)
    for launch in plan.launches:
        log = compile_kernel(launch.kernel).log
        assert not re.search(r"warning|C75\d\d|serializ", log, re.IGNORECASE), log
        assert max(map(int, re.findall(r"(\d+) bytes spill", log))) == 0, log


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_forward(options, head_dims):
    static, operands = OPTIONS[options]
    out_dtype = {"plain": "float32", "window": "float16"}.get(options, "bfloat16")
    spec = AttentionSpec(scale=0.1, out_dtype=out_dtype, **static)
    plan = forward_plan.plan_forward(spec, arrays(_float8.DTYPE, *head_dims, **operands), H100)
    check(plan)


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("padding", (0, 8, None))
def test_quantize(padding, head_dims):
    """Without padding the Hadamard matrix may be as large as a row; with None there is none."""
    incoherent = padding is not None
    signs = {"rotation_signs": jax.ShapeDtypeStruct((1, head_dims[0] - (padding or 0)), jnp.float32)}
    others = LENGTHS | (signs if incoherent else {})
    dtype = "bfloat16" if incoherent else "float16"
    given = arrays(dtype, *head_dims, **others)
    check_quantize(plan_quantize(given, H100))
    rows = QuantizeOperands(given.query, given.rotation_signs, INTEGERS)
    check_quantize(plan_quantize_rows(QuantizeSpec(N // K), rows, H100))
    check_quantize(plan_quantize_rows(QuantizeSpec(1), rows, H100))
    ungrouped = given.replace(query=jax.ShapeDtypeStruct((B, T, K, head_dims[0]), given.query.dtype))
    check_quantize(plan_quantize(ungrouped, H100))


def check_quantize(plan):
    check(plan)
    # Half as many warps on a multiprocessor had half of the rate.
    (launch,) = plan.launches
    (registers,) = map(int, re.findall(r"Used (\d+) registers", compile_kernel(launch.kernel).log))
    assert 65536 // (registers * launch.block) * launch.block >= 16 * 32


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_arrange(head_dims):
    scales = jax.ShapeDtypeStruct((B, K, 1), jnp.float32)
    given = arrays(_float8.DTYPE, *head_dims, query_descale=scales, key_descale=scales, value_descale=scales)
    plan = plan_arrange(given, H100)
    check(plan)
    (launch,) = plan.launches
    (registers,) = map(int, re.findall(r"Used (\d+) registers", compile_kernel(launch.kernel).log))
    assert 65536 // (registers * launch.block) * launch.block >= 16 * 32


def test_rows_per_descale():
    """The kernels' constant is the definition's."""
    header = (kernels_folder() / "common/float8.cuh").read_text()
    assert re.findall(r"rows_per_descale = (\d+);", header) == [str(_float8.ROWS_PER_DESCALE)]
