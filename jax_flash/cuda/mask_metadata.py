"""Mask metadata: which keys each query sees, and which blocks each tile visits, computed at run time.

Lengths, offsets of varlen sequences, segment ids and a diagonal are data, so the mask of a call that has them
is not known when the call is planned. Together with the window, all but the ids let each query see an
interval of keys, and each key be seen by an interval of queries. The kernels mask by these intervals, and
compare segment ids besides. They skip blocks outside of a tile's `BlockRange`, and apply the mask only in
blocks that are not full.

Small kernels compute the metadata before attention starts (mask_metadata_plan.py). They run in a custom call
of their own, so that XLA runs it once for all layers with the same lengths.
"""

import math

import jax

from jax_flash import _varlen_unpacking
from jax_flash._spec import Operands, Sizes, sizes
from jax_flash.cuda.launch_plan import Buffer, Pointer
from jax_flash.cuda.parameters import struct

LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")
SEGMENTS = ("query_segment_ids", "key_value_segment_ids")

MAX_SHIFT = 2**29
"""A diagonal that lies farther away is moved to there, so that positions stay within 32 bits."""

_SEQUENCES = 4
"""Sequences that a batch row with offsets or segments is assumed to hold; the data alone has their number."""

Shapes = Operands[jax.ShapeDtypeStruct]

FORWARD_PARAMETERS = struct(
    "MaskMetadata",
    row_keys="const Interval*",  # (B, rows of all tiles): the keys that a row sees; end 0: none
    row_segments="const int*",  # likewise; null without segments, as `key_segments`
    group_blocks="const BlockRange*",  # (B, groups of 64 rows): the key blocks that a group visits
    key_segments="const int*",  # (B, S)
)
"""Mask metadata of the forward kernel."""

BACKWARD_PARAMETERS = struct(
    "MaskMetadata",
    key_queries="const Interval*",  # (B, keys of all tiles): the queries that see a key; end 0: none
    group_blocks="const Interval*",  # (B, groups of 64 keys): the query blocks that are full
    tile_blocks="const Interval*",  # (B, key tiles): the query blocks that a tile visits
    block_tiles="const Interval*",  # (B, query blocks): the key tiles that visit a block
    span_tiles="const int*",  # (B, spans): how many key tiles visit blocks of a span
    query_segments="const int*",  # (B, T); null without segments, as `key_segments`
    key_segments="const int*",  # (B, S)
)
"""Mask metadata of the backward kernel."""


def is_needed(shapes: Shapes) -> bool:
    """Whether the mask depends on arrays, which are known only at run time."""
    names = *LENGTHS, *SEGMENTS, *_varlen_unpacking.OFFSETS, "diagonal"
    return any(getattr(shapes, name) is not None for name in names)


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
    """The forward kernel's mask metadata; none if the mask is static. A batch row has `groups` of 64 rows."""
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
    """Mask metadata of the backward kernel; none if the mask is static.

    Args:
      queries: of a block.
      keys: of a tile.
      span: query blocks whose visiting tiles are counted together.
    """
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


_BUFFERS = {
    "query_offsets": _varlen_unpacking.OFFSETS[0],
    "key_offsets": _varlen_unpacking.OFFSETS[1],
    "query_lengths": LENGTHS[0],
    "key_lengths": LENGTHS[1],
    "query_segments": SEGMENTS[0],
    "key_segments": SEGMENTS[1],
    "shifts": "diagonal",
}
"""Names of buffers, where the fields that point to them have other names."""


def pointers(buffers: tuple[Buffer, ...], *fields: str) -> dict[str, Pointer | None]:
    """Pointers for `fields`; null for a field whose buffer is not among `buffers`."""
    present = {buffer.name for buffer in buffers}
    names = {field: _BUFFERS.get(field, field) for field in fields}
    return {field: Pointer(name) if name in present else None for field, name in names.items()}


def forward_arguments(buffers: tuple[Buffer, ...]) -> dict[str, Pointer | None]:
    """Arguments of `FORWARD_PARAMETERS`."""
    return pointers(buffers, *(name for name, _ in FORWARD_PARAMETERS.fields))


def backward_arguments(buffers: tuple[Buffer, ...]) -> dict[str, Pointer | None]:
    """Arguments of `BACKWARD_PARAMETERS`."""
    return pointers(buffers, *(name for name, _ in BACKWARD_PARAMETERS.fields))
