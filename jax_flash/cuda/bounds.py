"""Which keys each query sees, as data: where sequences are shorter than the arrays, packed, or have segments.

The window, lengths and packed sequences give each query an interval of keys, and each key one of queries.
Kernels mask by these, and pass over the blocks that summaries of them name; segments are compared besides
(cuda/kernels/sm90/forward_bounds.cuh, backward_bounds.cuh). Everything here is XLA's, linear in T and S but
for summaries of segments, which look at every pair of blocks.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_flash import _packing
from jax_flash._spec import AttentionSpec, Operands, Sizes, sizes
from jax_flash.cuda.launch_plan import Buffer, Parameter, Pointer, Scalar

LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")
SEGMENTS = ("query_segment_ids", "key_value_segment_ids")

_SEQUENCES = 4
"""A batch row of several sequences is taken to have so many, of one length, as only the data says."""
_FEW_OFFSETS = 128
"""Up to so many are compared with each token: one kernel, where a search has one for each of its steps."""
_NOWHERE = 1 << 30
"""Where an interval of nothing begins; it ends at 0."""

Interval = tuple[jax.Array, jax.Array]
"""First position, and the first one behind, int32 `(B, positions)`."""


def has_bounds(shapes: Operands) -> bool:
    """Whether what queries see is data, besides operands that are added to scores."""
    return any(getattr(shapes, name) is not None for name in (*LENGTHS, *SEGMENTS, *_packing.OFFSETS))


def has_segments(shapes: Operands) -> bool:
    return shapes.query_segment_ids is not None


def parts(shapes: Operands) -> int:
    """Into how many parts a batch row falls, each with tiles that see it alone, about; 0 without bounds."""
    if has_segments(shapes) or shapes.query_offsets is not None:
        return _SEQUENCES
    return int(has_bounds(shapes))


def defines(shapes: Operands) -> tuple[tuple[str, int], ...]:
    return (("BOUNDS", int(has_bounds(shapes))), ("SEGMENTS", int(has_segments(shapes))))


NO_DEFINES = (("BOUNDS", 0), ("SEGMENTS", 0))


def forward_buffers(shapes: Operands, groups: int) -> tuple[Buffer, ...]:
    """What `forward_operands` gives, of batch rows of so many `groups` of 64 rows."""
    n = sizes(shapes)
    if not has_bounds(shapes):
        return ()
    row_segments = Buffer("row_segments", (n.B, groups * 64), "int32")
    return (
        Buffer("row_keys", (n.B, groups * 64, 2), "int32"),
        *((row_segments, _segments(n)[1]) if has_segments(shapes) else ()),
        Buffer("group_blocks", (n.B, groups, 4), "int32"),
        *_diagonals(shapes, n),
    )


def backward_buffers(shapes: Operands, queries: int, keys: int, span: int) -> tuple[Buffer, ...]:
    """What `backward_operands` gives."""
    n = sizes(shapes)
    if not has_bounds(shapes):
        return ()
    blocks, tiles = math.ceil(n.T / queries), math.ceil(n.S / keys)
    return (
        Buffer("key_queries", (n.B, n.S, 2), "int32"),
        Buffer("group_blocks", (n.B, tiles * keys // 64, 2), "int32"),
        Buffer("tile_blocks", (n.B, tiles, 2), "int32"),
        Buffer("block_tiles", (n.B, blocks, 2), "int32"),
        Buffer("span_tiles", (n.B, math.ceil(blocks / span)), "int32"),
        *(_segments(n) if has_segments(shapes) else ()),
        *_diagonals(shapes, n),
    )


def _segments(n: Sizes) -> tuple[Buffer, ...]:
    return tuple(Buffer(name, (n.B, size), "int32") for name, size in zip(SEGMENTS, (n.T, n.S), strict=True))


def _diagonals(shapes: Operands, n: Sizes) -> tuple[Buffer, ...]:
    return () if shapes.alibi_slopes is None else (Buffer("diagonals", (n.B, n.T), "int32"),)


def parameters(buffers: tuple[Buffer, ...], *names: str) -> tuple[Parameter, ...]:
    """Pointers to those of `buffers` that are there, null for others."""
    present = {buffer.name for buffer in buffers}
    return tuple(Pointer(name) if name in present else Scalar("int64", 0) for name in names)


def forward_operands(
    spec: AttentionSpec, operands: Operands, rows: int, keys: int, pack: int
) -> dict[str, jax.Array]:
    """By name what the forward kernel reads of an `Operands` with bounds.

    Args:
      rows: of a tile.
      keys: of a block.
      pack: rows that each query has in a tile.
    """
    n = sizes(operands)
    begin, end, diagonal = _query_keys(spec, operands)
    queries = 64 // pack  # of a group
    groups = math.ceil(n.T * pack / rows) * (rows // 64)
    first, last, whole_begin, whole_end = _blocks((begin, end), queries, groups, keys)
    if has_segments(operands):
        first, last, whole_begin, whole_end = _of_shared_segments(
            _id_ranges(operands.query_segment_ids, queries, groups),
            _id_ranges(operands.key_value_segment_ids, keys, math.ceil(n.S / keys)),
            (first, last),
            (whole_begin, whole_end),
        )
    rows = groups * 64
    found = {
        "row_keys": _of_rows(jnp.stack((begin, end), -1), pack, rows),
        "group_blocks": jnp.stack((first, last, whole_begin, whole_end), -1),
        "diagonals": diagonal,
    }
    if has_segments(operands):
        found["row_segments"] = _of_rows(operands.query_segment_ids, pack, rows)
    return found


def backward_operands(
    spec: AttentionSpec, operands: Operands, queries: int, keys: int, span: int
) -> dict[str, jax.Array]:
    """By name what the backward kernel reads of an `Operands` with bounds.

    Args:
      queries: of a block.
      keys: of a tile.
      span: blocks that key tiles count together as done.
    """
    n = sizes(operands)
    begin, end = _key_queries(spec, operands)
    *_, diagonal = _query_keys(spec, operands)
    tiles, blocks = math.ceil(n.S / keys), math.ceil(n.T / queries)
    groups = tiles * keys // 64
    # A last block of queries that are not there is whole without them.
    whole = jnp.where(end >= n.T, blocks * queries, end)
    _, _, whole_begin, whole_end = _blocks((begin, whole), 64, groups, queries, missing_see=False)
    first, last, _, _ = _blocks((begin, end), keys, tiles, queries)
    if has_segments(operands):
        of_blocks = _id_ranges(operands.query_segment_ids, queries, blocks)
        ids = operands.key_value_segment_ids
        *_, whole_begin, whole_end = _of_shared_segments(
            _id_ranges(ids, 64, groups),
            of_blocks,
            (jnp.zeros_like(whole_begin), whole_end),
            (whole_begin, whole_end),
        )
        first, last, *_ = _of_shared_segments(
            _id_ranges(ids, keys, tiles), of_blocks, (first, last), (first, first)
        )
    # The tiles that visit a block are to follow one another, so that their numbers rank them. Where first and
    # last blocks rise from tile to tile they do; elsewhere tiles visit some blocks more.
    first = jax.lax.cummin(jnp.where(first < last, first, blocks), 1, reverse=True)
    last = jax.lax.cummax(last, 1)
    block = jnp.arange(blocks)
    first_tile = (last[:, :, None] <= block).sum(1)
    end_tile = (first[:, :, None] <= block).sum(1)
    of_span = jnp.arange(math.ceil(blocks / span)) * span
    in_span = (first[:, :, None] < of_span + span) & (last[:, :, None] > of_span)
    in_span &= (first < last)[:, :, None]
    return {
        "key_queries": jnp.stack((begin, end), -1),
        "group_blocks": jnp.stack((whole_begin, whole_end), -1),
        "tile_blocks": jnp.stack((first, last), -1),
        "block_tiles": jnp.stack((first_tile, end_tile), -1).astype(jnp.int32),
        "span_tiles": in_span.sum(1, dtype=jnp.int32),
        "diagonals": diagonal,
    }


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Of each query, or each key, the sequence that it is of: int32 `(B, positions)`, or `(B, 1)` where each
    batch row is one."""

    first_query: jax.Array
    queries: jax.Array
    first_key: jax.Array
    keys: jax.Array
    there: jax.Array  # whether the position is of one at all, `(B, positions)`


