"""Backward by the Triton lowering: one kernel for dK and dV, and one for dQ, so that neither needs atomics.

With p = exp(x - lse) for the logit x = scale q.k, delta = rowsum(dO * O) - d_lse and ds = p * (dO.v - delta):

    dV = p^T dO        dK = scale * ds^T q        dQ = scale * ds k

ds is the gradient of x. A gradient of bias or slopes is a sum over ds, taken in the kernel whose programs
have all of its terms: over keys in the kernel for dQ, over queries in that for dK and dV, and over heads or
batch rows in one of its own (backward_bias.py). The derivatives of score_mod and of the soft cap come after
these sums. What dropout keeps is divided by its probability at the very end: delta is multiplied by it until
then.

Each of these sums is taken in one program in a fixed order, so it is bitwise equal from run to run. Any
program may read an array that score_mod captures, so the kernel for dQ adds to its gradient by atomics, in
no fixed order.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jax_flash import _gradients
from jax_flash._spec import AttentionSpec, Gradients, Operands, Sizes, captured_name, sizes

from .. import features
from ..compat import result, triton_call, zeros
from ..loop import over_skipped_blocks, over_visited_blocks
from . import backward_bias, scores
from .memory import dot, dot_transposed, load, load_vector, store, store_block, store_vector
from .nonfinite import count_seen, finite, over_spoiled_tiles, programs, spoiled_rows
from .scores import Place, Scores
from .tiles import Tile, Tiles, padded


def flash_backward_keys(
    query,
    key,
    value,
    d_out,
    lse,
    delta,
    score_operands: dict[str, Any],
    *results,
    spec: AttentionSpec,
    size: Sizes,
    tile: Tile,
    again: bool,
) -> None:
    """A program owns a block of keys of one key head and loops over the queries of each head that shares it.

    Refs: query (T,group,H), key (S,H), value (S,V), d_out (T,group,V), lse and delta (group,T) float32, and
    what `Scores` takes of these heads -> d_key (S,H), d_value (S,V); in a dict, where there is such a sum,
    "bias_of_keys" (group,S) float32; and if the call hides pairs, `spoiled_rows` (S,) of both gradients.
    Scores are held transposed, keys by queries.

    With `again`, a program computes the tiles once more in which there are spoiled rows, without what isn't
    finite in query and d_out. Refs in place of the results: spoiled rows, and d_key and d_value twice, as
    they are and to be changed.
    """
    T, S, H, V = size.T, size.S, size.H, size.V
    of = Scores(spec, size, score_operands)
    mask = of.position_mask()
    across = mask.transposed()
    T_tail = T if T % tile.queries else None
    S_tail = S if S % tile.keys else None
    if again:
        spoiled, _, _, d_key, d_value = results
        d_bias = {}
    else:
        d_key, d_value, d_bias, spoiled = results

    def body(first, k, v, isolate: bool, head, partial: bool, i, carry):
        dk, dv, bias_of_keys, seen = carry
        start = i * tile.queries
        rows = T_tail if partial else None
        q = load(query, start, tile.queries, width=H, rows=rows, head=head)
        # exp2(x - inf) = 0: queries beyond the end have no part in any sum.
        row_lse = load_vector(lse, start, tile.queries, rows=rows, other=jnp.inf, head=head)
        products = dot_transposed(k, q)
        place = Place(start, first, tile, rows, S_tail, transposed=True, head=head)
        logits = of.logits(products, place, mask)
        p = of.probability(logits.x, row_lse[None, :])
        by_position = across.visible(place.keys, place.queries) if partial else None
        visible = of.visible(place, by_position, partial)
        p = p if visible is None else jnp.where(visible, p, 0.0)
        do = load(d_out, start, tile.queries, width=V, rows=rows, head=head)
        p_kept = of.with_dropout(p, place)
        finite_q, finite_do = q, do
        if isolate and visible is not None:
            seen = seen + count_seen(jnp.broadcast_to(visible, p.shape), do)
            finite_q, finite_do = finite(q), finite(do)
        dv = dv + dot(p_kept.astype(do.dtype), finite_do)
        row_delta = load_vector(delta, start, tile.queries, rows=rows, other=0.0, head=head)
        ds = p * (of.with_dropout(dot_transposed(v, do), place) - row_delta[None, :])
        if bias_of_keys:
            terms = ds if visible is None else jnp.where(visible, ds, 0.0)
            bias_of_keys = {name: x + jnp.sum(terms, axis=1) for name, x in bias_of_keys.items()}
        ds = of.score_grad(ds, logits, place, visible)
        if isolate and visible is not None:
            ds = jnp.where(visible, ds, 0.0)
        return dk + dot(ds.astype(q.dtype), finite_q), dv, bias_of_keys, seen

    def compute(block, isolate: bool):
        """Stores a tile's gradients and returns them. Where what isn't finite is kept apart, d_value stays as
        it is for keys that queries with such a d_out see."""
        first = block * tile.keys
        k = load(key, first, tile.keys, width=H, rows=S_tail)
        v = load(value, first, tile.keys, width=V, rows=S_tail)

        def of_head(head, carry):
            blocks = of.blocks(across, block, tile.keys, tile.queries, head)
            dk, dv, seen = carry
            bias_of_keys = {name: jnp.zeros((tile.keys,), jnp.float32) for name in d_bias}
            dk, dv, bias_of_keys, seen = over_visited_blocks(
                blocks,
                functools.partial(body, first, k, v, isolate, head),
                (dk, dv, bias_of_keys, seen),
            )
            for name, x in bias_of_keys.items():
                store_vector(d_bias[name], first, x * of.dropout_scale, rows=S_tail, head=head)
            return dk, dv, seen

        zeros = jnp.zeros((tile.keys, padded(V)), jnp.float32)
        carry = (jnp.zeros((tile.keys, padded(H)), jnp.float32), zeros, zeros if isolate else None)
        dk, dv, seen = lax.fori_loop(np.int32(0), np.int32(size.group), of_head, carry)
        dk = dk * (spec.scale * of.dropout_scale)
        dv = dv if of.dropout_scale == 1 else dv * of.dropout_scale
        store(d_key, first, dk, width=H, rows=S_tail)
        is_clean = None if seen is None else seen == 0.0
        store(d_value, first, dv, width=V, rows=S_tail, where=is_clean)
        return dk, dv

    if again:
        over_spoiled_tiles(spoiled, S, tile.keys, functools.partial(compute, isolate=True))
        return
    block = pl.program_id(0)
    gradients = compute(block, isolate=False)
    if spoiled is not None:
        store_vector(spoiled, block * tile.keys, spoiled_rows(*gradients), rows=S_tail)


def flash_backward_queries(
    query,
    key,
    value,
    d_out,
    lse,
    delta,
    score_operands: dict[str, Any],
    *results,
    spec: AttentionSpec,
    size: Sizes,
    tile: Tile,
    again: bool,
) -> None:
    """A program owns a block of queries of one head and loops over its keys.

    Refs: query (T,H), key (S,H), value (S,V), d_out (T,V), lse and delta (T,) float32, what `Scores` takes of
    the head, and a dict of zeros (elements,) float32 -> that dict, with the gradients of captured arrays
    added, by all programs; d_query (T,H); a dict with those of "bias" (T,S), "bias_of_queries" and "slopes"
    (T,) float32 that there are; and if the call hides pairs, `spoiled_rows` (T,) of d_query.

    With `again`, a program computes the tiles of d_query once more in which there are spoiled rows, without
    what isn't finite in keys. Refs in place of the results: spoiled rows, and d_query twice, as it is and to
    be changed.
    """
    T, S, H, V = size.T, size.S, size.H, size.V
    of = Scores(spec, size, score_operands)
    mask = of.position_mask()
    T_tail = T if T % tile.queries else None
    S_tail = S if S % tile.keys else None
    if again:
        spoiled, _, d_query = results
        d_scores = d_captured = {}
    else:
        _, d_captured, d_query, d_scores, spoiled = results

    def store_bias(first, start, ds):
        store_block(d_scores["bias"], first, start, ds, rows=T_tail, columns=S_tail)

    def body(first, q, do, row_lse, row_delta, isolate: bool, partial: bool, j, carry):
        dq, of_queries = carry
        start = j * tile.keys
        end = S_tail if partial else None
        k = load(key, start, tile.keys, width=H, rows=end)
        products = dot_transposed(q, k)
        place = Place(first, start, tile, T_tail, end)
        logits = of.logits(products, place, mask)
        p = of.probability(logits.x, row_lse[:, None])
        by_position = mask.visible(place.queries, place.keys, end) if partial else None
        visible = of.visible(place, by_position, partial)
        v = load(value, start, tile.keys, width=V, rows=end)
        ds = p * (of.with_dropout(dot_transposed(do, v), place) - row_delta[:, None])
        # Hidden pairs last, as their factors may be NaN.
        ds = ds if visible is None else jnp.where(visible, ds, 0.0)
        if "bias" in d_scores:
            store_bias(first, start, ds * of.dropout_scale)
        terms = {"bias_of_queries": ds}
        if logits.distance is not None:
            terms["slopes"] = -ds * logits.distance
        of_queries = {name: x + jnp.sum(terms[name], axis=1) for name, x in of_queries.items()}
        of.add_captured_gradients(d_captured, ds, logits, place, visible)
        ds = of.score_grad(ds, logits, place, visible)
        if isolate and visible is not None:  # once more, as tanh may be NaN
            ds, k = jnp.where(visible, ds, 0.0), finite(k)
        return dq + dot(ds.astype(k.dtype), k), of_queries

    def compute(block, isolate: bool):
        """Stores a tile's gradients, and returns that of queries."""
        first = block * tile.queries
        q = load(query, first, tile.queries, width=H, rows=T_tail)
        do = load(d_out, first, tile.queries, width=V, rows=T_tail)
        row_lse = load_vector(lse, first, tile.queries, rows=T_tail, other=jnp.inf)
        row_delta = load_vector(delta, first, tile.queries, rows=T_tail, other=0.0)
        blocks = of.blocks(mask, block, tile.queries, tile.keys)
        of_queries = {name: jnp.zeros((tile.queries,), jnp.float32) for name in d_scores if name != "bias"}
        dq, of_queries = over_visited_blocks(
            blocks,
            functools.partial(body, first, q, do, row_lse, row_delta, isolate),
            (jnp.zeros((tile.queries, padded(H)), jnp.float32), of_queries),
        )
        dq = dq * (spec.scale * of.dropout_scale)
        store(d_query, first, dq, width=H, rows=T_tail)
        for name, x in of_queries.items():
            store_vector(d_scores[name], first, x * of.dropout_scale, rows=T_tail)
        if "bias" in d_scores:
            zeros = jnp.zeros((tile.queries, tile.keys), jnp.float32)
            store_zeros = lambda j: store_bias(first, j * tile.keys, zeros)  # noqa: E731
            over_skipped_blocks(blocks, pl.cdiv(S, tile.keys), store_zeros)
        return dq

    if again:
        over_spoiled_tiles(spoiled, T, tile.queries, functools.partial(compute, isolate=True))
        return
    block = pl.program_id(0)
    if mask.high is not None:
        block = pl.cdiv(T, tile.queries) - 1 - block  # as in the forward kernel
    dq = compute(block, isolate=False)
    if spoiled is not None:
        store_vector(spoiled, block * tile.queries, spoiled_rows(dq), rows=T_tail)


