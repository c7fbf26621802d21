"""The definition of a call on a key-value cache: append, then attention with lengths.

Written sequence by sequence in NumPy, for tests. Attention itself is `_reference.py`'s.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_flash import _float8, _reference
from jax_flash._cache_spec import CacheOperands, CacheSizes, CacheSpec, cache_sizes
from jax_flash._spec import AttentionSpec, Operands, captured_name
from jax_flash.functions.chunks import on_chunks

ROWS_AT_ONCE = 64
"""The queries of packed sequences are padded to a multiple of it."""


class Results(NamedTuple):
    """What a call returns, in NumPy. `key` and `value` are the cache after the append, as the call had it."""

    out: np.ndarray  # as the query, with V columns
    lse: np.ndarray  # (B, N, T), or (1, N, T) of varlen sequences
    key: np.ndarray
    value: np.ndarray | None


def reference(spec: CacheSpec, operands: CacheOperands) -> Results:
    """The call in float64."""
    with jax.enable_x64(True):
        return _results(spec, jax.tree.map(_wide, operands), np.float64, _has_float8(operands))


def plain(spec: CacheSpec, operands: CacheOperands) -> Results:
    """The call as plain attention computes it, in query's dtype."""
    dtype = jnp.promote_types(operands.query.dtype, jnp.float32)
    return _results(spec, jax.tree.map(np.asarray, operands), dtype, _has_float8(operands))


def _own(operands: CacheOperands, name: str) -> Any:
    """The operand's row for the call's layer, or the nearest one; the operand if it has no axis of layers."""
    x = getattr(operands, name)
    if x is None or x.ndim == 1:
        return x
    return x[np.clip(operands.layer, 0, len(x) - 1)]


def _rounded(x: np.ndarray, descale: np.ndarray | None) -> np.ndarray:
    """`x (K, columns)` as a cache in e4m3 has it."""
    x = x.astype(np.float32)
    x = x if descale is None else x / descale[:, None].astype(np.float32)
    return np.where(np.isinf(x), np.nan, np.clip(x, -448, 448)).astype(ml_dtypes.float8_e4m3fn)


def _wide(x):
    x = np.asarray(x)
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def without_cache(spec: CacheSpec, operands: CacheOperands) -> Operands:
    """What the call attends to, in float64: the keys of each sequence after the append, one after another."""
    with jax.enable_x64(True):
        return _attended(spec, jax.tree.map(_wide, operands), np.float64, _has_float8(operands))[0]


def attention_spec(spec: CacheSpec) -> AttentionSpec:
    """The spec of the call on `without_cache`'s operands, whose queries are counted from 0."""
    function = spec.attention.score_mod
    score_mod = None if function is None else on_chunks(function, stride=1)
    return dataclasses.replace(spec.attention, score_mod=score_mod)


