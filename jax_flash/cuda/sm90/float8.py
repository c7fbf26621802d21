"""What the forward kernel takes for arrays of 8 bits: values transposed, a positive scale for every block.

wgmma contracts 8-bit operands along the axis that is contiguous in memory. That of PV is the axis of keys, so
values are transposed before the launch. And their keys are permuted, so that accumulators of probabilities
become operands as they are: of each 16 keys a thread has 2t, 2t + 1, 2t + 8 and 2t + 9 as accumulators, and
4t to 4t + 3 as operands.

Of a key whose value isn't finite, the value is 0 and the key NaN. So it reaches the queries that see the key,
whose logit is NaN, and no others.
"""

import math

import jax

from jax_flash import _float8
from jax_flash._spec import Operands, sizes
from jax_flash.cuda.launch_plan import Buffer, TensorMap

Shapes = Operands[jax.ShapeDtypeStruct]

PANEL = 128
"""Keys of a panel of transposed values, which has so many bytes a row."""

MOST_COLUMNS = 192
"""Of values in blocks of 128 keys. With more, registers have no room for the scores of so many keys."""


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