def _specs(size: Sizes, heads: int | None, key_head: Callable[[jax.Array], jax.Array]) -> list[pl.BlockSpec]:
    """Blocks of query, key, value, d_out, lse and delta for a grid of (block, head, batch row).

    A program sees `heads` query heads as an axis, or, with None, the one that the grid names.
    """
    H, V = padded(size.H), padded(size.V)

    def of_queries(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, size.T, heads, width), lambda _, head, b: (b, 0, head, 0))

    def of_keys(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, size.S, None, width), lambda _, head, b: (b, 0, key_head(head), 0))

    of_rows = pl.BlockSpec((None, heads, size.T), lambda _, head, b: (b, head, 0))
    return [of_queries(H), of_keys(H), of_keys(V), of_queries(V), of_rows, of_rows]


@dataclasses.dataclass(frozen=True)
class _Call:
    """What both kernels of a backward pass take."""

    spec: AttentionSpec
    size: Sizes
    operands: Operands
    arguments: tuple[jax.Array, ...]  # query, key, value, d_out, lse and delta
    bias_form: str | None  # see `features.bias_gradient`
    isolates: bool  # see `Scores`

    def sums(self, names: dict[str, bool], positions: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Those of the sums `(B, N, positions)` that the call has, by name."""
        shape = (self.size.B, self.size.N, positions)
        like = self.operands.query
        return {name: result(shape, jnp.float32, like=like) for name, present in names.items() if present}

    def captured_sums(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Those of the gradients of captured arrays `(B|1, elements)`, by the arrays' names."""
        function = self.spec.score_mod
        if function is None or function.derivative is None:
            return {}
        names = [captured_name("score_mod", number) for number in function.derivative.operands]
        arrays, like = self.operands.captured, self.operands.query
        return {name: result(arrays[name].shape, jnp.float32, like=like) for name in names}


def _keys(call: _Call, tile: Tile) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """d_key, d_value, and the sums over queries that `flash_backward_keys` computes."""
    size = call.size
    score_operands = scores.operands_of(call.spec, call.operands, tile.keys, tile.queries, transposed=True)
    sums = call.sums({"bias_of_keys": call.bias_form == "keys"}, size.S)
    kernel = functools.partial(flash_backward_keys, tile=tile, spec=call.spec, size=size)
    of_keys = [
        pl.BlockSpec((None, size.S, None, padded(width)), lambda block, k, b: (b, 0, k, 0))
        for width in (size.H, size.V)
    ]
    of_rows = pl.BlockSpec((None, None, size.S), lambda block, k, b: (b, k, 0))
    in_specs = [
        *_specs(size, heads=size.group, key_head=lambda k: k),
        scores.specs_of(score_operands, size.group),
    ]
    shapes = [
        result(x.shape, call.spec.result_dtype(name, x.dtype), like=x)
        for name, x in zip(("key", "value"), call.arguments[1:3], strict=True)
    ]
    row_shape = result((size.B, size.K, size.S), jnp.float32, like=call.operands.query)
    *gradients, sums, spoiled = triton_call(
        functools.partial(kernel, again=False),
        grid=(pl.cdiv(size.S, tile.keys), size.K, size.B),
        in_specs=in_specs,
        out_specs=[
            *of_keys,
            {name: pl.BlockSpec((None, size.group, size.S), lambda block, k, b: (b, k, 0)) for name in sums},
            of_rows if call.isolates else None,
        ],
        out_shape=[*shapes, sums, row_shape if call.isolates else None],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        name="jax_flash_pallas_backward_keys",
    )(*call.arguments, score_operands)
    if call.isolates:
        gradients = triton_call(
            functools.partial(kernel, again=True),
            grid=(programs(size.S), size.K, size.B),
            in_specs=[*in_specs, of_rows, *of_keys],
            out_specs=of_keys,
            out_shape=shapes,
            changes_last=2,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            name="jax_flash_pallas_backward_keys_again",
        )(*call.arguments, score_operands, spoiled, *gradients)
    return *gradients, sums


def _queries(call: _Call, tile: Tile) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
    """d_query, what else `flash_backward_queries` computes of the gradients of scores, and its sums for
    captured arrays."""
    size, query, bias = call.size, call.operands.query, call.operands.bias
    score_operands = scores.operands_of(call.spec, call.operands, tile.queries, tile.keys)
    has_slopes = call.operands.alibi_slopes is not None
    d_scores = call.sums({"bias_of_queries": call.bias_form == "queries", "slopes": has_slopes}, size.T)
    specs = {name: pl.BlockSpec((None, None, size.T), lambda block, n, b: (b, n, 0)) for name in d_scores}
    if call.bias_form == "scores" and bias is not None:
        d_scores["bias"] = result(bias.shape, call.spec.result_dtype("bias", bias.dtype), like=query)
        specs["bias"] = pl.BlockSpec((None, None, size.T, size.S), lambda block, n, b: (b, n, 0, 0))
    kernel = functools.partial(flash_backward_queries, tile=tile, spec=call.spec, size=size)
    of_queries = pl.BlockSpec((None, size.T, None, padded(size.H)), lambda block, n, b: (b, 0, n, 0))
    of_rows = pl.BlockSpec((None, None, size.T), lambda block, n, b: (b, n, 0))
    in_specs = [
        *_specs(size, heads=None, key_head=lambda n: lax.div(n, np.int32(size.group))),
        scores.specs_of(score_operands),
    ]
    shape = result(query.shape, call.spec.result_dtype("query", query.dtype), like=query)
    row_shape = result((size.B, size.N, size.T), jnp.float32, like=query)
    sums = call.captured_sums()
    of_sums = scores.specs_of(sums)
    d_captured, d_query, d_scores, spoiled = triton_call(
        functools.partial(kernel, again=False),
        grid=(pl.cdiv(size.T, tile.queries), size.N, size.B),
        in_specs=[*in_specs, of_sums],
        out_specs=[of_sums, of_queries, specs, of_rows if call.isolates else None],
        out_shape=[sums, shape, d_scores, row_shape if call.isolates else None],
        changes_last=len(sums),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        name="jax_flash_pallas_backward_queries",
    )(*call.arguments, score_operands, jax.tree.map(zeros, sums))
    if call.isolates:
        (d_query,) = triton_call(
            functools.partial(kernel, again=True),
            grid=(programs(size.T), size.N, size.B),
            in_specs=[*in_specs, of_rows, of_queries],
            out_specs=[of_queries],
            out_shape=[shape],
            changes_last=1,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            name="jax_flash_pallas_backward_queries_again",
        )(*call.arguments, score_operands, spoiled, d_query)
    return d_query, d_scores, d_captured


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    tiles: Tiles,
) -> Gradients:
    """Shapes as in `jax_flash.pallas.backward`."""
    size = sizes(operands)
    of = Scores(spec, size, operands.present())
    d_out = d_out.astype(operands.query.dtype)
    lse, delta = _gradients.lse_and_delta(out, lse, d_out, d_lse)
    d_sinks = None if operands.sinks is None else _gradients.of_sinks(operands.sinks, lse, delta)
    lse = lse if of.natural else lse * of.unit
    if spec.dropout_rate:
        delta = delta / of.dropout_scale
    arguments = (operands.query, operands.key, operands.value, d_out, lse, delta)
    call = _Call(spec, size, operands, arguments, features.bias_gradient(operands), of.isolates)
    d_key, d_value, sums_of_keys = _keys(call, tiles.backward_keys)
    d_query, d_scores, d_captured = _queries(call, tiles.backward_queries)

    def sum_to_operand(name: str, gradient: jax.Array) -> jax.Array:
        operand = operands.present()[name]
        return _gradients.sum_to(gradient, operand.shape).astype(spec.result_dtype(name, operand.dtype))

    d_bias = d_slopes = None
    if call.bias_form == "shared":
        d_bias = backward_bias.backward(spec, operands, arguments, tiles.backward_bias)
    elif call.bias_form == "scores":
        d_bias = d_scores["bias"]
    elif call.bias_form == "queries":
        d_bias = sum_to_operand("bias", d_scores["bias_of_queries"][:, :, :, None])
    elif call.bias_form == "keys":
        d_bias = sum_to_operand("bias", sums_of_keys["bias_of_keys"][:, :, None, :])
    if operands.alibi_slopes is not None:
        d_slopes = sum_to_operand("alibi_slopes", jnp.sum(d_scores["slopes"], 2))
    captured = {name: x for name, x in operands.differentiable().items() if name in operands.captured}
    d_captured = {
        name: (d_captured[name] * of.dropout_scale).astype(spec.result_dtype(name, x.dtype))
        if name in d_captured
        else jnp.zeros_like(x, spec.result_dtype(name, x.dtype))
        for name, x in captured.items()
    }
    return Gradients(d_query, d_key, d_value, d_bias, d_slopes, d_sinks, d_captured)
