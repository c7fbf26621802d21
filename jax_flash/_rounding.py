"""Conversions to fewer bits that round on every device."""

from typing import Any

import jax
import jax.numpy as jnp


def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in a floating `dtype` of fewer bits, or of as many.

    XLA may leave out a conversion to fewer bits and back, and on GPUs it does. So `x` is rounded before: to
    the significant bits of `dtype`, or, if it is small, to multiples of the least positive number.
    """
    to, of = jnp.finfo(dtype), jnp.finfo(x.dtype)
    if to.nmant < of.nmant:
        normal = jax.lax.reduce_precision(x, exponent_bits=of.nexp, mantissa_bits=to.nmant)
        if to.nexp == of.nexp:
            x = normal
        else:
            least = float(to.smallest_subnormal)
            small = jnp.abs(x) < float(to.smallest_normal)
            x = jnp.where(small, jnp.round(x * (1 / least)) * least, normal)
    return x.astype(dtype)
