"""The backward pass's scratch memory by its launch plan: gradients in float32, two rows of lse and delta."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

import jax_flash
from jax_flash import _device
from jax_flash._device import H100
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.cuda.launch_plan import ELEMENT_BYTES, Pointer
from jax_flash.cuda.sm90.backward_plan import plan_backward


def shapes(B=2, T=1000, S=777, N=8, K=2, H=128):
    query = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((B, S, K, H), jnp.bfloat16)
    return Operands(query, key, key)


def scratch(spec, **sizes):
    """All results behind the three gradients."""
    return plan_backward(spec, shapes(**sizes), H100).results[3:]


@pytest.mark.parametrize("H", (8, 64, 80, 128, 192, 256))
@pytest.mark.parametrize("T,S", ((1, 1), (1000, 777), (4096, 4096), (131072, 131072)))
@pytest.mark.parametrize("right", (None, 0))
@pytest.mark.parametrize("K", (1, 2, 8))
def test_is_gradients_in_float32_and_two_rows_of_lse_and_delta(K, T, S, H, right):
    spec = AttentionSpec(0.1, right=right)
    taken = sum(buffer.bytes for buffer in scratch(spec, T=T, S=S, K=K, H=H))
    keys = 2 * K * math.ceil(S / 128) * 128 * 2 * math.ceil(H / 16) * 16 * 4  # dK and dV
    flags = 2 * 8 * math.ceil(T / 64) * 4 if right == 0 else 0  # of blocks of queries, where pairs are hidden
    assert taken <= most(2, 8, T, H) + flags + keys


def most(B, N, T, H):
    """dQ in float32 and two rows of lse and delta, in whole blocks of queries; and counters of 4 bytes."""
    rows = B * N * math.ceil(T / 128) * 128
    counters = B * N * (math.ceil(T / 256) + 1) + 2  # for each four blocks, each head, and the call
    return rows * math.ceil(H / 16) * 16 * 4 + 2 * rows * 4 + 4 * counters


@pytest.mark.parametrize("sizes", ({"S": 77_777}, {"S": 77_777, "K": 1}, {"B": 64}, {"B": 64, "K": 1}))
def test_does_not_grow_with_keys_or_with_query_heads_for_each_key_head(sizes):
    """Where tiles are enough for all multiprocessors."""
    taken = sum(buffer.bytes for buffer in scratch(AttentionSpec(0.1), **sizes))
    assert taken <= most(sizes.get("B", 2), 8, 1000, 128)


@pytest.mark.parametrize("right", (None, 0))
def test_of_many_heads_only_some_have_their_dq_summed_up_at_a_time(right):
    taken = sum(b.bytes for b in scratch(AttentionSpec(0.1, right=right), B=8, T=4096, S=4096, N=16, K=16))
    assert taken < most(8, 16, 4096, 128) / 4


def test_the_program_holds_nothing_larger_than_dq_in_float32():
    """Not even under grouped heads, where a copy of keys for each query head would be larger."""
    query, key, value = (
        jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes(T=256, S=4096).present().values()
    )

    def attend(*inputs):
        return jax_flash.flash_attention(*inputs, implementation="cuda")

    with _device.assume(H100):
        vjp = jax.eval_shape(lambda *inputs: jax.vjp(attend, *inputs)[1], query, key, value)
        traced = jax.jit(lambda vjp, d_out: vjp(d_out)).trace(vjp, query)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    names = {"bf16": "bfloat16", "f32": "float32", "i32": "int32", "ui8": "uint8"}
    tensors = re.findall(r"tensor<((?:\d+x)*)([a-z]+\d+)>", text)
    sizes = {
        math.prod(int(n) for n in axes.split("x")[:-1]) * ELEMENT_BYTES[names[dtype]]
        for axes, dtype in tensors
        if dtype in names
    }
    inputs = {2 * math.prod(x.shape) for x in (query, key)}
    assert max(sizes - inputs) == 2 * 256 * 8 * 128 * 4


def test_gradients_through_lse_cost_nothing_where_they_are_not_used():
    """The plan without them has no operand for them, and the same kernels, launches and scratch."""
    without = plan_backward(AttentionSpec(0.1), shapes(), H100)
    with_lse = plan_backward(AttentionSpec(0.1, return_residual=True), shapes(), H100)
    assert not any("d_lse" in buffer.name for buffer in (*without.operands, *without.results))
    assert without.results == with_lse.results
    assert without.operands == with_lse.operands[:-1]
    for launch, other in zip(without.launches, with_lse.launches, strict=True):
        assert (launch.kernel, launch.grid, launch.shared_bytes) == (
            other.kernel,
            other.grid,
            other.shared_bytes,
        )
    preprocess, *rest = without.launches
    assert rest == list(
        with_lse.launches[1:]
    )  # only the first kernel reads d_lse, if its address is not null
    assert Pointer("d_lse") not in preprocess.arguments
