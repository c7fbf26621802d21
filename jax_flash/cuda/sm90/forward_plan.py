"""Launch plans of the forward pass."""

import dataclasses
import math

import jax

from jax_flash._device import Device
from jax_flash._mask import UNBOUNDED, Window, position_mask, window_of
from jax_flash._spec import AttentionSpec, Operands, Sizes, sizes
from jax_flash.cuda import dropout, mask_metadata, mask_metadata_plan, score_mod
from jax_flash.cuda.launch_plan import ELEMENT_BYTES, Buffer, Kernel, LaunchPlan, Pointer, Zero, launch
from jax_flash.cuda.parameters import struct
from jax_flash.cuda.sm90 import l2
from jax_flash.cuda.sm90.forward_tiles import (
    ForwardTile,
    Needs,
    can_cut,
    choices,
    cut_last_wave,
    pack,
    packs,
    tile,
)
from jax_flash.cuda.sm90.tensor_maps import padded_head_dims, rows_map

_PARAMETERS = struct(
    "Parameters",
    maps=struct("TensorMaps", query="TensorMap", key="TensorMap", value="TensorMap"),
    out="ELEMENT*",  # (B, T, N, V)
    lse="float*",  # (B, N, T)
    queries="int32_t",  # T
    keys="int32_t",  # S
    query_heads="int32_t",  # N
    group="int32_t",  # N / K
    batch="int32_t",  # B
    columns="int32_t",  # V
    left="int32_t",  # the window, read only where the kernel has that side
    right="int32_t",
    l2_head_group="int32_t",  # see tile_at
    next_tile="int*",  # see produce
    whole_tiles="int32_t",  # this and the next three: see Cut
    cut_ctas="int32_t",
    cut_tiles="int32_t",
    tile_blocks="int32_t",
    pieces="float*",  # see Partials
    arrived="int*",
    scale_log2="float",  # |scale|·log2(e)
    score=score_mod.PARAMETERS,
    sinks="const float*",  # (B | 1, N)
    sinks_stride="int64_t",  # from batch row to batch row
    mask_metadata=mask_metadata.FORWARD_PARAMETERS,
    dropout=dropout.PARAMETERS,
)


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
        window_of(spec, n),
        changes=score_mod.count(spec, shapes),
        read=score_mod.loaded_operand(shapes),
        bounded=mask_metadata.is_needed(shapes),
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
    if not mask_metadata.is_needed(shapes):
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
        parameters=_PARAMETERS,
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
    mask = position_mask(window, n.T, n.S)
    unequal = bounded or len(set(mask.block_counts(shape.rows // heads, shape.keys))) > 1
    counted = tiles > device.sm_count and unequal
    next_tile = Buffer("next_tile", (1,), "int32")
    blind_rows = 0 if bounded else mask.rows_before_first_column() * heads
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
    main = launch(
        kernel=kernel,
        grid=(device.sm_count if cut_tiles else min(tiles, device.sm_count), 1, 1),
        block=shape.threads,
        shared_bytes=shape.shared_bytes(needs),
        overlap_previous=not (counted or cut_tiles),  # zeroing is no kernel to overlap
        arguments={
            "maps": {
                "query": rows_map(query, shape.rows, heads),
                "key": rows_map(key, shape.keys),
                "value": rows_map(value, shape.keys),
            },
            "out": Pointer("out"),
            "lse": Pointer("lse"),
            **{"queries": n.T, "keys": n.S, "query_heads": n.N, "group": n.group, "batch": n.B},
            **{"columns": n.V, "left": window.left or 0, "right": window.right or 0},
            "l2_head_group": _l2_head_group(n, shapes, window, heads, device),
            "next_tile": Pointer("next_tile") if counted else None,
            **{"whole_tiles": whole_tiles, "cut_ctas": cut_ctas, "cut_tiles": cut_tiles},
            "tile_blocks": math.ceil(n.S / shape.keys),
            "pieces": Pointer("pieces") if cut_tiles else None,
            "arrived": Pointer("arrived") if cut_tiles else None,
            # Where the scale is zero the scores are too, and any factor does.
            "scale_log2": abs(spec.scale) * math.log2(math.e) or 1.0,
            "score": score_mod.arguments(spec, shapes),
            "sinks": score_mod.pointer("sinks", shapes.sinks),
            "sinks_stride": score_mod.batch_stride(shapes.sinks),
            "mask_metadata": mask_metadata.forward_arguments(limits),
            "dropout": dropout.arguments(spec),
        },
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
        return LaunchPlan(operands, (out, lse, next_tile), (Zero("next_tile"), main))
    if cut_tiles:
        return LaunchPlan(operands, (out, lse, pieces, arrived), (Zero("arrived"), main))
    return LaunchPlan(operands, (out, lse), (main,))


def _l2_head_group(
    n: Sizes, shapes: Operands[jax.ShapeDtypeStruct], window: Window, pack_gqa: int, device: Device
) -> int:
    """How many head packs the tile scheduler interleaves (`tile_at` in sm90/forward/tile_scheduler.cuh).

    A head pack is the `pack_gqa` query heads whose rows share tiles. Where all tiles take equally long, the
    scheduler finishes one head pack before the next, so that its keys and values stay in L2. Elsewhere it
    interleaves as many head packs as L2 holds, longest tiles first, to even out the tail. If tile lengths are
    known only at run time, concurrent tiles read about one sequence of each batch row.
    """
    sequences = mask_metadata.assumed_sequences(shapes)
    if window.unbounded and not sequences:
        return 1
    head_packs = n.B * n.N // pack_gqa
    element_bytes = ELEMENT_BYTES[shapes.key.dtype.name]
    bytes_per_pack = n.S * (n.H + n.V) * element_bytes / (n.group / pack_gqa)
    groups = math.ceil(head_packs * bytes_per_pack / (max(sequences, 1) * l2.forward_bytes(device)))
    # Groups of equal size: a small last group would end in a ragged wave.
    return math.ceil(head_packs / min(head_packs, groups))
