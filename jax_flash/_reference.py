"""The definition of attention that every implementation is tested against.

`reference` is the meaning of `flash_attention`'s arguments, as its docstring has it, over whole
`(B, N, T, S)` arrays, in float32 or float64. It is slow and large on purpose: nothing here is shared with
an implementation but the hash that decides which probabilities dropout keeps, which is part of the
definition.

- `reference`: forward, traceable and differentiable by JAX itself.
- `reference_with_gradients`: forward and gradients in float64, as NumPy arrays: the oracle.
- `plain_with_gradients`: what plain attention gets in the operands' own dtype: the yardstick that
  tolerances are multiples of.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jax_flash import _dropout
from jax_flash._block_kinds import Kind
from jax_flash._spec import AttentionSpec, Gradients, Operands, captured_name, sizes


def reference(spec: AttentionSpec, operands: Operands, dtype=jnp.float32) -> tuple[jax.Array, jax.Array]:
    """Attention by its definition, everything computed in `dtype`.

    Args:
      spec: what to compute; `return_residual` is ignored, the residual is always returned.
      operands: arrays as `Operands` lists them, of any floating dtype.
      dtype: float32, or float64 under `jax.enable_x64(True)`.

    Returns:
      out `(B, T, N, V)` and lse `(B, N, T)`, both in `dtype`. A row with no key to attend to has
      out 0 and lse −inf (with sinks too), and its gradients are 0.
    """
    return _attention(spec, operands, dtype, rounding=None)


def plain_attention(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Plain attention in query's dtype, by way of the whole matrix of probabilities.

    As `softmax(query @ key.T) @ value` with operands of that dtype on a tensor unit: products are
    summed in float32, softmax is float32, and what goes into the next product (the probabilities,
    and backward the cotangents of probabilities and logits) is rounded to the dtype.

    Returns:
      out `(B, T, N, V)` in query's dtype, or as `spec.wide_results` says, and lse `(B, N, T)` float32.
    """
    dtype = operands.query.dtype
    accumulator = jnp.promote_types(dtype, jnp.float32)
    out, lse = _attention(spec, operands, accumulator, rounding=dtype)
    return out.astype(spec.result_dtype("out", dtype)), lse


def reference_with_gradients(
    spec: AttentionSpec, operands: Operands, d_out, d_lse=None
) -> tuple[np.ndarray, np.ndarray, Gradients]:
    """`reference` in float64, and its gradients for the cotangents `d_out` and `d_lse`.

    Args:
      d_out: `(B, T, N, V)`.
      d_lse: `(B, N, T)`, or None for zeros. Where lse is −inf its cotangent is ignored.

    Returns:
      out, lse and Gradients as float64 NumPy arrays, whether or not 64-bit types are enabled.
    """
    with jax.enable_x64(True):
        operands, d_out, d_lse = jax.tree.map(_widen, (operands, d_out, d_lse))
        results = _with_gradients(_reference_float64, spec, operands, d_out, d_lse)
        return jax.tree.map(np.asarray, results)


def plain_with_gradients(
    spec: AttentionSpec, operands: Operands, d_out, d_lse=None
) -> tuple[np.ndarray, np.ndarray, Gradients]:
    """`plain_attention` and its gradients, in the operands' dtypes, as NumPy arrays."""
    return jax.tree.map(np.asarray, _with_gradients(plain_attention, spec, operands, d_out, d_lse))


def _reference_float64(spec, operands):
    return reference(spec, operands, jnp.float64)


def _with_gradients(attention, spec, operands, d_out, d_lse):
    size = sizes(operands)
    small = size.B * size.N * size.T * size.S <= 2**20
    compiled = _compiled_quickly if small else _compiled
    return compiled(attention, spec, operands, d_out, d_lse)


