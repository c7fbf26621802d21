"""The gradient of a broadcast bias, bitwise the same from run to run.

Many CTAs add to each of its elements, in no certain order, and sums of floats depend on the order. Those of
integers don't. So the backward kernel multiplies terms by a power of two that is found here, from the data,
and adds them up as 64-bit integers: so large that no sum overflows, and that what is rounded off is far
below float32's rounding of the largest terms.
"""

import math

import jax
import jax.numpy as jnp

from jax_flash._spec import AttentionSpec, Operands, sizes

_EXPONENTS = (-100, 126)  # of which float32 has the powers and their inverses


def adds_bias_up(spec: AttentionSpec, shapes: Operands) -> bool:
    """Whether the call's bias gradient is a sum of integers."""
    if shapes.bias is None or not spec.deterministic:
        return False
    n = sizes(shapes)
    return shapes.bias.shape != (n.B, n.N, n.T, n.S)


def factor(
    spec: AttentionSpec, operands: Operands, lse: jax.Array, d_out: jax.Array, d_lse: jax.Array | None
) -> jax.Array:
    """The number that terms are multiplied by, `(1,)` float32; NaN if some of the data is not finite.

    A term is dS = P∘(dP − delta). Each row of P adds up to 1 at most. So a sum is no larger than the
    sum, over its rows, of the largest |dP − delta|. dP is a product of rows of dO and V; delta is a
    product of rows of dO and out, which is a mean of rows of V, less d_lse. With dropout, terms are yet
    to be multiplied by its factor (`score_mod.gradients`): then out is a mean of the rows of V that are
    kept, and delta is no larger.
    """
    n = sizes(operands)
    bias = operands.present()["bias"]
    shared = [size for size, axis in zip((n.B, n.N, n.T), bias.shape, strict=False) if axis == 1]
    # In powers of two, as products may be beyond float32.
    largest_products = _log2_of_largest(d_out) + _log2_of_largest(operands.value)
    largest = largest_products + math.log2(2 * n.V)
    if d_lse is not None:
        largest = jnp.maximum(largest, _log2_of_largest(d_lse)) + 1
    # One bit is the sign, and two more are spared: P is rounded, and adds up to 1 only nearly.
    spared = 3 + math.ceil(math.log2(math.prod(shared)))
    exponent = jnp.clip(jnp.floor(64 - spared - largest), *_EXPONENTS)
    finite = (largest < jnp.inf) & (jnp.max(lse, initial=-jnp.inf) < jnp.inf)
    return jnp.where(finite, _power_of_two(exponent), jnp.nan).reshape(1)


def to_float32(sums: jax.Array, factor: jax.Array) -> jax.Array:
    """Sums of terms from the words `(..., 2)` of theirs times `factor`, the low one first."""
    low, high = sums[..., 0], sums[..., 1]
    negative = high >> 31 == 1
    # Of the magnitude, as both words of a small negative sum are large, and would be rounded.
    low, high = jnp.where(negative, ~low + 1, low), jnp.where(negative, ~high + (low == 0), high)
    magnitude = high.astype(jnp.float32) * 2.0**32 + low.astype(jnp.float32)
    return jnp.where(negative, -magnitude, magnitude) / factor


def _log2_of_largest(x: jax.Array) -> jax.Array:
    return jnp.log2(jnp.max(jnp.abs(x), initial=0).astype(jnp.float32))


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Exactly, as `exp2` need not be."""
    return jax.lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)
