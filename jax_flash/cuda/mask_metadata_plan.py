"""Launch plans of the kernels that compute mask metadata before attention starts (mask_metadata.py)."""

import math

import jax

from jax_flash import _query_parts, _varlen_unpacking
from jax_flash._mask import window_of
from jax_flash._spec import AttentionSpec, Operands, sizes
from jax_flash.cuda import mask_metadata
from jax_flash.cuda.launch_plan import Arguments, Buffer, Kernel, Launch, LaunchPlan, Pointer, launch
from jax_flash.cuda.parameters import Struct, struct

_WARPS = 4
"""Warps of a CTA. Each has a group, a tile or a block of its own."""
_ORDER_THREADS = 256

Shapes = Operands[jax.ShapeDtypeStruct]

_SEQUENCES = struct(
    # The sequences of a call: those between offsets, or else each batch row with its lengths.
    "SequenceOperands",
    query_offsets="const int*",  # (B, count + 1), ascending; null if each batch row is a sequence
    key_offsets="const int*",
    query_lengths="const int*",  # (B); null: all of T or S
    key_lengths="const int*",
    shifts="const int*",  # (B, parts): the operand `diagonal`, clipped; null without
    count="int32_t",  # sequences in a batch row
    longest_query="int32_t",  # tokens of a varlen sequence beyond are padding
    longest_key="int32_t",
    queries="int32_t",  # T
    keys="int32_t",  # S
    left="int32_t",  # the window; as far as any key on sides that hide nothing
    right="int32_t",
    parts="int32_t",  # of the queries, with a shift each
)

_FORWARD = struct(
    "Parameters",
    sequences=_SEQUENCES,
    query_segments="const int*",  # (B, T); null without segments, as the next
    block_segments="const SegmentRange*",  # (B, blocks of keys)
    row_keys="Interval*",  # (B, rows of all groups)
    row_segments="int*",  # likewise; null without segments
    group_blocks="BlockRange*",  # (B, groups)
    diagonals="int*",  # (B, T): the key on each query's diagonal; null without ALiBi
    batch="int32_t",
    groups="int32_t",
    pack_gqa="int32_t",  # rows of a query
    block_keys="int32_t",
)

_BACKWARD = struct(
    "Parameters",
    sequences=_SEQUENCES,
    key_segments="const int*",  # (B, S); null without segments, as the next
    block_segments="const SegmentRange*",  # (B, blocks of queries)
    key_queries="Interval*",  # (B, keys of all tiles)
    group_blocks="Interval*",  # (B, groups of all tiles): the query blocks that are full
    tile_blocks="Interval*",  # (B, tiles): the query blocks that are visited
    diagonals="int*",  # (B, T): the key on each query's diagonal; null without ALiBi
    batch="int32_t",
    tiles="int32_t",
    groups="int32_t",  # of 64 keys, in a tile
    block_queries="int32_t",
)

_ORDER = struct(
    "Parameters",
    tile_blocks="Interval*",  # (B, tiles), updated in place
    visitors="int*",  # (B, tiles): scratch
    block_tiles="Interval*",  # (B, blocks), see mask_metadata.BACKWARD_PARAMETERS
    span_tiles="int*",  # (B, spans), likewise
    tiles="int32_t",
    blocks="int32_t",
    span="int32_t",
)

_SEGMENT_RANGES = struct(
    "Parameters",
    ids="const int*",  # (B, positions)
    block_segments="SegmentRange*",  # (B, blocks)
    batch="int32_t",
    positions="int32_t",
    blocks="int32_t",
    size="int32_t",
)


