"""Block masks in the kernels: lists of the blocks that tiles visit, and the mask function as C++.

A `BlockMask` has blocks of the user's size, and kernels have tiles of their own. So XLA makes lists for the
kernel's grid before it runs (`lists`, from _block_lists.py). In partial blocks the function is computed for
each pair. The lists include causality, the window, lengths and segments, as far as whole blocks are hidden.

Without a mask function, as `BlockMask.from_blocks` has none, a pair's kind is looked up.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash import _block_lists
from jax_flash._block_kinds import Kind
from jax_flash._mask import position_mask, window_of
from jax_flash._spec import AttentionSpec, BlockMaskSpec, Operands, Sizes, sizes
from jax_flash.cuda import mask_metadata, user_function
from jax_flash.cuda.functions import value_text
from jax_flash.cuda.launch_plan import Arguments, Buffer, Pointer
from jax_flash.cuda.parameters import Struct, struct
from jax_flash.functions.graph import INT32, Graph, Node
from jax_flash.functions.static import StaticFunction

Shapes = Operands[jax.ShapeDtypeStruct]

HEADER_NAME = "user_mask_mod.cuh"
_NAMESPACE, _OPERANDS = "user_mask_mod", "UserMaskMod"


class Grid(NamedTuple):
    """Tiles of a kernel, and the blocks that it visits in each."""

    queries: int  # of a tile forward, of a block backward
    keys: int  # of a block forward, of a tile backward
    by_columns: bool = False  # backward: a tile of keys has a list of blocks of queries
    is_visited_whole: bool = False  # lists are not read: every block that positions let be seen is visited

    def counts(self, n: Sizes) -> tuple[int, int]:
        """How many blocks of queries and of keys there are."""
        return math.ceil(n.T / self.queries), math.ceil(n.S / self.keys)


@dataclasses.dataclass(frozen=True)
class _Kinds:
    """A mask function that looks the kind of a pair's block up."""

    value: Node
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    arguments: tuple[str, ...] = ("batch", "head", "query", "key")


def unsupported(block_mask: BlockMaskSpec, shapes: Shapes) -> str | None:
    """Why the kernels can't run the mask, or None."""
    if block_mask.mask_mod is not None:
        return _unsupported(block_mask.mask_mod)
    assert shapes.block_kinds is not None
    _, heads, rows, columns = shapes.block_kinds.shape
    if heads * rows * columns > _MOST_KINDS:
        return (
            f"block_mask has {heads} × {rows} × {columns} blocks in a batch row; "
            f"without a mask function it may have {_MOST_KINDS}"
        )
    return None


_unsupported = functools.cache(user_function.unsupported)
_MOST_KINDS = 2**31 - 1
"""Of a batch row: kernels count them in 32 bits where they look them up."""


NO_DEFINES = (("BLOCK_MASK", 0),)


def defines(spec: AttentionSpec) -> tuple[tuple[str, int], ...]:
    """BLOCK_MASK: 0 without one; 1 where a function says which pairs see each other; 2 where kinds do."""
    if spec.block_mask is None:
        return NO_DEFINES
    return (("BLOCK_MASK", 2 if spec.block_mask.mask_mod is None else 1),)


def headers(spec: AttentionSpec, shapes: Shapes) -> tuple[tuple[str, str], ...]:
    """What a kernel that reads the mask includes, as `Kernel.headers`."""
    if spec.block_mask is None:
        return ()
    function = _function(spec, shapes)
    assert function.value is not None, "`unsupported` was asked"
    text = value_text(function.value, False, _NAMESPACE, _OPERANDS)
    of_row = user_function.of_batch_row(_OPERANDS, user_function.operand_strides(function))
    return ((HEADER_NAME, "\n".join([text, user_function.in_namespace(_NAMESPACE, of_row)])),)


def parameters(spec: AttentionSpec, shapes: Shapes) -> dict[str, Struct]:
    """A further field of a kernel's parameters: `BlockMask` of cuda/kernels/common/block_mask.cuh."""
    if spec.block_mask is None:
        return {}
    part = struct(
        "BlockMask",
        blocks="const int*",  # (B | 1, heads | 1, tiles, most blocks), see `lists`
        counts="const int*",  # (B | 1, heads | 1, tiles, 2)
        visitors="const int*",  # (B | 1, heads | 1, spans), see `lists`
        columns="int32_t",  # most blocks
        batch_stride="int64_t",  # in tiles, from batch row to batch row
        head_stride="int64_t",
        visitors_batch_stride="int64_t",
        visitors_head_stride="int64_t",
        mask=user_function.parameters(_OPERANDS, _function(spec, shapes)),
    )
    return {"block_mask": part}