def packed_like(operands: CacheOperands, out: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Results of `without_cache`, packed if the queries are."""
    return _packed(operands, out, lse, _queries(operands, cache_sizes(operands))[1])


def of_sequences(operands: CacheOperands, results: Results) -> tuple[np.ndarray, np.ndarray]:
    """The opposite: `out (B, T, N, V)` and `lse (B, N, T)` of `without_cache`'s operands."""
    n = cache_sizes(operands)
    out, counts = _by_sequence(operands, n, results.out)
    lse, _ = _by_sequence(operands, n, results.lse.swapaxes(1, 2))
    lse[np.arange(lse.shape[1]) >= counts[:, None]] = -np.inf
    return out, lse.swapaxes(1, 2)


def _has_float8(operands: CacheOperands) -> bool:
    return _float8.is_float8(operands.key.dtype)


def _results(spec: CacheSpec, operands: Any, dtype, is_float8: bool) -> Results:
    attention, cache, counts = _attended(spec, operands, dtype, is_float8)
    of_attention = attention_spec(spec)
    if dtype == np.float64:
        out, lse = _reference.reference(of_attention, attention, jnp.float64)
    else:
        out, lse = _reference.plain_attention(of_attention, attention)
    out, lse = _packed(operands, np.asarray(out), np.asarray(lse), counts)
    return Results(out, lse, cache.key, cache.value)


def _attended(spec: CacheSpec, operands: Any, dtype, is_float8: bool) -> tuple[Operands, "Cache", np.ndarray]:
    """What the call attends to, the cache after the append, and how many queries each sequence has."""
    n = cache_sizes(operands)
    descales = _own(operands, "key_descale"), _own(operands, "value_descale")
    cache, lengths_before = Cache(operands), np.clip(_own(operands, "lengths"), 0, n.S)
    for b in range(n.B):
        for t in range(n.U):
            position = int(lengths_before[b]) + t
            new_key = _rotated(spec, operands, operands.new_key[b, t], position, dtype)
            new = new_key, operands.new_value[b, t]
            if is_float8:
                new = (_rounded(x, descale) for x, descale in zip(new, descales, strict=True))
            cache.write(b, position, *new)

    # The same caches with the keys of each sequence one after another; 0 for those that are hidden from all.
    lengths = np.minimum(lengths_before + n.U, n.S)
    key = np.zeros((n.B, n.S, n.K, n.H), operands.query.dtype)
    value = np.zeros((n.B, n.S, n.K, n.V), operands.query.dtype)
    is_visible = np.zeros((n.B, 1, 1, n.S), bool)
    padding = np.zeros(n.B, np.int32) if operands.left_padding is None else operands.left_padding
    for b in range(n.B):
        for j in range(max(int(padding[b]), 0), lengths[b]):
            if (row := cache.read(b, j)) is not None:
                key[b, j], value[b, j] = row
                for x, descale in zip((key, value), descales, strict=True):
                    if descale is not None:
                        x[b, j] *= descale[:, None].astype(key.dtype)
                is_visible[b, 0, 0, j] = True

    query, counts = _queries(operands, n)
    for b in range(n.B if operands.rotary_cos is not None else 0):
        for t in range(counts[b]):
            first = {
                "own": lengths[b] - counts[b],
                "appended": lengths_before[b],
                "first": lengths_before[b],
            }
            position = int(first[spec.query_positions]) + (t if spec.query_positions != "first" else 0)
            query[b, t] = _rotated(spec, operands, query[b, t], position, dtype)

    of_function = {name: jnp.asarray(x) for name, x in operands.captured.items()}
    if spec.attention.score_mod is not None:
        starts = np.stack([lengths - counts, np.zeros(n.B)], axis=1).astype(np.int32)
        of_function[captured_name("score_mod", len(of_function))] = jnp.asarray(starts)
        of_function |= {
            name: jnp.asarray(getattr(operands, name)) for name in ("batch_indices", "head_indices")
        }
    attention = Operands(
        *(jnp.asarray(x) for x in (query, key, value)),
        mask=jnp.asarray(is_visible),
        alibi_slopes=None if operands.alibi_slopes is None else jnp.asarray(operands.alibi_slopes),
        sinks=None if operands.sinks is None else jnp.asarray(operands.sinks),
        query_seq_lengths=jnp.asarray(counts, jnp.int32),
        key_value_seq_lengths=jnp.asarray(lengths, jnp.int32),
    )
    return attention.replace(**of_function), cache, counts


class Cache:
    """A copy of the cache, by the positions of keys in their sequences."""

    def __init__(self, operands: Any):
        self.operands, self.sizes = operands, cache_sizes(operands)
        self.key = operands.key.copy()
        self.value = None if operands.value is None else operands.value.copy()

    def place(self, b: int, position: int) -> tuple[int, ...] | None:
        """Where the cache has that key of sequence b; None where it has no place."""
        operands, page = self.operands, self.sizes.page
        if not 0 <= position < self.sizes.S:
            return None
        if page is not None:
            row, position = int(operands.page_table[b, position // page]), position % page
        else:
            row = b if operands.batch_index is None else int(operands.batch_index[b])
        place = (row, position) if operands.layer is None else (int(operands.layer), row, position)
        is_there = all(0 <= i < size for i, size in zip(place, operands.key.shape, strict=False))
        return place if is_there else None

    def write(self, b: int, position: int, key: np.ndarray, value: np.ndarray) -> None:
        """One row of keys `(K, H)` and values `(K, V)`."""
        place = self.place(b, position)
        if place is None:
            return
        if self.value is None:
            self.key[place][0::2], self.key[place][1::2] = key, value
        else:
            self.key[place], self.value[place] = key, value

    def read(self, b: int, position: int) -> tuple[np.ndarray, np.ndarray] | None:
        place = self.place(b, position)
        if place is None:
            return None
        row = self.key[place]
        return (row[0::2], row[1::2]) if self.value is None else (row, self.value[place])


def _rotated(spec: CacheSpec, operands: Any, x: np.ndarray, position: int, dtype) -> np.ndarray:
    """`x (heads, H)` at that position, computed in `dtype` and rounded once; NaN where tables lack it."""
    if operands.rotary_cos is None:
        return x
    if not 0 <= position < operands.rotary_cos.shape[0]:
        cos = sin = np.full(operands.rotary_cos.shape[1], np.nan, dtype)
    else:
        cos, sin = (y[position].astype(dtype) for y in (operands.rotary_cos, operands.rotary_sin))
    half = len(cos)
    first, second = slice(half), slice(half, 2 * half)
    if spec.rotary_interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = (x[:, part].astype(dtype) for part in (first, second))
    turned = x.copy()
    turned[:, first] = a * cos - b * sin
    turned[:, second] = b * cos + a * sin
    return turned


def _queries(operands: Any, n: CacheSizes) -> tuple[np.ndarray, np.ndarray]:
    """The queries of each sequence `(B, T, N, H)`, and how many it has."""
    return _by_sequence(operands, n, operands.query)


def _by_sequence(operands: Any, n: CacheSizes, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A copy of `x`, whose first axes are the query's, with an axis of sequences; how many rows each has."""
    if operands.query_offsets is None:
        return x.copy(), np.full(n.B, n.T)
    starts, ends = operands.query_offsets[:-1], operands.query_offsets[1:]
    counts = ends - starts
    # As many rows as the longest has, rounded up so that few shapes are compiled.
    most = min(n.T, -(-int(counts.max(initial=1)) // ROWS_AT_ONCE) * ROWS_AT_ONCE)
    rows = np.zeros((n.B, most, *x.shape[2:]), x.dtype)
    for b in range(n.B):
        rows[b, : counts[b]] = x[0, starts[b] : ends[b]]
    return rows, counts


def _packed(operands: Any, out: np.ndarray, lse: np.ndarray, counts: np.ndarray):
    """Results of sequences packed as the queries are."""
    if operands.query_offsets is None:
        return out, lse
    tokens = operands.query.shape[1]
    packed = np.zeros((1, tokens, *out.shape[2:]), out.dtype)
    packed_lse = np.full((1, lse.shape[1], tokens), -np.inf, lse.dtype)
    for b, (start, count) in enumerate(zip(operands.query_offsets[:-1], counts, strict=True)):
        packed[0, start : start + count] = out[b, :count]
        packed_lse[0, :, start : start + count] = lse[b, :, :count]
    return packed, packed_lse