def _forward_and_backward(attention, spec, operands, d_out, d_lse):
    differentiable = operands.differentiable()
    (out, lse), vjp = jax.vjp(lambda inputs: attention(spec, operands.replace(**inputs)), differentiable)
    d_lse = jnp.zeros_like(lse) if d_lse is None else d_lse.astype(lse.dtype)
    (gradients,) = vjp((d_out.astype(out.dtype), d_lse))
    return out, lse, Gradients.of(gradients)


_compiled = jax.jit(_forward_and_backward, static_argnums=(0, 1))
# Compiling a small case takes far longer than running it: without optimisation, half as long.
_compiled_quickly = jax.jit(
    _forward_and_backward,
    static_argnums=(0, 1),
    compiler_options={"xla_backend_optimization_level": 0},
)


def _widen(x):
    x = np.asarray(x)
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _attention(spec, operands, dtype, rounding):
    size = sizes(operands)
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype)
    narrow = (lambda x: x) if rounding is None else (lambda x: x.astype(rounding).astype(dtype))
    operands = _without_descales(operands, dtype)
    query = operands.query.astype(dtype)
    key = jnp.repeat(operands.key.astype(dtype), size.group, axis=2)
    value = jnp.repeat(operands.value.astype(dtype), size.group, axis=2)

    x = product("btnh,bsnh->bnts", query, key)
    if rounding is not None:
        x = _round_cotangent(x, rounding)
    x = x * spec.scale
    if spec.logits_soft_cap is not None:
        x = spec.logits_soft_cap * jnp.tanh(x / spec.logits_soft_cap)
    if spec.score_mod is not None:
        x = _of_function(spec.score_mod, "score_mod", operands, dtype, x)
    if operands.bias is not None:
        x = x + operands.bias.astype(dtype)
    if operands.alibi_slopes is not None:
        slopes = operands.alibi_slopes.astype(dtype)[:, :, None, None]
        x = x - slopes * jnp.abs(_distance(spec, operands)).astype(dtype)
    allowed = _allowed(spec, operands)

    # Stable softmax. The maximum cancels, so no gradient flows through it, and a row with nothing
    # in it takes 0 for its maximum, so that no -inf meets a -inf.
    x = jnp.where(allowed, x, -jnp.inf)
    top = jax.lax.stop_gradient(x.max(-1, keepdims=True))
    empty = jnp.all(jnp.isneginf(x), -1, keepdims=True)  # by the maximum, NaN might be, too
    if operands.sinks is not None:
        sinks = operands.sinks.astype(dtype)[:, :, None, None]
        top = jnp.maximum(top, jax.lax.stop_gradient(sinks))
    top = jnp.where(empty, 0.0, top)
    e = jnp.where(allowed, jnp.exp(jnp.where(allowed, x - top, 0.0)), 0.0)
    total = e.sum(-1, keepdims=True)
    if operands.sinks is not None:
        total = total + jnp.exp(jnp.where(empty, 0.0, sinks - top))
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))[..., 0]
    p = jnp.where(empty, 0.0, e / total)

    if spec.dropout_rate:
        p = p * _kept(spec, operands).astype(dtype)
    return product("bnts,bsnv->btnv", narrow(p), value), lse