def _of_rows(of_queries: jax.Array, pack: int, rows: int) -> jax.Array:
    """`(B, rows, …)` of `(B, T, …)`: each query's for `pack` rows, and 0 for rows that are not there."""
    repeated = jnp.repeat(of_queries, pack, axis=1) if pack > 1 else of_queries
    return jnp.pad(repeated, [(0, 0), (0, rows - repeated.shape[1])] + [(0, 0)] * (of_queries.ndim - 2))


def _query_keys(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The interval of keys that each query sees, and the key that it is aligned with."""
    n = sizes(operands)
    of, _ = _sequences(spec, operands, n)
    diagonal = jnp.arange(n.T, dtype=jnp.int32) - of.first_query + of.first_key + of.keys - of.queries
    begin = jnp.broadcast_to(of.first_key, diagonal.shape)
    end = jnp.broadcast_to(of.first_key + of.keys, diagonal.shape)
    if spec.left is not None:
        begin = jnp.maximum(begin, diagonal - min(spec.left, n.S))
    if spec.right is not None:
        end = jnp.minimum(end, diagonal + min(spec.right, n.T) + 1)
    return *_nonempty(begin, end, of.there), diagonal


def _key_queries(spec: AttentionSpec, operands: Operands) -> Interval:
    """The interval of queries that see each key."""
    n = sizes(operands)
    _, of = _sequences(spec, operands, n)
    aligned = jnp.arange(n.S, dtype=jnp.int32) - of.first_key + of.first_query + of.queries - of.keys
    begin = jnp.broadcast_to(of.first_query, aligned.shape)
    end = jnp.broadcast_to(of.first_query + of.queries, aligned.shape)
    if spec.right is not None:
        begin = jnp.maximum(begin, aligned - min(spec.right, n.T))
    if spec.left is not None:
        end = jnp.minimum(end, aligned + min(spec.left, n.S) + 1)
    return _nonempty(begin, end, of.there)


def _sequences(spec: AttentionSpec, operands: Operands, n: Sizes) -> tuple[Sequences, Sequences]:
    """Those of queries, and those of keys."""
    query, key = jnp.arange(n.T, dtype=jnp.int32), jnp.arange(n.S, dtype=jnp.int32)
    if operands.query_offsets is None:

        def of_rows(lengths: jax.Array | None, whole: int) -> jax.Array:
            return jnp.full((n.B, 1), whole, jnp.int32) if lengths is None else lengths[:, None]

        queries = of_rows(operands.query_seq_lengths, n.T)
        keys = of_rows(operands.key_value_seq_lengths, n.S)
        first = jnp.zeros_like(keys)
        return (
            Sequences(first, queries, first, keys, query < queries),
            Sequences(first, queries, first, keys, key < keys),
        )
    sides = _packing.sides(spec, operands)
    starts = [side.offsets[:, :-1] for side in sides]
    lengths = [side.lengths().reshape(starts[0].shape) for side in sides]

    def of_tokens(own: int, token: jax.Array) -> Sequences:
        def of_row(offsets: jax.Array, *values: jax.Array) -> tuple[jax.Array, ...]:
            # The last one that starts there: those before it are empty.
            method = "compare_all" if offsets.size <= _FEW_OFFSETS else "scan_unrolled"
            sequence = jnp.searchsorted(offsets, token, side="right", method=method) - 1
            return sequence >= 0, *(x.at[sequence].get(mode="clip") for x in values)

        values = (starts[0], lengths[0], starts[1], lengths[1])
        known, *found = jax.vmap(of_row)(sides[own].offsets, *values)
        within = token - found[2 * own]
        return Sequences(*found, known & (within < found[2 * own + 1]))

    return of_tokens(0, query), of_tokens(1, key)


def _nonempty(begin: jax.Array, end: jax.Array, there: jax.Array) -> Interval:
    sees = there & (begin < end)
    return jnp.where(sees, begin, _NOWHERE), jnp.where(sees, end, 0)


def _blocks(
    interval: Interval, group: int, groups: int, size: int, missing_see: bool = True
) -> tuple[jax.Array, ...]:
    """Of each group of positions the blocks of `size` [first, last) that some of them see, and
    [whole_begin, whole_end) that all see whole. Positions that are not there see all, or nothing."""
    begin, end = interval
    least_begin = _grouped(begin, group, groups, _NOWHERE, jnp.min)
    greatest_end = _grouped(end, group, groups, 0, jnp.max)
    greatest_begin = _grouped(begin, group, groups, 0 if missing_see else _NOWHERE, jnp.max)
    least_end = _grouped(end, group, groups, _NOWHERE if missing_see else 0, jnp.min)
    last = -(-greatest_end // size)
    first = jnp.where(last > 0, least_begin // size, 0)
    return first, last, -(-greatest_begin // size), least_end // size


def _grouped(x: jax.Array, group: int, groups: int, fill: int, reduce: Callable) -> jax.Array:
    """`(B, positions)` reduced over groups, the last of which may have `fill` in it."""
    padded = jnp.pad(x, ((0, 0), (0, groups * group - x.shape[1])), constant_values=fill)
    return reduce(padded.reshape(x.shape[0], groups, group), 2)


def _id_ranges(ids: jax.Array, group: int, groups: int) -> Interval:
    """The least and the greatest id of each group of positions, and the other way about of no positions."""
    limits = jnp.iinfo(jnp.int32)
    return (
        _grouped(ids, group, groups, limits.max, jnp.min),
        _grouped(ids, group, groups, limits.min, jnp.max),
    )


def _of_shared_segments(
    groups: Interval, blocks: Interval, seen: Interval, whole: Interval
) -> tuple[jax.Array, ...]:
    """Narrows what `_blocks` gave for `groups` to blocks with which they may share a segment, and, of whole
    ones, to the first run of those with which they have one segment only. Ids are given by their ranges."""
    (least, greatest), (block_least, block_greatest) = (
        (x[:, :, None] for x in groups),
        (x[:, None] for x in blocks),
    )
    block = jnp.arange(block_least.shape[2], dtype=jnp.int32)

    def within(interval: Interval) -> jax.Array:
        begin, end = interval
        return (begin[:, :, None] <= block) & (block < end[:, :, None])

    may_share = within(seen) & (least <= block_greatest) & (block_least <= greatest)
    first = jnp.min(jnp.where(may_share, block, _NOWHERE), 2)
    last = jnp.max(jnp.where(may_share, block + 1, 0), 2)
    one = (least == greatest) & (block_least == block_greatest) & (least == block_least)
    is_whole = within(whole) & one
    whole_begin = jnp.min(jnp.where(is_whole, block, _NOWHERE), 2)
    behind = ~is_whole & (block > whole_begin[:, :, None])
    whole_end = jnp.min(jnp.where(behind, block, block.size), 2)
    return jnp.where(last > 0, first, 0), last, whole_begin, jnp.where(whole_begin < _NOWHERE, whole_end, 0)
