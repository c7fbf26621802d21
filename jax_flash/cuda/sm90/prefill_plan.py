"""Launch plans of the forward kernel on key-value caches: chunks of prompts, many queries of each sequence.

The decode kernel's tiles have up to 64 rows, and each reads the cache again. With many queries that is bound
by L2, and by how few products a block takes part in. The forward kernel has larger tiles, whose steps
overlap. It reads the cache where it lies: lengths and window become mask metadata, and `key_places` says
which row of the cache a batch row attends to. The kernel before it computes both
(cuda/kernels/sm90/prefill/preprocess.cu). Pages it loads one by one (cuda/kernels/sm90/forward/pages.cuh).
"""

import math

import jax

from jax_flash._cache_spec import CacheOperands, CacheSpec, cache_sizes
from jax_flash._device import Device
from jax_flash._float8 import is_float8
from jax_flash._spec import Operands
from jax_flash.cuda import mask_metadata
from jax_flash.cuda.launch_plan import Buffer, Kernel, Launch, LaunchPlan, Pointer, launch
from jax_flash.cuda.parameters import struct
from jax_flash.cuda.sm90 import decode_plan, forward_plan
from jax_flash.cuda.sm90.forward_plan import Configuration, Loaded, Pages

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
    groups="int32_t",  # of 64 rows, in a batch row
    next_tile="int*",  # the forward kernel's counter of tiles; null without
)

_THREADS = 128

_PAGE_MULTIPLE = 8
"""Keys of an atom of the shared-memory swizzle, of which what TMA copies from a page has whole ones."""

_LEAST_QUERIES = 64
"""Of each sequence. A step of decoding has fewer, even if it speculates."""


def suits(spec: CacheSpec, shapes: Shapes, device: Device) -> bool:
    """Whether the forward kernel takes a call that `decoding.supports` accepts; else the decode kernel does.

    It takes calls of many queries, if more than half of what the device computes in its tiles are rows of the
    call. Rows may be missing in tiles that are not full, and in multiprocessors that have no tile: the kernel
    doesn't split a tile's keys among several. The decode kernel does, and wastes few rows, but is taken to be
    half as fast. Where this rule should draw the line was not measured.
    """
    n = cache_sizes(shapes)
    if not can_run(shapes):
        return False
    chosen = _configuration(spec, shapes)
    tiles = math.ceil(n.T * chosen.pack_gqa / chosen.tile.rows) * (n.N // chosen.pack_gqa) * n.B
    computed = max(tiles, device.sm_count) * chosen.tile.rows
    return n.T >= _LEAST_QUERIES and 2 * n.B * n.T * n.N > computed


def can_run(shapes: Shapes) -> bool:
    """Whether the forward kernel could run a call that `decoding.supports` accepts, be it slower.

    It takes no pages whose size isn't a multiple of `_PAGE_MULTIPLE`, no packed queries, whose tiles would
    have keys of several sequences, and no cache in 8 bits beside queries in 16.
    """
    in_whole_atoms = (cache_sizes(shapes).page or 0) % _PAGE_MULTIPLE == 0
    return in_whole_atoms and shapes.query_offsets is None and not is_float8(shapes.key.dtype)


def describe(spec: CacheSpec, shapes: Shapes) -> str:
    """The forward kernel's tile shape for a call that it suits."""
    n, chosen = cache_sizes(shapes), _configuration(spec, shapes)
    tile = chosen.tile
    dims = f"head dim {n.H}" if n.H == n.V else f"head dims {n.H} of keys and {n.V} of values"
    pages = f" in pages of {n.page}" if n.page else ""
    return (
        f"sm_90 forward kernel on the cache{pages} for {dims}: tiles of {tile.rows} rows (queries × "
        f"{chosen.pack_gqa} heads) × {tile.keys} keys, {tile.stages} stages"
    )


def plan_prefill(spec: CacheSpec, shapes: Shapes, device: Device) -> LaunchPlan:
    """How `device` runs a call that `decoding.supports` accepts by the forward kernel."""
    n = cache_sizes(shapes)
    rotates = shapes.rotary_cos is not None
    query = Buffer("rotated_query" if rotates else "query", shapes.query.shape, shapes.query.dtype.name)
    attention_shapes = _attention_shapes(shapes)
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
        ),
    )
    metadata = forward_plan.metadata_buffers(spec.attention, attention_shapes)
    scratch = (
        *((query,) if rotates else ()),
        Buffer("key_places", (n.B, 4), "int32"),
        *metadata,
        *attention.scratch,
    )
    launches = (
        *((decode_plan.append(spec, shapes, device),) if n.U else ()),
        _preprocess(spec, shapes, device, (*metadata, *attention.scratch)),
        attention.launch,
    )
    return decode_plan.plan_of(shapes, launches, scratch)


