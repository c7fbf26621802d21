"""Launch plans of the forward kernel on key-value caches: chunks of prompts, many queries of each sequence.

The decode kernel's tiles have up to 64 rows, and each reads the cache again. With many queries that is bound
by L2, and by how few products a block takes part in. The forward kernel has larger tiles, whose steps
overlap. It reads the cache where it lies: lengths and window become mask metadata, and `key_places` says
which row of the cache a batch row attends to. The kernel before it computes both
(cuda/kernels/sm90/prefill/preprocess.cu). It loads pages one by one (cuda/kernels/sm90/forward/pages.cuh).

If queries are packed, the forward kernel takes the sequences that have many, and the decode kernel takes the
others. Lengths are data, so a call runs both kernels. Each row tile of the forward kernel is a slot, which
has queries of one sequence (cuda/kernels/sm90/forward/packed_queries.cuh).
"""

import dataclasses
import math

import jax

from jax_flash._cache_spec import CacheOperands, CacheSpec, cache_sizes
from jax_flash._device import Device
from jax_flash._float8 import is_float8
from jax_flash._spec import Operands, sizes
from jax_flash.cuda import mask_metadata
from jax_flash.cuda.launch_plan import Buffer, Kernel, Launch, LaunchPlan, Pointer, launch
from jax_flash.cuda.parameters import struct
from jax_flash.cuda.sm90 import decode_plan, forward_plan
from jax_flash.cuda.sm90.forward_plan import Configuration
from jax_flash.cuda.sm90.forward_tiles import pack_gqa_options
from jax_flash.cuda.sm90.loaded import Loaded, Pages

Shapes = CacheOperands[jax.ShapeDtypeStruct]

_PREPROCESS_PARAMETERS = struct(
    "Parameters",
    shape=decode_plan.SHAPE,
    rotary=decode_plan.ROTARY,
    query="const ELEMENT*",  # (B, T, N, H)
    rotated_query="ELEMENT*",  # likewise; null if queries aren't rotated
    key_places="KeyPlace*",  # (B)
    row_keys="Interval*",  # this and the next two: see mask_metadata.FORWARD_PARAMETERS
    group_blocks="BlockRange*",
    diagonals="int*",  # (B, T): the key on each query's diagonal; null without ALiBi
    key_ends="int*",  # (B): how many keys a batch row has; null without pages
    slots="QuerySlot*",  # if queries are packed: one for each tile of rows; null elsewhere
    used_slots="int*",  # likewise: how many come before those that are empty
    groups="int32_t",  # of 64 rows, in a batch row; of packed queries, in all slots
    next_tile="int*",  # the forward kernel's counter of tiles; null without
)

_WRITTEN = ("row_keys", "group_blocks", "diagonals", "key_ends", "slots", "used_slots", "next_tile")
_THREADS = 128
_GROUP_ROWS = 64  # of mask metadata

_PAGE_MULTIPLE = 8
"""Keys of an atom of the shared-memory swizzle, of which what TMA copies from a page has whole ones."""

_LEAST_QUERIES = 64
"""Of each sequence. A step of decoding has fewer, even if it speculates."""

_LEAST_MEAN_QUERIES = 2
"""Of packed queries, for each sequence that the call has room for. A step of decoding has one."""


