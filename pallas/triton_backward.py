"""Backward by the Triton lowering: one kernel for dK and dV, one for dQ, so that no sum needs an atomic.

With p = exp(scale q.k - lse), delta = rowsum(dO * O) - d_lse and ds = p * (dO.v - delta):

    dV = p^T dO        dK = scale * ds^T q        dQ = scale * ds k

Each sum is taken in one program in a fixed order: gradients are bitwise equal from run to run.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jax_flash._spec import AttentionSpec, Gradients, Operands, Sizes, sizes

from .band import Band, keys_of_queries
from .compat import result, triton_call
from .loop import over_blocks
from .memory import dot, dot_transposed, indices, load, load_vector, store
from .tiles import Tile, padded
from .triton_forward import LOG2_E


def flash_backward_keys(
    query, key, value, d_out, lse_2, delta, d_key, d_value, *, scale, band: Band, size: Sizes, tile: Tile
) -> None:
    """A program owns a block of keys of one key head and walks over the queries of each head that shares it.

    Refs: query (T,group,H), key (S,H), value (S,V), d_out (T,group,V), lse_2 and delta (group,T) float32
    -> d_key (S,H), d_value (S,V). `band` has keys as rows. Scores are held transposed, keys by queries.
    """
    T, S, H, V = size.T, size.S, size.H, size.V
    first = pl.program_id(0) * tile.keys
    T_tail = T if T % tile.queries else None
    S_tail = S if S % tile.keys else None
    k = load(key, first, tile.keys, width=H, rows=S_tail)
    v = load(value, first, tile.keys, width=V, rows=S_tail)

    def body(head, edge: bool, i, carry):
        dk, dv = carry
        start = i * tile.queries
        rows = T_tail if edge else None
        q = load(query, start, tile.queries, width=H, rows=rows, head=head)
        # exp2(x - inf) = 0: queries beyond the end have no part in any sum.
        lse = load_vector(lse_2, start, tile.queries, rows=rows, other=jnp.inf, head=head)
        p = jnp.exp2(dot_transposed(k, q) * (scale * LOG2_E) - lse[None, :])
        if edge:
            met = band.meets(indices(first, tile.keys, 0), indices(start, tile.queries, 1))
            p = p if met is None else jnp.where(met, p, 0.0)
        do = load(d_out, start, tile.queries, width=V, rows=rows, head=head)
        dv = dv + dot(p.astype(do.dtype), do)
        row_delta = load_vector(delta, start, tile.queries, rows=rows, other=0.0, head=head)
        ds = p * (dot_transposed(v, do) - row_delta[None, :])
        return dk + dot(ds.astype(q.dtype), q), dv

    blocks = band.blocks(first, tile.keys, tile.queries)
    carry = (
        jnp.zeros((tile.keys, padded(H)), jnp.float32),
        jnp.zeros((tile.keys, padded(V)), jnp.float32),
    )
    dk, dv = lax.fori_loop(
        np.int32(0),
        np.int32(size.group),
        lambda head, carry: over_blocks(blocks, functools.partial(body, head), carry),
        carry,
    )
    store(d_key, first, dk * scale, width=H, rows=S_tail)
    store(d_value, first, dv, width=V, rows=S_tail)


def flash_backward_queries(
    query, key, value, d_out, lse_2, delta, d_query, *, scale, band: Band, size: Sizes, tile: Tile
) -> None:
    """A program owns a block of queries of one head and walks over its keys.

    Refs: query (T,H), key (S,H), value (S,V), d_out (T,V), lse_2 and delta (T,) float32 -> d_query (T,H).
    """
    T, S, H, V = size.T, size.S, size.H, size.V
    block = pl.program_id(0)
    if band.high is not None:
        block = pl.cdiv(T, tile.queries) - 1 - block  # as in the forward kernel
    first = block * tile.queries
    T_tail = T if T % tile.queries else None
    S_tail = S if S % tile.keys else None
    q = load(query, first, tile.queries, width=H, rows=T_tail)
    do = load(d_out, first, tile.queries, width=V, rows=T_tail)
    lse = load_vector(lse_2, first, tile.queries, rows=T_tail, other=jnp.inf)
    row_delta = load_vector(delta, first, tile.queries, rows=T_tail, other=0.0)

    def body(edge: bool, j, dq):
        start = j * tile.keys
        rows = S_tail if edge else None
        k = load(key, start, tile.keys, width=H, rows=rows)
        p = jnp.exp2(dot_transposed(q, k) * (scale * LOG2_E) - lse[:, None])
        if edge:
            columns = indices(start, tile.keys, 1)
            met = band.meets(indices(first, tile.queries, 0), columns)
            if S_tail is not None:
                met = columns < S if met is None else met & (columns < S)
            p = jnp.where(met, p, 0.0)
        v = load(value, start, tile.keys, width=V, rows=rows)
        ds = p * (dot_transposed(do, v) - row_delta[:, None])
        return dq + dot(ds.astype(k.dtype), k)

    dq = over_blocks(
        band.blocks(first, tile.queries, tile.keys), body, jnp.zeros((tile.queries, padded(H)), jnp.float32)
    )
    store(d_query, first, dq * scale, width=H, rows=T_tail)


def _specs(size: Sizes, heads: int | None, key_head: Callable[[jax.Array], jax.Array]) -> list[pl.BlockSpec]:
    """Blocks of query, key, value, d_out, lse_2 and delta for a grid of (block, head, batch row).

    A program sees `heads` query heads as an axis, or, with None, the one that the grid names.
    """
    H, V = padded(size.H), padded(size.V)

    def of_queries(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, size.T, heads, width), lambda _, head, b: (b, 0, head, 0))

    def of_keys(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, size.S, None, width), lambda _, head, b: (b, 0, key_head(head), 0))

    of_rows = pl.BlockSpec((None, heads, size.T), lambda _, head, b: (b, head, 0))
    return [of_queries(H), of_keys(H), of_keys(V), of_queries(V), of_rows, of_rows]


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    keys_tile: Tile,
    queries_tile: Tile,
) -> Gradients:
    """Shapes as in `jax_flash.pallas.backward`; `keys_tile` is for dK and dV, `queries_tile` for dQ."""
    size = sizes(operands)
    query, key, value = operands.query, operands.key, operands.value
    d_out = d_out.astype(query.dtype)
    # Rows that meet nothing: 2^(x - inf) = 0, whatever x is.
    met_nothing = lse == -jnp.inf
    lse_2 = jnp.where(met_nothing, jnp.inf, lse * LOG2_E)
    delta = jnp.einsum("btnv,btnv->bnt", out.astype(jnp.float32), d_out.astype(jnp.float32))
    if d_lse is not None:
        delta = delta - d_lse
    delta = jnp.where(met_nothing, 0.0, delta)
    arguments = (query, key, value, d_out, lse_2, delta)

    band = keys_of_queries(spec, size)
    shared = dict(scale=spec.scale, size=size)
    d_key, d_value = triton_call(
        functools.partial(flash_backward_keys, band=band.transposed(), tile=keys_tile, **shared),
        grid=(pl.cdiv(size.S, keys_tile.keys), size.K, size.B),
        in_specs=_specs(size, heads=size.group, key_head=lambda k: k),
        out_specs=[
            pl.BlockSpec((None, size.S, None, padded(size.H)), lambda block, k, b: (b, 0, k, 0)),
            pl.BlockSpec((None, size.S, None, padded(size.V)), lambda block, k, b: (b, 0, k, 0)),
        ],
        out_shape=[result(x.shape, x.dtype, like=x) for x in (key, value)],
        num_warps=keys_tile.num_warps,
        num_stages=keys_tile.num_stages,
        name="jax_flash_pallas_backward_keys",
    )(*arguments)
    (d_query,) = triton_call(
        functools.partial(flash_backward_queries, band=band, tile=queries_tile, **shared),
        grid=(pl.cdiv(size.T, queries_tile.queries), size.N, size.B),
        in_specs=_specs(size, heads=None, key_head=lambda n: lax.div(n, np.int32(size.group))),
        out_specs=[pl.BlockSpec((None, size.T, None, padded(size.H)), lambda block, n, b: (b, 0, n, 0))],
        out_shape=[result(query.shape, query.dtype, like=query)],
        num_warps=queries_tile.num_warps,
        num_stages=queries_tile.num_stages,
        name="jax_flash_pallas_backward_queries",
    )(*arguments)
    return Gradients(d_query, d_key, d_value)