def _preprocess(spec: CacheSpec, shapes: Shapes, device: Device, written: tuple[Buffer, ...]) -> Launch:
    """Writes those of the buffers `written` that it knows, where sequences' keys are, and rotated queries."""
    n, chosen = cache_sizes(shapes), _configuration(spec, shapes)
    groups = forward_plan.row_groups(spec.attention, _attention_shapes(shapes))
    pairs = decode_plan.rotary_pairs(spec, shapes)
    work = max(32 * n.B * groups, n.B * n.T * n.N * n.H // 8 if pairs else 0)
    kernel = Kernel(
        source="sm90/prefill/preprocess.cu",
        entry="prefill_preprocess",
        arch=device.arch,
        defines=(
            ("ELEMENT", shapes.query.dtype.name),
            ("ROTARY", pairs),
            ("PACK_GQA", chosen.pack_gqa),
            ("BLOCK_KEYS", chosen.tile.keys),
            ("PAGE", n.page or 0),
        ),
        parameters=_PREPROCESS_PARAMETERS,
    )
    return launch(
        kernel=kernel,
        grid=(min(math.ceil(work / _THREADS), 8 * device.sm_count), 1, 1),
        block=_THREADS,
        overlap_previous=True,
        arguments={
            "shape": decode_plan.shape_arguments(spec, shapes),
            "rotary": decode_plan.rotary_arguments(shapes),
            "query": Pointer("query"),
            "rotated_query": Pointer("rotated_query") if pairs else None,
            "key_places": Pointer("key_places"),
            **mask_metadata.pointers(written, "row_keys", "group_blocks", "diagonals", "next_tile"),
            "groups": groups,
        },
    )


def keys_of_block(spec: CacheSpec, shapes: Shapes) -> int:
    """Keys that the forward kernel's blocks have."""
    return _configuration(spec, shapes).tile.keys


def _configuration(spec: CacheSpec, shapes: Shapes) -> Configuration:
    return forward_plan.configure(spec.attention, _attention_shapes(shapes))


def _attention_shapes(shapes: Shapes) -> Operands[jax.ShapeDtypeStruct]:
    """The call as the forward kernel sees it: each batch row has its keys, and so many as its length says."""
    n = cache_sizes(shapes)
    return Operands(
        shapes.query,
        jax.ShapeDtypeStruct((n.B, n.S, n.K, n.H), shapes.key.dtype),
        jax.ShapeDtypeStruct((n.B, n.S, n.K, n.V), shapes.key.dtype),
        alibi_slopes=shapes.alibi_slopes,
        sinks=shapes.sinks,
        key_value_seq_lengths=jax.ShapeDtypeStruct((n.B,), shapes.lengths.dtype),
        batch_indices=shapes.batch_indices,
        head_indices=shapes.head_indices,
        captured=shapes.captured,
    )


def _loaded(shapes: Shapes, name: str) -> Buffer:
    """The cache of keys, or of values; unless it has pages, without an axis for layers."""
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
