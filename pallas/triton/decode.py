"""Attention on a key-value cache by the Triton lowering: Flash-Decoding, with split-KV.

A program of the first kernel takes a tile of rows, pairs of a query and a query head of one key head, and
one split of the key blocks that the tile sees. It keeps the online softmax in base 2, as `forward.py` does.
If its tile has one split, it writes the output; if more, a partial result: unnormalised output, maximum and
sum. The second kernel combines the splits of each query and head.
"""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jax_flash._cache_spec import CacheOperands, CacheSizes, CacheSpec, cache_sizes
from jax_flash._spec import captured_name, is_captured

from ..compat import result, triton_call
from ..constants import LN_2, LOG2_E
from . import functions
from .decode_cache import SequenceCache
from .decode_schedule import Schedule, Share, ceil_divided, divided, remainder
from .decode_tiles import Cut
from .memory import dot, dot_transposed, indices
from .scores import accurate_tanh, whole
from .tiles import padded

_SPLITS_AT_ONCE = 8  # that the combine kernel loads


@dataclasses.dataclass(frozen=True)
class _Problem:
    """What both kernels know. `refs` has whole arrays, by the names of `CacheOperands`, but the query as
    (tokens, N, H) and sinks as (N,)."""

    spec: CacheSpec
    sizes: CacheSizes
    cut: Cut
    refs: Mapping[str, Any]

    @property
    def schedule(self) -> Schedule:
        offsets = self.refs.get("query_offsets")
        return Schedule(self.spec, self.sizes, self.cut, self.refs["lengths"], offsets)

    def place_of_lse(self, sequence: Any, head: Any, query: Any, token: Any) -> tuple[Any, Any]:
        """Where lse is, as (heads of all sequences, T), or (N, T) of packed queries."""
        return (head, token) if "query_offsets" in self.refs else (sequence * self.sizes.N + head, query)

    def normalised(self, top: Any, total: Any, acc: Any, head: Any) -> tuple[Any, Any]:
        """Output and lse of rows `(rows,)` whose query heads are `head`."""
        sees_nothing = total == 0.0
        if "sinks" in self.refs:
            sink = triton.load(self.refs["sinks"].at[head]) * LOG2_E
            new_top = jnp.maximum(top, sink)
            rescale = jnp.exp2(top - new_top)
            total = total * rescale + jnp.exp2(sink - new_top)
            acc = acc * (rescale[:, None] if jnp.ndim(rescale) else rescale)
            top = new_top
        total = jnp.where(sees_nothing, 1.0, total)
        lse = jnp.where(sees_nothing, -jnp.inf, top * LN_2 + jnp.log(total))
        return acc / (total[:, None] if jnp.ndim(total) else total), lse


class _Tile:
    """The rows of a tile: vectors with a number for each, and what the tile sees."""

    def __init__(self, problem: _Problem, share: Share, key_head: jax.Array):
        n, cut, schedule = problem.sizes, problem.cut, problem.schedule
        start, count = schedule.queries(share.sequence)
        keys = schedule.keys(share.sequence)
        first = share.tile * cut.rows
        row = first + lax.iota(jnp.int32, cut.rows)
        self.query = divided(row, n.group)
        self.head = key_head * n.group + remainder(row, n.group)
        self.is_row = self.query < count
        self.token = start + self.query
        self.diagonal = keys - count + self.query  # the key that each query is aligned with

        begin, end = jnp.int32(0), keys
        if "left_padding" in problem.refs:
            begin = jnp.maximum(triton.load(problem.refs["left_padding"].at[share.sequence]), 0)
        window = problem.spec.attention
        if window.left is not None:
            begin = jnp.maximum(begin, keys - count + divided(first, n.group) - window.left)
        if window.right is not None:
            last = jnp.minimum(divided(first + (cut.rows - 1), n.group), count - 1)
            end = jnp.minimum(end, keys - count + last + window.right + 1)
        self.begin, self.end = begin, end  # the keys that any row of it may see

    def blocks(self, share: Share, keys: int, is_there: jax.Array | bool) -> tuple[jax.Array, jax.Array]:
        """The blocks `[first, last)` of the program's split."""
        first = divided(self.begin, keys)
        sees_any = (self.end > self.begin) & is_there
        last = jnp.where(sees_any, ceil_divided(self.end, keys), first)
        if isinstance(share.splits, int):  # one
            return first, last
        each = lax.div(last - first + share.splits - 1, share.splits)
        own_first = first + share.split * each
        return own_first, jnp.minimum(own_first + each, last)


