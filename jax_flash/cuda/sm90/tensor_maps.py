"""How tiles lie in Hopper's shared memory, and the TMA tensor maps that copy them. Both passes use these."""

import math

from jax_flash._spec import Sizes
from jax_flash.cuda.launch_plan import ELEMENT_BYTES, Buffer, TensorMap

MAX_SHARED_BYTES = 227 * 1024
"""Dynamic shared memory that a CTA may have."""

PANEL_BYTES = 128
"""A tile lies in shared memory as panels. A panel holds this many bytes of each row: the swizzle's width."""

PANEL = 64
"""Columns of a panel of 16-bit elements."""


def panel_columns(element_bytes: int) -> int:
    """Columns of a panel, for elements of this size."""
    return PANEL_BYTES // element_bytes


def tile_row_bytes(columns: int, element_bytes: int) -> int:
    """Bytes that one row of a tile takes in shared memory, which holds whole panels."""
    return math.ceil(columns * element_bytes / PANEL_BYTES) * PANEL_BYTES


def padded_head_dim(head_dim: int, multiple: int = 16) -> int:
    """The head dim that kernels are compiled for. TMA fills the columns beyond `head_dim` with zeros."""
    return math.ceil(head_dim / multiple) * multiple


def padded_head_dims(n: Sizes, element_bytes: int = 2) -> tuple[int, int]:
    """The padded head dim of queries and keys, of which wgmma contracts 32 bytes a step; that of values."""
    return padded_head_dim(n.H, 32 // element_bytes), padded_head_dim(n.V)


def rows_map(buffer: Buffer, rows: int, pack_gqa: int = 1) -> TensorMap:
    """A tensor map over `(B, T, N, H)` whose box is one panel of a tile with `rows` rows.

    With PackGQA the box holds `rows / pack_gqa` tokens of `pack_gqa` heads. The heads of a token are
    neighbours in the tile.
    """
    B, T, N, H = buffer.shape
    element = ELEMENT_BYTES[buffer.dtype]
    strides = (H * element, N * H * element, T * N * H * element)
    box = (panel_columns(element), pack_gqa, rows // pack_gqa, 1)
    return TensorMap(buffer.name, buffer.dtype, (H, N, T, B), strides, box)


def cache_map(buffer: Buffer, box: int) -> TensorMap:
    """A tensor map over a cache of keys or values, `([L,] C or P, S or page, K, H)`.

    Its box is a panel of one head of `box` keys.
    """
    *layers, C, S, K, H = buffer.shape
    element = ELEMENT_BYTES[buffer.dtype]
    strides = (H * element, K * H * element, S * K * H * element, C * S * K * H * element)
    sizes = (H, K, S, C, math.prod(layers))
    return TensorMap(buffer.name, buffer.dtype, sizes, strides, (panel_columns(element), 1, box, 1, 1))
