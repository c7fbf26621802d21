"""The forward pass: for each block of queries, an online softmax over the blocks of keys."""

import functools

import jax
import jax.numpy as jnp

from jax_flash import _device, _dropout, _float8, _isolation, _query_parts, _varlen_unpacking
from jax_flash._spec import AttentionSpec, Operands, sizes
from jax_flash.transforms.varying import vary_alike
from jax_flash.xla import blocks, logits, loops, symbolic


def forward(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Attention.

    Returns:
      out `(B, T, N, V)` in `spec.result_dtype` of query's, and lse `(B, N, T)` in float32
      (float64 for float64 operands), −inf where a row has nothing to attend to.
    """
    if _query_parts.are_several(operands):
        return _query_parts.forward(forward, spec, operands)
    if symbolic.needs_padding(operands):
        return symbolic.forward(forward, spec, operands)
    if _float8.is_float8(operands.query.dtype):
        operands = _float8.dequantized(operands)
    if operands.query_offsets is not None:
        return _varlen_unpacking.forward(forward, spec, operands)
    if spec.quantization is not None:
        spec, operands = _float8.quantized(spec, operands)
        operands = _float8.dequantized(operands)
    cut = blocks.plan(spec, operands, _device.current())
    operands = vary_alike(operands)

    def attend(operands):
        results, _ = loops.over_batch(
            cut.batch, lambda rows, others, carry: (_forward(spec, rows, cut), carry), operands, (), ()
        )
        return results

    if not blocks.hides_keys(spec, operands):
        return attend(operands)
    return loops.until_finite(
        attend, _isolation.with_finite_values, operands, judge=lambda results: results[:1]
    )


def _forward(spec, operands, cut):
    """`forward` of as many batch rows as fit at once."""
    size = sizes(operands)
    dtype = logits.accumulator(operands)
    mask = blocks.position_mask(spec, operands)
    grouped = logits.heads_first(operands)
    sinks = None if operands.sinks is None else logits.by_group(operands.sinks.astype(dtype), size.K)

    def query_block(index, results):
        out, lse = results
        query = cut.queries.take(grouped.query, index, 3)

        def key_block(key_index, state):
            step = functools.partial(visited_block, key_index)
            return blocks.unless_hidden(spec, operands, cut, index, key_index, step, state)

        def visited_block(key_index, state):
            top, total, accumulated = state
            key = cut.keys.take(grouped.key, key_index, 2)
            value = cut.keys.take(grouped.value, key_index, 2)
            block = logits.block(spec, grouped, mask, cut, query, key, index, key_index)
            x = block.masked(block.x, -jnp.inf)
            new_top = jnp.maximum(top, x.max(-1))
            p = jnp.exp(x - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            total = total * shrink + p.sum(-1)
            if block.kept is not None:
                p = jnp.where(block.kept, p, 0)
            p_value = logits.product(logits.for_product(p, value.dtype), value, ((4,), (2,)), dtype)
            return new_top, total, accumulated * shrink[..., None] + p_value

        # The running maximum starts finite, so that a row with nothing to attend to so far has
        # exp(-inf - finite) = 0 everywhere and never -inf - -inf.
        rows = query.shape[:4]
        state = (
            loops.full(rows, jnp.finfo(dtype).min, dtype, like=query),
            loops.full(rows, 0, dtype, like=query),
            loops.full((*rows, size.V), 0, dtype, like=query),
        )
        first, end = blocks.key_blocks(spec, operands, cut, index)
        top, total, accumulated = jax.lax.fori_loop(first, end, key_block, state)

        empty = total == 0
        if sinks is not None:
            new_top = jnp.maximum(top, sinks[..., None])
            shrink = jnp.exp(top - new_top)
            total = total * shrink + jnp.exp(sinks[..., None] - new_top)
            accumulated *= shrink[..., None]
            top = new_top
        total = jnp.where(empty, 1, total)
        block_out = accumulated / (total * _dropout.keep_probability(spec.dropout_rate))[..., None]
        block_lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))
        out = cut.queries.put(out, logits.by_head(block_out).swapaxes(1, 2), index, 1)
        return out, cut.queries.put(lse, logits.by_head(block_lse), index, 2)

    out_dtype = spec.result_dtype("out", operands.query.dtype)
    out = loops.full((size.B, size.T, size.N, size.V), 0, out_dtype, like=operands.query)
    lse = loops.full((size.B, size.N, size.T), 0, dtype, like=operands.query)
    return jax.lax.fori_loop(0, cut.queries.count, query_block, (out, lse))
