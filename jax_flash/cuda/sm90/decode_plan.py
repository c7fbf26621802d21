"""Launch plans of attention on a key-value cache (cuda/kernels/sm90/decode)."""

import dataclasses
import math
from collections.abc import Iterable

from jax_flash._cache_spec import CacheSizes, CacheSpec, cache_sizes
from jax_flash._device import Device
from jax_flash._mask import Window
from jax_flash.cuda import user_score_mod
from jax_flash.cuda.launch_plan import (
    Alias,
    Argument,
    Arguments,
    Buffer,
    Kernel,
    Launch,
    LaunchPlan,
    Pointer,
    TensorMap,
    launch,
)
from jax_flash.cuda.parameters import Struct, struct
from jax_flash.cuda.sm90.decode_division import Division, Shapes, divide
from jax_flash.cuda.sm90.decode_tiles import ROWS, DecodeTile, choose_tile
from jax_flash.cuda.sm90.tensor_maps import cache_map, rows_map

SHAPE = struct(
    "Shape",
    batch="int32_t",  # B
    queries="int32_t",  # T
    query_heads="int32_t",  # N
    key_heads="int32_t",  # K
    group="int32_t",  # N / K
    head_dim="int32_t",  # H
    value_dim="int32_t",  # V
    capacity="int32_t",  # S
    appended="int32_t",  # U
    layers="int32_t",  # L; 1 without layers
    cache_rows="int32_t",  # C; with pages P
    page="int32_t",  # its keys; 0 without pages
    table_pages="int32_t",  # pages that a sequence may have
    head_step="int32_t",  # 2 if pages hold keys and values, 1 elsewhere
    left="int32_t",  # the window; a side without limit is `UNBOUNDED_SIDE`
    right="int32_t",
    tiles_alike="int32_t",  # 1: all tiles of a sequence have the same number of blocks
    query_base="int32_t",  # `QueryBase` in sequences.cuh
    query_step="int32_t",  # positions from a query to the next; see `query_position` there
    lengths="const int*",
    lengths_stride="int32_t",  # from layer to layer; 0 if all have the same
    layer="const int*",
    page_table="const int*",
    batch_index="const int*",
    left_padding="const int*",
    query_offsets="const int*",
    least_queries="int32_t",  # if queries are packed: another kernel takes sequences with fewer than this …
    most_queries="int32_t",  # … or with more than this
)
ROTARY = struct("Rotary", cos="const float*", sin="const float*", positions="int32_t", half="int32_t")
DIVISION = struct(  # how CTAs divide tiles (schedule.cuh)
    "Division",
    max_parts="int32_t",  # of a tile
    least_share="int32_t",  # blocks of a CTA, at least, unless there are fewer
    team_size="int32_t",  # CTAs that go through the same keys, each with a key head of its own
    team_size_inverse="uint32_t",  # the least integer greater than 2^31 / team_size
    teams="int32_t",
    head_groups="int32_t",  # of key heads, each with a team's
)

_TMA_CACHE = struct("Cache", key="TensorMap", value="TensorMap")
_GATHERED_CACHE = struct("Cache", key="const CACHE_ELEMENT*", value="const CACHE_ELEMENT*")
_DESCALES = struct(  # of a cache in e4m3
    "Descales",
    key="const float*",  # (K), or (L, K)
    value="const float*",  # likewise
    stride="int32_t",  # from layer to layer; 0 without layers
)
_APPEND = struct(
    "Append",
    new_key="const ELEMENT*",  # (B, U, K, H)
    new_value="const ELEMENT*",  # (B, U, K, V)
    key="CACHE_ELEMENT*",  # the cache
    value="CACHE_ELEMENT*",
)


def _parameters(spec: CacheSpec, box: int, query_by_tma: bool) -> Struct:
    common = struct(
        "Parameters",
        cache=_TMA_CACHE if box else _GATHERED_CACHE,
        query="TensorMap" if query_by_tma else "const ELEMENT*",  # (B, T, N, H)
        out="ELEMENT*",  # (B, T, N, V)
        lse="float*",  # (B, N, T)
        shape=SHAPE,
        append=_APPEND,
        rotary=ROTARY,
        descales=_DESCALES,
        scale="float",  # see ConsumerCall
        soft_cap="float",
        slopes="const float*",
        slopes_stride="int32_t",
        sinks="const float*",
        division=DIVISION,
        partial_out="float*",  # see Partials
        partial_statistics="float2*",
        arrivals="uint64_t*",
    )
    return user_score_mod.parameters(spec.attention, common)


