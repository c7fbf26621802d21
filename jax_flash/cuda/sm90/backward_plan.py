"""Launch plans of the backward pass."""

import dataclasses
import math

import jax

from jax_flash._device import Device
from jax_flash._dropout import keep_probability
from jax_flash._mask import Window, position_mask, window_of
from jax_flash._spec import AttentionSpec, Operands, sizes
from jax_flash.cuda import dropout, fixed_point, mask_metadata, mask_metadata_plan, score_mod
from jax_flash.cuda.launch_plan import Buffer, Kernel, LaunchPlan, Pointer, Zero, launch
from jax_flash.cuda.parameters import Struct, struct
from jax_flash.cuda.sm90 import l2
from jax_flash.cuda.sm90.backward_scheduler import (
    section_heads,
    section_heads_by_data,
    section_heads_in_turns,
    sum_places,
)
from jax_flash.cuda.sm90.tensor_maps import PANEL, padded_head_dims, rows_map


@dataclasses.dataclass(frozen=True)
class BackwardTile:
    """Tile shape of one variant of the kernels.

    Two consumer warpgroups share a block. They split its keys, each with dK and dV of 64 keys in registers,
    while a third warpgroup computes dQ; or, where the head dim leaves room for one of the two, its products.
    """

    queries: int  # in a block
    cta_keys: int  # of each CTA that shares the tile
    split_products: bool
    stages: int  # blocks of Q, and of dO, in flight
    # CTAs that share a tile. With split products 2 halve the sums of dQ, and are needed above head dim 192.
    cluster: int = 1
    # Where a warpgroup of its own computes dQ: tiles of it on their way to the sum, and 4 KiB pieces of
    # complete sums on their way to each of two warps that write them.
    sum_stages: int = 1
    writer_stages: int = 0
    turn_stages: int = 0  # and turns under way, where tiles add to sums in turns
    bounds: bool = False  # whether what queries see is data
    factors: bool = False  # whether one consumer hands the soft cap's derivative to the other, beside P
    dropout: bool = False

    @property
    def in_turns(self) -> "BackwardTile":
        """The same where tiles add to sums in turns: no warps of the kernel's own write dQ, and their memory
        holds another stage of it where that is as large."""
        sum_stages = self.sum_stages if self.split_products else self.writer_stages
        return dataclasses.replace(self, sum_stages=sum_stages, writer_stages=0, turn_stages=2)

    @property
    def statistics(self) -> int:
        """What the main kernel has to know of a query: lse, D, and dropout's word."""
        return 2 + self.dropout

    @property
    def threads(self) -> int:
        return 384 if self.split_products else 512

    @property
    def keys(self) -> int:
        return self.cta_keys * self.cluster

    def gradients_in_value_place(self, larger_dim: int) -> bool:
        """Whether dK and dV leave by way of V's place, beside which K of the next tile has one."""
        return not self.split_products and larger_dim <= 96

    def value_rows(self, larger_dim: int) -> int:
        """Keys whose V comes by itself."""
        return 64 if self.gradients_in_value_place(larger_dim) else self.cta_keys

    def shared_bytes(self, head_dim: int, value_dim: int | None = None) -> int:
        """Dynamic shared memory, in the order of `SharedMemory` in cuda/kernels/sm90/backward/traits.cuh.

        `value_dim` is that of V where it is not `head_dim`.
        """
        value_dim = value_dim or head_dim
        larger_dim = max(head_dim, value_dim)
        key_row, value_row, larger_row = (
            math.ceil(x / PANEL) * PANEL * 2 for x in (head_dim, value_dim, larger_dim)
        )
        # K of the next tile, too, and a place for V that has room for either gradient; or one for gradients.
        in_value_place = self.gradients_in_value_place(larger_dim)
        key_stages = 2 if in_value_place else 1
        keys = self.cta_keys * key_stages * key_row
        values = self.cta_keys * (larger_row if in_value_place else value_row)
        gradients = 0 if self.split_products or in_value_place else self.cta_keys * larger_row
        blocks = self.stages * self.queries * (key_row + value_row)
        buffers = 1 if self.split_products else 2
        d_scores = buffers * self.queries * self.cta_keys * 2
        peer = (self.queries + 2 * PANEL) * self.cta_keys * 2 if self.cluster > 1 else 0
        if self.split_products:
            d_query_columns = head_dim // self.cluster if larger_dim <= 192 else 0
        else:
            d_query_columns = head_dim if larger_dim <= 96 else PANEL
        d_query = self.sum_stages * 64 * d_query_columns * 4
        writers = 2 * self.writer_stages * 4096
        statistics = self.stages * self.statistics * self.queries * 4
        value_parts = self.cta_keys // self.value_rows(larger_dim)
        barriers = 2 * key_stages + value_parts + 2 + 2 * buffers + 4 * self.stages
        barriers += 2 * self.sum_stages + 2 * self.writer_stages + 3 * self.turn_stages
        d_scores *= 2 if self.factors else 1
        sums = d_query + writers
        tells_work = in_value_place or (self.bounds and not self.split_products)  # not the tile's index alone
        told = key_stages * (3 + 2 * self.bounds) if tells_work else 1
        words = barriers + told
        return keys + values + blocks + d_scores + peer + sums + gradients + statistics + 8 * words


