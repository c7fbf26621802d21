"""Conversions to fewer bits, as ml_dtypes makes them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_flash._rounding import round_to

DTYPES = (ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, np.float16)


def numbers(dtype):
    """Of all magnitudes that `dtype` has, ties between two of its numbers, and small ones."""
    rng = np.random.default_rng(0)
    info, bits = ml_dtypes.finfo(dtype), 8 * np.dtype(dtype).itemsize
    low, high = np.log2(float(info.smallest_subnormal)) - 2, np.log2(float(info.max)) - 1e-3
    drawn = 2.0 ** rng.uniform(max(low, -126), min(high, 126), 200_000) * rng.choice([-1, 1], 200_000)
    every = rng.integers(0, 2**bits, 50_000).astype(f"uint{bits}").view(dtype).astype(np.float64)
    every = every[np.isfinite(every) & (np.abs(every) < float(info.max) / 2) & (np.abs(every) > 2.0**-125)]
    ties = every * (1 + float(info.eps) / 2)
    small = (np.arange(-40, 41) / 2) * float(info.smallest_subnormal) * (info.nexp != 8)
    return np.concatenate([drawn, every, ties, small, [0.0, -0.0, np.nan]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("of", (np.float32, ml_dtypes.bfloat16))
def test_is_the_nearest(of, dtype):
    """Of a tie the even one."""
    with np.errstate(invalid="ignore", over="ignore"):
        x = numbers(dtype).astype(of)
        expected = x.astype(np.float64).astype(dtype)
    found = np.asarray(jax.jit(round_to, static_argnums=1)(x, dtype))
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
    assert found.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_a_step_of_its_own(dtype):
    """A compiler that leaves out a conversion and its inverse finds rounded numbers all the same."""
    text = jax.jit(lambda x: round_to(x, dtype).astype(jnp.float32)).lower(np.ones(3, np.float32)).as_text()
    assert "reduce_precision" in text


def test_of_as_few_bits_is_a_conversion():
    x = jnp.arange(5, dtype=jnp.bfloat16)
    assert round_to(x, jnp.bfloat16) is x or "reduce_precision" not in str(
        jax.make_jaxpr(lambda x: round_to(x, x.dtype))(x)
    )