def decode_splits(problem: _Problem, results: Any) -> None:
    """Attends with one split of one tile.

    Refs of `results`: out (tokens, N, V), lse; and where tiles may have several splits, partial results:
    output (programs, K, rows, V), maxima and sums (programs, K, rows).
    """
    program, key_head = pl.program_id(0), pl.program_id(1)
    share = problem.schedule.share(program)
    if share.is_there is True:
        _decode_split(problem, share, program, key_head, results)
    else:
        pl.when(share.is_there)(lambda: _decode_split(problem, share, program, key_head, results))


def _decode_split(problem: _Problem, share: Share, program: Any, key_head: Any, results: Any) -> None:
    n, cut = problem.sizes, problem.cut
    tile = _Tile(problem, share, key_head)
    cache = SequenceCache(problem.refs, n, share.sequence, key_head, cut.keys)
    first, last = tile.blocks(share, cut.keys, cache.is_there())
    top, total, acc = _attend(problem, share, tile, cache, first, last)

    out, lse, *partial = results

    def write_results():
        values, log_sums = problem.normalised(top, total, acc, tile.head)
        _store_rows(out, (tile.token, tile.head), values, tile.is_row, n.V)
        place = problem.place_of_lse(share.sequence, tile.head, tile.query, tile.token)
        triton.store(lse.at[place], log_sums, mask=tile.is_row)

    def write_partial():
        acc_ref, top_ref, total_ref = partial
        row = lax.iota(jnp.int32, cut.rows)
        # The combine kernel reads no output of a row without a maximum.
        _store_rows(acc_ref, (program, key_head, row), acc, tile.is_row & (top != -jnp.inf), n.V)
        triton.store(top_ref.at[program, key_head, row], top)
        triton.store(total_ref.at[program, key_head, row], total)

    if cut.splits == 1:
        write_results()
    else:
        pl.when(share.splits == 1)(write_results)
        pl.when(share.splits > 1)(write_partial)


