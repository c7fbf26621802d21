"""What the forward kernel takes for arrays of 8 bits: values transposed, and a scale for every block.

wgmma contracts 8-bit operands along the axis that is contiguous in memory. That of PV is the axis of keys, so
values are transposed before the launch. And their keys are permuted, so that accumulators of probabilities
become operands as they are: of each 16 keys a thread has 2t, 2t + 1, 2t + 8 and 2t + 9 as accumulators, and
4t to 4t + 3 as operands.
"""

import math

import jax
import jax.numpy as jnp

from jax_flash import _float8
from jax_flash._spec import Operands, sizes
from jax_flash.cuda.launch_plan import Buffer, TensorMap

Shapes = Operands[jax.ShapeDtypeStruct]

KEYS = _float8.ROWS_PER_SCALE
"""Of a block of the kernel, so that it has one scale."""

_ORDERED = 16
"""Keys that are permuted among themselves."""


def transposed_shape(shapes: Shapes) -> tuple[int, int, int, int]:
    n = sizes(shapes)
    return n.B, n.K, n.V, math.ceil(n.S / _ORDERED) * _ORDERED


def descale_shapes(shapes: Shapes) -> dict[str, tuple[int, int, int]]:
    n = sizes(shapes)
    queries, keys = (n.B, n.K, _float8.scales_of(n.T)), (n.B, n.K, _float8.scales_of(n.S))
    return {"query_descale": queries, "key_descale": keys, "value_descale": keys}


def value_map(buffer: Buffer, rows: int) -> TensorMap:
    """A tensor map over `(B, K, V, S)` whose box is the keys of a block, with `rows` rows for V."""
    B, K, V, S = buffer.shape
    return TensorMap(buffer.name, buffer.dtype, (S, V, K, B), (S, S * V, S * V * K), (KEYS, rows, 1, 1))


def arranged(operands: Operands) -> dict[str, jax.Array]:
    """The operands as the kernel takes them, by the names of its buffers.

    Of a key whose value isn't finite, the value becomes 0 and the key NaN. So it reaches the queries that see
    the key, whose logit is NaN, and no others. Descales become positive, which the kernel relies on.
    """
    arrays = operands.present()
    n = sizes(operands)
    for name, shape in descale_shapes(operands).items():
        given = arrays.get(name, jnp.ones((1, 1, 1), jnp.float32))
        arrays[name] = jnp.broadcast_to(given, shape)
    for name in ("query", "key", "value"):
        x, scales = arrays[name], arrays[f"{name}_descale"]
        of_rows = _float8.of_rows(scales, x.shape[1], x.shape[2])
        is_finite = jnp.isfinite(of_rows)
        x = jnp.where(of_rows < 0, -x, jnp.where(of_rows == 0, jnp.zeros_like(x), x))
        arrays[name] = jnp.where(is_finite, x, jnp.full_like(x, jnp.nan))
        usable = jnp.isfinite(scales) & (scales != 0)
        arrays[f"{name}_descale"] = jnp.where(usable, jnp.abs(scales), 1.0)
    value = arrays.pop("value")
    finite = jnp.isfinite(value)
    arrays["key"] = jnp.where(
        jnp.all(finite, -1, keepdims=True), arrays["key"], jnp.full_like(arrays["key"], jnp.nan)
    )
    value = jnp.where(finite, value, jnp.zeros_like(value))
    S = transposed_shape(operands)[-1]
    value = jnp.pad(value, ((0, 0), (0, S - n.S), (0, 0), (0, 0)))
    in_order = value.reshape(n.B, S // _ORDERED, 2, 4, 2, n.K, n.V)  # (…, upper half, t, one of a pair, …)
    in_order = in_order.transpose(0, 5, 6, 1, 3, 2, 4)
    arrays["transposed_value"] = in_order.reshape(n.B, n.K, n.V, S)
    return arrays
