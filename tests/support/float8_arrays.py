"""What the forward kernel takes for arrays of 8 bits (jax_flash/cuda/sm90/float8.py), by plain JAX."""

import jax
import jax.numpy as jnp

from jax_flash import _float8
from jax_flash._spec import Operands, sizes
from jax_flash.cuda.sm90 import float8

_ORDERED = 16
"""Keys that are permuted among themselves."""


def arranged(operands: Operands) -> dict[str, jax.Array]:
    """The operands of a call in e4m3 as the forward kernel takes them, by the names of its buffers."""
    arrays = operands.present()
    for name, shape in float8.descale_shapes(operands).items():
        given = arrays.get(name, jnp.ones((1, 1, 1), jnp.float32))
        arrays[name] = jnp.broadcast_to(given, shape)
    for name in ("query", "key", "value"):
        x, scales = arrays[name], arrays[f"{name}_descale"]
        of_rows = _float8.of_rows(scales, x.shape[1], x.shape[2])
        is_finite = jnp.isfinite(of_rows)
        x = jnp.where(of_rows < 0, -x, jnp.where((of_rows == 0) & jnp.isfinite(x), jnp.zeros_like(x), x))
        arrays[name] = jnp.where(is_finite, x, jnp.full_like(x, jnp.nan))
        usable = jnp.isfinite(scales) & (scales != 0)
        arrays[f"{name}_descale"] = jnp.where(usable, jnp.abs(scales), 1.0)
    value = arrays.pop("value")
    finite = jnp.isfinite(value)
    arrays["key"] = jnp.where(
        jnp.all(finite, -1, keepdims=True), arrays["key"], jnp.full_like(arrays["key"], jnp.nan)
    )
    value = jnp.where(finite, value, jnp.zeros_like(value))
    arrays["transposed_value"] = _transposed(value, operands)
    return arrays


def _transposed(value: jax.Array, operands: Operands) -> jax.Array:
    n, shape, keys = (
        sizes(operands),
        float8.transposed_shape(operands),
        float8.keys_of_block(sizes(operands).V),
    )
    parts = float8.PANEL // keys
    value = jnp.pad(value, ((0, 0), (0, shape[1] * keys - n.S), (0, 0), (0, 0)))
    # Of each 16 keys: upper half, t, one of a pair.
    value = value.reshape(n.B, shape[1], keys // _ORDERED, 2, 4, 2, n.K, parts, n.V // parts)
    return value.transpose(0, 6, 1, 8, 7, 2, 4, 3, 5).reshape(shape)
