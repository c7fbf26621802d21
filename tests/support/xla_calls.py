"""Calls of the portable implementation, by itself, beside the definition."""

import functools

import jax
import numpy as np

from jax_flash import _reference, xla
from jax_flash._spec import Operands


def normal(draw, *shape):
    return draw.standard_normal(shape).astype(np.float32)


def qkv(draw, B=2, T=70, S=70, N=4, K=2, H=16, V=8):
    return Operands(normal(draw, B, T, N, H), normal(draw, B, S, K, H), normal(draw, B, S, K, V))


def cotangents(draw, operands):
    B, T, N, _ = operands.query.shape
    return normal(draw, B, T, N, operands.value.shape[3]), normal(draw, B, N, T)


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def run(spec, operands, d_out, d_lse):
    out, lse = xla.forward(spec, operands)
    return out, lse, xla.backward(spec, operands, out, lse, d_out, d_lse)


def check(spec, operands, d_out, d_lse, tolerance=1e-5, dtype=np.float32):
    """Run it afresh (blocks may have been patched) and compare everything with the oracle."""
    run.clear_cache()
    got = run(spec, operands, d_out, d_lse)
    expected = _reference.reference_with_gradients(spec, operands, d_out, d_lse)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for result, exact in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        result = np.asarray(result)
        assert result.shape == exact.shape
        assert result.dtype == dtype
        np.testing.assert_array_equal(np.isneginf(result), np.isneginf(exact))
        result, exact = (np.where(np.isneginf(x), 0, x) for x in (result, exact))
        assert np.linalg.norm(result - exact) <= tolerance * (np.linalg.norm(exact) + 1e-3)
