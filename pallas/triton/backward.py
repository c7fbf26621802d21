"""Backward by the Triton lowering: one kernel for dK and dV, one for dQ, so that no sum needs an atomic.

With p = exp(x - lse) for the logit x = scale q.k, delta = rowsum(dO * O) - d_lse and ds = p * (dO.v - delta):

    dV = p^T dO        dK = scale * ds^T q        dQ = scale * ds k

ds is the gradient of x. A gradient of bias or slopes is a sum over ds, taken in the kernel whose programs
have all of its terms: over keys in the kernel for dQ, over queries in that for dK and dV, and over heads or
batch rows in one of its own (backward_bias.py). The soft cap's derivative comes after these sums, and what
dropout keeps is divided by its probability at the very end: delta is multiplied by it until then.

Each sum is taken in one program in a fixed order: gradients are bitwise equal from run to run.
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
from jax_flash._spec import AttentionSpec, Gradients, Operands, Sizes, sizes

from .. import features, scores
from ..compat import result, triton_call
from ..loop import over_block_range, over_skipped_blocks
from ..scores import Place, Scores
from . import backward_bias
from .memory import dot, dot_transposed, load, load_vector, store, store_block, store_vector
from .tiles import Tile, Tiles, padded


def flash_backward_keys(
    query,
    key,
    value,
    d_out,
    lse,
    delta,
    score_operands: dict[str, Any],
    d_key,
    d_value,
    d_bias: dict[str, Any],
    *,
    spec: AttentionSpec,
    size: Sizes,
    tile: Tile,
) -> None:
    """A program owns a block of keys of one key head and loops over the queries of each head that shares it.

    Refs: query (T,group,H), key (S,H), value (S,V), d_out (T,group,V), lse and delta (group,T) float32, and
    what `Scores` takes of these heads -> d_key (S,H), d_value (S,V), and in `d_bias`, where there is such a
    sum, "bias_of_keys" (group,S) float32. Scores are held transposed, keys by queries.
    """
    T, S, H, V = size.T, size.S, size.H, size.V
    of = Scores(spec, size, score_operands)
    mask = of.position_mask()
    across = mask.transposed()
    block = pl.program_id(0)
    first = block * tile.keys
    T_tail = T if T % tile.queries else None
    S_tail = S if S % tile.keys else None
    k = load(key, first, tile.keys, width=H, rows=S_tail)
    v = load(value, first, tile.keys, width=V, rows=S_tail)

    def body(head, partial: bool, i, carry):
        dk, dv, bias_of_keys = carry
        start = i * tile.queries
        rows = T_tail if partial else None
        q = load(query, start, tile.queries, width=H, rows=rows, head=head)
        # exp2(x - inf) = 0: queries beyond the end have no part in any sum.
        row_lse = load_vector(lse, start, tile.queries, rows=rows, other=jnp.inf, head=head)
        products = dot_transposed(k, q)
        place = Place(start, first, tile, rows, S_tail, transposed=True, head=head)
        logits = of.logits(products, place, mask)
        p = of.probability(logits.x, row_lse[None, :])
        visible = of.visible(place, across.visible(place.keys, place.queries) if partial else None)
        p = p if visible is None else jnp.where(visible, p, 0.0)
        do = load(d_out, start, tile.queries, width=V, rows=rows, head=head)
        p_kept = of.with_dropout(p, place)
        dv = dv + dot(p_kept.astype(do.dtype), do)
        row_delta = load_vector(delta, start, tile.queries, rows=rows, other=0.0, head=head)
        ds = p * (of.with_dropout(dot_transposed(v, do), place) - row_delta[None, :])
        bias_of_keys = {name: x + jnp.sum(ds, axis=1) for name, x in bias_of_keys.items()}
        ds = logits.softcap_grad(ds)
        return dk + dot(ds.astype(q.dtype), q), dv, bias_of_keys

    def of_head(head, carry):
        dk, dv = carry
        bias_of_keys = {name: jnp.zeros((tile.keys,), jnp.float32) for name in d_bias}
        dk, dv, bias_of_keys = over_block_range(blocks, functools.partial(body, head), (dk, dv, bias_of_keys))
        for name, x in bias_of_keys.items():
            store_vector(d_bias[name], first, x * of.dropout_scale, rows=S_tail, head=head)
        return dk, dv

    blocks = of.block_range(across, block, tile.keys, tile.queries)
    carry = (
        jnp.zeros((tile.keys, padded(H)), jnp.float32),
        jnp.zeros((tile.keys, padded(V)), jnp.float32),
    )
    dk, dv = lax.fori_loop(np.int32(0), np.int32(size.group), of_head, carry)
    store(d_key, first, dk * (spec.scale * of.dropout_scale), width=H, rows=S_tail)
    store(d_value, first, dv if of.dropout_scale == 1 else dv * of.dropout_scale, width=V, rows=S_tail)


def flash_backward_queries(
    query,
    key,
    value,
    d_out,
    lse,
    delta,
    score_operands: dict[str, Any],
    d_query,
    d_scores: dict[str, Any],
    *,
    spec: AttentionSpec,
    size: Sizes,
    tile: Tile,
) -> None:
    """A program owns a block of queries of one head and loops over its keys.

    Refs: query (T,H), key (S,H), value (S,V), d_out (T,V), lse and delta (T,) float32, and what `Scores`
    takes of the head -> d_query (T,H), and those of `d_scores` that there are: "bias" (T,S),
    "bias_of_queries" and "slopes" (T,) float32.
    """
    T, S, H, V = size.T, size.S, size.H, size.V
    of = Scores(spec, size, score_operands)
    mask = of.position_mask()
    block = pl.program_id(0)
    if mask.high is not None:
        block = pl.cdiv(T, tile.queries) - 1 - block  # as in the forward kernel
    first = block * tile.queries
    T_tail = T if T % tile.queries else None
    S_tail = S if S % tile.keys else None
    q = load(query, first, tile.queries, width=H, rows=T_tail)
    do = load(d_out, first, tile.queries, width=V, rows=T_tail)
    row_lse = load_vector(lse, first, tile.queries, rows=T_tail, other=jnp.inf)
    row_delta = load_vector(delta, first, tile.queries, rows=T_tail, other=0.0)

    def store_bias(start, ds):
        store_block(d_scores["bias"], first, start, ds, rows=T_tail, columns=S_tail)

    def body(partial: bool, j, carry):
        dq, of_queries = carry
        start = j * tile.keys
        end = S_tail if partial else None
        k = load(key, start, tile.keys, width=H, rows=end)
        products = dot_transposed(q, k)
        place = Place(first, start, tile, T_tail, end)
        logits = of.logits(products, place, mask)
        p = of.probability(logits.x, row_lse[:, None])
        by_position = mask.visible(place.queries, place.keys, end) if partial else None
        visible = of.visible(place, by_position)
        p = p if visible is None else jnp.where(visible, p, 0.0)
        v = load(value, start, tile.keys, width=V, rows=end)
        ds = p * (of.with_dropout(dot_transposed(do, v), place) - row_delta[:, None])
        if "bias" in d_scores:
            store_bias(start, ds * of.dropout_scale)
        terms = {"bias_of_queries": ds}
        if logits.distance is not None:
            terms["slopes"] = -ds * logits.distance
        of_queries = {name: x + jnp.sum(terms[name], axis=1) for name, x in of_queries.items()}
        ds = logits.softcap_grad(ds)
        return dq + dot(ds.astype(k.dtype), k), of_queries

    blocks = of.block_range(mask, block, tile.queries, tile.keys)
    of_queries = {name: jnp.zeros((tile.queries,), jnp.float32) for name in d_scores if name != "bias"}
    dq, of_queries = over_block_range(
        blocks, body, (jnp.zeros((tile.queries, padded(H)), jnp.float32), of_queries)
    )
    store(d_query, first, dq * (spec.scale * of.dropout_scale), width=H, rows=T_tail)
    for name, x in of_queries.items():
        store_vector(d_scores[name], first, x * of.dropout_scale, rows=T_tail)
    if "bias" in d_scores:
        zeros = jnp.zeros((tile.queries, tile.keys), jnp.float32)
        over_skipped_blocks(blocks, pl.cdiv(S, tile.keys), lambda j: store_bias(j * tile.keys, zeros))


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

    def sums(self, names: dict[str, bool], positions: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Those of the sums `(B, N, positions)` that the call has, by name."""
        shape = (self.size.B, self.size.N, positions)
        like = self.operands.query
        return {name: result(shape, jnp.float32, like=like) for name, present in names.items() if present}