# The larger head dim, of K and Q or of V, rounded up to a multiple of 16, at most → tile. What a consumer
# thread holds at once decides, in registers of 208 (240 above 128): gradients, and the larger of scores or dP
# with packed P, and of packed P, dS and dQ. Timed where both are the same.
#
#   head dim   gradients           S or dP, P   packed P or dS, and dQ   shared KB
#   64         2 x 32              64 + 32      32 + 32                  210
#   96         2 x 48              32 + 16      16 + 16                  225
#   128        2 x 64              32 + 16      16 + 16                  225
#   192        96 (dK or dV)       32           16 + 32 (dQ)             201
#   256        128 (dK or dV)      32           16 + 32 (dQ)             225
_TILES = {
    64: BackwardTile(128, 128, split_products=False, stages=2, writer_stages=2),
    96: BackwardTile(64, 128, split_products=False, stages=2, writer_stages=1),
    128: BackwardTile(64, 128, split_products=False, stages=2, writer_stages=2),
    192: BackwardTile(64, 64, split_products=True, stages=2, cluster=2),
    256: BackwardTile(64, 64, split_products=True, stages=2, cluster=2),
}

# Where scores become logits by more than the scale: one gradient a consumer leaves registers for that.
_CHANGED_TILE = BackwardTile(64, 64, split_products=True, stages=2)

# Beyond, the soft cap's derivative takes the place of P, as there is no room for both.
_MAX_HEAD_DIM_WITH_FACTORS = 192

# Blocks of queries that key tiles count together as done.
_SPAN = 4

# The kernels' arithmetic on a window's side that does not bind stays in 32 bits with this in its place.
_UNBOUNDED = 1 << 29

_PREPROCESS = struct(
    "Parameters",
    out="const uint4*",  # (B, T, N, V), as the next
    d_out="const uint4*",
    lse="const float*",  # (B, N, T), natural
    d_lse="const float*",  # (B, N, T), or null
    statistics="float*",  # (B, N, query blocks, 2, queries), see Call
    d_query_sums="float4*",  # this and the next three: see QueryGradient
    arrived="int*",
    written="int*",
    next_job="int*",
    zeroed_heads="int32_t",  # sums there are to be set to zero
    next_tile="int*",  # a counter, or null
    turns="int*",  # (B, N, query blocks), or null
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
    statistics="const float*",
    d_query_sums="float*",  # this and the next six: see QueryGradient
    arrived="int*",
    written="int*",
    next_job="int*",
    d_query="ELEMENT*",
    places="int32_t",
    columns="int32_t",
    next_tile="int*",
    turns="int*",
    queries="int32_t",  # T
    keys="int32_t",  # S
    key_heads="int32_t",  # K
    group="int32_t",  # N / K
    batch="int32_t",  # B
    left="int32_t",  # the window
    right="int32_t",
    section_heads="int32_t",  # see key_tile_at
    scale="float",
    score=score_mod.PARAMETERS,
    d_bias="BIAS_SUM*",  # as the bias
    d_slopes="float*",  # (B, N, CTAs' shares of the keys, 4 warps)
    mask_metadata=mask_metadata.BACKWARD_PARAMETERS,
    bias_factor="const float*",  # of terms that are added up as integers
    dropout=dropout.PARAMETERS,
)

