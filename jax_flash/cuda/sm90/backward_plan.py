"""Launch plans of the backward pass.

A call has two to four launches: preprocess, the main kernel, and postprocesses of what is summed in float32:
of dQ, unless the main kernel writes it, and of dK and dV where units of work share key tiles.
"""

import itertools
from collections.abc import Mapping

import jax

from jax_flash._device import Device
from jax_flash._dropout import keep_probability
from jax_flash._mask import Window
from jax_flash._spec import AttentionSpec, Operands, shapes_of
from jax_flash.cuda import block_mask, dropout, mask_metadata, mask_metadata_plan, score_mod, user_score_mod
from jax_flash.cuda.launch_plan import (
    ELEMENT_BYTES,
    Argument,
    Arguments,
    Kernel,
    Launch,
    LaunchPlan,
    Pointer,
    Zero,
    element_type,
    launch,
)
from jax_flash.cuda.parameters import Struct, struct
from jax_flash.cuda.sm90 import backward_units
from jax_flash.cuda.sm90.backward_call import BackwardCall, Schedule, tile_of
from jax_flash.cuda.sm90.backward_scheduler import MAX_DQ_SUMS
from jax_flash.cuda.sm90.backward_tiles import SPAN
from jax_flash.cuda.sm90.backward_units import Units
from jax_flash.cuda.sm90.tensor_maps import rows_map

# In place of a window's side that doesn't bind: so large that it never does, and kernels' arithmetic stays in
# 32 bits.
_UNBOUNDED = 1 << 29
# A window that hides everything, as kernels get it: far from all keys.
_HIDES_ALL = Window(0, -_UNBOUNDED)
_THREADS = 256
"""Of a CTA of preprocess and postprocess, which has a block of queries of one head."""

_PREPROCESS = struct(
    "Parameters",
    out="const uint4*",  # (B, T, N, V), as the next
    d_out="const uint4*",
    lse="const float*",  # (B, N, T), natural
    d_lse="const float*",  # (B, N, T), or null
    lse_delta="float*",  # (B, N, query blocks, 2, or 3 with dropout, queries), see Call
    query="const uint4*",  # (B, T, N, H), or null where spoiled is
    query_columns="int32_t",  # H
    spoiled="int*",  # (B, N, query blocks): whether rows aren't finite (isolation.cuh); or null
    dq_accum="float4*",  # this and the next three: see DqAccum
    arrived="int*",
    written="int*",
    next_job="int*",
    zeroed_heads="int32_t",  # slots of dq_accum to set to zero
    next_tile="int*",  # a counter, or null
    dq_semaphore="int*",  # (sums of a block, B, N, query blocks), or null
    key_sums=backward_units.KEY_SUMS,
    key_groups="int32_t",  # of 64 keys, of all heads and batch rows
    block_tiles="const Interval*",  # (B, query blocks): the key tiles that visit a block, or null
    empty_tiles=struct(
        "EmptyTiles",
        tile_blocks="const Interval*",  # (B, key tiles): the query blocks that a tile visits, or null
        tiles="int32_t",  # of all heads and batch rows
        d_key="uint4*",  # (B, S, K, H)
        d_value="uint4*",  # (B, S, K, V)
        keys="int32_t",  # S
        key_heads="int32_t",  # K
        key_vectors="int32_t",  # of 16 bytes, in a row of d_key
        value_vectors="int32_t",  # … of d_value
    ),
    queries="int32_t",  # T
    query_heads="int32_t",  # N
    columns="int32_t",  # V
    dropout_rows="const uint32_t*",  # (B, N, T), or null
    kept="float",  # share that dropout keeps
)

_MAIN = struct(
    "Parameters",
    maps=struct(
        "TensorMaps",
        query="TensorMap",
        key="TensorMap",
        value="TensorMap",
        d_out="TensorMap",
        d_key="TensorMap",
        d_value="TensorMap",
    ),
    lse_delta="const float*",
    spoiled="const int*",  # (B, N, query blocks), or null
    dq_accum="float*",  # this and the next six: see DqAccum
    arrived="int*",
    written="int*",
    next_job="int*",
    d_query="ELEMENT*",
    dq_accum_slots="int32_t",
    columns="int32_t",
    next_tile="int*",
    dq_semaphore="int*",
    key_sums=backward_units.KEY_SUMS,
    queries="int32_t",  # T
    keys="int32_t",  # S
    head_shares="int32_t",  # of a batch row; this and the next three: see Units
    group="int32_t",  # query heads of a head share
    shares_of_head="int32_t",
    parts_of_blocks="int32_t",
    batch="int32_t",  # B
    left="int32_t",  # the window
    right="int32_t",
    l2_head_group="int32_t",  # see unit_at
    scale="float",
    score=score_mod.PARAMETERS,
    d_bias="BIAS_SUM*",  # as the bias
    d_slopes="float*",  # (B, N, shares of 64 keys, 4 warps)
    mask_metadata=mask_metadata.BACKWARD_PARAMETERS,
    bias_factor="const float*",  # of terms that are added up as integers
    dropout=dropout.PARAMETERS,
)

