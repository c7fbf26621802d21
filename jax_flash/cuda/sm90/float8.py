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

PANEL = 128
"""Keys of a panel of transposed values, which has so many bytes a row."""

MOST_COLUMNS = 192
"""Of values in blocks of 128 keys. With more, registers have no room for the scores of so many keys."""

_ORDERED = 16
"""Keys that are permuted among themselves."""


def keys_of_block(value_dim: int) -> int:
    """Keys of a block of the kernel. All have one scale."""
    return PANEL if value_dim <= MOST_COLUMNS else PANEL // 2


def transposed_shape(shapes: Shapes) -> tuple[int, int, int, int]:
    """`(B * K, blocks, rows, keys)`, each block a panel.

    A row has the keys of a block, of one column of V; or, of blocks of half as many keys, those of two
    columns that are V / 2 apart.
    """
    n = sizes(shapes)
    keys = keys_of_block(n.V)
    return n.B * n.K, math.ceil(n.S / keys), n.V * keys // PANEL, PANEL


def descale_shapes(shapes: Shapes) -> dict[str, tuple[int, int, int]]:
    n = sizes(shapes)
    queries, keys = (n.B, n.K, _float8.scales_of(n.T)), (n.B, n.K, _float8.scales_of(n.S))
    return {"query_descale": queries, "key_descale": keys, "value_descale": keys}


def value_map(buffer: Buffer) -> TensorMap:
    """A tensor map over transposed values whose box is a block."""
    heads, blocks, rows, keys = buffer.shape
    strides = (keys, rows * keys, blocks * rows * keys)
    return TensorMap(buffer.name, buffer.dtype, (keys, rows, blocks, heads), strides, (keys, rows, 1, 1))


def arranged(operands: Operands) -> dict[str, jax.Array]:
    """The operands as the kernel takes them, by the names of its buffers.

    Of a key whose value isn't finite, the value becomes 0 and the key NaN. So it reaches the queries that see
    the key, whose logit is NaN, and no others. Descales become positive, which the kernel relies on.
    """
    arrays = operands.present()
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
    arrays["transposed_value"] = _transposed(value, operands)
    return arrays


def _transposed(value: jax.Array, operands: Operands) -> jax.Array:
    n, shape, keys = sizes(operands), transposed_shape(operands), keys_of_block(sizes(operands).V)
    parts = PANEL // keys
    value = jnp.pad(value, ((0, 0), (0, shape[1] * keys - n.S), (0, 0), (0, 0)))
    # Of each 16 keys: upper half, t, one of a pair.
    value = value.reshape(n.B, shape[1], keys // _ORDERED, 2, 4, 2, n.K, parts, n.V // parts)
    return value.transpose(0, 6, 1, 8, 7, 2, 4, 3, 5).reshape(shape)
