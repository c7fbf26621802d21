"""Forward by the Triton lowering: a program owns a block of queries of one head, and walks over its keys.

Online softmax in base 2: with c = scale * log2(e) and m the running maximum of c * q.k over the keys so far,
it keeps l = sum 2^(c q.k - m) and acc = sum 2^(c q.k - m) v. At the end out = acc / l and the natural
log-sum-exp is m * ln(2) + ln(l).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jax_flash._spec import AttentionSpec, Operands, Sizes, sizes

from .band import Band, keys_of_queries
from .compat import result, triton_call
from .loop import over_blocks
from .memory import dot, dot_transposed, indices, load, store, store_vector
from .tiles import Tile, padded

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)


def flash_forward(query, key, value, out, lse, *, scale, band: Band, size: Sizes, tile: Tile) -> None:
    """Refs: query (T,H), key (S,H), value (S,V) -> out (T,V), lse (T,); head dims padded."""
    T, S, H, V = size.T, size.S, size.H, size.V
    block = pl.program_id(0)
    if band.high is not None:
        # The last queries see the most keys: start those first, so that none of them ends alone.
        block = pl.cdiv(T, tile.queries) - 1 - block
    first = block * tile.queries
    T_tail = T if T % tile.queries else None
    S_tail = S if S % tile.keys else None

    q = load(query, first, tile.queries, width=H, rows=T_tail)
    scale_2 = scale * LOG2_E
    extreme = jnp.max if scale_2 >= 0 else jnp.min

    def body(edge: bool, j, carry):
        row_max, row_sum, acc = carry
        start = j * tile.keys
        k = load(key, start, tile.keys, width=H, rows=S_tail if edge else None)
        scores = dot_transposed(q, k)
        if edge:
            columns = indices(start, tile.keys, 1)
            met = band.meets(indices(first, tile.queries, 0), columns)
            if S_tail is not None:
                met = columns < S if met is None else met & (columns < S)
            scores = jnp.where(met, scores * scale_2, -jnp.inf)
            new_max = jnp.maximum(row_max, jnp.max(scores, axis=1))
            # A row that has met nothing yet has no maximum to subtract: 2^(-inf - 0) is the 0 it wants.
            shift = jnp.where(new_max == -jnp.inf, 0.0, new_max)
            p = jnp.exp2(scores - shift[:, None])
        else:
            new_max = jnp.maximum(row_max, extreme(scores, axis=1) * scale_2)
            shift = new_max
            p = jnp.exp2(scores * scale_2 - shift[:, None])
        correction = jnp.exp2(row_max - shift)
        v = load(value, start, tile.keys, width=V, rows=S_tail if edge else None)
        acc = acc * correction[:, None] + dot(p.astype(v.dtype), v)
        return new_max, row_sum * correction + jnp.sum(p, axis=1), acc

    row_max, row_sum, acc = over_blocks(
        band.blocks(first, tile.queries, tile.keys),
        body,
        (
            jnp.full((tile.queries,), -jnp.inf, jnp.float32),
            jnp.zeros((tile.queries,), jnp.float32),
            jnp.zeros((tile.queries, padded(V)), jnp.float32),
        ),
    )
    met_nothing = row_sum == 0.0
    row_sum = jnp.where(met_nothing, 1.0, row_sum)
    store(out, first, acc / row_sum[:, None], width=V, rows=T_tail)
    log_sum = jnp.where(met_nothing, -jnp.inf, row_max * LN_2 + jnp.log(row_sum))
    store_vector(lse, first, log_sum, rows=T_tail)


def forward(spec: AttentionSpec, operands: Operands, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Operands as in `jax_flash.pallas.forward` -> out (B,T,N,V) in query's dtype, lse (B,N,T) float32."""
    size = sizes(operands)
    kernel = functools.partial(
        flash_forward, scale=spec.scale, band=keys_of_queries(spec, size), size=size, tile=tile
    )

    def of_queries(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, size.T, None, width), lambda _, n, b: (b, 0, n, 0))

    def of_keys(width: int) -> pl.BlockSpec:
        group = np.int32(size.group)
        return pl.BlockSpec((None, size.S, None, width), lambda _, n, b: (b, 0, lax.div(n, group), 0))

    return triton_call(
        kernel,
        grid=(pl.cdiv(size.T, tile.queries), size.N, size.B),
        in_specs=[of_queries(padded(size.H)), of_keys(padded(size.H)), of_keys(padded(size.V))],
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
    )(operands.query, operands.key, operands.value)