def arguments(spec: AttentionSpec, shapes: Shapes, grid: Grid, span: int = 1) -> Arguments:
    """Arguments of that field. `span` is how many blocks' visitors are counted together."""
    if spec.block_mask is None:
        return {}
    assert shapes.block_kinds is not None
    found = {buffer.name: buffer for buffer in list_buffers(spec, shapes, grid, span)}
    names = {name: f"block_{name}" for name in ("blocks", "counts", "visitors")}
    rows, heads, tiles = found["block_counts"].shape[:3] if found else (1, 1, 0)
    spans = found["block_visitors"].shape[2] if "block_visitors" in found else 0
    return {
        "block_mask": {
            **{field: Pointer(name) if name in found else None for field, name in names.items()},
            "columns": found["block_blocks"].shape[3] if found else 0,
            "batch_stride": 0 if rows == 1 else heads * tiles,
            "head_stride": 0 if heads == 1 else tiles,
            "visitors_batch_stride": 0 if rows == 1 else heads * spans,
            "visitors_head_stride": 0 if heads == 1 else spans,
            "mask": user_function.arguments(_operands(spec), shapes),
        }
    }


def buffers(spec: AttentionSpec, shapes: Shapes) -> tuple[Buffer, ...]:
    """The arrays that the mask function reads."""
    return () if spec.block_mask is None else user_function.buffers(_operands(spec), shapes)


def list_buffers(spec: AttentionSpec, shapes: Shapes, grid: Grid, span: int = 1) -> tuple[Buffer, ...]:
    """What `lists` gives."""
    if spec.block_mask is None or grid.is_visited_whole:
        return ()
    assert shapes.block_kinds is not None
    n, (rows, heads) = sizes(shapes), shapes.block_kinds.shape[:2]
    if mask_metadata.is_needed(shapes):
        rows = n.B
    tiles, blocks = grid.counts(n)
    if grid.by_columns:
        tiles, blocks, heads = blocks, tiles, 1 if heads == 1 else n.K
    found = [
        Buffer("block_blocks", (rows, heads, tiles, blocks), "int32"),
        Buffer("block_counts", (rows, heads, tiles, 2), "int32"),
    ]
    if grid.by_columns:
        found.append(Buffer("block_visitors", (rows, heads, math.ceil(blocks / span)), "int32"))
    return tuple(found)


def _function(spec: AttentionSpec, shapes: Shapes) -> StaticFunction | _Kinds:
    """What is compiled in: the user's mask_mod, or the look-up of a kind."""
    assert spec.block_mask is not None and shapes.block_kinds is not None
    if spec.block_mask.mask_mod is not None:
        return spec.block_mask.mask_mod
    _, heads, rows, columns = shapes.block_kinds.shape
    graph = Graph()
    head, query, key = (graph.input(name, INT32) for name in ("head", "query", "key"))
    row, column = (
        graph.clip(graph.divide(x, size), count - 1)
        for x, size, count in zip((query, key), spec.block_mask.block_size, (rows, columns), strict=True)
    )
    index = graph.add(graph.multiply(row, columns), column)
    if heads > 1:
        index = graph.add(graph.multiply(head, rows * columns), index)
    kind = graph.load(0, index, np.dtype(np.int8))
    is_full = graph.apply(
        "eq", (graph.convert(kind, INT32), graph.integer(Kind.FULL)), np.dtype(bool), lax.eq
    )
    size = jax.ShapeDtypeStruct((heads, rows, columns), np.int8)
    return _Kinds(is_full, (size,))


def _operands(spec: AttentionSpec) -> list[str]:
    """The names of the operands that it reads."""
    assert spec.block_mask is not None
    function = spec.block_mask.mask_mod
    return ["block_kinds"] if function is None else user_function.captured("mask_mod", function)


def lists(
    spec: AttentionSpec, operands: Operands, metadata: Mapping[str, jax.Array], grid: Grid, span: int = 1
) -> dict[str, jax.Array]:
    """Which blocks each tile visits, as int32 arrays by their buffers' names; none without a block mask.

    `block_blocks` has a list for each tile. Forward, full blocks come first, then partial ones, and
    `block_counts` has the number of full ones and of all. Backward, blocks come in ascending order, twice
    each, plus 1 where they are partial; `block_counts` has 0 and the number of all; and `block_visitors` says
    how many tiles visit each span of blocks.

    Args:
      metadata: mask metadata of the kernel, by name; empty where the mask of positions is static.
    """
    if spec.block_mask is None or grid.is_visited_whole:
        return {}
    ranges = metadata.get("tile_blocks" if grid.by_columns else "group_blocks")
    return _lists(spec, sizes(operands), grid, span, operands.block_kinds, ranges)