_WIDE_KEY_GRADIENTS = struct(
    "WideKeyGradients",
    d_key="float*",  # (B, S, K, H)
    d_value="float*",  # (B, S, K, V)
    key_columns="int32_t",  # H
    value_columns="int32_t",  # V
)

_POSTPROCESS = struct(
    "Parameters",
    dq_accum="const float*",  # (sums of a block, B, N, query blocks, queries · head_dim)
    d_query="RESULT*",  # (B, T, N, H)
    queries="int32_t",  # T
    query_heads="int32_t",  # N
    head_dim="int32_t",  # H
    scale="float",
)

_POSTPROCESS_KEYS = struct(
    "Parameters",
    key_sums=backward_units.KEY_SUMS,
    d_key="RESULT*",  # (B, S, K, H)
    d_value="RESULT*",  # (B, S, K, V)
    keys="int32_t",  # S
    key_heads="int32_t",  # K
    head_dim="int32_t",  # H
    value_dim="int32_t",  # V
    scale="float",
    value_scale="float",
)


def plan_backward_metadata(
    spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device
) -> LaunchPlan | None:
    """The plan that computes the main kernel's mask metadata, or None if the mask is static."""
    if not mask_metadata.is_needed(shapes):
        return None
    tile = tile_of(spec, shapes)
    return mask_metadata_plan.plan_backward(spec, shapes, device.arch, tile.queries, tile.keys, SPAN)


def backward_block_lists(
    spec: AttentionSpec, operands: Operands, metadata: Mapping[str, jax.Array], device: Device
) -> dict[str, jax.Array]:
    """The lists of a block mask that the main kernel reads, by name; none without a block mask."""
    if spec.block_mask is None:
        return {}
    grid = BackwardCall(spec, shapes_of(operands), device).block_grid
    return block_mask.lists(spec, operands, metadata, grid, SPAN)


def plan_backward(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device) -> LaunchPlan:
    """The plan that computes the gradients of query, key and value, for calls that the kernels support.

    Beside the gradients of query, key and value its results are, where the call has them: d_bias, in float32
    or as fixed_point.py has it; d_slopes, in shares along further axes; gradients of what score_mod captures,
    in float32 or as exact_sum.py has them. These are yet to be multiplied by dropout's factor.
    """
    call = BackwardCall(spec, shapes, device)
    return LaunchPlan(
        operands=call.operands,
        results=(*call.gradients, *call.score_gradients, *call.scratch),
        steps=(*(Zero(x.name) for x in call.score_gradients), *_launches(call)),
    )


def kernels(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device) -> list[Kernel]:
    """Every kernel of `plan_backward` that calls of this kind may run, whatever their lengths and number of
    heads. These decide how many sums of dQ there are, whether units share key tiles, and who writes dQ."""
    most = MAX_DQ_SUMS if spec.deterministic else 1
    every_choice = itertools.product(
        (Units(), Units(parts=2)), (True, False), (1 << i for i in range(most.bit_length()))
    )
    found: dict[Kernel, None] = {}
    for choice in every_choice:
        call = BackwardCall(spec, shapes, device, Schedule(*choice))
        found |= dict.fromkeys(launch.kernel for launch in _launches(call))
    return list(found)


def _launches(call: BackwardCall) -> list[Launch]:
    launches = [_preprocess(call), _main(call)]
    if not call.main_writes_dq:
        launches.append(_postprocess(call))
    if call.has_key_sums:
        launches.append(_postprocess_keys(call))
    return launches


_ACCUM = ("dq_accum", "arrived", "written", "next_job")


