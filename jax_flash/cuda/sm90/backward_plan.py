"""Launch plans of the backward pass.

A call has up to three launches: preprocess, the main kernel, and, unless that writes dQ itself, postprocess.
"""

import dataclasses
import functools
import math

import jax

from jax_flash._device import Device
from jax_flash._dropout import keep_probability
from jax_flash._mask import PositionMask, Window, position_mask, window_of
from jax_flash._spec import AttentionSpec, Operands, Sizes, sizes
from jax_flash.cuda import dropout, fixed_point, mask_metadata, mask_metadata_plan, score_mod
from jax_flash.cuda.launch_plan import (
    ELEMENT_BYTES,
    Argument,
    Buffer,
    Kernel,
    Launch,
    LaunchPlan,
    Pointer,
    Zero,
    launch,
)
from jax_flash.cuda.parameters import Struct, struct
from jax_flash.cuda.sm90 import backward_scheduler, backward_tiles, l2
from jax_flash.cuda.sm90.backward_tiles import SPAN, BackwardTile
from jax_flash.cuda.sm90.tensor_maps import padded_head_dims, rows_map

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
    lse_delta="float*",  # (B, N, query blocks, 2, queries), see Call
    dq_accum="float4*",  # this and the next three: see DqAccum
    arrived="int*",
    written="int*",
    next_job="int*",
    zeroed_heads="int32_t",  # slots of dq_accum to set to zero
    next_tile="int*",  # a counter, or null
    dq_semaphore="int*",  # (sums of a block, B, N, query blocks), or null
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
    dq_accum="float*",  # this and the next six: see DqAccum
    arrived="int*",
    written="int*",
    next_job="int*",
    d_query="ELEMENT*",
    dq_accum_slots="int32_t",
    columns="int32_t",
    next_tile="int*",
    dq_semaphore="int*",
    queries="int32_t",  # T
    keys="int32_t",  # S
    key_heads="int32_t",  # K
    group="int32_t",  # N / K
    batch="int32_t",  # B
    left="int32_t",  # the window
    right="int32_t",
    l2_head_group="int32_t",  # see key_tile_at
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
    dq_accum="const float*",  # (sums of a block, B, N, query blocks, queries · head_dim)
    d_query="uint4*",  # (B, T, N, H)
    queries="int32_t",  # T
    query_heads="int32_t",  # N
    head_dim="int32_t",  # H
    scale="float",
)


def plan_backward_metadata(
    spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device
) -> LaunchPlan | None:
    """The plan that computes the main kernel's mask metadata, or None if the mask is static."""
    if not mask_metadata.is_needed(shapes):
        return None
    tile = _tile(spec, shapes)
    return mask_metadata_plan.plan_backward(spec, shapes, device.arch, tile.queries, tile.keys, SPAN)


def plan_backward(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device) -> LaunchPlan:
    """The plan that computes the gradients of query, key and value, for calls that the kernels support.

    Operands are query, key, value; of bias, mask, alibi_slopes, dropout_rows and dropout_columns those that
    the call has; the mask metadata; out, lse, d_out; d_lse if the spec returns the residual; and bias_factor
    if fixed_point.py is asked for one. Results are d_query, d_key, d_value; with a bias d_bias, in float32 or
    as fixed_point.py has it; with slopes d_slopes, in shares along further axes; and scratch memory. d_bias
    and d_slopes are yet to be multiplied by dropout's factor.
    """
    call = _Call(spec, shapes, device)
    postprocess = () if call.main_writes_dq else (_postprocess(call),)
    return LaunchPlan(
        operands=call.operands,
        results=(*call.gradients, *call.score_gradients, *call.scratch),
        steps=(*(Zero(x.name) for x in call.score_gradients), _preprocess(call), _main(call), *postprocess),
    )


def kernels(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device) -> list[Kernel]:
    """Every kernel of `plan_backward` that calls of this kind may run, whatever their lengths and number of
    heads. These decide how many sums of dQ there are."""
    most = backward_scheduler.MAX_DQ_SUMS if spec.deterministic else 1

    def with_sums(kernel: Kernel, sums: int) -> Kernel:
        return dataclasses.replace(kernel, defines=tuple((dict(kernel.defines) | {"DQ_SUMS": sums}).items()))

    return [
        with_sums(launch.kernel, sums)
        for sums in (1 << i for i in range(most.bit_length()))
        for launch in plan_backward(spec, shapes, device).launches
    ]


