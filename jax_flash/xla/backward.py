"""The backward pass: computes each block of logits again, and adds to every gradient.

The gradient of a logit is `p * (d_out · v - delta)`, with lse and delta as `_gradients.py` has them.
"""

import functools

import jax
import jax.numpy as jnp

from jax_flash import _device, _dropout, _gradients, _query_parts, _varlen_unpacking
from jax_flash._spec import AttentionSpec, Gradients, Operands, sizes
from jax_flash.transforms.varying import vary_alike
from jax_flash.xla import blocks, functions, logits, loops, symbolic


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
) -> Gradients:
    """Gradients of every differentiable operand that is there.

    Args:
      out: `(B, T, N, V)`, from `forward`.
      lse: `(B, N, T)`, from `forward`.
      d_out: `(B, T, N, V)`.
      d_lse: `(B, N, T)`, or None where nothing depends on lse.

    Returns:
      Gradients in their operands' shapes and dtypes; a broadcast axis is summed over.
    """
    if operands.query_offsets is not None:
        return _varlen_unpacking.backward(backward, spec, operands, out, lse, d_out, d_lse)
    if _query_parts.are_several(operands):
        return _query_parts.backward(backward, spec, operands, out, lse, d_out, d_lse)
    if symbolic.needs_padding(operands):
        return symbolic.backward(backward, spec, operands, out, lse, d_out, d_lse)
    cut = blocks.plan(spec, operands, _device.current())
    dtype = logits.accumulator(operands)
    operands, out, lse, d_out, d_lse = vary_alike((operands, out, lse, d_out, d_lse))

    lse, delta = _gradients.lse_and_delta(out, lse, d_out, d_lse, dtype)

    def attend(operands, others, sums):
        return _backward(spec, operands, cut, *others, sums)

    shared = loops.shared_operands(operands)
    sums = {name: x for name, x in _zero_sums(operands, dtype).items() if name in shared}

    present = operands.present()

    def run(arrays):
        operands, others = arrays
        gradients, of_all = loops.over_batch(cut.batch, attend, operands, others, sums)
        gradients |= of_all
        return {
            name: x.reshape(present[name].shape).astype(spec.result_dtype(name, present[name].dtype))
            for name, x in gradients.items()
        }

    arrays = operands, (lse, delta, d_out)
    if blocks.hides_keys(spec, operands):
        gradients = loops.until_finite(run, _isolate, arrays, judge=_of_products)
    else:
        gradients = run(arrays)
    if operands.sinks is not None:
        sinks = _gradients.of_sinks(operands.sinks.astype(dtype), lse, delta)
        gradients["sinks"] = sinks.astype(operands.sinks.dtype)
    return Gradients.of(gradients)


def _of_products(gradients):
    return [gradients[name] for name in ("query", "key", "value")]


def _isolate(arrays):
    """Operands, lse, delta and d_out with 0 for all that isn't finite.

    lse is NaN for the queries that it reaches and that see a key. Their probabilities are NaN for the keys
    that they see and 0 for others. Nothing else is NaN, so a pair of a query and a key that it does not see
    adds nothing to any gradient.
    """
    operands, (lse, delta, d_out) = arrays

    def finite(x):
        return jnp.where(jnp.isfinite(x), x, 0)

    is_right = jnp.isfinite(delta) & jnp.isfinite(operands.query).all(-1).swapaxes(1, 2)
    is_right &= lse < jnp.finfo(lse.dtype).max  # which it is where a key is infinite, as logits are clipped
    lse = jnp.where(is_right | jnp.isposinf(lse), lse, jnp.nan)
    isolated = {name: finite(getattr(operands, name)) for name in ("query", "key", "value")}
    return operands.replace(**isolated), (lse, finite(delta), finite(d_out))


def _zero_sums(operands, dtype):
    """Where the gradients of bias, alibi_slopes and captured arrays gather, by name, with heads grouped."""
    K = sizes(operands).K
    return {
        name: loops.full(logits.by_group(x, K).shape, 0, dtype, like=operands.query)
        for name, x in operands.present().items()
        if name in ("bias", "alibi_slopes")
    } | {
        name: loops.full(x.shape, 0, dtype, like=operands.query)
        for name, x in operands.differentiable().items()
        if name in operands.captured
    }


