"""Attention that JAX can differentiate, for second derivatives. Slower than `forward`, memory linear too.

A loop goes over blocks of queries, and a block computes its logits on all keys at once. The body of the loop
is a `jax.checkpoint`: a derivative of any order computes the logits of a block again, so it keeps nothing of
size T×S. Products are float32 (float64 for float64 operands).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jax_flash import _dropout, _query_parts, _varlen_unpacking
from jax_flash._axes import batch_shape, fold
from jax_flash._spec import AttentionSpec, Operands, sizes
from jax_flash.transforms.varying import vary_alike
from jax_flash.xla import blocks, logits, symbolic

LOGITS_PER_BLOCK = 2**24
"""Logits held at once, over batch rows, heads and keys: 64 MiB of float32. More with many keys, as a block
has at least `QUERIES_AT_LEAST` queries."""
QUERIES_AT_LEAST = 16
QUERIES_AT_MOST = 256


def forward(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Attention of operands with any number of batch axes `*B`.

    Returns:
      out `(*B, T, N, V)` in query's dtype, and lse `(*B, N, T)` in float32 (float64 for float64 operands),
      −inf where a row has nothing to attend to. Its derivatives are 0 there.
    """
    batch = batch_shape(operands)
    dtype = operands.query.dtype
    accumulator = logits.accumulator(operands)
    wide = {name: x.astype(accumulator) for name, x in operands.differentiable().items()}
    out, lse = _forward(spec, fold(operands.replace(**wide), batch))
    return out.reshape(*batch, *out.shape[1:]).astype(dtype), lse.reshape(*batch, *lse.shape[1:])


def _forward(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Attention of operands with one batch axis."""
    if operands.query_offsets is not None:
        return _varlen_unpacking.forward(_forward, spec, operands)
    if _query_parts.are_several(operands):
        return _query_parts.forward(_forward, spec, operands)
    if symbolic.needs_padding(operands):
        return symbolic.forward(_forward, spec, operands)
    operands = vary_alike(operands)
    size = sizes(operands)
    queries = blocks.Axis(size.T, _queries_per_block(size))
    cut = blocks.Plan(blocks.Axis(size.B, size.B), queries, blocks.Axis(size.S, size.S))
    grouped = logits.heads_first(operands)
    mask = blocks.position_mask(spec, operands)
    run = functools.partial(_query_block, spec, grouped, mask, cut)
    out, lse = jax.lax.map(jax.checkpoint(run), jnp.arange(queries.count, dtype=jnp.int32))
    out, lse = (logits.by_head(_joined(queries, x)) for x in (out, lse))
    return out.swapaxes(1, 2), lse


def _queries_per_block(size) -> int:
    if not all(isinstance(n, int) for n in (size.B, size.T, size.S)):
        return min(size.T, QUERIES_AT_LEAST) if isinstance(size.T, int) else symbolic.BLOCK
    room = LOGITS_PER_BLOCK // (size.B * size.N * size.S)
    return min(size.T, max(QUERIES_AT_LEAST, min(QUERIES_AT_MOST, room)))


def _query_block(spec, operands, mask, cut, index):
    """out `(B, K, G, block of T, V)` and lse `(B, K, G, block of T)` of block `index`."""
    query = cut.queries.take(operands.query, index, 3)
    dtype = query.dtype
    query, key, value, spoiled = _finite(query, operands.key, operands.value)
    block = logits.block(spec, operands, mask, cut, query, key, index, jnp.int32(0), by_jax=True)
    block = dataclasses.replace(block, x=block.x + spoiled)

    # The maximum cancels, so no derivative flows through it. It is finite, so that no -inf meets a -inf.
    top = jax.lax.stop_gradient(block.masked(block.x, -jnp.inf).max(-1, keepdims=True))
    top = jnp.maximum(top, jnp.finfo(dtype).min)
    sinks = None
    if operands.sinks is not None:
        sinks = logits.by_group(operands.sinks, operands.key.shape[1])[..., None, None]
        top = jnp.maximum(top, jax.lax.stop_gradient(sinks))
    p = block.masked(jnp.exp(block.masked(block.x - top, 0)), 0)
    total = p.sum(-1, keepdims=True)
    is_empty = total == 0
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    total = jnp.where(is_empty, 1, total)
    lse = jnp.where(is_empty, -jnp.inf, top + jnp.log(total))[..., 0]
    p = p / total
    if block.kept is not None:
        p = jnp.where(block.kept, p / _dropout.keep_probability(spec.dropout_rate), 0)
    return logits.product(p, value, ((4,), (2,)), dtype), lse


def _finite(query, key, value):
    """The three with 0 for what isn't finite; and what logits get: NaN for pairs that have it, else 0.

    So what isn't finite reaches no query and no key that doesn't see it, though a product of a block, and a
    derivative of one, has terms of hidden pairs too: zeros, and 0 times NaN is NaN.
    """
    query, of_query = _with_zeros(query)
    key, of_key = _with_zeros(key)
    value, of_value = _with_zeros(value)
    is_finite = of_query[..., None] & (of_key & of_value)[:, :, None, None]
    return query, key, value, jnp.where(is_finite, 0.0, jnp.nan).astype(query.dtype)


def _with_zeros(x):
    """`x` with 0 for what isn't finite, and which rows have none of it."""
    is_finite = jnp.isfinite(x)
    return jnp.where(is_finite, x, jnp.zeros_like(x)), is_finite.all(-1)


def _joined(axis: blocks.Axis, x: jax.Array) -> jax.Array:
    """Blocks `(count, B, K, G, size, …)` as `(B, K, G, length, …)`. The last may overlap the one before."""
    if axis.even:
        x = jnp.moveaxis(x, 0, 3)
        return x.reshape(*x.shape[:3], axis.length, *x.shape[5:])
    whole = jnp.moveaxis(x[:-1], 0, 3)
    whole = whole.reshape(*whole.shape[:3], -1, *whole.shape[5:])
    fresh = axis.length - whole.shape[3]
    return jnp.concatenate([whole, x[-1][:, :, :, axis.size - fresh :]], axis=3)
