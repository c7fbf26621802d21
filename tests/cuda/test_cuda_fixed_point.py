"""Sums of a broadcast bias's gradient as integers: their range, and the way back to floats."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash._device import H100, assume
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.cuda import fixed_point
from jax_flash.cuda.sm90.backward_plan import plan_backward

SHAPES = ["".join(axes) for axes in itertools.product("B1", "N1", "T1", "S1") if axes != ("B", "N", "T", "S")]
SIZES = {"B": 2, "N": 3, "T": 5, "S": 7, "1": 1}


def words(numbers):
    """64-bit integers as the kernel leaves them."""
    return jnp.asarray(np.asarray(numbers, np.int64).view(np.uint32).reshape(-1, 2))


def call(form="11TS", d_out=1.0, d_lse=None, value=1.0, lse=0.0, **sizes):
    """Operands, lse, and cotangents; all of an array's elements are the same."""
    sizes = SIZES | sizes
    B, N, T, S = (sizes[axis] for axis in "BNTS")

    def full(*shape, of=0.0, dtype=jnp.float32):
        return jnp.full(shape, of, dtype)

    operands = Operands(
        full(B, T, N, 16, dtype=jnp.bfloat16),
        full(B, S, N, 16, dtype=jnp.bfloat16),
        full(B, S, N, 16, of=value, dtype=jnp.bfloat16),
        bias=full(*(sizes[axis] for axis in form)),
    )
    d_out = full(B, T, N, 16, of=d_out, dtype=jnp.bfloat16)
    return operands, full(B, N, T, of=lse), d_out, None if d_lse is None else full(B, N, T, of=d_lse)


def factor(**arguments):
    (result,) = fixed_point.factor(AttentionSpec(0.1, deterministic=True), *call(**arguments))
    return float(result)


@pytest.mark.parametrize("power", (-60, -40, 0, 20, 126))
def test_back_to_floats(power):
    numbers = [0, 1, -1, 3, -3, 2**24 + 1, -(2**31), 2**32 - 1, -(2**32), 2**32 + 5, -(2**45) - 7, 2**62]
    numbers += [-(2**62), -(2**63) + 1]
    got = fixed_point.to_float32(words(numbers), jnp.full((1,), 2.0**power, jnp.float32))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.array(numbers, np.float64) / 2.0**power, rtol=2.0**-23)


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("magnitude", (2.0**-60, 1e-3, 1.0, 3e4, 2.0**50))
def test_sums_use_the_integers_range_and_no_more(form, magnitude):
    for data in ({"d_out": magnitude, "value": -7.0}, {"d_out": 0.5, "d_lse": magnitude}):
        rows = math.prod(SIZES[axis] for axis, there in zip("BNT", form, strict=False) if there == "1")
        largest = 2 * 16 * data["d_out"] * abs(data.get("value", 1.0)) + data.get("d_lse", 0.0)
        got = factor(form=form, **data)
        assert math.log2(got) == round(math.log2(got))
        assert 2.0**56 < got * rows * largest <= 2.0**62


def test_data_without_a_range():
    assert factor(d_out=0.0) == 2.0**126
    assert factor(d_out=2.0**-120, value=2.0**-120) == 2.0**126
    assert factor(d_out=2.0**120, value=2.0**120) == 2.0**-100
    assert factor(lse=-np.inf) > 0
    for data in ({"d_out": np.nan}, {"d_out": np.inf}, {"value": np.nan}, {"lse": np.nan}, {"d_lse": np.inf}):
        assert math.isnan(factor(**data)), data
        assert np.isnan(fixed_point.to_float32(words([5]), jnp.array([factor(**data)]))).all()


@pytest.mark.parametrize("form", ["BNTS", *SHAPES])
def test_only_where_the_order_would_matter(form):
    def backward(deterministic):
        operands = jax.eval_shape(lambda: call(form)[0])
        return plan_backward(AttentionSpec(0.1, deterministic=deterministic), operands, H100)

    shape = tuple(SIZES[axis] for axis in form)
    for deterministic in (False, True):
        plan = backward(deterministic)
        d_bias = next(b for b in plan.results if b.name == "d_bias")
        is_integer = deterministic and form != "BNTS"
        assert (d_bias.shape, d_bias.dtype) == (((*shape, 2), "uint32") if is_integer else (shape, "float32"))
        assert ("bias_factor" in [b.name for b in plan.operands]) == is_integer
        main = next(launch for launch in plan.launches if launch.kernel.entry == "backward")
        assert dict(main.kernel.defines)["BIAS_SUM"] == ("uint64_t" if is_integer else "float")
    whole, broadcast = backward(False).launches, backward(True).launches
    assert whole[0].kernel == broadcast[0].kernel  # the kernel ahead serves both


def test_from_the_public_function():
    x = jax.ShapeDtypeStruct((2, 64, 2, 64), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((2, 1, 64), jnp.float16)

    def loss(x, bias):
        out = jax_flash.flash_attention(x, x, x, bias=bias, deterministic=True, implementation="cuda")
        return out.astype(jnp.float32).sum()

    with assume(H100):
        d_bias = jax.eval_shape(jax.grad(loss, 1), x, bias)
    assert (d_bias.shape, d_bias.dtype) == (bias.shape, bias.dtype)
