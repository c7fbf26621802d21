"""What every backward pass computes around its kernels or loops.

With the probability `p = exp(x - lse)` of a logit x, the gradient of that logit is `p * (d_out · v - delta)`,
where `delta = rowsum(d_out * out) - d_lse` holds all that reaches it through the sum over its row and through
the residual. The backward kernels take lse and delta, and compute probabilities again.

lse is taken as +inf for a row that sees no key, where it is -inf: then `exp(x - lse)` is 0 for every finite
x, and for x = -inf too, without a branch. delta is 0 there, whatever the row's cotangents are.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def lse_and_delta(
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    dtype: jnp.dtype = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """lse and delta as backward passes take them, `(B, N, T)` in `dtype`; lse is natural.

    Args:
      out: `(B, T, N, V)`.
      lse: `(B, N, T)`, -inf for a row that sees no key.
      d_out: `(B, T, N, V)`.
      d_lse: `(B, N, T)`, or None for zeros.
    """
    sees_nothing = jnp.isneginf(lse)
    delta = jnp.sum(out.astype(dtype) * d_out.astype(dtype), axis=-1).swapaxes(1, 2)
    if d_lse is not None:
        delta = delta - d_lse.astype(dtype)
    return jnp.where(sees_nothing, jnp.inf, lse.astype(dtype)), jnp.where(sees_nothing, 0, delta)


def of_sinks(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """The gradient of the sinks `(B|1, N)`, from what `lse_and_delta` returns.

    A sink's probability is `exp(sink - lse)`. It has no value, so the gradient of its logit is that times
    `-delta`.
    """
    p = jnp.exp(sinks.astype(lse.dtype)[:, :, None] - lse)
    return sum_to(-jnp.sum(p * delta, axis=2), sinks.shape).astype(sinks.dtype)


def sum_to(gradient: jax.Array, shape: Sequence[int]) -> jax.Array:
    """`gradient` summed over the axes along which its operand, of this `shape`, has one element for all."""
    axes = [axis for axis, (size, own) in enumerate(zip(gradient.shape, shape, strict=True)) if size != own]
    assert all(shape[axis] == 1 for axis in axes), (gradient.shape, shape)
    return jnp.sum(gradient, axis=axes, keepdims=True) if axes else gradient
