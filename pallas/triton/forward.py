"""Forward by the Triton lowering: a program owns a block of queries of one head, and loops over its keys.

Online softmax in base 2: with c = scale * log2(e) and m the running maximum of c * q.k over the keys so far,
it keeps l = sum 2^(c q.k - m) and acc = sum 2^(c q.k - m) v. At the end out = acc / l and the natural
log-sum-exp is m * ln(2) + ln(l). Logits that are more than scaled scores stay in natural units (scores.py).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jax_flash._spec import AttentionSpec, Operands, Sizes, sizes

from .. import scores
from ..compat import result, triton_call
from ..loop import over_block_range
from ..scores import LN_2, LOG2_E, Place, Scores
from .memory import dot, dot_transposed, load, store, store_vector
from .tiles import Tile, padded


def flash_forward(
    query,
    key,
    value,
    score_operands: dict[str, Any],
    sinks,
    out,
    lse,
    *,
    spec: AttentionSpec,
    size: Sizes,
    tile: Tile,
) -> None:
    """Refs: query (T,H), key (S,H), value (S,V) -> out (T,V), lse (T,); head dims padded.

    Besides, where they are there, the head's part of what `Scores` takes, and its sink.
    """
    T, S, H, V = size.T, size.S, size.H, size.V
    of = Scores(spec, size, score_operands)
    mask = of.position_mask()
    block = pl.program_id(0)
    if mask.high is not None:
        # The last queries see the most keys: start those first, so that none of them ends alone.
        block = pl.cdiv(T, tile.queries) - 1 - block
    first = block * tile.queries
    T_tail = T if T % tile.queries else None
    S_tail = S if S % tile.keys else None

    q = load(query, first, tile.queries, width=H, rows=T_tail)
    scale_2 = spec.scale * LOG2_E
    extreme = jnp.max if scale_2 >= 0 else jnp.min

    def body(partial: bool, j, carry):
        row_max, row_sum, acc = carry
        start = j * tile.keys
        end = S_tail if partial else None
        k = load(key, start, tile.keys, width=H, rows=end)
        products = dot_transposed(q, k)
        place = Place(first, start, tile, T_tail, end)
        if partial or not of.plain:
            by_position = mask.visible(place.queries, place.keys, end) if partial else None
            visible = of.visible(place, by_position)
            x = of.logits(products, place, mask).x
            x = x if visible is None else jnp.where(visible, x, -jnp.inf)
            new_max = jnp.maximum(row_max, jnp.max(x, axis=1))
            # A row that has seen nothing yet has no maximum to subtract: 2^(-inf - 0) is the 0 it wants.
            shift = jnp.where(new_max == -jnp.inf, 0.0, new_max)
            p = of.exp(x - shift[:, None])
        else:
            new_max = jnp.maximum(row_max, extreme(products, axis=1) * scale_2)
            shift = new_max
            p = jnp.exp2(products * scale_2 - shift[:, None])
        correction = of.exp(row_max - shift)
        v = load(value, start, tile.keys, width=V, rows=end)
        acc = acc * correction[:, None] + dot(of.with_dropout(p, place).astype(v.dtype), v)
        return new_max, row_sum * correction + jnp.sum(p, axis=1), acc

    row_max, row_sum, acc = over_block_range(
        of.block_range(mask, block, tile.queries, tile.keys),
        body,
        (
            jnp.full((tile.queries,), -jnp.inf, jnp.float32),
            jnp.zeros((tile.queries,), jnp.float32),
            jnp.zeros((tile.queries, padded(V)), jnp.float32),
        ),
    )
    sees_nothing = row_sum == 0.0
    if sinks is not None:
        sink = triton.load(sinks) * of.unit
        top = jnp.maximum(row_max, sink)
        correction = of.exp(row_max - top)
        row_sum = row_sum * correction + of.exp(sink - top)
        acc = acc * correction[:, None]
        row_max = top
    row_sum = jnp.where(sees_nothing, 1.0, row_sum)
    if spec.dropout_rate:
        acc = acc * of.dropout_scale
    store(out, first, acc / row_sum[:, None], width=V, rows=T_tail)
    natural_max = row_max if of.natural else row_max * LN_2
    log_sum = jnp.where(sees_nothing, -jnp.inf, natural_max + jnp.log(row_sum))
    store_vector(lse, first, log_sum, rows=T_tail)


def forward(spec: AttentionSpec, operands: Operands, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Operands as in `jax_flash.pallas.forward` -> out (B,T,N,V) in query's dtype, lse (B,N,T) float32."""
    size = sizes(operands)
    kernel = functools.partial(flash_forward, spec=spec, size=size, tile=tile)
    score_operands = scores.operands_of(operands, tile.queries, tile.keys)

    def of_queries(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, size.T, None, width), lambda _, n, b: (b, 0, n, 0))

    def of_keys(width: int) -> pl.BlockSpec:
        group = np.int32(size.group)
        return pl.BlockSpec((None, size.S, None, width), lambda _, n, b: (b, 0, lax.div(n, group), 0))

    return triton_call(
        kernel,
        grid=(pl.cdiv(size.T, tile.queries), size.N, size.B),
        in_specs=[
            of_queries(padded(size.H)),
            of_keys(padded(size.H)),
            of_keys(padded(size.V)),
            scores.specs_of(score_operands),
            scores.spec_of("sinks", operands.sinks),
        ],
        out_specs=[
            of_queries(padded(size.V)),
            pl.BlockSpec((None, None, size.T), lambda _, n, b: (b, n, 0)),
        ],
        out_shape=[
            result((size.B, size.T, size.N, size.V), operands.query.dtype, like=operands.query),
            result((size.B, size.N, size.T), jnp.float32, like=operands.query),
        ],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        name="jax_flash_pallas_forward",
    )(operands.query, operands.key, operands.value, score_operands, operands.sinks)