_APPEND_PARAMETERS = struct(
    "Parameters",
    append=_APPEND,
    descales=_DESCALES,
    shape=SHAPE,
    rotary=ROTARY,
)

UNBOUNDED_SIDE = 1 << 30
"""A side of the window that hides nothing, of any length that calls have."""

# Hides all from tiles, too, as the keys of a tile's last row end before those of its first row begin.
_HIDES_ALL = Window(0, -UNBOUNDED_SIDE)

MOST_APPENDED = 16
"""Tokens of a sequence that the decode kernel appends by itself, at most. Not tuned."""

ANY_QUERIES = 2**31 - 1

_PARTIALS = ("partial_out", "partial_statistics", "arrivals")
_NODE_PARTIALS, _NODE_LEVELS = 8, 3  # `node_partials` and `Partials::levels`
_APPEND_THREADS = 128
_ROTARY_HALVES, _ROTARY_NEIGHBOURS = 1, 2  # `RotaryPairs` in rotary.cuh
_OWN_POSITION, _LENGTH_BEFORE = 0, 1  # `QueryBase` in sequences.cuh


def window_of(spec: CacheSpec, n: CacheSizes) -> Window:
    return Window(spec.attention.left, spec.attention.right).normalised(n.T, n.S)


def appends_itself(shapes: Shapes) -> bool:
    """Whether the decode kernel appends what the call appends, so that no kernel has to run ahead of it.

    One warp appends then, so tokens must be few. And nobody else may read them: each sequence has memory of
    its own, and each of its key heads one tile.
    """
    n = cache_sizes(shapes)
    is_shared = n.page is not None or shapes.batch_index is not None
    return 0 < n.U <= MOST_APPENDED and has_one_tile(shapes) and not is_shared


def has_one_tile(shapes: Shapes) -> bool:
    """Whether each key head of a sequence has one tile, whose rows begin with the sequence's first query."""
    n = cache_sizes(shapes)
    return shapes.query_offsets is None and 0 < n.T * n.group <= ROWS


def plan_decode(
    spec: CacheSpec, shapes: Shapes, device: Device, most_queries: int = ANY_QUERIES
) -> LaunchPlan:
    """How `device` runs a call that `decoding.supports` accepts by the decode kernel.

    If queries are packed, it leaves sequences with more than `most_queries` to another kernel.
    """
    n, tile = cache_sizes(shapes), choose_tile(shapes)
    division = divide(spec, shapes, tile, device)
    tile = dataclasses.replace(tile, pairs=division.pairs)
    if division.cluster > 1:
        tile = tile.in_clusters(division.cluster)
        assert tile is not None, "clusters that shared memory has no room for"
    scratch = ()
    if division.split:
        assert division.teams <= _NODE_PARTIALS**_NODE_LEVELS, "more CTAs share a tile than nodes can add up"
        partials = 2 * division.sharers
        scratch = (
            Buffer("partial_out", (partials, tile.query_rows, tile.value_dim), "float32"),
            Buffer("partial_statistics", (partials, _NODE_LEVELS, tile.query_rows, 2), "float32"),
            Buffer("arrivals", (partials, _NODE_LEVELS, 2), "int32"),
        )
    launches = [_decode(spec, shapes, device, tile, division, most_queries)]
    if n.U and not appends_itself(shapes):
        launches.insert(0, append(spec, shapes, device))
    return plan_of(shapes, launches, scratch)


def plan_of(shapes: Shapes, launches: Iterable[Launch], scratch: Iterable[Buffer]) -> LaunchPlan:
    """The launches of a call on a cache as a plan.

    Operands are those of `CacheOperands` that the call has, in their order. Results are out and lse. If
    something is appended, the caches follow, as `key_after` and `value_after`; then comes scratch memory.
    """
    n, (B, T, N, _) = cache_sizes(shapes), shapes.query.shape
    operands = tuple(Buffer(name, x.shape, x.dtype.name) for name, x in shapes.present().items())
    caches = [b for b in operands if b.name in ("key", "value")] if n.U else []
    aliases = tuple(Alias(b.name, f"{b.name}_after") for b in caches)
    after = tuple(Buffer(f"{b.name}_after", b.shape, b.dtype) for b in caches)
    out = Buffer("out", (B, T, N, n.V), shapes.query.dtype.name)
    lse = Buffer("lse", (B, N, T), "float32")
    return LaunchPlan(operands, (out, lse, *after, *scratch), tuple(launches), aliases)