_POSTPROCESS = struct(
    "Parameters",
    d_query_sum="const float*",  # (B, N, query blocks, queries · head_dim)
    d_query="uint4*",  # (B, T, N, H)
    queries="int32_t",  # T
    query_heads="int32_t",  # N
    head_dim="int32_t",  # H
    scale="float",
)


def tile(larger_dim: int, changed: bool = False) -> BackwardTile:
    """The tile for the larger of a call's head dims, that of K and that of V, where scores are `changed`
    beyond scale and window or not."""
    if changed and larger_dim <= 128:
        return _CHANGED_TILE
    return next(shape for limit, shape in _TILES.items() if larger_dim <= limit)


def plan_backward_metadata(
    spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device
) -> LaunchPlan | None:
    """How `device` finds what the main kernel reads of a call with bounds."""
    if not mask_metadata.is_needed(shapes):
        return None
    n = sizes(shapes)
    shape = tile(max(n.H, n.V), score_mod.has_score_mod(spec, shapes))
    return mask_metadata_plan.plan_backward(spec, shapes, device.arch, shape.queries, shape.keys, _SPAN)


def plan_backward(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device) -> LaunchPlan:
    """How `device` computes the gradients of query, key and value; for calls that `supports` accepts.

    Operands are query, key, value, those of bias, mask, alibi_slopes, dropout_rows and dropout_columns
    that are there, what `plan_backward_metadata` gives, out, lse, d_out, where the spec returns the residual
    d_lse, and where fixed_point.py makes one bias_factor. Results are d_query, d_key and d_value; where there
    are bias and slopes, d_bias, in float32 or as fixed_point.py takes it, and d_slopes, shares of it along
    further axes, both yet to be multiplied by dropout's factor; and scratch memory.
    """
    n = sizes(shapes)
    dtype = shapes.query.dtype.name
    window = window_of(spec, n)
    mask = position_mask(window, n.T, n.S)
    changed = score_mod.has_score_mod(spec, shapes)
    shape = dataclasses.replace(tile(max(n.H, n.V), changed), dropout=spec.dropout_rate > 0)
    # With split products both consumers have columns of dQ, and dP may be computed in two parts.
    least = 32 if shape.split_products else 16
    head_dim, value_dim = (max(x, least) for x in padded_head_dims(n))
    bounded = mask_metadata.is_needed(shapes)
    beside = score_mod.needs_softcap_grad(spec, shapes)
    beside = beside and max(head_dim, value_dim) <= _MAX_HEAD_DIM_WITH_FACTORS
    main_shape = dataclasses.replace(
        shape.in_turns if spec.deterministic else shape, bounds=bounded, factors=beside
    )
    in_turns = spec.deterministic and not shape.split_products  # and all by one warp
    query_blocks = math.ceil(n.T / shape.queries)
    limits = mask_metadata.backward_buffers(shapes, shape.queries, shape.keys, _SPAN)
    tiles_alike = window.unbounded and not bounded
    fixed_point_bias = fixed_point.adds_bias_up(spec, shapes)

    def kernel(
        source: str, entry: str, parameters: Struct, shape: BackwardTile = shape, is_main: bool = False
    ) -> Kernel:
        defines = (
            ("ELEMENT", dtype),
            ("HEAD_DIM", head_dim),
            ("VALUE_DIM", value_dim),
            ("QUERIES", shape.queries),
            ("KEYS", shape.keys),
            ("CLUSTER", shape.cluster),
            ("SPLIT_PRODUCTS", int(shape.split_products)),
            ("STAGES", shape.stages),
            ("SUM_STAGES", shape.sum_stages),
            ("WRITER_STAGES", shape.writer_stages),
            ("TURN_STAGES", shape.turn_stages),
            ("SPAN", _SPAN),
            ("DETERMINISTIC", int(is_main and spec.deterministic)),
            *(mask_metadata.defines(shapes) if is_main else mask_metadata.NO_DEFINES),
            *(score_mod.defines(spec, shapes) if is_main else score_mod.NO_DEFINES),
            ("BIAS_SUM", "uint64_t" if is_main and fixed_point_bias else "float"),
            *dropout.defines(spec),
            ("SHARED_BYTES", shape.shared_bytes(head_dim, value_dim)),
        )
        return Kernel(source, entry, device.arch, defines, parameters)

    query = Buffer("query", shapes.query.shape, dtype)
    key = Buffer("key", shapes.key.shape, dtype)
    value = Buffer("value", shapes.value.shape, dtype)
    out = Buffer("out", (n.B, n.T, n.N, n.V), dtype)
    lse = Buffer("lse", (n.B, n.N, n.T), "float32")
    d_out = Buffer("d_out", out.shape, dtype)
    d_lse = Buffer("d_lse", lse.shape, "float32")
    d_query = Buffer("d_query", query.shape, dtype)
    d_key = Buffer("d_key", key.shape, dtype)
    d_value = Buffer("d_value", value.shape, dtype)
    d_bias = None
    if shapes.bias is not None:
        d_bias = Buffer("d_bias", shapes.bias.shape, "float32")
        if fixed_point_bias:
            d_bias = Buffer("d_bias", (*shapes.bias.shape, 2), "uint32")
    bias_factor = (Buffer("bias_factor", (1,), "float32"),) if fixed_point_bias else ()
    d_slopes = None
    if shapes.alibi_slopes is not None:
        # A share for each warp of each CTA, so that the sum doesn't depend on who comes first.
        d_slopes = Buffer("d_slopes", (n.B, n.N, math.ceil(n.S / shape.keys) * shape.cluster, 4), "float32")
    statistics = Buffer("statistics", (n.B, n.N, query_blocks, shape.statistics, shape.queries), "float32")
    seen = mask.transposed().block_counts(shape.keys, shape.queries)
    workers = device.sm_count // shape.cluster
    key_heads = n.B * n.K
    head_bytes = n.T * (head_dim * (2 + 4) + value_dim * 2)  # Q and the sum of dQ, dO
    l2_bytes = l2.backward_bytes(device)
    if spec.deterministic:
        section = section_heads_in_turns(key_heads, n.group * head_bytes, tiles_alike, l2_bytes)
    elif bounded:
        section = section_heads_by_data(
            key_heads, head_bytes, mask_metadata.assumed_sequences(shapes), l2_bytes
        )
    else:
        section = section_heads(seen, key_heads, n.group, head_bytes, workers, l2_bytes)
    # Sums that are added to in turns have all a place, and a kernel of its own writes dQ.
    counted = not shape.split_products and not spec.deterministic
    places = n.B * n.N
    if counted:
        # More heads are under way where much of each is passed over.
        places = sum_places(seen, key_heads, n.group, section, workers * (4 if bounded else 1))
    sums = Buffer("d_query_sums", (places, query_blocks, shape.queries * head_dim), "float32")
    counts = (
        Buffer("arrived", (n.B, n.N, math.ceil(query_blocks / _SPAN)), "int32"),
        Buffer("written", (n.B, n.N), "int32"),
        Buffer("next_job", (1,), "int32"),
    )
    sums_arguments = {
        "d_query_sums": Pointer("d_query_sums"),
        **{x.name: Pointer(x.name) if counted else None for x in counts},
    }
    if window.hides_all:
        window = Window(0, -_UNBOUNDED)  # empty: for the kernels' arithmetic, far from everything
    left, right = (_UNBOUNDED if x is None else x for x in (window.left, window.right))
    tiles = math.ceil(n.S / shape.keys) * n.K * n.B
    # Split products can load nothing of the next tile beside the end of one, so each tile has its CTAs.
    # Others are persistent.
    ctas = tiles if shape.split_products else min(tiles, device.sm_count)
    # Wherever warps wait for other CTAs' tiles, CTAs take tiles from a counter (dq_order.cuh).
    waits = spec.deterministic or not shape.split_products
    counter = (Buffer("next_tile", (1,), "int32"),) if waits else ()
    next_tile = Pointer("next_tile") if counter else None
    turns = (Buffer("turns", (n.B, n.N, query_blocks), "int32"),) if spec.deterministic else ()
    turns_argument = Pointer("turns") if turns else None

    # The first tile in turn puts its share there, where there is one.
    first_writes = in_turns and not bounded and mask.every_row_sees_a_column()
    prepare = launch(
        kernel=kernel("sm90/backward/preprocess.cu", "backward_preprocess", _PREPROCESS),
        grid=(query_blocks * n.N * n.B, 1, 1),
        block=256,
        arguments={
            **{name: Pointer(name) for name in ("out", "d_out", "lse", "statistics")},
            "d_lse": Pointer("d_lse") if spec.return_residual else None,
            **sums_arguments,
            "zeroed_heads": 0 if first_writes else places,
            "next_tile": next_tile,
            "turns": turns_argument,
            **{"queries": n.T, "query_heads": n.N, "columns": n.V},
            "dropout_rows": dropout.pointer(spec, "dropout_rows"),
            "kept": keep_probability(spec.dropout_rate),
        },
    )
    main = launch(
        kernel=kernel("sm90/backward/backward.cu", "backward", _MAIN, main_shape, is_main=True),
        grid=(ctas * shape.cluster, 1, 1),
        block=shape.threads,
        shared_bytes=main_shape.shared_bytes(head_dim, value_dim),
        cluster=shape.cluster,
        arguments={
            "maps": {
                # Each CTA loads a part of the block for all.
                "query": rows_map(query, shape.queries // shape.cluster),
                "key": rows_map(key, shape.cta_keys),
                "value": rows_map(value, shape.value_rows(max(head_dim, value_dim))),
                "d_out": rows_map(d_out, shape.queries // shape.cluster),
                "d_key": rows_map(d_key, 64),
                "d_value": rows_map(d_value, 64),
            },
            "statistics": Pointer("statistics"),
            **sums_arguments,
            **{"d_query": Pointer("d_query"), "places": places, "columns": n.H},
            "next_tile": next_tile,
            "turns": turns_argument,
            **{"queries": n.T, "keys": n.S, "key_heads": n.K, "group": n.group, "batch": n.B},
            **{"left": left, "right": right, "section_heads": section},
            "scale": spec.scale,
            "score": score_mod.arguments(spec, shapes),
            "d_bias": None if d_bias is None else Pointer("d_bias"),
            "d_slopes": None if d_slopes is None else Pointer("d_slopes"),
            "mask_metadata": mask_metadata.backward_arguments(limits),
            "bias_factor": Pointer("bias_factor") if fixed_point_bias else None,
            "dropout": dropout.arguments(spec),
        },
    )
    finish = launch(
        kernel=kernel("sm90/backward/postprocess.cu", "backward_postprocess", _POSTPROCESS),
        grid=(query_blocks * n.N * n.B, 1, 1),
        block=256,
        arguments={
            "d_query_sum": Pointer("d_query_sums"),
            "d_query": Pointer("d_query"),
            **{"queries": n.T, "query_heads": n.N, "head_dim": n.H},
            "scale": spec.scale * dropout.factor(spec),
        },
    )
    added_to = tuple(x for x in (d_bias, d_slopes) if x is not None)
    scratch = (statistics, sums, *(counts if counted else ()), *counter, *turns)
    of_residual = (d_lse,) if spec.return_residual else ()
    words = dropout.buffers(spec, (n.B, n.N, n.T), (n.B, n.S))
    return LaunchPlan(
        operands=(
            *(query, key, value),
            *score_mod.buffers(shapes),
            *words,
            *limits,
            *(out, lse, d_out),
            *of_residual,
            *bias_factor,
        ),
        results=(d_query, d_key, d_value, *added_to, *scratch),
        steps=(*(Zero(x.name) for x in added_to), prepare, main, *(() if counted else (finish,))),
    )
