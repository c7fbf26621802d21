"""Launch plans of the forward pass."""

import dataclasses
import math
from collections.abc import Mapping

import jax

from jax_flash._device import Device
from jax_flash._float8 import is_float8
from jax_flash._mask import UNBOUNDED, position_mask, window_of
from jax_flash._spec import AttentionSpec, Operands, Sizes, shapes_of, sizes
from jax_flash.cuda import (
    block_mask,
    dropout,
    mask_metadata,
    mask_metadata_plan,
    score_mod,
    user_function,
    user_score_mod,
)
from jax_flash.cuda.launch_plan import (
    ELEMENT_BYTES,
    Arguments,
    Buffer,
    Kernel,
    Launch,
    LaunchPlan,
    Pointer,
    Zero,
    element_type,
    launch,
)
from jax_flash.cuda.parameters import struct
from jax_flash.cuda.sm90 import float8, l2
from jax_flash.cuda.sm90.forward_tiles import (
    ForwardTile,
    TileRequirements,
    can_split_kv,
    choose_pack_gqa,
    choose_tile,
    pack_gqa_options,
    split_last_wave,
    tile_options,
)
from jax_flash.cuda.sm90.loaded import Loaded
from jax_flash.cuda.sm90.tensor_maps import padded_head_dims, rows_map

Shapes = Operands[jax.ShapeDtypeStruct]

_PARAMETERS = struct(
    "Parameters",
    maps=struct("TensorMaps", query="TensorMap", key="TensorMap", value="TensorMap"),
    out="RESULT*",  # (B, T, N, V)
    lse="float*",  # (B, N, T)
    queries="int32_t",  # T
    keys="int32_t",  # S
    query_heads="int32_t",  # N
    group="int32_t",  # N / K
    batch="int32_t",  # B
    columns="int32_t",  # V
    left="int32_t",  # the window, read only if the kernel has that side
    right="int32_t",
    l2_head_group="int32_t",  # see tile_at
    next_tile="int*",  # see produce
    whole_tiles="int32_t",  # this and the next three: see SplitKV
    split_ctas="int32_t",
    split_tiles="int32_t",
    tile_blocks="int32_t",
    partials="float*",  # see Partials
    arrived="int*",
    scale_log2="float",  # log2(e) times `score_mod.logit_unit`
    score=score_mod.PARAMETERS,
    sinks="const float*",  # (B | 1, N)
    sinks_stride="int64_t",  # from batch row to batch row
    mask_metadata=mask_metadata.FORWARD_PARAMETERS,
    next_repeat="int*",  # see cuda/kernels/sm90/forward/repeat.cuh
    dropout=dropout.PARAMETERS,
    descales=struct("Descales", query="const float*", key="const float*", value="const float*"),  # of e4m3
    key_places="const KeyPlace*",  # (B), if K and V are a cache; see cuda/kernels/common/key_place.cuh
)


def kernels(spec: AttentionSpec, shapes: Shapes, device: Device) -> list[Kernel]:
    """Every kernel that calls of this kind may run, whatever their lengths and number of heads."""
    n, requirements, loaded = sizes(shapes), requirements_of(spec, shapes), loaded_of(shapes)
    return [
        _kernel(spec, shapes, device.arch, Configuration(option.tile, pack_gqa), split_kv, loaded)
        for option in tile_options(requirements)
        for pack_gqa in pack_gqa_options(
            most_heads(spec, n), 64 if requirements.mask_metadata else option.tile.rows
        )
        for split_kv in ((False, True) if can_split_kv(requirements) else (False,))
    ]