def _keys(call: _Call, tile: Tile) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """d_key, d_value, and the sums over queries that `flash_backward_keys` computes."""
    size = call.size
    score_operands = scores.operands_of(call.operands, tile.keys, tile.queries, transposed=True)
    sums = call.sums({"bias_of_keys": call.bias_form == "keys"}, size.S)
    return triton_call(
        functools.partial(flash_backward_keys, tile=tile, spec=call.spec, size=size),
        grid=(pl.cdiv(size.S, tile.keys), size.K, size.B),
        in_specs=[
            *_specs(size, heads=size.group, key_head=lambda k: k),
            scores.specs_of(score_operands, size.group),
        ],
        out_specs=[
            pl.BlockSpec((None, size.S, None, padded(size.H)), lambda block, k, b: (b, 0, k, 0)),
            pl.BlockSpec((None, size.S, None, padded(size.V)), lambda block, k, b: (b, 0, k, 0)),
            {name: pl.BlockSpec((None, size.group, size.S), lambda block, k, b: (b, k, 0)) for name in sums},
        ],
        out_shape=[*(result(x.shape, x.dtype, like=x) for x in call.arguments[1:3]), sums],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        name="jax_flash_pallas_backward_keys",
    )(*call.arguments, score_operands)


def _queries(call: _Call, tile: Tile) -> tuple[jax.Array, dict[str, jax.Array]]:
    """d_query, and what else `flash_backward_queries` computes of the gradients of scores."""
    size, query, bias = call.size, call.operands.query, call.operands.bias
    score_operands = scores.operands_of(call.operands, tile.queries, tile.keys)
    has_slopes = call.operands.alibi_slopes is not None
    d_scores = call.sums({"bias_of_queries": call.bias_form == "queries", "slopes": has_slopes}, size.T)
    specs = {name: pl.BlockSpec((None, None, size.T), lambda block, n, b: (b, n, 0)) for name in d_scores}
    if call.bias_form == "scores" and bias is not None:
        d_scores["bias"] = result(bias.shape, bias.dtype, like=query)
        specs["bias"] = pl.BlockSpec((None, None, size.T, size.S), lambda block, n, b: (b, n, 0, 0))
    return triton_call(
        functools.partial(flash_backward_queries, tile=tile, spec=call.spec, size=size),
        grid=(pl.cdiv(size.T, tile.queries), size.N, size.B),
        in_specs=[
            *_specs(size, heads=None, key_head=lambda n: lax.div(n, np.int32(size.group))),
            scores.specs_of(score_operands),
        ],
        out_specs=[
            pl.BlockSpec((None, size.T, None, padded(size.H)), lambda block, n, b: (b, 0, n, 0)),
            specs,
        ],
        out_shape=[result(query.shape, query.dtype, like=query), d_scores],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        name="jax_flash_pallas_backward_queries",
    )(*call.arguments, score_operands)


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
    size, bias = sizes(operands), operands.bias
    of = Scores(spec, size, operands.present())
    d_out = d_out.astype(operands.query.dtype)
    lse, delta = _gradients.lse_and_delta(out, lse, d_out, d_lse)
    d_sinks = None if operands.sinks is None else _gradients.of_sinks(operands.sinks, lse, delta)
    lse = lse if of.natural else lse * of.unit
    if spec.dropout_rate:
        delta = delta / of.dropout_scale
    arguments = (operands.query, operands.key, operands.value, d_out, lse, delta)
    call = _Call(spec, size, operands, arguments, features.bias_gradient(operands))
    d_key, d_value, sums_of_keys = _keys(call, tiles.backward_keys)
    d_query, d_scores = _queries(call, tiles.backward_queries)

    def sum_to_operand(gradient: jax.Array, operand: jax.Array) -> jax.Array:
        return _gradients.sum_to(gradient, operand.shape).astype(operand.dtype)

    d_bias = d_slopes = None
    if call.bias_form == "shared":
        d_bias = backward_bias.backward(spec, operands, arguments, tiles.backward_bias)
    elif call.bias_form == "scores":
        d_bias = d_scores["bias"]
    elif call.bias_form == "queries":
        d_bias = sum_to_operand(d_scores["bias_of_queries"][:, :, :, None], bias)
    elif call.bias_form == "keys":
        d_bias = sum_to_operand(sums_of_keys["bias_of_keys"][:, :, None, :], bias)
    if operands.alibi_slopes is not None:
        d_slopes = sum_to_operand(jnp.sum(d_scores["slopes"], 2), operands.alibi_slopes)
    return Gradients(d_query, d_key, d_value, d_bias, d_slopes, d_sinks)