def _attend(
    problem: _Problem, share: Share, tile: _Tile, cache: SequenceCache, first: jax.Array, last: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Maxima, sums and unnormalised output of a tile over the blocks `[first, last)`."""
    n, rows, refs, spec = problem.sizes, problem.cut.rows, problem.refs, problem.spec.attention
    columns = indices(0, padded(n.H), 1)
    is_query = jnp.broadcast_to(tile.is_row[:, None], (rows, padded(n.H)))
    if n.H != padded(n.H):
        is_query = is_query & (columns < n.H)
    query_at = refs["query"].at[tile.token[:, None], tile.head[:, None], columns]
    query = triton.load(query_at, mask=is_query, other=np.zeros((), refs["query"].dtype))
    slopes = None
    if "alibi_slopes" in refs:
        b = share.sequence if refs["alibi_slopes"].shape[0] > 1 else np.int32(0)
        slopes = triton.load(refs["alibi_slopes"].at[b, tile.head]) * LOG2_E
    cap = spec.logits_soft_cap
    unit = LOG2_E if spec.score_mod is None else 1.0  # of the logits that it takes
    scale = spec.scale * unit if cap is None else spec.scale / cap
    if "key_descale" in refs:
        scale = scale * cache.descale("key_descale")

    def step(j, carry):
        row_max, row_sum, acc = carry
        key, value, is_there, positions = cache.block(j, tile.begin, tile.end)
        visible = jnp.broadcast_to(is_there[None, :], (rows, problem.cut.keys))
        distance = positions[None, :] - tile.diagonal[:, None]
        if spec.left is not None:
            visible = visible & (distance >= -spec.left)
        if spec.right is not None:
            visible = visible & (distance <= spec.right)
        x = dot_transposed(query, key) * scale
        if cap is not None:
            x = accurate_tanh(x) * (cap * unit)
        if spec.score_mod is not None:
            x = _of_function(problem, share, tile, x, positions) * LOG2_E
        if slopes is not None:
            x = x - slopes[:, None] * jnp.abs(distance).astype(jnp.float32)
        x = jnp.where(visible, x, -jnp.inf)
        new_max = jnp.maximum(row_max, jnp.max(x, axis=1))
        # A row that has seen no key has the maximum -inf. 0 is subtracted instead: 2^(-inf - 0) is 0.
        shift = jnp.where(new_max == -jnp.inf, 0.0, new_max)
        p = jnp.exp2(x - shift[:, None])
        rescale = jnp.exp2(row_max - shift)
        acc = acc * rescale[:, None] + dot(p.astype(value.dtype), value)
        return new_max, row_sum * rescale + jnp.sum(p, axis=1), acc

    carry = (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, padded(n.V)), jnp.float32),
    )
    row_max, row_sum, acc = lax.fori_loop(first, last, step, carry)
    if "value_descale" in refs:
        acc = acc * cache.descale("value_descale")
    return row_max, row_sum, acc


def _of_function(
    problem: _Problem, share: Share, tile: _Tile, scores: jax.Array, positions: jax.Array
) -> jax.Array:
    """What the call's score_mod makes of the scores of a tile's rows on keys at `positions`."""
    function, refs = problem.spec.attention.score_mod, problem.refs
    assert function is not None and function.value is not None  # or the call would be refused
    inputs = {
        "score": scores,
        "batch": triton.load(refs["batch_indices"].at[share.sequence]).reshape(1, 1),
        "head": triton.load(refs["head_indices"].at[np.int32(0), tile.head])[:, None],
        "query": tile.diagonal[:, None],
        "key": positions[None, :],
    }

    def load(operand: Hashable, index: jax.Array) -> jax.Array:
        assert isinstance(operand, int)
        return triton.load(refs[captured_name("score_mod", operand)].at[np.int32(0), index])

    (x,) = functions.values([function.value], inputs, load)
    return jnp.broadcast_to(x, scores.shape)


def combine_splits(problem: _Problem, partial: Any, out: Any, lse: Any) -> None:
    """Combines the splits of one query and head, if they are several. Refs `partial` are those that
    `decode_splits` writes, or none; out (tokens, N, V) and lse are changed."""
    n, schedule = problem.sizes, problem.schedule
    token, head = pl.program_id(0), pl.program_id(1)
    sequence, is_of_one = schedule.sequence_of(token)
    query = token - schedule.queries(sequence)[0]

    def store(values, log_sum):
        columns = lax.iota(jnp.int32, padded(n.V))
        triton.store(out.at[token, head, columns], values.astype(out.dtype), mask=columns < n.V)
        triton.store(lse.at[problem.place_of_lse(sequence, head, query, token)], log_sum)

    def store_nothing():
        store(jnp.zeros(padded(n.V), jnp.float32), jnp.float32(-jnp.inf))

    if is_of_one is not True:
        pl.when(jnp.logical_not(is_of_one))(store_nothing)
    if not partial:
        return
    key_head = divided(head, n.group)
    row = query * n.group + (head - key_head * n.group)
    tile = divided(row, problem.cut.rows)
    first, splits = schedule.programs_of(sequence, tile)

    @pl.when((splits > 1) & is_of_one)
    def _():
        sums = _summed(problem, partial, first, splits, key_head, row - tile * problem.cut.rows)
        store(*problem.normalised(*sums, head))


def _summed(problem: _Problem, partial: Any, first: Any, splits: Any, key_head: Any, row: Any):
    """Maximum, sum and unnormalised output of one row over the programs `[first, first + splits)`."""
    V = problem.sizes.V
    acc_ref, top_ref, total_ref = partial

    def load(ref, split, other):
        return triton.load(ref.at[first + split, key_head, row], mask=split < splits, other=other)

    every = lax.iota(jnp.int32, padded(problem.cut.splits))
    tops = load(top_ref, every, -np.inf)
    top = jnp.max(tops)
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    total = jnp.sum(load(total_ref, every, 0.0) * jnp.exp2(tops - shift))
    columns = indices(0, padded(V), 1)

    def step(i, acc):
        split = i * _SPLITS_AT_ONCE + lax.iota(jnp.int32, _SPLITS_AT_ONCE)
        own_top = load(top_ref, split, -np.inf)
        is_there = jnp.broadcast_to((own_top != -jnp.inf)[:, None], (_SPLITS_AT_ONCE, padded(V)))
        ref = acc_ref.at[(first + split)[:, None], key_head, row, columns]
        part = triton.load(ref, mask=is_there & (columns < V), other=0.0)
        return acc + jnp.sum(part * jnp.exp2(own_top - shift)[:, None], axis=0)

    count = ceil_divided(splits, _SPLITS_AT_ONCE)
    acc = lax.fori_loop(np.int32(0), count, step, jnp.zeros(padded(V), jnp.float32))
    return top, total, acc


def _store_rows(ref: Any, index: tuple[Any, ...], rows: jax.Array, where: jax.Array, width: int) -> None:
    """Writes `rows`, in the ref's dtype, to the last axis of `ref` at `index`, vectors or scalars."""
    columns = indices(0, padded(width), 1)
    index = tuple(x[:, None] if jnp.ndim(x) else x for x in index)
    mask = jnp.broadcast_to(where[:, None], rows.shape) & (columns < width)
    triton.store(ref.at[*index, columns], rows.astype(ref.dtype), mask=mask)


def forward(spec: CacheSpec, operands: CacheOperands, cut: Cut) -> tuple[jax.Array, jax.Array]:
    """`out` and `lse` for a cache that has the new keys, and for queries that are rotated."""
    n, query = cache_sizes(operands), operands.query
    names = (
        *("lengths", "key", "value", "page_table", "batch_index", "left_padding", "alibi_slopes", "layer"),
        *("query_offsets", "key_descale", "value_descale", "batch_indices", "head_indices"),
    )
    present = operands.present()
    arrays = {name: x for name, x in present.items() if name in names or is_captured(name)}
    arrays["query"] = query.reshape(-1, n.N, n.H)
    if operands.sinks is not None:
        arrays["sinks"] = operands.sinks.reshape(n.N)
    tokens = arrays["query"].shape[0]

    def kernel(refs, *results):
        decode_splits(_Problem(spec, n, cut, refs), results)

    shapes = [((tokens, n.N, n.V), query.dtype), ((query.shape[0] * n.N, query.shape[1]), jnp.float32)]
    if cut.splits > 1:
        statistics = (cut.programs, n.K, cut.rows)
        shapes += [((*statistics, n.V), jnp.float32), (statistics, jnp.float32), (statistics, jnp.float32)]
    out_shape = [result(shape, dtype, like=query) for shape, dtype in shapes]
    out, lse, *partial = triton_call(
        kernel,
        grid=(cut.programs, n.K),
        in_specs=[whole(arrays)],
        out_specs=whole(out_shape),
        out_shape=out_shape,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        name="jax_flash_pallas_decode",
    )(arrays)
    if partial or operands.query_offsets is not None:
        out, lse = _combined(spec, n, cut, arrays, partial, out, lse)
    return out.reshape(*query.shape[:-1], n.V), lse.reshape(query.shape[0], n.N, query.shape[1])


def _combined(
    spec: CacheSpec, n: CacheSizes, cut: Cut, arrays: dict[str, jax.Array], partial: Any, out: Any, lse: Any
) -> tuple[jax.Array, jax.Array]:
    """Out and lse with the rows whose tiles have several splits, and 0 and -inf for tokens of no sequence."""
    arrays = {name: x for name, x in arrays.items() if name in ("lengths", "sinks", "query_offsets")}

    def kernel(refs, partial, _, __, out, lse):
        combine_splits(_Problem(spec, n, cut, refs), partial, out, lse)

    arguments = (arrays, partial, out, lse)
    return triton_call(
        kernel,
        grid=(out.shape[0], n.N),
        in_specs=list(whole(arguments)),
        out_specs=whole([out, lse]),
        out_shape=[result(x.shape, x.dtype, like=x) for x in (out, lse)],
        changes_last=2,
        num_warps=4,
        num_stages=2,
        name="jax_flash_pallas_decode_combine",
    )(*arguments)