# One program, so that its numbers are constants in it.
@functools.partial(jax.jit, static_argnums=range(4))
def _lists(
    spec: AttentionSpec, n: Sizes, grid: Grid, span: int, kinds: jax.Array, ranges: jax.Array | None
) -> dict[str, jax.Array]:
    """`lists`, from mask metadata's ranges of blocks that tiles visit, if there is any."""
    assert spec.block_mask is not None
    low, high = _block_lists.pooled(kinds, spec.block_mask.block_size, (n.T, n.S), (grid.queries, grid.keys))
    if grid.by_columns and kinds.shape[1] > 1:  # the heads of a key head share lists
        low = low.reshape(low.shape[0], n.K, n.group, *low.shape[2:]).min(2)
        high = high.reshape(high.shape[0], n.K, n.group, *high.shape[2:]).max(2)
    is_full, is_visited = low == Kind.FULL, high != Kind.HIDDEN
    if grid.by_columns:
        is_full, is_visited = (jnp.swapaxes(x, -1, -2) for x in (is_full, is_visited))
        visited = _visited_by_positions(spec, n, ranges, grid)
        return _ascending(is_full, is_visited & visited, span)
    visited, full = _visited_and_full_by_positions(spec, n, ranges, grid)
    blocks, counts = _block_lists.full_first(is_full & full, is_visited & visited)
    return {"block_blocks": blocks, "block_counts": counts}


def _visited_and_full_by_positions(
    spec: AttentionSpec, n: Sizes, group_blocks: jax.Array | None, grid: Grid
) -> tuple[jax.Array, jax.Array]:
    """Forward: bool (B | 1, 1, tiles, blocks), by causality, the window, lengths and segments."""
    tiles, blocks = grid.counts(n)
    if group_blocks is None:
        starts = np.arange(0, n.T, grid.queries)
        counts = np.minimum(grid.queries, n.T - starts)
        found = position_mask(window_of(spec, n), n.T, n.S).block_range(starts, counts, grid.keys)
        ends = [np.broadcast_to(x, tiles)[None] for x in dataclasses.astuple(found)]
        first, last, full_begin, full_end = map(jnp.asarray, ends)
    else:
        groups = group_blocks.reshape(n.B, tiles, -1, 4)  # of 64 rows
        sees = groups[..., 0] < groups[..., 1]
        first = jnp.min(groups[..., 0], axis=-1, where=sees, initial=blocks)
        last = jnp.max(groups[..., 1], axis=-1, where=sees, initial=0)
        full_begin, full_end = groups[..., 2].max(-1), groups[..., 3].min(-1)
    column = jnp.arange(blocks, dtype=jnp.int32)

    def within(begin: jax.Array, end: jax.Array) -> jax.Array:
        return ((column >= begin[..., None]) & (column < end[..., None]))[:, None]

    return within(first, last), within(full_begin, full_end)


def _visited_by_positions(
    spec: AttentionSpec, n: Sizes, tile_blocks: jax.Array | None, grid: Grid
) -> jax.Array:
    """Backward: bool (B | 1, 1, tiles of keys, blocks of queries). Kernels find partial blocks themselves."""
    blocks, tiles = grid.counts(n)
    if tile_blocks is None:
        starts = np.arange(0, n.S, grid.keys)
        counts = np.minimum(grid.keys, n.S - starts)
        mask = position_mask(window_of(spec, n), n.T, n.S).transposed()
        found = mask.block_range(starts, counts, grid.queries)
        first, last = (jnp.asarray(np.broadcast_to(x, tiles))[None] for x in (found.first, found.last))
    else:
        first, last = tile_blocks[..., 0], tile_blocks[..., 1]
    block = jnp.arange(blocks, dtype=jnp.int32)
    return ((block >= first[..., None]) & (block < last[..., None]))[:, None]


def _ascending(is_full: jax.Array, is_visited: jax.Array, span: int) -> dict[str, jax.Array]:
    *_, columns = is_visited.shape
    entries = 2 * jnp.arange(columns, dtype=jnp.int32) + ~is_full
    ordered = jnp.sort(jnp.where(is_visited, entries, 2 * columns), axis=-1)
    count = jnp.sum(is_visited, axis=-1, dtype=jnp.int32)
    spans = math.ceil(columns / span)
    padded = jnp.pad(is_visited, [(0, 0)] * 3 + [(0, spans * span - columns)])
    by_span = padded.reshape(*padded.shape[:3], spans, span).any(-1)
    return {
        "block_blocks": jnp.where(ordered < 2 * columns, ordered, 0).astype(jnp.int32),
        "block_counts": jnp.stack([jnp.zeros_like(count), count], axis=-1),
        "block_visitors": jnp.sum(by_span, axis=2, dtype=jnp.int32),
    }
