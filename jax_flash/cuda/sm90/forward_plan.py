"""Launch plans of the forward pass."""

import dataclasses
import math

import jax

from jax_flash._device import Device
from jax_flash._spec import AttentionSpec, Operands, Sizes, sizes
from jax_flash.cuda import dropout, mask_metadata, mask_metadata_plan, score_mod
from jax_flash.cuda.launch_plan import Buffer, Kernel, Launch, LaunchPlan, Pointer, Scalar, TensorMap, Zero
from jax_flash.cuda.sm90.forward_tiles import (
    PANEL,
    ForwardTile,
    Needs,
    block_counts,
    can_cut,
    choices,
    cut_last_wave,
    pack,
    packs,
    tile,
)
from jax_flash.cuda.window import UNBOUNDED, Window, binding_window

# Keys and values of the heads that a section of the tile walk works on at once should stay in L2, beside
# what else passes through it.
_SECTION_BYTES = 32 << 20


def padded_head_dim(head_dim: int) -> int:
    """What the kernels are compiled for; TMA fills the columns beyond `head_dim` with zeros."""
    return math.ceil(head_dim / 16) * 16


def padded_head_dims(n: Sizes) -> tuple[int, int]:
    """The same of keys, and of values."""
    return padded_head_dim(n.H), padded_head_dim(n.V)


