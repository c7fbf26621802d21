"""What the forward kernel takes for arrays of 8 bits: values transposed, a positive descale for every block.

wgmma contracts 8-bit operands along the axis that is contiguous in memory. That of PV is the axis of keys, so
values are transposed before the launch. And their keys are permuted, so that accumulators of probabilities
become operands as they are: of each 16 keys a thread has 2t, 2t + 1, 2t + 8 and 2t + 9 as accumulators, and
4t to 4t + 3 as operands.

Of a key whose value isn't finite, the value is 0 and the key NaN. So it reaches the queries that see the key,
whose logit is NaN, and no others.
"""

import math
from collections.abc import Mapping

import jax

from jax_flash import _float8
from jax_flash._spec import Operands, sizes
from jax_flash.cuda.launch_plan import Buffer, TensorMap

Shapes = Operands[jax.ShapeDtypeStruct]

PANEL = 128
"""Keys of a panel of transposed values, which has so many bytes a row."""

MOST_COLUMNS = 192
"""Of values in blocks of 128 keys. With more, registers have no room for the scores of so many keys."""


RESULT_FIELDS = {
    "query_out": "unsigned char*",  # as query
    "key_out": "unsigned char*",  # as key
    "value_out": "unsigned char*",  # see `transposed_shape`
    "query_descale": "float*",  # (B, K, blocks of T)
    "key_descale": "float*",  # (B, K, blocks of S), as the next
    "value_descale": "float*",
}
"""What the kernels write that make these arrays, as fields of their parameters."""

SIZE_FIELDS = {
    "queries": "int32_t",  # T
    "keys": "int32_t",  # S
    "query_heads": "int32_t",  # N
    "key_heads": "int32_t",  # K
    "batch": "int32_t",  # B
}
"""The sizes that they take."""


def grid(arguments: Mapping[str, int]) -> tuple[int, int, int]:
    """Their CTAs, of `SIZE_FIELDS`: one for each block of queries, and of keys, of each key head."""
    blocks = _float8.descales_of(arguments["queries"]) + _float8.descales_of(arguments["keys"])
    return arguments["batch"] * arguments["key_heads"] * blocks, 1, 1


def size_arguments(shapes: Shapes) -> dict[str, int]:
    """The arguments for `SIZE_FIELDS` of a call's arrays."""
    n = sizes(shapes)
    return {"queries": n.T, "keys": n.S, "query_heads": n.N, "key_heads": n.K, "batch": n.B}


def keys_of_block(value_dim: int) -> int:
    """Keys of a block of the kernel. All have one descale."""
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
    queries, keys = (n.B, n.K, _float8.descales_of(n.T)), (n.B, n.K, _float8.descales_of(n.S))
    return {"query_descale": queries, "key_descale": keys, "value_descale": keys}


def value_map(buffer: Buffer) -> TensorMap:
    """A tensor map over transposed values whose box is a block."""
    heads, blocks, rows, keys = buffer.shape
    strides = (keys, rows * keys, blocks * rows * keys)
    return TensorMap(buffer.name, buffer.dtype, (keys, rows, blocks, heads), strides, (keys, rows, 1, 1))
