"""Mask metadata by its definition, in array operations (jax_flash/cuda/mask_metadata.py)."""

import dataclasses
import math

import numpy as np

from jax_flash._spec import AttentionSpec, Operands, Sizes, sizes
from jax_flash.cuda.mask_metadata import has_segments

NOWHERE = 1 << 30
"""Where an empty interval begins; it ends at 0."""

Interval = tuple[np.ndarray, np.ndarray]
"""Half-open: begins and ends, each `(B, positions)`."""


def forward_operands(
    spec: AttentionSpec, operands: Operands, rows: int, keys: int, pack_gqa: int
) -> dict[str, np.ndarray]:
    """The forward kernel's mask metadata, by name.

    Args:
      rows: of a tile, of which `pack_gqa` are of one query.
      keys: of a block.
    """
    n = sizes(operands)
    begin, end = _query_keys(spec, operands)
    queries = 64 // pack_gqa  # of a group
    groups = math.ceil(n.T * pack_gqa / rows) * (rows // 64)
    first, last, full_begin, full_end = _blocks((begin, end), queries, groups, keys)
    found = {}
    if has_segments(operands):
        ids, key_ids = _segment_ids(operands)
        first, last, full_begin, full_end = _narrowed_by_segments(
            _id_ranges(ids, queries, groups),
            _id_ranges(key_ids, keys, math.ceil(n.S / keys)),
            (first, last),
            (full_begin, full_end),
        )
        found["row_segments"] = _per_row(ids, pack_gqa, groups * 64)
    return found | {
        "row_keys": _per_row(np.stack((begin, end), -1), pack_gqa, groups * 64),
        "group_blocks": np.stack((first, last, full_begin, full_end), -1),
    }


def backward_operands(
    spec: AttentionSpec, operands: Operands, queries: int, keys: int, span: int
) -> dict[str, np.ndarray]:
    """The backward kernel's mask metadata, by name.

    Args:
      queries: of a block.
      keys: of a tile.
      span: query blocks whose visiting tiles are counted together.
    """
    n = sizes(operands)
    begin, end = _key_queries(spec, operands)
    tiles, blocks = math.ceil(n.S / keys), math.ceil(n.T / queries)
    groups = tiles * keys // 64
    # The last block may be full although it holds fewer queries.
    rounded_end = np.where(end >= n.T, blocks * queries, end)
    _, _, full_begin, full_end = _blocks((begin, rounded_end), 64, groups, queries, missing_see=False)
    first, last, _, _ = _blocks((begin, end), keys, tiles, queries)
    if has_segments(operands):
        query_ids, ids = _segment_ids(operands)
        block_ranges = _id_ranges(query_ids, queries, blocks)
        *_, full_begin, full_end = _narrowed_by_segments(
            _id_ranges(ids, 64, groups),
            block_ranges,
            (np.zeros_like(full_begin), full_end),
            (full_begin, full_end),
        )
        first, last, *_ = _narrowed_by_segments(
            _id_ranges(ids, keys, tiles), block_ranges, (first, last), (first, first)
        )
    # The tiles that visit a block are made consecutive: first and last blocks rise from tile to tile.
    first = np.minimum.accumulate(np.where(first < last, first, blocks)[:, ::-1], 1)[:, ::-1]
    last = np.maximum.accumulate(last, 1)
    block = np.arange(blocks)
    span_begin = np.arange(math.ceil(blocks / span)) * span
    in_span = (first[:, :, None] < span_begin + span) & (last[:, :, None] > span_begin)
    in_span &= (first < last)[:, :, None]
    no_key = ((0, 0), (0, tiles * keys - n.S))
    padded = np.pad(begin, no_key, constant_values=NOWHERE), np.pad(end, no_key)
    return {
        "key_queries": np.stack(padded, -1),
        "group_blocks": np.stack((full_begin, full_end), -1),
        "tile_blocks": np.stack((first, last), -1),
        "block_tiles": np.stack(
            ((last[:, :, None] <= block).sum(1), (first[:, :, None] <= block).sum(1)), -1
        ),
        "span_tiles": in_span.sum(1),
    }


def diagonals(spec: AttentionSpec, operands: Operands) -> tuple[np.ndarray, np.ndarray]:
    """The key on each query's diagonal, and whether the query is no padding, `(B, T)`."""
    n = sizes(operands)
    of, _ = _sequences(spec, operands, n)
    return _shifted(operands, n) - of.first_query + of.first_key + of.keys - of.queries, of.there


def _shifted(operands: Operands, n: Sizes) -> np.ndarray:
    """Each query's index and how much further to the right its diagonal lies, added: ascending `(B, T)`."""
    shifts = np.zeros((n.B, 1), np.int64)
    if operands.diagonal is not None:
        shifts = np.asarray(operands.diagonal, np.int64)
    return np.arange(n.T) + shifts.repeat(n.T // shifts.shape[1], axis=1)


@dataclasses.dataclass(frozen=True)
class Sequences:
    """The sequence of each query, or key: `(B, positions)`, or `(B, 1)` if a batch row is a sequence."""

    first_query: np.ndarray
    queries: np.ndarray
    first_key: np.ndarray
    keys: np.ndarray
    there: np.ndarray  # whether the position is in a sequence, `(B, positions)`


def _query_keys(spec: AttentionSpec, operands: Operands) -> Interval:
    """The interval of keys that each query sees."""
    of, _ = _sequences(spec, operands, sizes(operands))
    diagonal, there = diagonals(spec, operands)
    begin = np.broadcast_to(of.first_key, diagonal.shape)
    end = np.broadcast_to(of.first_key + of.keys, diagonal.shape)
    if spec.left is not None:
        begin = np.maximum(begin, diagonal - spec.left)
    if spec.right is not None:
        end = np.minimum(end, diagonal + spec.right + 1)
    return _nonempty(begin, end, there)


def _key_queries(spec: AttentionSpec, operands: Operands) -> Interval:
    """The interval of queries that see each key."""
    n = sizes(operands)
    _, of = _sequences(spec, operands, n)
    aligned = np.arange(n.S) - of.first_key + of.first_query + of.queries - of.keys + np.zeros((n.B, 1), int)
    begin = np.broadcast_to(of.first_query, aligned.shape)
    end = np.broadcast_to(of.first_query + of.queries, aligned.shape)

    def first_from(aligned: np.ndarray) -> np.ndarray:
        rows = zip(_shifted(operands, n), aligned, strict=True)
        return np.stack([np.searchsorted(shifted, row) for shifted, row in rows])

    if spec.right is not None:
        begin = np.maximum(begin, first_from(aligned - spec.right))
    if spec.left is not None:
        end = np.minimum(end, first_from(aligned + spec.left + 1))
    return _nonempty(begin, end, of.there)


def _sequences(spec: AttentionSpec, operands: Operands, n: Sizes) -> tuple[Sequences, Sequences]:
    """The sequences of queries, and those of keys."""
    query, key = np.arange(n.T), np.arange(n.S)
    if operands.query_offsets is None:

        def of_rows(lengths, size: int) -> np.ndarray:
            return np.full((n.B, 1), size) if lengths is None else np.asarray(lengths, np.int64)[:, None]

        queries = of_rows(operands.query_seq_lengths, n.T)
        keys = of_rows(operands.key_value_seq_lengths, n.S)
        first = np.zeros_like(keys)
        return (
            Sequences(first, queries, first, keys, query < queries),
            Sequences(first, queries, first, keys, key < keys),
        )
    sides = [np.asarray(x, np.int64) for x in (operands.query_offsets, operands.key_value_offsets)]
    longest = spec.max_query_length, spec.max_key_value_length
    values = []
    for offsets, most in zip(sides, longest, strict=True):
        values += [offsets[:, :-1], np.clip(np.diff(offsets), 0, most)]

    def of_tokens(own: int, token: np.ndarray) -> Sequences:
        # The last sequence that starts there; those before it are empty.
        sequence = np.stack([np.searchsorted(x, token, side="right") for x in sides[own]]) - 1
        found = [np.take_along_axis(x, np.clip(sequence, 0, x.shape[1] - 1), 1) for x in values]
        within = token - found[2 * own]
        return Sequences(*found, (sequence >= 0) & (within < found[2 * own + 1]))

    return of_tokens(0, query), of_tokens(1, key)


def _nonempty(begin: np.ndarray, end: np.ndarray, there: np.ndarray) -> Interval:
    sees = there & (begin < end)
    return np.where(sees, begin, NOWHERE), np.where(sees, end, 0)


def _per_row(of_queries: np.ndarray, pack_gqa: int, rows: int) -> np.ndarray:
    """`(B, rows, …)` from `(B, T, …)`: a query's value for each of its rows, 0 for rows beyond the last."""
    repeated = np.repeat(of_queries, pack_gqa, axis=1)
    return np.pad(repeated, [(0, 0), (0, rows - repeated.shape[1])] + [(0, 0)] * (of_queries.ndim - 2))


def _blocks(
    interval: Interval, group: int, groups: int, size: int, missing_see: bool = True
) -> tuple[np.ndarray, ...]:
    """The block range of each group of positions, for blocks of `size`: first, last, full_begin, full_end.

    Positions beyond the last see everything if `missing_see`, else nothing.
    """
    begin, end = interval
    least_begin = _grouped(begin, group, groups, NOWHERE, np.min)
    greatest_end = _grouped(end, group, groups, 0, np.max)
    greatest_begin = _grouped(begin, group, groups, 0 if missing_see else NOWHERE, np.max)
    least_end = _grouped(end, group, groups, NOWHERE if missing_see else 0, np.min)
    last = -(-greatest_end // size)
    first = np.where(last > 0, least_begin // size, 0)
    return first, last, -(-greatest_begin // size), least_end // size


def _grouped(x: np.ndarray, group: int, groups: int, fill: int, reduce) -> np.ndarray:
    """Reduces `(B, positions)` over groups of positions; `fill` completes the last group."""
    padded = np.pad(x, ((0, 0), (0, groups * group - x.shape[1])), constant_values=fill)
    return reduce(padded.reshape(x.shape[0], groups, group), 2)


def _segment_ids(operands: Operands) -> tuple[np.ndarray, np.ndarray]:
    query, key = operands.query_segment_ids, operands.key_value_segment_ids
    return np.asarray(query, np.int64), np.asarray(key, np.int64)


def _id_ranges(ids: np.ndarray, group: int, groups: int) -> Interval:
    """The least and the greatest id of each group of positions; least above greatest for an empty group."""
    limits = np.iinfo(np.int32)
    return (
        _grouped(ids, group, groups, limits.max, np.min),
        _grouped(ids, group, groups, limits.min, np.max),
    )


def _narrowed_by_segments(
    groups: Interval, blocks: Interval, visited: Interval, full: Interval
) -> tuple[np.ndarray, ...]:
    """Narrows the block ranges of `groups`, both given by their ranges of ids.

    Visited blocks are narrowed to those that may share a segment with the group. Full blocks are narrowed to
    the first run of those that consist of one segment, the same of which the group consists.
    """
    (least, greatest), (block_least, block_greatest) = (
        (x[:, :, None] for x in groups),
        (x[:, None] for x in blocks),
    )
    block = np.arange(block_least.shape[2])

    def within(interval: Interval) -> np.ndarray:
        begin, end = interval
        return (begin[:, :, None] <= block) & (block < end[:, :, None])

    may_share = within(visited) & (least <= block_greatest) & (block_least <= greatest)
    first = np.min(np.where(may_share, block, NOWHERE), 2)
    last = np.max(np.where(may_share, block + 1, 0), 2)
    one = (least == greatest) & (block_least == block_greatest) & (least == block_least)
    is_full = within(full) & one
    full_begin = np.min(np.where(is_full, block, NOWHERE), 2)
    behind = ~is_full & (block > full_begin[:, :, None])
    full_end = np.min(np.where(behind, block, block.size), 2)
    return np.where(last > 0, first, 0), last, full_begin, np.where(full_begin < NOWHERE, full_end, 0)