def _decode(
    spec: CacheSpec,
    shapes: Shapes,
    device: Device,
    tile: DecodeTile,
    division: Division,
    most_queries: int,
) -> Launch:
    n, cap, query_by_tma = cache_sizes(shapes), spec.attention.logits_soft_cap, has_one_tile(shapes)
    scale = spec.attention.scale
    if cap is not None:
        scale /= cap
    elif not _are_natural(spec, shapes):
        scale *= math.log2(math.e)
    kernel = Kernel(
        source="sm90/decode/decode.cu",
        entry="decode",
        arch=device.arch,
        defines=(
            ("ELEMENT", shapes.query.dtype.name),
            ("CACHE_ELEMENT", shapes.key.dtype.name),
            ("HEAD_DIM", tile.head_dim),
            ("VALUE_DIM", tile.value_dim),
            ("KEYS", tile.keys),
            ("STAGES", tile.stages),
            ("QUERY_ROWS", tile.query_rows),
            ("CTAS_OF_SM", tile.ctas_of_sm),
            ("PAGED", int(tile.paged)),
            ("PLAIN", int(_is_plain(spec, shapes))),
            ("QUERY_TMA", int(query_by_tma)),
            ("BOX", tile.box),
            ("SPLIT", int(division.split)),
            ("PAIRS", int(division.pairs)),
            ("CLUSTER", division.cluster),
            ("PARTIALS_APART", int(tile.partials_apart)),
            ("SOFT_CAP", int(cap is not None)),
            ("ALIBI", int(shapes.alibi_slopes is not None)),
            ("SCORE_MOD", int(spec.attention.score_mod is not None)),
            ("APPENDS", int(appends_itself(shapes))),
            ("ROTARY", rotary_pairs(spec, shapes)),
            ("SHARED_BYTES", tile.shared_bytes),
        ),
        parameters=_parameters(spec, tile.box, query_by_tma),
        headers=user_score_mod.headers(spec.attention, backward=False),
    )
    slopes = shapes.alibi_slopes
    return launch(
        kernel=kernel,
        grid=(division.ctas, 1, 1),
        cluster=2 if division.pairs else division.cluster,
        block=tile.threads,
        shared_bytes=tile.shared_bytes,
        overlap_previous=True,
        arguments={
            "cache": _cache_arguments(shapes, tile),
            "query": query_map(shapes, tile) if query_by_tma else Pointer("query"),
            "out": Pointer("out"),
            "lse": Pointer("lse"),
            "shape": shape_arguments(spec, shapes, most_queries=most_queries),
            "append": _append_arguments(shapes),
            "rotary": rotary_arguments(shapes),
            "descales": _descale_arguments(shapes),
            "scale": scale,
            "soft_cap": cap or 0.0,
            "slopes": _pointer(shapes, "alibi_slopes"),
            "slopes_stride": 0 if slopes is None or slopes.shape[0] == 1 else n.N,
            "sinks": _pointer(shapes, "sinks"),
            "division": _division_arguments(division, n.K),
            **{name: Pointer(name) if division.split else None for name in _PARTIALS},
            **user_score_mod.arguments(spec.attention, shapes),
        },
    )


def _division_arguments(division: Division, key_heads: int) -> Arguments:
    return {
        "max_parts": division.most_parts,
        "least_share": division.least_share,
        "team_size": division.team_size,
        "team_size_inverse": 2**31 // division.team_size + 1,
        "teams": division.teams,
        "head_groups": key_heads // division.team_size,
    }


def _is_plain(spec: CacheSpec, shapes: Shapes) -> bool:
    """Whether the call has no window, packed queries, left padding or batch index."""
    others = (shapes.query_offsets, shapes.left_padding, shapes.batch_index)
    return window_of(spec, cache_sizes(shapes)).unbounded and all(x is None for x in others)


def _are_natural(spec: CacheSpec, shapes: Shapes) -> bool:
    """Whether logits are natural, and not in base 2."""
    of_attention = (spec.attention.logits_soft_cap, spec.attention.score_mod, shapes.alibi_slopes)
    return any(x is not None for x in of_attention)


def append(spec: CacheSpec, shapes: Shapes, device: Device) -> Launch:
    """Appends what the call appends, ahead of the kernel that attends."""
    n = cache_sizes(shapes)
    chunks = n.B * n.U * n.K * (n.H + n.V) // 8
    kernel = Kernel(
        source="sm90/decode/append.cu",
        entry="decode_append",
        arch=device.arch,
        defines=(
            ("ELEMENT", shapes.query.dtype.name),
            ("CACHE_ELEMENT", shapes.key.dtype.name),
            ("ROTARY", rotary_pairs(spec, shapes)),
        ),
        parameters=_APPEND_PARAMETERS,
    )
    return launch(
        kernel=kernel,
        grid=(min(math.ceil(chunks / _APPEND_THREADS), 8 * device.sm_count), 1, 1),
        block=_APPEND_THREADS,
        overlap_previous=True,
        arguments={
            "append": _append_arguments(shapes),
            "descales": _descale_arguments(shapes),
            "shape": shape_arguments(spec, shapes),
            "rotary": rotary_arguments(shapes),
        },
    )