def _backward(spec, operands, cut, lse, delta, d_out, sums):
    """Gradients of as many batch rows as fit at once, as a dict, and `sums` with theirs added."""
    size = sizes(operands)
    dtype = logits.accumulator(operands)
    mask = blocks.position_mask(spec, operands)
    grouped = logits.heads_first(operands)
    lse, delta = logits.by_group(lse, size.K), logits.by_group(delta, size.K)
    d_out = logits.by_group(d_out.astype(operands.value.dtype).swapaxes(1, 2), size.K)
    shared = tuple(sums)
    sums = _zero_sums(operands, dtype) | sums

    def query_block(index, state):
        d_query, d_key, d_value, sums = state
        query = cut.queries.take(grouped.query, index, 3)
        d_out_block = cut.queries.take(d_out, index, 3)
        # Transposed once here, so that d_key and d_value come from products without a transposition.
        query_t, d_out_t = query.swapaxes(3, 4), d_out_block.swapaxes(3, 4)
        lse_block = cut.queries.take(lse, index, 3)
        if not cut.queries.even:
            lse_block = jnp.where(cut.queries.fresh(index), lse_block, jnp.inf)
        delta_block = cut.queries.take(delta, index, 3)

        def key_block(key_index, state):
            step = functools.partial(visited_block, key_index)
            return blocks.unless_hidden(spec, operands, cut, index, key_index, step, state)

        def visited_block(key_index, state):
            d_query, d_key, d_value, sums = state
            key = cut.keys.take(grouped.key, key_index, 2)
            value = cut.keys.take(grouped.value, key_index, 2)
            block = logits.block(spec, grouped, mask, cut, query, key, index, key_index)
            # 0 at most but for rounding, which among huge logits is large enough for an overflow.
            p = block.masked(jnp.exp(jnp.minimum(block.x - lse_block[..., None], 0)), 0)
            dp = logits.product(d_out_block, value, ((4,), (3,)), dtype)
            p_kept, dp = (_with_dropout(spec, block, x) for x in (p, dp))
            dx = p * (dp - delta_block[..., None])
            shares = {}
            of_logits = dx
            if block.score is not None:
                masked = functools.partial(block.masked, fill=0)
                dx, shares = functions.score_mod_gradients(spec, grouped, block.score, dx, masked)
            # An array that is captured and has no share has no gradient.
            sums = {
                name: x + shares.get(name, 0)
                if name in operands.captured
                else _add_sum(name, x, of_logits, block, cut, index, key_index)
                for name, x in sums.items()
            }
            if block.capped is not None:
                dx *= 1 - jnp.square(block.capped)
            dx = logits.for_product(dx, key.dtype)
            p_kept = logits.for_product(p_kept, value.dtype)
            d_query += logits.product(dx, key, ((4,), (2,)), dtype)
            d_key = cut.keys.add(d_key, logits.product(query_t, dx, ((2, 4), (2, 3)), dtype), key_index, 3)
            d_value = cut.keys.add(
                d_value, logits.product(d_out_t, p_kept, ((2, 4), (2, 3)), dtype), key_index, 3
            )
            return d_query, d_key, d_value, sums

        first, end = blocks.key_blocks(spec, operands, cut, index)
        state = loops.full(query.shape, 0, dtype, like=query), d_key, d_value, sums
        d_query_block, d_key, d_value, sums = jax.lax.fori_loop(first, end, key_block, state)
        d_query_block = logits.by_head(d_query_block * spec.scale).swapaxes(1, 2)
        return cut.queries.add(d_query, d_query_block, index, 1), d_key, d_value, sums

    state = *_zero_gradients(spec, operands, dtype), sums
    d_query, d_key, d_value, sums = jax.lax.fori_loop(0, cut.queries.count, query_block, state)
    gradients = {
        "query": d_query,
        "key": (d_key * spec.scale).transpose(0, 3, 1, 2),
        "value": d_value.transpose(0, 3, 1, 2),
    }
    own = {name: x for name, x in sums.items() if name not in shared}
    return gradients | own, {name: sums[name] for name in shared}


def _zero_gradients(spec, operands, dtype):
    """Where the gradients of query, key and value gather; those of key and value with their heads first."""
    size = sizes(operands)

    def zeros(shape, dtype):
        return loops.full(shape, 0, dtype, like=operands.query)

    return (
        zeros(operands.query.shape, spec.result_dtype("query", operands.query.dtype)),
        zeros((size.B, size.K, size.H, size.S), dtype),
        zeros((size.B, size.K, size.V, size.S), dtype),
    )


def _with_dropout(spec, block, x):
    """`x`, of a block's scores, as dropout leaves it: divided by the probability of being kept, or 0."""
    if block.kept is None:
        return x
    return jnp.where(block.kept, x / _dropout.keep_probability(spec.dropout_rate), 0)


def _add_sum(name, x, dx, block, cut, query_block, key_block):
    """`x`, the gradient of bias or alibi_slopes so far, with one block's share added."""
    if name == "alibi_slopes":
        return x + _gradients.sum_to(-(dx * block.distance).sum((-2, -1)), x.shape)
    starts = [jnp.int32(0)] * x.ndim
    shape = list(x.shape)
    for axis, positions, index in ((-2, cut.queries, query_block), (-1, cut.keys, key_block)):
        if x.shape[axis] != 1:
            starts[axis], shape[axis] = positions.start(index), positions.size
    share = jax.lax.dynamic_slice(x, starts, shape) + _gradients.sum_to(dx, shape)
    return jax.lax.dynamic_update_slice(x, share, starts)
