"""Launch plans of the kernels that find bounds before attention starts, see mask_metadata.py."""

import math

import jax

from jax_flash import _packing
from jax_flash._spec import AttentionSpec, Operands, sizes
from jax_flash.cuda import mask_metadata
from jax_flash.cuda.launch_plan import Buffer, Kernel, Launch, LaunchPlan, Parameter, Pointer, Scalar

_WARPS = 4
"""Of a CTA, each with some work of its own."""
_ORDER_THREADS = 256

Shapes = Operands[jax.ShapeDtypeStruct]


def plan_forward(
    spec: AttentionSpec, shapes: Shapes, arch: str, rows: int, keys: int, pack: int
) -> LaunchPlan:
    """What the forward kernel reads of a call with bounds.

    Args:
      rows: of a tile.
      keys: of a block.
      pack: rows that each query has in a tile.
    """
    n = sizes(shapes)
    groups = math.ceil(n.T * pack / rows) * (rows // 64)
    operands, results = _buffers(shapes, mask_metadata.forward_buffers(shapes, groups))
    ids, find_ids = _block_segments(shapes, arch, "key_value_segment_ids", keys)
    find = _launch(
        "mask_metadata_forward",
        arch,
        n.B * groups,
        *_sequences(spec, shapes, operands),
        *mask_metadata.parameters((*operands, *ids), "query_segment_ids", "block_segments"),
        *mask_metadata.parameters(results, "row_keys", "row_segments", "group_blocks", "diagonals"),
        *(Scalar("int32", x) for x in (n.B, groups, pack, keys)),
    )
    return LaunchPlan(operands, (*results, *ids), (*find_ids, find))


def plan_backward(
    spec: AttentionSpec, shapes: Shapes, arch: str, queries: int, keys: int, span: int
) -> LaunchPlan:
    """What the backward kernel reads of a call with bounds.

    Args:
      queries: of a block.
      keys: of a tile.
      span: blocks that key tiles count together as done.
    """
    n = sizes(shapes)
    tiles, blocks = math.ceil(n.S / keys), math.ceil(n.T / queries)
    operands, results = _buffers(shapes, mask_metadata.backward_buffers(shapes, queries, keys, span))
    ids, find_ids = _block_segments(shapes, arch, "query_segment_ids", queries)
    visitors = Buffer("visitors", (n.B, tiles), "int32")
    find = _launch(
        "mask_metadata_backward",
        arch,
        n.B * tiles,
        *_sequences(spec, shapes, operands),
        *mask_metadata.parameters((*operands, *ids), "key_value_segment_ids", "block_segments"),
        *mask_metadata.parameters(results, "key_queries", "group_blocks", "tile_blocks", "diagonals"),
        *(Scalar("int32", x) for x in (n.B, tiles, keys // 64, queries)),
    )
    order = Launch(
        kernel=_kernel("mask_metadata_order", arch),
        grid=(n.B, 1, 1),
        block=_ORDER_THREADS,
        shared_bytes=0,
        overlap_previous=True,
        parameters=(
            *mask_metadata.parameters(
                (*results, visitors), "tile_blocks", "visitors", "block_tiles", "span_tiles"
            ),
            *(Scalar("int32", x) for x in (tiles, blocks, span)),
        ),
    )
    return LaunchPlan(operands, (*results, *ids, visitors), (*find_ids, find, order))


def _buffers(shapes: Shapes, wanted: tuple[Buffer, ...]) -> tuple[tuple[Buffer, ...], tuple[Buffer, ...]]:
    """Operands of a call with bounds that these depend on, and what is `wanted` and not among them."""
    names = (*_packing.OFFSETS, *mask_metadata.LENGTHS, *mask_metadata.SEGMENTS)
    found = ((name, getattr(shapes, name)) for name in names)
    operands = tuple(Buffer(name, x.shape, "int32") for name, x in found if x is not None)
    return operands, tuple(buffer for buffer in wanted if buffer.name not in names)


def _block_segments(
    shapes: Shapes, arch: str, name: str, size: int
) -> tuple[tuple[Buffer, ...], tuple[Launch, ...]]:
    """The range of ids of each block of `size` positions, and how it is found; nothing without segments."""
    if not mask_metadata.has_segments(shapes):
        return (), ()
    B, positions = getattr(shapes, name).shape
    blocks = math.ceil(positions / size)
    found = Buffer("block_segments", (B, blocks, 2), "int32")
    parameters = (
        Pointer(name),
        Pointer(found.name),
        *(Scalar("int32", x) for x in (B, positions, blocks, size)),
    )
    return (found,), (_launch("segment_ranges", arch, B * blocks, *parameters),)


def _sequences(spec: AttentionSpec, shapes: Shapes, operands: tuple[Buffer, ...]) -> tuple[Parameter, ...]:
    """`SEQUENCES_PARAMETERS` of the kernels."""
    n = sizes(shapes)
    count, longest = 0, (0, 0)
    if shapes.query_offsets is not None:
        count = shapes.query_offsets.shape[1] - 1
        longest = spec.max_query_length, spec.max_key_value_length
    # Far enough to hide all or nothing is as far as it goes.
    least = -(n.T + n.S)
    left = n.S if spec.left is None else max(min(spec.left, n.S), least)
    right = n.T if spec.right is None else max(min(spec.right, n.T), least)
    return (
        *mask_metadata.parameters(operands, *_packing.OFFSETS, *mask_metadata.LENGTHS),
        *(Scalar("int32", x) for x in (count, *map(min, longest, (n.T, n.S)), n.T, n.S, left, right)),
    )


def _launch(entry: str, arch: str, warps: int, *parameters: Parameter) -> Launch:
    return Launch(
        kernel=_kernel(entry, arch),
        grid=(math.ceil(warps / _WARPS), 1, 1),
        block=32 * _WARPS,
        shared_bytes=0,
        overlap_previous=True,
        parameters=parameters,
    )


def _kernel(entry: str, arch: str) -> Kernel:
    return Kernel(f"common/{entry}.cu", entry, arch, ())