def rows_map(buffer: Buffer, rows: int, pack: int = 1) -> TensorMap:
    """A map over `(B, rows, heads, head dim)` that copies `rows / pack` rows of `pack` heads, one panel of
    columns; the heads of a row stand together."""
    B, T, N, H = buffer.shape
    element = buffer.bytes // math.prod(buffer.shape)
    strides = (H * element, N * H * element, T * N * H * element)
    return TensorMap(buffer.name, buffer.dtype, (H, N, T, B), strides, (PANEL, pack, rows // pack, 1))


def kernels(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device) -> list[Kernel]:
    """Every kernel that calls of this kind may run, whatever their lengths and number of heads."""
    n, needs = sizes(shapes), needs_of(spec, shapes)
    return [
        _kernel(spec, shapes, device.arch, choice.tile, heads, cut)
        for choice in choices(needs)
        for heads in packs(n.group, 64 if needs.bounded else choice.tile.rows)
        for cut in ((False, True) if can_cut(needs) else (False,))
    ]


def needs_of(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct]) -> Needs:
    n = sizes(shapes)
    return Needs(
        *padded_head_dims(n),
        binding_window(spec, n),
        changes=score_mod.changes(spec, shapes),
        read=score_mod.read(shapes),
        bounded=mask_metadata.has_bounds(shapes),
        segments=mask_metadata.has_segments(shapes),
        dropout=spec.dropout_rate > 0,
    )


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What decides on everything else in a call."""

    tile: ForwardTile
    pack: int  # query heads that share a tile


def schedule(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct]) -> Schedule:
    n, needs = sizes(shapes), needs_of(spec, shapes)
    chosen = tile(needs, n)
    return Schedule(chosen, pack(n, chosen.rows, needs.bounded))


def plan_forward_metadata(
    spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device
) -> LaunchPlan | None:
    """How `device` finds what the kernel reads of a call with bounds."""
    if not mask_metadata.has_bounds(shapes):
        return None
    chosen = schedule(spec, shapes)
    return mask_metadata_plan.plan_forward(
        spec, shapes, device.arch, chosen.tile.rows, chosen.tile.keys, chosen.pack
    )


def _kernel(
    spec: AttentionSpec,
    shapes: Operands[jax.ShapeDtypeStruct],
    arch: str,
    tile: ForwardTile,
    pack: int,
    cut: bool,
) -> Kernel:
    needs = needs_of(spec, shapes)
    # Where what rows see is data, the window is part of that.
    window = UNBOUNDED if needs.bounded else needs.window
    # Logits have their sign already.
    sign = 1 if needs.changes else (spec.scale > 0) - (spec.scale < 0)
    return Kernel(
        source="sm90/forward/forward.cu",
        entry="forward",
        arch=arch,
        defines=(
            ("ELEMENT", shapes.query.dtype.name),
            ("HEAD_DIM", needs.head_dim),
            ("VALUE_DIM", needs.value_dim),
            ("CONSUMERS", tile.consumers),
            ("KEYS", tile.keys),
            ("STAGES", tile.stages),
            ("QUERY_STAGES", tile.query_stages),
            ("PINGPONG", int(tile.pingpong)),
            ("SPLIT", tile.split),
            ("PACK", pack),
            ("CUT", int(cut)),
            ("HAS_LEFT", int(window.left is not None)),
            ("HAS_RIGHT", int(window.right is not None)),
            ("SCORE_SIGN", sign),
            ("SINKS", int(shapes.sinks is not None)),
            *score_mod.defines(spec, shapes),
            *mask_metadata.defines(shapes),
            *dropout.defines(spec),
            ("SHARED_BYTES", tile.shared_bytes(needs)),
        ),
    )


def plan_forward(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device) -> LaunchPlan:
    """How `device` computes `out (B, T, N, V)` and `lse (B, N, T)`; for calls that `supports` accepts.

    Operands are query, key, value, those of bias, mask, alibi_slopes, sinks, dropout_rows and
    dropout_columns that are there, the last as `dropout.arranged` has it, and what `plan_forward_metadata`
    gives.
    """
    n, needs = sizes(shapes), needs_of(spec, shapes)
    window, bounded = needs.window, needs.bounded
    dtype = shapes.query.dtype.name
    chosen = schedule(spec, shapes)
    shape, heads = chosen.tile, chosen.pack
    row_tiles = math.ceil(n.T * heads / shape.rows)
    limits = mask_metadata.forward_buffers(shapes, row_tiles * shape.consumers)
    query = Buffer("query", shapes.query.shape, dtype)
    key = Buffer("key", shapes.key.shape, dtype)
    value = Buffer("value", shapes.value.shape, dtype)
    out = Buffer("out", (n.B, n.T, n.N, n.V), dtype)
    lse = Buffer("lse", (n.B, n.N, n.T), "float32")
    tiles = row_tiles * (n.N // heads) * n.B
    # Where tiles take unequally long, CTAs take the next from a counter. Its zeroing costs 2 µs.
    unequal = bounded or len(set(block_counts(shape, heads, window, n))) > 1
    counted = tiles > device.sm_count and unequal
    next_tile = Buffer("next_tile", (1,), "int32")
    blind_rows = 0 if window.right is None or bounded else min(max(n.T - n.S - window.right, 0), n.T) * heads
    whole_tiles = tiles - blind_rows // shape.rows * (n.N // heads) * n.B
    cut_ctas = 0
    if can_cut(needs):
        whole_tiles, cut_ctas = cut_last_wave(tiles, device.sm_count, math.ceil(n.S / shape.keys))
    cut_tiles = tiles - whole_tiles if cut_ctas else 0
    warps = 4 * shape.consumers
    words = 32 * (needs.value_dim // 2 + 4)
    pieces = Buffer("pieces", (cut_ctas + cut_tiles, warps, words), "float32")
    arrived = Buffer("arrived", (cut_tiles, warps), "int32")
    kernel = _kernel(spec, shapes, device.arch, shape, heads, cut_tiles > 0)
    launch = Launch(
        kernel=kernel,
        grid=(device.sm_count if cut_tiles else min(tiles, device.sm_count), 1, 1),
        block=shape.threads,
        shared_bytes=shape.shared_bytes(needs),
        overlap_previous=not (counted or cut_tiles),  # zeroing is no kernel to overlap
        parameters=(
            rows_map(query, shape.rows, heads),
            rows_map(key, shape.keys),
            rows_map(value, shape.keys),
            Pointer("out"),
            Pointer("lse"),
            *(Scalar("int32", x) for x in (n.T, n.S, n.N, n.group, n.B, n.V)),
            *(Scalar("int32", x or 0) for x in (window.left, window.right)),
            Scalar("int32", _section_heads(n, window, heads, mask_metadata.parts(shapes))),
            Pointer("next_tile") if counted else Scalar("int64", 0),
            Scalar("int32", whole_tiles),
            Scalar("int32", cut_ctas),
            Scalar("int32", cut_tiles),
            Scalar("int32", math.ceil(n.S / shape.keys)),
            *((Pointer("pieces"), Pointer("arrived")) if cut_tiles else 2 * (Scalar("int64", 0),)),
            # Where the scale is zero the scores are too, and any factor does.
            Scalar("float32", abs(spec.scale) * math.log2(math.e) or 1.0),
            *score_mod.parameters(spec, shapes),
            *score_mod.sinks_parameters(shapes),
            *mask_metadata.parameters(
                limits, "row_keys", "row_segments", "group_blocks", "key_value_segment_ids"
            ),
            *dropout.parameters(spec),
        ),
    )
    words = dropout.buffers(spec, (n.B, n.N, n.T), (n.B, math.ceil(n.S / shape.keys), shape.keys))
    operands = (
        query,
        key,
        value,
        *score_mod.buffers(shapes, (*score_mod.OPERANDS, "sinks")),
        *words,
        *limits,
    )
    if counted:
        return LaunchPlan(operands, (out, lse, next_tile), (Zero("next_tile"), launch))
    if cut_tiles:
        return LaunchPlan(operands, (out, lse, pieces, arrived), (Zero("arrived"), launch))
    return LaunchPlan(operands, (out, lse), (launch,))


def _section_heads(n: Sizes, window: Window, pack: int, parts: int) -> int:
    """Packs of query heads whose tiles are walked together (`tile_at` in sm90/forward/tile_scheduler.cuh).

    Without a window all tiles take equally long: one pack at a time keeps its keys and values in L2.
    With one, the longest tiles of many packs go first, so that CTAs end together; and so they do where it is
    data how long tiles take. Tiles of a turn read one of `parts` of a pack's bytes then; 0: it is not data.
    """
    if window.unbounded and not parts:
        return 1
    packs = n.B * n.N // pack
    bytes_per_pack = n.S * (n.H + n.V) * 2 / (n.group / pack)
    sections = min(packs, math.ceil(packs * bytes_per_pack / (max(parts, 1) * _SECTION_BYTES)))
    return math.ceil(packs / sections)  # all sections alike: a small last one would end in a ragged wave