def plan_forward(
    spec: AttentionSpec, shapes: Shapes, arch: str, rows: int, keys: int, pack_gqa: int
) -> LaunchPlan:
    """Computes the mask metadata that the forward kernel reads.

    Args:
      rows: of a tile.
      keys: of a block.
      pack_gqa: query heads that share a tile, so rows of each query.
    """
    n = sizes(shapes)
    groups = math.ceil(n.T * pack_gqa / rows) * (rows // 64)
    operands, results = _buffers(shapes, mask_metadata.forward_buffers(shapes, groups))
    ranges, compute_ranges = _block_segments(shapes, arch, "key_value_segment_ids", keys)
    compute = _launch(
        "mask_metadata_forward",
        arch,
        n.B * groups,
        _FORWARD,
        {
            "sequences": _sequences(spec, shapes, operands),
            **mask_metadata.pointers((*operands, *ranges), "query_segments", "block_segments"),
            **mask_metadata.pointers(results, "row_keys", "row_segments", "group_blocks", "diagonals"),
            **{"batch": n.B, "groups": groups, "pack_gqa": pack_gqa, "block_keys": keys},
        },
    )
    return LaunchPlan(operands, (*results, *ranges), (*compute_ranges, compute))


def plan_backward(
    spec: AttentionSpec, shapes: Shapes, arch: str, queries: int, keys: int, span: int
) -> LaunchPlan:
    """Computes the mask metadata that the backward kernel reads.

    Args:
      queries: of a block.
      keys: of a tile.
      span: query blocks whose visiting tiles are counted together.
    """
    n = sizes(shapes)
    tiles, blocks = math.ceil(n.S / keys), math.ceil(n.T / queries)
    operands, results = _buffers(shapes, mask_metadata.backward_buffers(shapes, queries, keys, span))
    ranges, compute_ranges = _block_segments(shapes, arch, "query_segment_ids", queries)
    visitors = Buffer("visitors", (n.B, tiles), "int32")
    compute = _launch(
        "mask_metadata_backward",
        arch,
        n.B * tiles,
        _BACKWARD,
        {
            "sequences": _sequences(spec, shapes, operands),
            **mask_metadata.pointers((*operands, *ranges), "key_segments", "block_segments"),
            **mask_metadata.pointers(results, "key_queries", "group_blocks", "tile_blocks", "diagonals"),
            **{"batch": n.B, "tiles": tiles, "groups": keys // 64, "block_queries": queries},
        },
    )
    order = launch(
        kernel=_kernel("mask_metadata_order", arch, _ORDER),
        grid=(n.B, 1, 1),
        block=_ORDER_THREADS,
        overlap_previous=True,
        arguments={
            **mask_metadata.pointers(
                (*results, visitors), "tile_blocks", "visitors", "block_tiles", "span_tiles"
            ),
            **{"tiles": tiles, "blocks": blocks, "span": span},
        },
    )
    return LaunchPlan(operands, (*results, *ranges, visitors), (*compute_ranges, compute, order))


def _buffers(shapes: Shapes, wanted: tuple[Buffer, ...]) -> tuple[tuple[Buffer, ...], tuple[Buffer, ...]]:
    """The operands that mask metadata is computed from, and those of the `wanted` buffers to compute."""
    names = (*_varlen_unpacking.OFFSETS, *mask_metadata.LENGTHS, *mask_metadata.SEGMENTS)
    found = ((name, getattr(shapes, name)) for name in names)
    operands = tuple(Buffer(name, x.shape, "int32") for name, x in found if x is not None)
    if shapes.diagonal is not None:
        operands += (Buffer("diagonal", (sizes(shapes).B, shapes.diagonal.shape[1]), "int32"),)
    return operands, tuple(buffer for buffer in wanted if buffer.name not in names)


def _block_segments(
    shapes: Shapes, arch: str, name: str, size: int
) -> tuple[tuple[Buffer, ...], tuple[Launch, ...]]:
    """A buffer with the range of segment ids in each block, and the launch that fills it.

    A block has `size` positions of the operand `name`. Calls without segments have neither.
    """
    if not mask_metadata.has_segments(shapes):
        return (), ()
    B, positions = getattr(shapes, name).shape
    blocks = math.ceil(positions / size)
    found = Buffer("block_segments", (B, blocks, 2), "int32")
    arguments = {
        "ids": Pointer(name),
        "block_segments": Pointer(found.name),
        **{"batch": B, "positions": positions, "blocks": blocks, "size": size},
    }
    return (found,), (_launch("segment_ranges", arch, B * blocks, _SEGMENT_RANGES, arguments),)


def _sequences(spec: AttentionSpec, shapes: Shapes, operands: tuple[Buffer, ...]) -> Arguments:
    """Arguments of `_SEQUENCES`."""
    n = sizes(shapes)
    count, longest = 0, (0, 0)
    if shapes.query_offsets is not None:
        count = shapes.query_offsets.shape[1] - 1
        longest = spec.max_query_length, spec.max_key_value_length
    is_shifted = shapes.diagonal is not None
    window = window_of(spec, n, is_shifted=is_shifted)
    farthest = mask_metadata.MAX_SHIFT if is_shifted else 0
    left = n.S + farthest if window.left is None else window.left
    right = n.T + farthest if window.right is None else window.right
    lengths = "query_lengths", "key_lengths"
    return {
        **mask_metadata.pointers(operands, "query_offsets", "key_offsets", *lengths, "shifts"),
        "count": count,
        **{"longest_query": min(longest[0], n.T), "longest_key": min(longest[1], n.S)},
        **{"queries": n.T, "keys": n.S, "left": left, "right": right},
        "parts": _query_parts.count(shapes),
    }


def _launch(entry: str, arch: str, warps: int, parameters: Struct, arguments: Arguments) -> Launch:
    return launch(
        kernel=_kernel(entry, arch, parameters),
        grid=(math.ceil(warps / _WARPS), 1, 1),
        block=32 * _WARPS,
        overlap_previous=True,
        arguments=arguments,
    )


def _kernel(entry: str, arch: str, parameters: Struct) -> Kernel:
    return Kernel(f"common/{entry}.cu", entry, arch, (), parameters)