def _tile(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct]) -> BackwardTile:
    n = sizes(shapes)
    return backward_tiles.tile(max(n.H, n.V), score_mod.has_score_mod(spec, shapes))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call, and what its launches have in common."""

    spec: AttentionSpec
    shapes: Operands[jax.ShapeDtypeStruct]
    device: Device

    @functools.cached_property
    def n(self) -> Sizes:
        return sizes(self.shapes)

    @property
    def dtype(self) -> str:
        return self.shapes.query.dtype.name

    @functools.cached_property
    def tile(self) -> BackwardTile:
        """What preprocess and postprocess are compiled for, in deterministic calls and others alike."""
        return dataclasses.replace(_tile(self.spec, self.shapes), dropout=self.spec.dropout_rate > 0)

    @functools.cached_property
    def main_tile(self) -> BackwardTile:
        softcap_grad = score_mod.needs_softcap_grad(self.spec, self.shapes)
        softcap_grad &= max(self.head_dims) <= backward_tiles.MAX_SOFTCAP_GRAD_HEAD_DIM
        return dataclasses.replace(
            self.tile.deterministic() if self.spec.deterministic else self.tile,
            mask_metadata=self.has_metadata,
            softcap_grad=softcap_grad,
        )

    @functools.cached_property
    def head_dims(self) -> tuple[int, int]:
        """That of queries and keys, and that of values, as the kernels are compiled for."""
        head_dim, value_dim = (max(x, self.tile.least_head_dim) for x in padded_head_dims(self.n))
        return head_dim, value_dim

    @property
    def has_metadata(self) -> bool:
        return mask_metadata.is_needed(self.shapes)

    @functools.cached_property
    def window(self) -> Window:
        return window_of(self.spec, self.n)

    @functools.cached_property
    def mask(self) -> PositionMask:
        return position_mask(self.window, self.n.T, self.n.S)

    @property
    def query_blocks(self) -> int:
        return math.ceil(self.n.T / self.tile.queries)

    @property
    def key_tiles(self) -> int:
        return math.ceil(self.n.S / self.tile.keys)

    @property
    def workers(self) -> int:
        """CTAs, or clusters, at work at a time on this device. Plans use it to be fast, never to be right."""
        return self.device.sm_count // self.tile.cluster

    @property
    def has_fixed_point_bias(self) -> bool:
        return fixed_point.adds_bias_up(self.spec, self.shapes)

    @property
    def main_writes_dq(self) -> bool:
        """Whether warps of the main kernel write dQ. Otherwise every head keeps its sum for postprocess."""
        return not self.tile.split_products and not self.spec.deterministic

    @property
    def counts_tiles(self) -> bool:
        """Whether CTAs take tiles from a counter: if any warp waits for other CTAs' tiles (dq_order.cuh)."""
        return self.spec.deterministic or not self.tile.split_products

    @functools.cached_property
    def _blocks_of_tiles(self) -> tuple[int, ...]:
        return self.mask.transposed().block_counts(self.tile.keys, self.tile.queries)

    @functools.cached_property
    def l2_head_group(self) -> int:
        n, (head_dim, value_dim) = self.n, self.head_dims
        element_bytes = ELEMENT_BYTES[self.dtype]
        q_and_dq = head_dim * (element_bytes + 4)  # the sum of dQ is float32
        heads, head_bytes = n.B * n.K, n.T * (q_and_dq + value_dim * element_bytes)
        l2_bytes = l2.backward_bytes(self.device)
        if self.spec.deterministic:
            tiles_alike = self.window.unbounded and not self.has_metadata
            return backward_scheduler.l2_head_group_in_order(
                heads, n.group * head_bytes, tiles_alike, l2_bytes
            )
        if self.has_metadata:
            sequences = mask_metadata.assumed_sequences(self.shapes)
            return backward_scheduler.l2_head_group_of_unknown_lengths(heads, head_bytes, sequences, l2_bytes)
        return backward_scheduler.l2_head_group(
            self._blocks_of_tiles, heads, n.group, head_bytes, self.workers, l2_bytes
        )

    @functools.cached_property
    def dq_accum_slots(self) -> int:
        n = self.n
        if not self.main_writes_dq:
            return n.B * n.N
        # Where much of each head is skipped, more heads are at work.
        workers = self.workers * (4 if self.has_metadata else 1)
        return backward_scheduler.dq_accum_slots(
            self._blocks_of_tiles, n.B * n.K, n.group, self.l2_head_group, workers
        )

    @functools.cached_property
    def dq_sums(self) -> int:
        """Sums of each block of dQ (`backward_scheduler.dq_sums`)."""
        if not self.spec.deterministic:
            return 1
        n, high = self.n, self.mask.high
        # Without a bound on their right, queries of the first block see all tiles.
        aligned = self.key_tiles if high is None else min(self.key_tiles, max(high, 0) // self.tile.keys + 1)
        blocks = self._blocks_of_tiles
        if self.has_metadata:  # tiles see the queries of one sequence
            sequences = mask_metadata.assumed_sequences(self.shapes)
            aligned = math.ceil(aligned / sequences)
            blocks = tuple(math.ceil(x / sequences) for x in blocks)
        dq_bytes = n.B * n.N * self.query_blocks * self.tile.queries * self.head_dims[0] * 4
        gradients_bytes = 4 * sum(math.prod(x.shape) for x in self.gradients)
        return backward_scheduler.dq_sums(
            blocks,
            aligned,
            n.B * n.K,
            n.group,
            self.l2_head_group,
            backward_scheduler.ASSUMED_CTAS // self.tile.cluster,
            backward_scheduler.dq_sums_that_fit(dq_bytes, gradients_bytes),
        )

    @functools.cached_property
    def metadata(self) -> tuple[Buffer, ...]:
        return mask_metadata.backward_buffers(self.shapes, self.tile.queries, self.tile.keys, SPAN)

    @functools.cached_property
    def operands(self) -> tuple[Buffer, ...]:
        n, shapes = self.n, self.shapes
        out_shape, lse_shape = (n.B, n.T, n.N, n.V), (n.B, n.N, n.T)
        return (
            Buffer("query", shapes.query.shape, self.dtype),
            Buffer("key", shapes.key.shape, self.dtype),
            Buffer("value", shapes.value.shape, self.dtype),
            *score_mod.buffers(shapes),
            *dropout.buffers(self.spec, lse_shape, (n.B, n.S)),
            *self.metadata,
            Buffer("out", out_shape, self.dtype),
            Buffer("lse", lse_shape, "float32"),
            Buffer("d_out", out_shape, self.dtype),
            *((Buffer("d_lse", lse_shape, "float32"),) if self.spec.return_residual else ()),
            *((Buffer("bias_factor", (1,), "float32"),) if self.has_fixed_point_bias else ()),
        )

    @functools.cached_property
    def gradients(self) -> tuple[Buffer, ...]:
        operands = {"d_query": self.shapes.query, "d_key": self.shapes.key, "d_value": self.shapes.value}
        return tuple(Buffer(name, x.shape, self.dtype) for name, x in operands.items())

    @functools.cached_property
    def score_gradients(self) -> tuple[Buffer, ...]:
        """Gradients of bias and slopes that the call has. The kernel adds to them."""
        n, bias, found = self.n, self.shapes.bias, []
        if bias is not None and self.has_fixed_point_bias:
            found.append(Buffer("d_bias", (*bias.shape, 2), "uint32"))
        elif bias is not None:
            found.append(Buffer("d_bias", bias.shape, "float32"))
        if self.shapes.alibi_slopes is not None:
            # A share for each warp of each CTA, so that the sum doesn't depend on who comes first.
            found.append(Buffer("d_slopes", (n.B, n.N, self.key_tiles * self.tile.cluster, 4), "float32"))
        return tuple(found)

    @functools.cached_property
    def scratch(self) -> tuple[Buffer, ...]:
        n, tile, blocks = self.n, self.tile, self.query_blocks
        block_elements = tile.queries * self.head_dims[0]
        found = [
            Buffer("lse_delta", (n.B, n.N, blocks, tile.per_query_values, tile.queries), "float32"),
            Buffer("dq_accum", (self.dq_sums * self.dq_accum_slots, blocks, block_elements), "float32"),
        ]
        if self.main_writes_dq:
            found += [
                Buffer("arrived", (n.B, n.N, math.ceil(blocks / SPAN)), "int32"),
                Buffer("written", (n.B, n.N), "int32"),
                Buffer("next_job", (1,), "int32"),
            ]
        if self.counts_tiles:
            found.append(Buffer("next_tile", (1,), "int32"))
        if self.spec.deterministic:
            found.append(Buffer("dq_semaphore", (self.dq_sums * n.B, n.N, blocks), "int32"))
        return tuple(found)

    def pointer(self, name: str) -> Pointer | None:
        """To the buffer of this name, or null if the call has none."""
        buffers = (*self.operands, *self.gradients, *self.score_gradients, *self.scratch)
        return Pointer(name) if any(buffer.name == name for buffer in buffers) else None

    def pointers(self, *names: str) -> dict[str, Argument]:
        return {name: self.pointer(name) for name in names}


_ACCUM = ("dq_accum", "arrived", "written", "next_job")


def _kernel(call: _Call, entry: str, parameters: Struct) -> Kernel:
    """The kernel `backward`, or `backward_preprocess` and the like, for the call's tile."""
    is_main = entry == "backward"
    tile = call.main_tile if is_main else call.tile
    head_dim, value_dim = call.head_dims
    defines = (
        ("ELEMENT", call.dtype),
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
        ("DETERMINISTIC", int(is_main and call.spec.deterministic)),
        ("DQ_SUMS", call.dq_sums),
        *(mask_metadata.defines(call.shapes) if is_main else mask_metadata.NO_DEFINES),
        *(score_mod.defines(call.spec, call.shapes) if is_main else score_mod.NO_DEFINES),
        ("BIAS_SUM", "uint64_t" if is_main and call.has_fixed_point_bias else "float"),
        *dropout.defines(call.spec),
        ("SHARED_BYTES", tile.shared_bytes(head_dim, value_dim, ELEMENT_BYTES[call.dtype])),
    )
    source = entry.removeprefix("backward_")  # as "preprocess"
    return Kernel(f"sm90/backward/{source}.cu", entry, call.device.arch, defines, parameters)


def _preprocess(call: _Call) -> Launch:
    """Computes delta, lse in base 2, and sets sums and counters to zero."""
    n, spec = call.n, call.spec
    # In a fixed order the first tile of a sum stores, if one warp adds all of its dQ and each sum has a tile.
    first_stores = spec.deterministic and not call.tile.split_products
    first_stores &= not call.has_metadata and call.mask.every_row_sees_a_column()
    if first_stores and call.dq_sums > 1:
        first_stores = min(call.mask.block_counts(call.tile.queries, call.tile.keys)) >= call.dq_sums
    return launch(
        kernel=_kernel(call, "backward_preprocess", _PREPROCESS),
        grid=(call.query_blocks * n.N * n.B, 1, 1),
        block=_THREADS,
        arguments={
            **call.pointers("out", "d_out", "lse", "d_lse", "lse_delta", *_ACCUM),
            "zeroed_heads": 0 if first_stores else call.dq_accum_slots,
            **call.pointers("next_tile", "dq_semaphore"),
            **{"queries": n.T, "query_heads": n.N, "columns": n.V},
            "dropout_rows": dropout.pointer(spec, "dropout_rows"),
            "kept": keep_probability(spec.dropout_rate),
        },
    )


def _main(call: _Call) -> Launch:
    """Computes the gradients; dQ as float32 sums, unless its own warps write it."""
    n, spec, tile = call.n, call.spec, call.main_tile
    window = _HIDES_ALL if call.window.hides_all else call.window
    left, right = (_UNBOUNDED if x is None else x for x in (window.left, window.right))
    tiles = call.key_tiles * n.K * n.B
    # Split products have no room to load the next tile beside the end of one, so each tile has its CTAs.
    # Others are persistent.
    ctas = tiles if tile.split_products else min(tiles, call.device.sm_count)
    buffers = {buffer.name: buffer for buffer in (*call.operands, *call.gradients)}
    rows = {
        # Each CTA loads a part of the block for all that share it.
        **{"query": tile.queries // tile.cluster, "d_out": tile.queries // tile.cluster},
        **{"key": tile.cta_keys, "value": tile.value_rows(max(call.head_dims))},
        **{"d_key": 64, "d_value": 64},
    }
    return launch(
        kernel=_kernel(call, "backward", _MAIN),
        grid=(ctas * tile.cluster, 1, 1),
        block=tile.threads,
        shared_bytes=tile.shared_bytes(*call.head_dims, ELEMENT_BYTES[call.dtype]),
        cluster=tile.cluster,
        arguments={
            "maps": {name: rows_map(buffers[name], count) for name, count in rows.items()},
            **call.pointers("lse_delta", *_ACCUM, "d_query"),
            **{"dq_accum_slots": call.dq_accum_slots, "columns": n.H},
            **call.pointers("next_tile", "dq_semaphore"),
            **{"queries": n.T, "keys": n.S, "key_heads": n.K, "group": n.group, "batch": n.B},
            **{"left": left, "right": right, "l2_head_group": call.l2_head_group},
            "scale": spec.scale,
            "score": score_mod.arguments(spec, call.shapes),
            **call.pointers("d_bias", "d_slopes", "bias_factor"),
            "mask_metadata": mask_metadata.backward_arguments(call.metadata),
            "dropout": dropout.arguments(spec),
        },
    )


def _postprocess(call: _Call) -> Launch:
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
