"""The gradient of a bias of queries and keys that heads or batch rows share, by the Triton lowering.

A program owns a block of the bias and loops over the heads or batch rows that share it. It computes their
scores again, so the sum needs no atomics and no memory for all scores. `backward.py` has the other forms.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jax_flash._spec import AttentionSpec, Operands, Sizes, sizes

from ..compat import result, triton_call
from . import scores
from .memory import dot_transposed, load, load_vector, store_block
from .scores import Place, Scores
from .tiles import Tile, padded


def flash_backward_bias(
    query,
    key,
    value,
    d_out,
    lse,
    delta,
    score_operands: dict[str, Any],
    d_bias,
    *,
    spec: AttentionSpec,
    size: Sizes,
    tile: Tile,
) -> None:
    """Refs: query (B,T,N,H), key (B,S,K,H), value (B,S,K,V), d_out (B,T,N,V), head dims padded, lse and delta
    (B,N,T) float32, and what `Scores` takes, whole -> d_bias (T,S), of the batch row and head that the grid
    names, or of all that share it.
    """
    T, S, H, V = size.T, size.S, size.H, size.V
    batch_rows, heads = score_operands["bias"].shape[:2]
    of = Scores(spec, size, score_operands)
    j, block = pl.program_id(0), pl.program_id(1)
    own_batch, own_head = (
        lax.div(pl.program_id(2), np.int32(heads)),
        lax.rem(pl.program_id(2), np.int32(heads)),
    )
    start, first = j * tile.keys, block * tile.queries
    T_tail = T if T % tile.queries else None
    S_tail = S if S % tile.keys else None

    def sharing(own, count: int, sharing_count: int):
        """The heads, or batch rows, that share the block."""
        return (own, own + 1) if count == sharing_count else (np.int32(0), np.int32(sharing_count))

    def of_head(batch, mask, head, ds_sum):
        key_head = lax.div(head, np.int32(size.group))
        at = dict(head=head, batch=batch)
        q = load(query, first, tile.queries, width=H, rows=T_tail, **at)
        k = load(key, start, tile.keys, width=H, rows=S_tail, head=key_head, batch=batch)
        row_lse = load_vector(lse, first, tile.queries, rows=T_tail, other=jnp.inf, **at)
        place = Place(first, start, tile, T_tail, S_tail, **at)
        logits = of.logits(dot_transposed(q, k), place, mask)
        p = of.probability(logits.x, row_lse[:, None])
        visible = of.visible(place, mask.visible(place.queries, place.keys, S_tail), True)
        do = load(d_out, first, tile.queries, width=V, rows=T_tail, **at)
        v = load(value, start, tile.keys, width=V, rows=S_tail, head=key_head, batch=batch)
        row_delta = load_vector(delta, first, tile.queries, rows=T_tail, other=0.0, **at)
        ds = p * (of.with_dropout(dot_transposed(do, v), place) - row_delta[:, None])
        # Hidden pairs last, as their factors may be NaN.
        return ds_sum + (ds if visible is None else jnp.where(visible, ds, 0.0))

    def of_batch_row(batch, ds_sum):
        mask = of.position_mask(batch)
        blocks = of.block_range(mask, block, tile.queries, tile.keys, batch)
        from_head, to_head = sharing(own_head, heads, size.N)
        is_visited = (blocks.first <= j) & (j < blocks.last)
        to_head = jnp.where(is_visited, to_head, from_head)
        return lax.fori_loop(from_head, to_head, functools.partial(of_head, batch, mask), ds_sum)

    zeros = jnp.zeros((tile.queries, tile.keys), jnp.float32)
    ds_sum = lax.fori_loop(*sharing(own_batch, batch_rows, size.B), of_batch_row, zeros)
    store_block(d_bias, first, start, ds_sum * of.dropout_scale, rows=T_tail, columns=S_tail)


def _padded(x: jax.Array) -> pl.BlockSpec:
    """Every program sees all of `x`, whose last axis is a head dim, which `load` takes padded."""
    return pl.BlockSpec((*x.shape[:-1], padded(x.shape[-1])), lambda *_: (0,) * x.ndim)


def backward(
    spec: AttentionSpec, operands: Operands, arguments: tuple[jax.Array, ...], tile: Tile
) -> jax.Array:
    """The gradient of a bias of the form "shared", from the arguments that other backward kernels have."""
    size, bias = sizes(operands), operands.bias
    assert bias is not None
    batch_rows, heads = bias.shape[:2]
    score_operands = scores.operands_of(spec, operands, tile.queries, tile.keys)

    def index(j, block, n):
        return lax.div(n, np.int32(heads)), lax.rem(n, np.int32(heads)), 0, 0

    return triton_call(
        functools.partial(flash_backward_bias, spec=spec, size=size, tile=tile),
        grid=(pl.cdiv(size.S, tile.keys), pl.cdiv(size.T, tile.queries), batch_rows * heads),
        in_specs=[
            *map(_padded, arguments[:-2]),
            *scores.whole(arguments[-2:]),  # lse and delta
            scores.whole(score_operands),
        ],
        out_specs=[pl.BlockSpec((None, None, size.T, size.S), index)],
        out_shape=[result(bias.shape, spec.result_dtype("bias", bias.dtype), like=arguments[0])],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        name="jax_flash_pallas_backward_bias",
    )(*arguments, score_operands)[0]