def _kernel(call: BackwardCall, entry: str, parameters: Struct) -> Kernel:
    """The kernel `backward`, or `backward_preprocess` and the like, for the call's tile."""
    is_main = entry == "backward"
    written_by = {"backward_postprocess": "query", "backward_postprocess_keys": "key"}
    tile = call.main_tile if is_main else call.tile
    head_dim, value_dim = call.head_dims
    result = call.spec.result_dtype(written_by[entry], call.dtype) if entry in written_by else call.dtype
    defines = (
        ("ELEMENT", call.dtype),
        ("RESULT", element_type(result)),
        ("HEAD_DIM", head_dim),
        ("VALUE_DIM", value_dim),
        ("QUERIES", tile.queries),
        ("KEYS", tile.keys),
        ("CLUSTER", tile.cluster),
        ("SPLIT_PRODUCTS", int(tile.split_products)),
        ("STAGES", tile.stages),
        ("DQ_STAGES", tile.dq_stages),
        ("WRITER_STAGES", tile.writer_stages),
        ("SEMAPHORE_STAGES", tile.semaphore_stages),
        ("SPAN", SPAN),
        ("ISOLATES", int(is_main and call.isolates)),
        ("DETERMINISTIC", int(is_main and call.spec.deterministic)),
        ("KEY_SUMS", int(is_main and call.has_key_sums)),
        ("WIDE_KEY_GRADIENTS", int(is_main and call.has_wide_key_gradients)),
        ("DQ_SUMS", 1 if entry == "backward_postprocess_keys" else call.dq_sums),
        *(mask_metadata.defines(call.shapes) if is_main else mask_metadata.NO_DEFINES),
        *(block_mask.defines(call.spec) if is_main else block_mask.NO_DEFINES),
        *(score_mod.defines(call.spec, call.shapes, backward=True) if is_main else score_mod.NO_DEFINES),
        ("BIAS_SUM", "uint64_t" if is_main and call.has_fixed_point_bias else "float"),
        *dropout.defines(call.spec),
        ("SHARED_BYTES", tile.shared_bytes(head_dim, value_dim, ELEMENT_BYTES[call.dtype])),
    )
    source = entry.removeprefix("backward_")  # as "preprocess"
    headers = ()
    if is_main:
        of_mask = block_mask.headers(call.spec, call.shapes)
        headers = (*user_score_mod.headers(call.spec, backward=True), *of_mask)
    return Kernel(f"sm90/backward/{source}.cu", entry, call.device.arch, defines, parameters, headers)


def _preprocess(call: BackwardCall) -> Launch:
    """Computes delta, lse in base 2, and sets sums and counters to zero."""
    n, spec = call.n, call.spec
    # The gradient of sinks is computed from delta of all queries, those among them that see no key.
    skips_blocks = call.has_metadata and call.shapes.sinks is None
    return launch(
        kernel=_kernel(call, "backward_preprocess", _PREPROCESS),
        grid=(call.query_blocks * n.N * n.B, 1, 1),
        block=_THREADS,
        arguments={
            **call.pointers("out", "d_out", "lse", "d_lse", "lse_delta", "spoiled", *_ACCUM),
            **{"query": Pointer("query") if call.isolates else None, "query_columns": n.H},
            "zeroed_heads": 0 if _first_tile_stores(call) else call.dq_accum_slots,
            **call.pointers("next_tile", "dq_semaphore"),
            **{"key_sums": call.key_sums(), "key_groups": n.B * n.K * call.key_groups},
            "block_tiles": Pointer("block_tiles") if skips_blocks else None,
            "empty_tiles": _empty_tiles(call),
            **{"queries": n.T, "query_heads": n.N, "columns": n.V},
            "dropout_rows": dropout.pointer(spec, "dropout_rows"),
            "kept": keep_probability(spec.dropout_rate),
        },
    )


