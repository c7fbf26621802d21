"""The definition of a call on a key-value cache: append, then attention with lengths.

Written sequence by sequence in NumPy, for tests. Attention itself is `_reference.py`'s.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import _reference
from jax_flash._cache_spec import CacheOperands, CacheSpec, cache_sizes
from jax_flash._spec import Operands


class Results(NamedTuple):
    """What a call returns, in NumPy. `key` and `value` are the cache after the append, as the call had it."""

    out: np.ndarray  # as the query, with V columns
    lse: np.ndarray  # (B, N, T), or (1, N, T) of packed sequences
    key: np.ndarray
    value: np.ndarray | None


def reference(spec: CacheSpec, operands: CacheOperands) -> Results:
    """The call in float64."""
    with jax.enable_x64(True):
        return _results(spec, jax.tree.map(_wide, operands), np.float64)


def plain(spec: CacheSpec, operands: CacheOperands) -> Results:
    """The call as plain attention computes it, in query's dtype."""
    return _results(spec, jax.tree.map(np.asarray, operands), np.float32)


def _wide(x):
    x = np.asarray(x)
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _results(spec: CacheSpec, operands: CacheOperands, dtype) -> Results:
    n = cache_sizes(operands)
    layer = () if operands.layer is None else (int(operands.layer),)
    is_there = not layer or 0 <= layer[0] < operands.key.shape[0]
    arrays = [x.copy() for x in (operands.key, operands.value) if x is not None]

    for b in range(n.B if is_there else 0):
        for t in range(n.U):
            position = int(operands.lengths[b]) + t
            place = _place(operands, b, position)
            if place is None:
                continue
            new_key = _rotated(spec, operands, operands.new_key[b, t], position, dtype)
            if operands.value is None:
                arrays[0][(*layer, *place)] = np.stack([new_key, operands.new_value[b, t]], 1).reshape(
                    -1, n.H
                )
            else:
                arrays[0][(*layer, *place)] = new_key
                arrays[1][(*layer, *place)] = operands.new_value[b, t]

    # The same caches with the keys of each sequence one after another.
    key = np.zeros((n.B, n.S, n.K, n.H), operands.key.dtype)
    value = np.zeros((n.B, n.S, n.K, n.V), operands.key.dtype)
    is_visible = np.zeros((n.B, 1, 1, n.S), bool)
    for b in range(n.B if is_there else 0):
        for j in range(0 if operands.left_padding is None else max(int(operands.left_padding[b]), 0), n.S):
            place = _place(operands, b, j)
            if place is None:
                continue
            row = arrays[0][(*layer, *place)]
            key[b, j], value[b, j] = (
                (row[0::2], row[1::2]) if operands.value is None else (row, arrays[1][(*layer, *place)])
            )
            is_visible[b, 0, 0, j] = True

    lengths = np.minimum(operands.lengths + n.U, n.S)
    query, counts = _queries(operands, n)
    for b in range(n.B if operands.rotary_cos is not None else 0):
        for t in range(counts[b]):
            first = {
                "own": lengths[b] - counts[b],
                "appended": operands.lengths[b],
                "first": operands.lengths[b],
            }
            position = int(first[spec.query_positions]) + (t if spec.query_positions != "first" else 0)
            query[b, t] = _rotated(spec, operands, query[b, t], position, dtype)

    attention = Operands(
        *(jnp.asarray(x) for x in (query, key, value)),
        mask=jnp.asarray(is_visible),
        alibi_slopes=None if operands.alibi_slopes is None else jnp.asarray(operands.alibi_slopes),
        sinks=None if operands.sinks is None else jnp.asarray(operands.sinks),
        query_seq_lengths=jnp.asarray(counts, jnp.int32),
        key_value_seq_lengths=jnp.asarray(lengths, jnp.int32),
    )
    if dtype == np.float64:
        out, lse = _reference.reference(spec.attention, attention, jnp.float64)
    else:
        out, lse = _reference.plain_attention(spec.attention, attention)
    out, lse = _packed(operands, np.asarray(out), np.asarray(lse), counts)
    return Results(out, lse, arrays[0], None if operands.value is None else arrays[1])


def _place(operands: CacheOperands, b: int, position: int) -> tuple[int, int] | None:
    """Where the cache has that key of sequence b, after the axis of layers; None where it has no place."""
    n = cache_sizes(operands)
    if not 0 <= position < n.S:
        return None
    if operands.page_table is None:
        row = b if operands.batch_index is None else int(operands.batch_index[b])
        return (row, position) if 0 <= row < operands.key.shape[-4] else None
    page = int(operands.page_table[b, position // n.page])
    return (page, position % n.page) if 0 <= page < operands.key.shape[-4] else None


def _rotated(spec: CacheSpec, operands: CacheOperands, x: np.ndarray, position: int, dtype) -> np.ndarray:
    """`x (heads, H)` at that position, computed in `dtype` and rounded once; NaN where tables lack it."""
    if operands.rotary_cos is None:
        return x
    if not 0 <= position < operands.rotary_cos.shape[0]:
        cos = sin = np.full(operands.rotary_cos.shape[1], np.nan, dtype)
    else:
        cos, sin = (y[position].astype(dtype) for y in (operands.rotary_cos, operands.rotary_sin))
    half = len(cos)
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if spec.rotary_interleaved
        else (slice(half), slice(half, 2 * half))
    )
    a, b = (x[:, part].astype(dtype) for part in (first, second))
    turned = x.copy()
    turned[:, first] = a * cos - b * sin
    turned[:, second] = b * cos + a * sin
    return turned


def _queries(operands: CacheOperands, n) -> tuple[np.ndarray, np.ndarray]:
    """The queries of each sequence `(B, T, N, H)`, and how many it has."""
    if operands.query_offsets is None:
        return operands.query.copy(), np.full(n.B, n.T)
    starts, ends = operands.query_offsets[:-1], operands.query_offsets[1:]
    query = np.zeros((n.B, n.T, n.N, n.H), operands.query.dtype)
    for b in range(n.B):
        query[b, : ends[b] - starts[b]] = operands.query[0, starts[b] : ends[b]]
    return query, ends - starts


def _packed(operands: CacheOperands, out: np.ndarray, lse: np.ndarray, counts: np.ndarray):
    """Results of sequences packed as the queries are."""
    if operands.query_offsets is None:
        return out, lse
    packed = np.zeros((1, *out.shape[1:]), out.dtype)
    packed_lse = np.full((1, *lse.shape[1:]), -np.inf, lse.dtype)
    for b, (start, count) in enumerate(zip(operands.query_offsets[:-1], counts, strict=True)):
        packed[0, start : start + count] = out[b, :count]
        packed_lse[0, :, start : start + count] = lse[b, :, :count]
    return packed, packed_lse