def requirements_of(spec: AttentionSpec, shapes: Shapes) -> TileRequirements:
    n = sizes(shapes)
    return TileRequirements(
        *padded_head_dims(n, ELEMENT_BYTES[shapes.query.dtype.name]),
        window_of(spec, n),
        score_mods=score_mod.count(spec, shapes),
        loaded_operand=score_mod.loaded_operand(spec, shapes),
        mask_metadata=mask_metadata.is_needed(shapes),
        segments=mask_metadata.has_segments(shapes),
        block_mask=spec.block_mask is not None,
        mask=shapes.mask is not None,
        dropout=spec.dropout_rate > 0,
        element_bytes=ELEMENT_BYTES[shapes.query.dtype.name],
    )


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The two choices from which the rest of a call's launch follows."""

    tile: ForwardTile
    pack_gqa: int  # query heads that share a tile


def configure(spec: AttentionSpec, shapes: Shapes) -> Configuration:
    n, requirements = sizes(shapes), requirements_of(spec, shapes)
    tile = choose_tile(requirements, n)
    return Configuration(tile, choose_pack_gqa(n, tile.rows, requirements.mask_metadata, most_heads(spec, n)))


def most_heads(spec: AttentionSpec, n: Sizes) -> int:
    """How many query heads of a key head may share a tile. Those with block masks of their own don't."""
    return 1 if spec.block_mask is not None and spec.block_mask.differs_by_head else n.group


