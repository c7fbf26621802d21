"""Which keys each query sees, as data: where sequences are shorter than the arrays, packed, or have segments.

The window, lengths and packed sequences give each query an interval of keys, and each key one of queries.
Kernels mask by these, and pass over the blocks that summaries of them name; segments are compared besides
(mask_metadata.cuh of each pass). All of it is found before attention starts, by small kernels in a custom
call of their own (mask_metadata_plan.py), so that XLA runs it once for all layers with the same offsets.
"""

import math

import jax

from jax_flash import _packing
from jax_flash._spec import Operands, Sizes, sizes
from jax_flash.cuda.launch_plan import Buffer, Parameter, Pointer, Scalar

LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")
SEGMENTS = ("query_segment_ids", "key_value_segment_ids")

_SEQUENCES = 4
"""Sequences that a batch row with offsets or segments is assumed to hold; the data alone has their number."""

Shapes = Operands[jax.ShapeDtypeStruct]


def is_needed(shapes: Shapes) -> bool:
    """Whether the mask depends on lengths, segments or offsets, which are known only at run time."""
    return any(getattr(shapes, name) is not None for name in (*LENGTHS, *SEGMENTS, *_packing.OFFSETS))


def has_segments(shapes: Shapes) -> bool:
    return shapes.query_segment_ids is not None


def assumed_sequences(shapes: Shapes) -> int:
    """How many sequences schedulers assume in a batch row; 0 if the mask is static."""
    if has_segments(shapes) or shapes.query_offsets is not None:
        return _SEQUENCES
    return int(is_needed(shapes))


def defines(shapes: Shapes) -> tuple[tuple[str, int], ...]:
    return (("MASK_METADATA", int(is_needed(shapes))), ("SEGMENTS", int(has_segments(shapes))))


NO_DEFINES = (("MASK_METADATA", 0), ("SEGMENTS", 0))


def forward_buffers(shapes: Shapes, groups: int) -> tuple[Buffer, ...]:
    """What the forward kernel reads, of batch rows of so many `groups` of 64 rows."""
    n = sizes(shapes)
    if not is_needed(shapes):
        return ()
    row_segments = Buffer("row_segments", (n.B, groups * 64), "int32")
    return (
        Buffer("row_keys", (n.B, groups * 64, 2), "int32"),
        *((row_segments, _segments(n)[1]) if has_segments(shapes) else ()),
        Buffer("group_blocks", (n.B, groups, 4), "int32"),
        *_diagonals(shapes, n),
    )


def backward_buffers(shapes: Shapes, queries: int, keys: int, span: int) -> tuple[Buffer, ...]:
    """What the backward kernel reads, of tiles of `keys` and blocks of `queries`. `span` of those are counted
    together as done."""
    n = sizes(shapes)
    if not is_needed(shapes):
        return ()
    blocks, tiles = math.ceil(n.T / queries), math.ceil(n.S / keys)
    return (
        Buffer("key_queries", (n.B, tiles * keys, 2), "int32"),
        Buffer("group_blocks", (n.B, tiles * keys // 64, 2), "int32"),
        Buffer("tile_blocks", (n.B, tiles, 2), "int32"),
        Buffer("block_tiles", (n.B, blocks, 2), "int32"),
        Buffer("span_tiles", (n.B, math.ceil(blocks / span)), "int32"),
        *(_segments(n) if has_segments(shapes) else ()),
        *_diagonals(shapes, n),
    )


def _segments(n: Sizes) -> tuple[Buffer, ...]:
    return tuple(Buffer(name, (n.B, size), "int32") for name, size in zip(SEGMENTS, (n.T, n.S), strict=True))


def _diagonals(shapes: Shapes, n: Sizes) -> tuple[Buffer, ...]:
    return () if shapes.alibi_slopes is None else (Buffer("diagonals", (n.B, n.T), "int32"),)


def parameters(buffers: tuple[Buffer, ...], *names: str) -> tuple[Parameter, ...]:
    """Pointers to those of `buffers` that are there, null for others."""
    present = {buffer.name for buffer in buffers}
    return tuple(Pointer(name) if name in present else Scalar("int64", 0) for name in names)