def suits(spec: CacheSpec, shapes: Shapes, device: Device) -> bool:
    """Whether the forward kernel takes a call that `decoding.supports` accepts; else the decode kernel does.

    It takes calls of many queries, if more than half of what the device computes in its tiles are rows of the
    call. Rows may be missing in tiles that are not full, and in multiprocessors that have no tile: the kernel
    doesn't split a tile's keys among several. The decode kernel does, and wastes few rows, but is taken to be
    half as fast. Where this rule should draw the line was not measured. Packed queries count as those of one
    sequence. There must be so many of them that some may be a prompt's.
    """
    n = cache_sizes(shapes)
    if not can_run(spec, shapes) or n.T < _LEAST_QUERIES:
        return False
    is_packed = shapes.query_offsets is not None
    chosen, batch = _configuration(spec, shapes), 1 if is_packed else n.B
    tiles = math.ceil(n.T * chosen.pack_gqa / chosen.tile.rows) * (n.N // chosen.pack_gqa) * batch
    computed = max(tiles, device.sm_count) * chosen.tile.rows
    return 2 * batch * n.T * n.N > computed and (not is_packed or n.T >= _LEAST_MEAN_QUERIES * n.B)


def can_run(spec: CacheSpec, shapes: Shapes) -> bool:
    """Whether the forward kernel can run a call that `decoding.supports` accepts, however slowly.

    It takes no pages whose size isn't a multiple of `_PAGE_MULTIPLE`, and no cache in 8 bits beside queries
    in 16. With packed queries it takes no functions, and no slopes or sinks that differ by sequence.
    """
    if (cache_sizes(shapes).page or 0) % _PAGE_MULTIPLE or is_float8(shapes.key.dtype):
        return False
    if shapes.query_offsets is None:
        return True
    of_batch_rows = any(x is not None and x.shape[0] > 1 for x in (shapes.alibi_slopes, shapes.sinks))
    not_packed = (shapes.new_key, shapes.rotary_cos, spec.attention.score_mod)
    return not of_batch_rows and all(x is None for x in not_packed)


def describe(spec: CacheSpec, shapes: Shapes) -> str:
    """The forward kernel's tile shape for a call that it suits."""
    n, chosen = cache_sizes(shapes), _configuration(spec, shapes)
    tile = chosen.tile
    dims = f"head dim {n.H}" if n.H == n.V else f"head dims {n.H} of keys and {n.V} of values"
    pages = f" in pages of {n.page}" if n.page else ""
    packed = ""
    if shapes.query_offsets is not None:
        packed = f"; for sequences with fewer than {_LEAST_QUERIES} queries, the decode kernel"
    return (
        f"sm_90 forward kernel on the cache{pages} for {dims}: tiles of {tile.rows} rows (queries × "
        f"{chosen.pack_gqa} heads) × {tile.keys} keys, {tile.stages} stages{packed}"
    )


def plan_prefill(spec: CacheSpec, shapes: Shapes, device: Device) -> LaunchPlan:
    """How `device` runs a call that `can_run` accepts: by the forward kernel; packed queries, by both."""
    n, chosen = cache_sizes(shapes), _configuration(spec, shapes)
    is_packed = shapes.query_offsets is not None
    rotates = shapes.rotary_cos is not None
    query = Buffer("rotated_query" if rotates else "query", shapes.query.shape, shapes.query.dtype.name)
    attention_shapes = _attention_shapes(spec, shapes)
    attention = forward_plan.plan_attention(
        spec.attention,
        attention_shapes,
        device,
        Loaded(
            query,
            *(_loaded(shapes, name) for name in ("key", "value")),
            in_cache=True,
            has_hidden_values=shapes.left_padding is not None
            or decode_plan.window_of(spec, n).left is not None,
            pages=_pages(shapes),
            is_packed=is_packed,
        ),
        chosen,
    )
    metadata = forward_plan.metadata_buffers(spec.attention, attention_shapes, chosen)
    places = () if shapes.page_table is None else (Buffer("key_ends", (n.B,), "int32"),)
    if is_packed:
        slots = _slots(spec, shapes)
        places = (*places, Buffer("slots", (slots, 4), "int32"), Buffer("used_slots", (1,), "int32"))
    scratch = (
        *((query,) if rotates else ()),
        Buffer("key_places", (n.B, 2), "int32"),
        *places,
        *metadata,
        *attention.scratch,
    )
    launches = (
        *((decode_plan.append(spec, shapes, device),) if n.U else ()),
        _preprocess(spec, shapes, device, (*places, *metadata, *attention.scratch)),
        attention.launch,
    )
    if is_packed:
        others = decode_plan.plan_decode(spec, shapes, device, most_queries=_LEAST_QUERIES - 1)
        launches = (*launches, *others.launches)
        scratch = (*scratch, *(b for b in others.results if b.name not in ("out", "lse")))
    return decode_plan.plan_of(shapes, launches, scratch)


def _preprocess(spec: CacheSpec, shapes: Shapes, device: Device, written: tuple[Buffer, ...]) -> Launch:
    """Writes those of the buffers `written` that it knows, where sequences' keys are, and rotated queries."""
    n, chosen = cache_sizes(shapes), _configuration(spec, shapes)
    attention_shapes = _attention_shapes(spec, shapes)
    groups = forward_plan.row_groups(spec.attention, attention_shapes, chosen)
    pairs = decode_plan.rotary_pairs(spec, shapes)
    work = max(32 * sizes(attention_shapes).B * groups, n.B, n.B * n.T * n.N * n.H // 8 if pairs else 0)
    kernel = Kernel(
        source="sm90/prefill/preprocess.cu",
        entry="prefill_preprocess",
        arch=device.arch,
        defines=(
            ("ELEMENT", shapes.query.dtype.name),
            ("ROTARY", pairs),
            ("PACK_GQA", chosen.pack_gqa),
            ("BLOCK_KEYS", chosen.tile.keys),
            ("TILE_GROUPS", chosen.tile.consumers),
            ("PAGE", n.page or 0),
            ("PACKED", int(shapes.query_offsets is not None)),
        ),
        parameters=_PREPROCESS_PARAMETERS,
    )
    return launch(
        kernel=kernel,
        grid=(min(math.ceil(work / _THREADS), 8 * device.sm_count), 1, 1),
        block=_THREADS,
        overlap_previous=True,
        arguments={
            "shape": decode_plan.shape_arguments(spec, shapes, least_queries=_LEAST_QUERIES),
            "rotary": decode_plan.rotary_arguments(shapes),
            "query": Pointer("query"),
            "rotated_query": Pointer("rotated_query") if pairs else None,
            "key_places": Pointer("key_places"),
            **mask_metadata.pointers(written, *_WRITTEN),
            "groups": groups,
        },
    )


def keys_of_block(spec: CacheSpec, shapes: Shapes) -> int:
    """Keys that the forward kernel's blocks have."""
    return _configuration(spec, shapes).tile.keys


def _configuration(spec: CacheSpec, shapes: Shapes) -> Configuration:
    chosen = forward_plan.configure(spec.attention, _of_queries(shapes, shapes.query))
    if shapes.query_offsets is None:
        return chosen
    # A sequence's last tile is partly empty, so the fewer tiles there are, the better.
    return dataclasses.replace(chosen, pack_gqa=pack_gqa_options(cache_sizes(shapes).group, _GROUP_ROWS)[-1])


def _slots(spec: CacheSpec, shapes: Shapes) -> int:
    """The most row tiles that packed queries need. The last one of each sequence may not be full."""
    n, chosen = cache_sizes(shapes), _configuration(spec, shapes)
    return math.ceil(n.T * chosen.pack_gqa / chosen.tile.rows) + min(n.B, n.T // _LEAST_QUERIES)


def _attention_shapes(spec: CacheSpec, shapes: Shapes) -> Operands[jax.ShapeDtypeStruct]:
    """The call as the forward kernel sees it: each batch row has its keys, and so many as its length says.

    Packed queries count as one batch row, and as so many as the slots have room for.
    """
    query = shapes.query
    if shapes.query_offsets is not None:
        chosen = _configuration(spec, shapes)
        queries = _slots(spec, shapes) * chosen.tile.rows // chosen.pack_gqa
        query = jax.ShapeDtypeStruct((1, queries, *query.shape[2:]), query.dtype)
    return _of_queries(shapes, query)


def _of_queries(shapes: Shapes, query: jax.ShapeDtypeStruct) -> Operands[jax.ShapeDtypeStruct]:
    """Attention of these queries, `(B, T, N, H)`, to the cache."""
    n, B = cache_sizes(shapes), query.shape[0]
    return Operands(
        query,
        jax.ShapeDtypeStruct((B, n.S, n.K, n.H), shapes.key.dtype),
        jax.ShapeDtypeStruct((B, n.S, n.K, n.V), shapes.key.dtype),
        alibi_slopes=shapes.alibi_slopes,
        sinks=shapes.sinks,
        key_value_seq_lengths=jax.ShapeDtypeStruct((B,), shapes.lengths.dtype),
        batch_indices=shapes.batch_indices,
        head_indices=shapes.head_indices,
        captured=shapes.captured,
    )


def _loaded(shapes: Shapes, name: str) -> Buffer:
    """The cache of keys, or of values. Without pages, layers and sequences are one axis."""
    array = shapes.key if shapes.value is None else getattr(shapes, name)
    *rows, S, K, H = array.shape
    shape = (math.prod(rows), S, K, H) if shapes.page_table is None else array.shape
    return Buffer(decode_plan.cache_buffer(shapes, name), shape, array.dtype.name)


def _pages(shapes: Shapes) -> Pages | None:
    if shapes.page_table is None:
        return None
    *_, count, keys, _, _ = shapes.key.shape
    table = Buffer("page_table", shapes.page_table.shape, shapes.page_table.dtype.name)
    return Pages(table, keys, count, hold_both=shapes.value is None)