def rotary_pairs(spec: CacheSpec, shapes: Shapes) -> int:
    if shapes.rotary_cos is None:
        return 0
    return _ROTARY_NEIGHBOURS if spec.rotary_interleaved else _ROTARY_HALVES


def _pointer(shapes: Shapes, name: str) -> Argument:
    return None if getattr(shapes, name) is None else Pointer(name)


def rotary_arguments(shapes: Shapes) -> Arguments:
    positions, half = (0, 0) if shapes.rotary_cos is None else shapes.rotary_cos.shape
    cos, sin = (_pointer(shapes, name) for name in ("rotary_cos", "rotary_sin"))
    return {"cos": cos, "sin": sin, "positions": positions, "half": half}


def _append_arguments(shapes: Shapes) -> Arguments:
    new = {f"new_{name}": _pointer(shapes, f"new_{name}") for name in ("key", "value")}
    has_new = shapes.new_key is not None
    return new | {name: Pointer(cache_buffer(shapes, name)) if has_new else None for name in ("key", "value")}


def _descale_arguments(shapes: Shapes) -> Arguments:
    of_layers = any(x is not None and x.ndim == 2 for x in (shapes.key_descale, shapes.value_descale))
    pointers = {name: _pointer(shapes, f"{name}_descale") for name in ("key", "value")}
    return pointers | {"stride": cache_sizes(shapes).K if of_layers else 0}


def shape_arguments(
    spec: CacheSpec, shapes: Shapes, least_queries: int = 0, most_queries: int = ANY_QUERIES
) -> Arguments:
    """Arguments of `SHAPE`. If queries are packed, the kernel takes sequences with so many of them."""
    n = cache_sizes(shapes)
    window = window_of(spec, n)
    window = _HIDES_ALL if window.hides_all else window
    table, layer = shapes.page_table, shapes.layer
    data = ("lengths", "layer", "page_table", "batch_index", "left_padding", "query_offsets")
    return {
        **{"batch": n.B, "queries": n.T, "query_heads": n.N, "key_heads": n.K, "group": n.group},
        **{"head_dim": n.H, "value_dim": n.V, "capacity": n.S, "appended": n.U},
        "layers": 1 if layer is None else shapes.key.shape[0],
        "lengths_stride": n.B if shapes.lengths.ndim == 2 else 0,
        "cache_rows": shapes.key.shape[-4],
        "page": n.page or 0,
        "table_pages": 0 if table is None else table.shape[1],
        "head_step": 2 if shapes.value is None else 1,
        "left": UNBOUNDED_SIDE if window.left is None else window.left,
        "right": UNBOUNDED_SIDE if window.right is None else window.right,
        "tiles_alike": int(window.unbounded),
        "query_base": _OWN_POSITION if spec.query_positions == "own" else _LENGTH_BEFORE,
        "query_step": 0 if spec.query_positions == "first" else 1,
        **{name: _pointer(shapes, name) for name in data},
        "least_queries": least_queries,
        "most_queries": most_queries,
    }


def cache_buffer(shapes: Shapes, name: str) -> str:
    """The buffer of the cache of keys, or of values."""
    name = "key" if shapes.value is None else name
    return name if shapes.new_key is None else f"{name}_after"


def query_map(shapes: Shapes, tile: DecodeTile) -> TensorMap:
    """A map of queries whose box has a tile's rows: a panel of them, or all columns if Q is rotated."""
    n, query = cache_sizes(shapes), shapes.query
    panels = rows_map(Buffer("query", query.shape, query.dtype.name), n.T * n.group, n.group)
    if not tile.rotary:
        return panels
    return dataclasses.replace(panels, box=(tile.head_dim, *panels.box[1:]), swizzle=0)


def _cache_arguments(shapes: Shapes, tile: DecodeTile) -> Arguments:
    arrays = {"key": shapes.key, "value": shapes.key if shapes.value is None else shapes.value}
    if not tile.box:
        return {name: Pointer(cache_buffer(shapes, name)) for name in arrays}
    buffers = {name: Buffer(cache_buffer(shapes, name), x.shape, x.dtype.name) for name, x in arrays.items()}
    return {name: cache_map(buffer, tile.box) for name, buffer in buffers.items()}