def _without_descales(operands, dtype):
    """Arrays of 8 bits times their scales, in `dtype`: one for each block of 128 rows, or for all rows."""
    size, arrays = sizes(operands), operands.present()
    for name, rows in (("query", size.T), ("key", size.S), ("value", size.S)):
        scales = arrays.pop(f"{name}_descale", None)
        if scales is not None:
            block = jnp.arange(rows) // 128 if scales.shape[2] > 1 else jnp.zeros(rows, int)
            scales = jnp.repeat(scales, arrays[name].shape[2] // size.K, axis=1)[:, :, block]
            arrays[name] = arrays[name].astype(dtype) * scales.astype(dtype).transpose(0, 2, 1)[..., None]
    return Operands.of(arrays)


def _kept(spec, operands):
    """What dropout multiplies probabilities by: `(B, N, T, S)`, or 1 without it."""
    if not spec.dropout_rate:
        return jnp.ones(())
    kept = _dropout.keep(operands.dropout_rows, operands.dropout_columns[:, None], spec.dropout_rate)
    return jnp.where(kept, 1 / _dropout.keep_probability(spec.dropout_rate), 0.0)


def _distance(spec, operands):
    """Key column minus the column on the diagonal of each row, `(B|1, 1, T, S)`.

    It is `j - (i + S - T + diagonal)`, without the operand `j - (i + S - T)`.
    """
    size = sizes(operands)
    if operands.diagonal is not None:
        distance = _distance(spec, operands.replace(diagonal=None))
        of_queries = jnp.repeat(operands.diagonal, size.T // operands.diagonal.shape[1], axis=1)
        return distance - of_queries[:, None, :, None]
    if operands.query_offsets is not None:
        return _distance_within_sequences(spec, operands)
    queries, keys = operands.query_seq_lengths, operands.key_value_seq_lengths
    queries = jnp.full((1,), size.T) if queries is None else queries
    keys = jnp.full((1,), size.S) if keys is None else keys
    i = jnp.arange(size.T)[:, None]
    j = jnp.arange(size.S)[None, :]
    return j - (i + (keys - queries)[:, None, None, None])


def _allowed(spec, operands):
    """Which keys each query may attend to: bool `(B, N, T, S)`."""
    size = sizes(operands)
    allowed = jnp.ones((size.B, size.N, size.T, size.S), bool)
    if operands.mask is not None:
        allowed &= operands.mask
    if spec.block_mask is not None:
        query_size, key_size = spec.block_mask.block_size
        kinds = jnp.repeat(operands.block_kinds, query_size, axis=2)[:, :, : size.T]
        kinds = jnp.repeat(kinds, key_size, axis=3)[..., : size.S]
        sees = kinds == Kind.FULL
        if spec.block_mask.mask_mod is not None:
            differs = spec.block_mask.differs_by_batch, spec.block_mask.differs_by_head
            sees |= (kinds == Kind.PARTIAL) & _of_function(
                spec.block_mask.mask_mod, "mask_mod", operands, differs=differs
            )
        allowed &= sees
    distance = _distance(spec, operands)
    if spec.left is not None:
        allowed &= distance >= -spec.left
    if spec.right is not None:
        allowed &= distance <= spec.right
    if operands.query_segment_ids is not None:
        queries = operands.query_segment_ids[:, None, :, None]
        keys = operands.key_value_segment_ids[:, None, None, :]
        allowed &= queries == keys
    if operands.query_seq_lengths is not None:
        allowed &= jnp.arange(size.T)[:, None] < operands.query_seq_lengths[:, None, None, None]
    if operands.key_value_seq_lengths is not None:
        allowed &= jnp.arange(size.S) < operands.key_value_seq_lengths[:, None, None, None]
    if operands.query_offsets is not None:
        queries, _, _ = _sequences(operands.query_offsets, spec.max_query_length, size.T)
        keys, _, _ = _sequences(operands.key_value_offsets, spec.max_key_value_length, size.S)
        allowed &= jnp.any(queries[:, :, :, None] & keys[:, :, None, :], axis=1)[:, None]
    return allowed


def _of_function(function, name, operands, dtype=jnp.float32, *score, differs=(True, True)):
    """What a user's function returns for all pairs, `(B, N, T, S)`. Everything floating in it is `dtype`."""
    size = sizes(operands)
    captured = [operands.captured[captured_name(name, i)] for i in range(len(function.shapes))]
    captured = [_in_dtype(jnp.broadcast_to(x, (size.B, x.shape[1])), dtype) for x in captured]

    def of_pair(consts, *scalars):
        consts = [x.reshape(shape.shape) for x, shape in zip(consts, function.shapes, strict=True)]
        (result,) = _evaluated(function.jaxpr, consts, scalars, dtype)
        return result

    differing = {
        "S": {"key"},
        "N": {"head"},
        "T": {"batch", "query"},
        "B": {"captured", "batch", "query", "key"},
    }
    for axis in "STNB":  # in the order of the results' axes, from the last
        of_call, *of_index = (
            0 if name in differing[axis] else None for name in ("captured", "batch", "head", "query", "key")
        )
        of_pair = jax.vmap(of_pair, (of_call, *[0] * len(score), *of_index))
    heads = jnp.broadcast_to(operands.head_indices, (size.B, size.N))[0]
    batch, queries, keys = _places(operands)
    return of_pair(captured, *score, batch * differs[0], heads * differs[1], queries, keys)


def _places(operands):
    """What functions take: each query's batch and position, `(B, T)`, and each key's position, `(B, S)`."""
    size = sizes(operands)
    if operands.query_offsets is None:
        batch = jnp.broadcast_to(operands.batch_indices[:, None], (size.B, size.T))
        positions = (jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (size.B, n)) for n in (size.T, size.S))
        return batch, *positions
    is_of, starts, _ = _sequences(operands.query_offsets, size.T, size.T)
    is_key_of, key_starts, _ = _sequences(operands.key_value_offsets, size.S, size.S)
    sequence = jnp.argmax(is_of, axis=1).astype(jnp.int32)
    queries, keys = (
        jnp.arange(is_of.shape[2], dtype=jnp.int32) - jnp.sum(is_of * starts[:, :, None], axis=1)
        for is_of, starts in ((is_of, starts), (is_key_of, key_starts))
    )
    return sequence, queries.astype(jnp.int32), keys.astype(jnp.int32)


def _evaluated(jaxpr, consts, args, dtype):
    """A jaxpr's results, with everything floating in `dtype`."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def value_of(variable):
        return _in_dtype(variable.val, dtype) if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        operands = [value_of(variable) for variable in equation.invars]
        params = dict(equation.params)
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        if inner is not None and equation.primitive.name in ("jit", "pjit", "custom_jvp_call", "closed_call"):
            constants = [_in_dtype(x, dtype) for x in inner.consts]
            results = _evaluated(inner.jaxpr, constants, operands, dtype)
        else:
            for name in ("new_dtype", "dtype", "preferred_element_type"):
                if name in params and jnp.issubdtype(params[name], jnp.floating):
                    params[name] = np.dtype(dtype)
            results = equation.primitive.bind(*operands, **params)
            results = results if equation.primitive.multiple_results else [results]
        values |= zip(equation.outvars, results, strict=True)
    return [value_of(variable) for variable in jaxpr.outvars]


def _in_dtype(x, dtype):
    x = jnp.asarray(x)
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _distance_within_sequences(spec, operands):
    """`_distance` of varlen sequences, with the lengths of the one that the query is of, `(B, 1, T, S)`."""
    size = sizes(operands)
    is_of, starts, queries = _sequences(operands.query_offsets, spec.max_query_length, size.T)
    _, key_starts, keys = _sequences(operands.key_value_offsets, spec.max_key_value_length, size.S)
    diagonal_of_first = key_starts + keys - queries  # a key, as packed, for each sequence
    diagonal = jnp.arange(size.T) + jnp.sum(is_of * (diagonal_of_first - starts)[:, :, None], axis=1)
    return (jnp.arange(size.S) - diagonal[:, :, None])[:, None]


def _sequences(offsets, longest, tokens):
    """Which tokens each varlen sequence has, bool `(B, P, tokens)`; where it starts, and its length."""
    starts = offsets[:, :-1]
    lengths = jnp.minimum(offsets[:, 1:] - starts, longest)
    token = jnp.arange(tokens)
    is_of = (starts[:, :, None] <= token) & (token < (starts + lengths)[:, :, None])
    return is_of, starts, lengths


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _round_cotangent(x, dtype):
    """`x` as it is; its cotangent rounded to `dtype`, as it would be before the next product."""
    return x


_round_cotangent.defvjp(
    lambda x, dtype: (x, None),
    lambda dtype, _, cotangent: (cotangent.astype(dtype).astype(cotangent.dtype),),
)