def block_grid(spec: AttentionSpec, shapes: Shapes) -> block_mask.Grid:
    """Tiles of queries and blocks of keys, as a block mask's lists have them."""
    chosen = configure(spec, shapes)
    return block_mask.Grid(chosen.tile.rows // chosen.pack_gqa, chosen.tile.keys)


def plan_forward_metadata(spec: AttentionSpec, shapes: Shapes, device: Device) -> LaunchPlan | None:
    """How `device` computes the mask metadata that the forward kernel reads; None if the mask is static."""
    if not mask_metadata.is_needed(shapes):
        return None
    chosen = configure(spec, shapes)
    tile, pack_gqa = chosen.tile, chosen.pack_gqa
    return mask_metadata_plan.plan_forward(spec, shapes, device.arch, tile.rows, tile.keys, pack_gqa)


def forward_block_lists(
    spec: AttentionSpec, operands: Operands, metadata: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """The lists of a block mask that the forward kernel reads, by name; none without a block mask."""
    if spec.block_mask is None:
        return {}
    return block_mask.lists(spec, operands, metadata, block_grid(spec, shapes_of(operands)))


def _kernel(
    spec: AttentionSpec,
    shapes: Shapes,
    arch: str,
    configuration: Configuration,
    split_kv: bool,
    loaded: Loaded,
) -> Kernel:
    requirements, tile = requirements_of(spec, shapes), configuration.tile
    # Mask metadata includes the window.
    window = UNBOUNDED if requirements.mask_metadata else requirements.window
    in_units = score_mod.logit_unit(spec, shapes) != 1
    # Score modifications apply the whole scale, sign included.
    sign = 1 if requirements.score_mods else (spec.scale > 0) - (spec.scale < 0)
    return Kernel(
        source="sm90/forward/forward.cu",
        entry="forward",
        arch=arch,
        defines=(
            ("ELEMENT", shapes.query.dtype.name),
            ("RESULT", element_type(spec.result_dtype("out", shapes.query.dtype))),
            ("HEAD_DIM", requirements.head_dim),
            ("VALUE_DIM", requirements.value_dim),
            ("CONSUMERS", tile.consumers),
            ("KEYS", tile.keys),
            ("STAGES", tile.stages),
            ("QUERY_STAGES", tile.query_stages),
            ("PINGPONG", int(tile.pingpong)),
            ("EARLY_PV_STEPS", tile.early_pv_steps),
            ("SUM_BLOCKS", tile.sum_blocks),
            ("PACK_GQA", configuration.pack_gqa),
            ("SPLIT_KV", int(split_kv)),
            ("ISOLATES", int(requirements.isolates)),
            ("HAS_LEFT", int(window.left is not None)),
            ("HAS_RIGHT", int(window.right is not None)),
            ("SCORE_SIGN", sign),
            ("SINKS", int(shapes.sinks is not None)),
            *score_mod.defines(spec, shapes),
            *mask_metadata.defines(shapes),
            *block_mask.defines(spec),
            *loaded.defines(tile.keys),
            *dropout.defines(spec),
            ("SHARED_BYTES", tile.shared_bytes(requirements)),
        ),
        parameters=_PARAMETERS.replace(
            score=score_mod.parameters(spec),
            **block_mask.parameters(spec, shapes),
            **loaded.parameters(),
        ),
        headers=(*user_score_mod.headers(spec, False, in_units), *block_mask.headers(spec, shapes)),
    )


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """How the tiles of a call are shared among CTAs (cuda/kernels/sm90/forward/tile_scheduler.cuh)."""

    tiles: int
    whole_tiles: int  # that are neither skipped nor split
    split_tiles: int
    split_ctas: int
    counted: bool  # whether CTAs take the next tile from a counter
    l2_head_group: int

    def ctas(self, device: Device) -> int:
        return device.sm_count if self.split_tiles else min(self.tiles, device.sm_count)


def _schedule(spec: AttentionSpec, shapes: Shapes, device: Device, chosen: Configuration) -> _Schedule:
    n, requirements = sizes(shapes), requirements_of(spec, shapes)
    tile, pack_gqa = chosen.tile, chosen.pack_gqa
    head_packs = n.N // pack_gqa * n.B
    tiles = math.ceil(n.T * pack_gqa / tile.rows) * head_packs
    mask = position_mask(requirements.window, n.T, n.S)
    # CTAs take tiles of unequal length from a counter. Its zeroing costs 2 µs.
    unknown = requirements.mask_metadata or requirements.block_mask
    alike = not unknown and len(set(mask.block_counts(tile.rows // pack_gqa, tile.keys))) <= 1
    skipped_rows = 0 if unknown else mask.rows_before_first_column() * pack_gqa
    whole_tiles = tiles - skipped_rows // tile.rows * head_packs
    split_ctas = 0
    if can_split_kv(requirements):
        whole_tiles, split_ctas = split_last_wave(tiles, device.sm_count, math.ceil(n.S / tile.keys))
    return _Schedule(
        tiles,
        whole_tiles,
        split_tiles=tiles - whole_tiles if split_ctas else 0,
        split_ctas=split_ctas,
        counted=tiles > device.sm_count and not alike,
        l2_head_group=_l2_head_group(spec, shapes, pack_gqa, tiles, device),
    )


def plan_forward(spec: AttentionSpec, shapes: Shapes, device: Device) -> LaunchPlan:
    """How `device` computes `out (B, T, N, V)` and `lse (B, N, T)`; for calls that `supports` accepts.

    `dropout.arranged` makes what the plan calls dropout_columns, `plan_forward_metadata` the mask metadata.
    """
    n, loaded, tile = sizes(shapes), loaded_of(shapes), configure(spec, shapes).tile
    operands = (
        *(loaded.query, loaded.key, loaded.value),
        *score_mod.buffers(shapes, (*score_mod.OPERANDS, "sinks")),
        *user_function.index_buffers(spec, shapes),
        *user_score_mod.buffers(spec, shapes),
        *block_mask.buffers(spec, shapes),
        *block_mask.list_buffers(spec, shapes, block_grid(spec, shapes)),
        *descale_buffers(shapes),
        *dropout.buffers(spec, (n.B, n.N, n.T), (n.B, math.ceil(n.S / tile.keys), tile.keys)),
        *metadata_buffers(spec, shapes),
    )
    out = Buffer("out", (n.B, n.T, n.N, n.V), spec.result_dtype("out", shapes.query.dtype).name)
    lse = Buffer("lse", (n.B, n.N, n.T), "float32")
    attention = plan_attention(spec, shapes, device, loaded)
    zeroed = tuple(map(Zero, attention.zeroed))
    # Zeroing is no kernel to overlap.
    main = dataclasses.replace(attention.launch, overlap_previous=not zeroed)
    return LaunchPlan(operands, (out, lse, *attention.scratch), (*zeroed, main))


def loaded_of(shapes: Shapes) -> Loaded:
    """The arrays that the kernel loads, in a call without a cache."""
    arrays = {"query": shapes.query, "key": shapes.key, "value": shapes.value}
    buffers = {name: Buffer(name, x.shape, x.dtype.name) for name, x in arrays.items()}
    if is_float8(shapes.value.dtype):
        buffers["value"] = Buffer(
            "transposed_value", float8.transposed_shape(shapes), shapes.value.dtype.name
        )
    return Loaded(**buffers)


def descale_buffers(shapes: Shapes) -> tuple[Buffer, ...]:
    """The scales of arrays of 8 bits."""
    if not is_float8(shapes.query.dtype):
        return ()
    return tuple(Buffer(name, shape, "float32") for name, shape in float8.descale_shapes(shapes).items())


def _descale(shapes: Shapes, name: str) -> Pointer | None:
    return Pointer(f"{name}_descale") if is_float8(shapes.query.dtype) else None


def row_groups(spec: AttentionSpec, shapes: Shapes, chosen: Configuration | None = None) -> int:
    """How many groups of 64 rows mask metadata has of each batch row.

    Its tile and PackGQA are `chosen`, by default as `configure` says.
    """
    chosen = chosen or configure(spec, shapes)
    return math.ceil(sizes(shapes).T * chosen.pack_gqa / chosen.tile.rows) * chosen.tile.consumers


def metadata_buffers(
    spec: AttentionSpec, shapes: Shapes, chosen: Configuration | None = None
) -> tuple[Buffer, ...]:
    """The mask metadata that the kernel reads; none if the mask is static. `chosen`: see `row_groups`."""
    return mask_metadata.forward_buffers(shapes, row_groups(spec, shapes, chosen))


@dataclasses.dataclass(frozen=True)
class Attention:
    """The launch of the kernel, and what its plan has to provide."""

    launch: Launch
    scratch: tuple[Buffer, ...]
    zeroed: tuple[str, ...]  # those buffers of it that have to be zero before the launch


def plan_attention(
    spec: AttentionSpec,
    shapes: Shapes,
    device: Device,
    loaded: Loaded,
    chosen: Configuration | None = None,
) -> Attention:
    """The launch that reads `loaded` and mask metadata, and writes the buffers `out` and `lse`.

    Its tile and PackGQA are `chosen`, by default as `configure` says.
    """
    n, requirements = sizes(shapes), requirements_of(spec, shapes)
    chosen = chosen or configure(spec, shapes)
    tile = chosen.tile
    schedule = _schedule(spec, shapes, device, chosen)
    warps = 4 * tile.consumers
    # For each lane of a warp: its accumulators of the output, then maxima and sums of its two rows.
    partial = 32 * (requirements.value_dim // 2 + 4)
    partials = Buffer("partials", (schedule.split_ctas + schedule.split_tiles, warps, partial), "float32")
    arrived = Buffer("arrived", (schedule.split_tiles, warps), "int32")
    next_tile = Buffer("next_tile", (1,), "int32")
    next_repeat = Buffer("next_repeat", (schedule.tiles,), "int32")
    scratch, zeroed = (), ()
    if schedule.counted:
        scratch, zeroed = (next_tile,), ("next_tile",)
    elif schedule.split_tiles:
        scratch, zeroed = (partials, arrived), ("arrived",)
    if requirements.isolates:
        scratch = (*scratch, next_repeat)
    value_map = loaded.block_map(loaded.value, tile.keys)
    if requirements.fp8:
        assert tile.keys == float8.keys_of_block(requirements.value_dim)
        value_map = float8.value_map(loaded.value)
    main = launch(
        kernel=_kernel(spec, shapes, device.arch, chosen, schedule.split_tiles > 0, loaded),
        grid=(schedule.ctas(device), 1, 1),
        block=tile.threads,
        shared_bytes=tile.shared_bytes(requirements),
        overlap_previous=True,
        arguments={
            "maps": {
                "query": rows_map(loaded.query, tile.rows, chosen.pack_gqa),
                "key": loaded.block_map(loaded.key, tile.keys),
                "value": value_map,
            },
            "tile_blocks": math.ceil(n.S / tile.keys),
            **_arguments(spec, shapes, schedule),
            "mask_metadata": mask_metadata.forward_arguments(metadata_buffers(spec, shapes, chosen)),
            **block_mask.arguments(spec, shapes, block_grid(spec, shapes)),
            "descales": {name: _descale(shapes, name) for name in ("query", "key", "value")},
            **loaded.arguments(),
        },
    )
    return Attention(main, scratch, zeroed)


def _arguments(spec: AttentionSpec, shapes: Shapes, schedule: _Schedule) -> Arguments:
    """Those of `_PARAMETERS` that don't depend on the tile's shape."""
    n, window = sizes(shapes), window_of(spec, sizes(shapes))
    return {
        "out": Pointer("out"),
        "lse": Pointer("lse"),
        **{"queries": n.T, "keys": n.S, "query_heads": n.N, "group": n.group, "batch": n.B},
        **{"columns": n.V, "left": window.left or 0, "right": window.right or 0},
        "l2_head_group": schedule.l2_head_group,
        "next_tile": Pointer("next_tile") if schedule.counted else None,
        "whole_tiles": schedule.whole_tiles,
        "split_ctas": schedule.split_ctas,
        "split_tiles": schedule.split_tiles,
        "partials": Pointer("partials") if schedule.split_tiles else None,
        "arrived": Pointer("arrived") if schedule.split_tiles else None,
        # A scale of zero makes all scores zero, so any factor does.
        "scale_log2": score_mod.logit_unit(spec, shapes) * math.log2(math.e) or 1.0,
        "score": score_mod.arguments(spec, shapes),
        "sinks": score_mod.pointer("sinks", shapes.sinks),
        "sinks_stride": score_mod.batch_stride(shapes.sinks),
        "next_repeat": Pointer("next_repeat") if requirements_of(spec, shapes).isolates else None,
        "dropout": dropout.arguments(spec),
    }


# Of `_l2_head_group`: tiles for each multiprocessor, by measurement (docs/tuning/options.md, random blocks).
_TAIL_TILES = 1.5  # in a group, so that all multiprocessors end at about the same time
_MANY_TILES = 32  # in a long call


def _l2_head_group(spec: AttentionSpec, shapes: Shapes, pack_gqa: int, tiles: int, device: Device) -> int:
    """How many head packs the tile scheduler interleaves (`tile_at` in sm90/forward/tile_scheduler.cuh).

    A head pack is the `pack_gqa` query heads whose rows share tiles. Where all tiles take equally long, the
    scheduler finishes one head pack before the next, so that its keys and values stay in L2. Elsewhere it
    interleaves as many head packs as L2 holds, longest tiles first, to even out the tail. If tile lengths are
    known only at run time, concurrent tiles read about one sequence of each batch row.

    Tiles with lists of blocks don't read the same keys at the same time, so they find fewer of them in L2. A
    group of a long call with such lists has only as many head packs as an even tail needs.
    """
    n, sequences = sizes(shapes), mask_metadata.assumed_sequences(shapes)
    if window_of(spec, n).unbounded and not sequences and spec.block_mask is None:
        return 1
    head_packs = n.B * n.N // pack_gqa
    element_bytes = ELEMENT_BYTES[shapes.key.dtype.name]
    bytes_per_pack = n.S * (n.H + n.V) * element_bytes / (n.group / pack_gqa)
    groups = math.ceil(head_packs * bytes_per_pack / (max(sequences, 1) * l2.forward_bytes(device)))
    if spec.block_mask is not None and tiles >= _MANY_TILES * device.sm_count:
        groups = max(groups, tiles // math.ceil(_TAIL_TILES * device.sm_count))
    # Groups of equal size: a small last group would end in a ragged wave.
    return math.ceil(head_packs / min(head_packs, groups))