def _empty_tiles(call: BackwardCall) -> dict[str, Argument]:
    """What preprocess needs for the zeros of key tiles that the main kernel skips. Sums are zeros anyway."""
    n, names = call.n, ("tile_blocks", "d_key", "d_value")
    stores = call.skips_empty_tiles and not call.has_key_sums
    elements_of_vector = 16 // call.spec.result_dtype("key", call.dtype).itemsize
    return {
        **{name: Pointer(name) if stores else None for name in names},
        **{"tiles": n.B * n.K * call.key_tiles, "keys": n.S, "key_heads": n.K},
        **{"key_vectors": n.H // elements_of_vector, "value_vectors": n.V // elements_of_vector},
    }


def _first_tile_stores(call: BackwardCall) -> bool:
    """Whether the first tile of each sum of dQ stores rather than adds, so that it needs no zeros.

    It does where one warp adds all of a tile's dQ and tiles come in a fixed order, or a head has one tile.
    """
    if call.tile.split_products or call.has_metadata or not call.mask.every_row_sees_a_column():
        return False
    if call.spec.deterministic:
        every_block = call.mask.block_counts(call.tile.queries, call.tile.keys)
        return call.dq_sums == 1 or min(every_block) >= call.dq_sums
    return call.key_tiles == 1 and call.spec.block_mask is None


def _wide_key_gradients(call: BackwardCall) -> Arguments:
    """A further field of the main kernel's parameters: where it writes float32 rows of dK and dV."""
    if not call.has_wide_key_gradients:
        return {}
    columns = {"key_columns": call.n.H, "value_columns": call.n.V}
    return {"wide_key_gradients": {**call.pointers("d_key", "d_value"), **columns}}


def _main(call: BackwardCall) -> Launch:
    """Computes the gradients; dQ as float32 sums, unless its own warps write it."""
    n, spec, tile = call.n, call.spec, call.main_tile
    window = _HIDES_ALL if call.window.hides_all else call.window
    left, right = (_UNBOUNDED if x is None else x for x in (window.left, window.right))
    units = call.key_tiles * call.head_shares.heads * call.units.parts
    # Split products have no room to load the next tile beside the end of one, so each unit has its CTAs.
    # Others are persistent.
    ctas = units if tile.split_products else min(units, call.device.sm_count)
    buffers = {buffer.name: buffer for buffer in (*call.operands, *call.gradients)}
    if spec.is_wide("key"):  # float32 rows have no map: these aren't used
        buffers |= {"d_key": buffers["key"], "d_value": buffers["value"]}
    of_function = user_score_mod.gradient_parameters(spec)
    of_mask = block_mask.parameters(spec, call.shapes)
    wide = {"wide_key_gradients": _WIDE_KEY_GRADIENTS} if call.has_wide_key_gradients else {}
    parameters = _MAIN.replace(score=score_mod.parameters(spec), **wide, **of_function, **of_mask)
    rows = {
        # Each CTA loads a part of the block for all that share it.
        **{"query": tile.queries // tile.cluster, "d_out": tile.queries // tile.cluster},
        **{"key": tile.cta_keys, "value": tile.value_rows(max(call.head_dims))},
        **{"d_key": 64, "d_value": 64},
    }
    return launch(
        kernel=_kernel(call, "backward", parameters),
        grid=(ctas * tile.cluster, 1, 1),
        block=tile.threads,
        shared_bytes=tile.shared_bytes(*call.head_dims, ELEMENT_BYTES[call.dtype]),
        cluster=tile.cluster,
        arguments={
            "maps": {name: rows_map(buffers[name], count) for name, count in rows.items()},
            **call.pointers("lse_delta", "spoiled", *_ACCUM, "d_query"),
            **{"dq_accum_slots": call.dq_accum_slots, "columns": n.H},
            **call.pointers("next_tile", "dq_semaphore"),
            **{"key_sums": call.key_sums(), "queries": n.T, "keys": n.S, "batch": n.B},
            **{"head_shares": n.K * call.units.shares, "group": n.group // call.units.shares},
            **{"shares_of_head": call.units.shares, "parts_of_blocks": call.units.parts},
            **{"left": left, "right": right, "l2_head_group": call.l2_head_group},
            "scale": spec.scale,
            "score": score_mod.arguments(spec, call.shapes),
            **call.pointers("d_bias", "d_slopes", "bias_factor"),
            "mask_metadata": mask_metadata.backward_arguments(call.metadata),
            "dropout": dropout.arguments(spec),
            **_wide_key_gradients(call),
            **user_score_mod.gradient_arguments(spec, call.shapes),
            **block_mask.arguments(spec, call.shapes, call.block_grid, SPAN),
        },
    )


def _postprocess(call: BackwardCall) -> Launch:
    """Writes dQ from the float32 sums."""
    n = call.n
    return launch(
        kernel=_kernel(call, "backward_postprocess", _POSTPROCESS),
        grid=(call.query_blocks * n.N * n.B, 1, 1),
        block=_THREADS,
        arguments={
            **call.pointers("dq_accum", "d_query"),
            **{"queries": n.T, "query_heads": n.N, "head_dim": n.H},
            "scale": call.spec.scale * dropout.factor(call.spec),
        },
    )


def _postprocess_keys(call: BackwardCall) -> Launch:
    """Writes dK and dV from the float32 sums."""
    n, factor = call.n, dropout.factor(call.spec)
    return launch(
        kernel=_kernel(call, "backward_postprocess_keys", _POSTPROCESS_KEYS),
        grid=(2 * call.key_groups * n.K * n.B, 1, 1),
        block=_THREADS,
        arguments={
            "key_sums": call.key_sums(),
            **call.pointers("d_key", "d_value"),
            **{"keys": n.S, "key_heads": n.K, "head_dim": n.H, "value_dim": n.V},
            **{"scale": call.spec.scale * factor, "value_scale": factor},
        },
    )
