"""`flash_attention`: from what a caller passed to one call of an implementation.

`prepare` checks and brings everything to the one form that implementations take (`AttentionSpec`,
`Operands`); `attend` picks an implementation, runs it and gives the results the caller's shape.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash import _device, _dispatch, _dropout, _validate
from jax_flash._spec import BATCH_AXIS_MAY_BE_ONE, AttentionSpec, Operands, sizes
from jax_flash.transforms import autodiff


@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    local_window_size: int | tuple[int | None, int | None] | None = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    query_segment_ids: ArrayLike | None = ...,
    key_value_segment_ids: ArrayLike | None = ...,
    logits_soft_cap: float | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    dropout_rate: float = ...,
    dropout_key: ArrayLike | None = ...,
    deterministic: bool = ...,
    return_residual: Literal[False] = ...,
    implementation: str | Sequence[str] | None = ...,
) -> jax.Array: ...


@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    local_window_size: int | tuple[int | None, int | None] | None = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    query_segment_ids: ArrayLike | None = ...,
    key_value_segment_ids: ArrayLike | None = ...,
    logits_soft_cap: float | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    dropout_rate: float = ...,
    dropout_key: ArrayLike | None = ...,
    deterministic: bool = ...,
    return_residual: Literal[True],
    implementation: str | Sequence[str] | None = ...,
) -> tuple[jax.Array, jax.Array]: ...


def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
    deterministic: bool = False,
    return_residual: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Exact scaled dot-product attention that never stores the matrix of logits.

    For query row :math:`i` and key column :math:`j` of one head, in float32 whatever the
    inputs' dtype:

    .. math::

        x_{ij} &= \mathrm{cap}(\mathrm{scale} \cdot q_i \cdot k_j) + \mathrm{bias}_{ij}
                  - \mathrm{slope} \, |i + S - T - j| \\
        \mathrm{lse}_i &= \log\Big(\sum_{j \in A_i} e^{x_{ij}} + e^{\mathrm{sink}}\Big) \\
        p_{ij} &= e^{x_{ij} - \mathrm{lse}_i} \cdot \mathrm{keep}_{ij} / (1 - \mathrm{rate}) \\
        \mathrm{out}_i &= \sum_{j \in A_i} p_{ij} v_j

    :math:`\mathrm{cap}(x) = c \tanh(x / c)` with a soft cap :math:`c`. :math:`A_i` holds the keys that
    row :math:`i` may attend to: those that the mask, causality, the window, the lengths and the segment
    ids all allow. A row with none gives out 0, lse :math:`-\infty` and gradients 0.

    Differentiable in query, key, value, bias, alibi_slopes and sinks, through both results. Memory is
    linear in T and S, forward and backward.

    Letters: `*B` any leading batch axes (none too), `T` queries, `S` keys, `N` query heads, `K` key heads
    (`N % K == 0`; query head n uses key head `n // (N // K)`), `H` head dim of queries and keys, `V` head
    dim of values.

    Args:
      query: `(*B, T, N, H)`, floating.
      key: `(*B, S, K, H)`, query's dtype.
      value: `(*B, S, K, V)`, query's dtype.
      bias: broadcastable to `(*B, N, T, S)`, floating. Added to the logits.
      mask: broadcastable to `(*B, N, T, S)`, bool. True attends.
      scale: of the logits; `1 / sqrt(H)` by default.
      is_causal: row i sees the keys `j <= i + S - T`: aligned to the bottom right, so that the last query
        sees every key.
      local_window_size: `(left, right)`: row i sees `i + S - T - left <= j <= i + S - T + right`. None or
        -1 on a side is unbounded; an int w means `(w, w)`.
      query_seq_lengths: `(*B,)`, integer, in tokens. Rows from there on are padding: they attend to
        nothing. Takes the place of T in every alignment above. Clipped to [0, T].
      key_value_seq_lengths: `(*B,)`, integer, in tokens. Keys from there on are padding. Takes the place
        of S in every alignment above. Clipped to [0, S].
      query_segment_ids: `(*B, T)`, integer. A row sees the keys of its own segment alone; goes with
        key_value_segment_ids.
      key_value_segment_ids: `(*B, S)`, integer.
      logits_soft_cap: c above, greater than 0; None for no cap.
      alibi_slopes: `(N,)` or `(*B, N)`, floating: slope above, for each query head.
      sinks: `(N,)`, floating: for each query head, a logit that takes part in the sum and has no value.
      dropout_rate: the share of probabilities to drop, in [0, 1), rounded to a multiple of 2**-15 below 1.
        What is kept is divided by one minus the rounded rate. A rate of at most 2**-16 drops nothing.
      dropout_key: one key, as from `jax.random.key`; needed when `dropout_rate > 0`. What is kept is a pure
        function of (key, batch, head, i, j): `jax_flash.dropout_mask` returns it.
      deterministic: make gradients bitwise equal from run to run.
      return_residual: return lse beside the output.
      implementation: "cuda", "pallas" or "xla", or a sequence of them tried in order; None for the
        fastest that supports the call on this device (`jax_flash.explain` tells which, and why).

    Returns:
      `(*B, T, N, V)` in query's dtype; with `return_residual`, also lse, float32 `(*B, T, N)`.

    Raises:
      TypeError: an argument is of the wrong dtype or kind.
      ValueError: an argument has a shape or value that doesn't fit.
      NotImplementedError: no implementation that was named can run the call; with the reason of each.

    All three are raised when the call is traced.

    References:
      FlashAttention (https://arxiv.org/abs/2205.14135), FlashAttention-2 (https://arxiv.org/abs/2307.08691)
      and FlashAttention-3 (https://arxiv.org/abs/2407.08608); the online softmax
      (https://arxiv.org/abs/1805.02867); ALiBi (https://arxiv.org/abs/2108.12409); grouped queries
      (https://arxiv.org/abs/2305.13245); the soft cap of Gemma 2 (https://arxiv.org/abs/2408.00118);
      attention sinks (https://arxiv.org/abs/2309.17453).
    """
    call = prepare(
        query,
        key,
        value,
        bias,
        mask,
        window=_validate.window(is_causal, local_window_size),
        scale=scale,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        deterministic=deterministic,
        return_residual=return_residual,
    )
    return attend(call, implementation)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that passed every check.

    Its operands are canonical but for one thing: the caller's leading axes are still apart, since to merge
    them where an inner one is sharded would gather. They are merged on each device.
    """

    spec: AttentionSpec
    operands: Operands  # leading axes: those of `batch_shape`, or one of size 1 where there are none
    batch_shape: tuple[int, ...]  # the caller's leading axes

    @property
    def shapes(self) -> Operands[jax.ShapeDtypeStruct]:
        """The canonical operands, with one batch axis, as shapes: what implementations are asked about."""
        axes = max(len(self.batch_shape), 1)
        batch = math.prod(self.batch_shape)

        def merged(name: str, x: jax.Array) -> jax.ShapeDtypeStruct:
            is_shared = name in BATCH_AXIS_MAY_BE_ONE and math.prod(x.shape[:axes]) == 1
            return jax.ShapeDtypeStruct((1 if is_shared else batch, *x.shape[axes:]), np.dtype(x.dtype))

        return Operands(**{name: merged(name, x) for name, x in self.operands.present().items()})

    @property
    def is_empty(self) -> bool:
        """Nothing to compute: no row, or no key for any row."""
        n = sizes(self.shapes)
        nothing_packed = self.operands.query_offsets is not None and (
            self.operands.query_offsets.shape[-1] < 2
            or 0 in (self.spec.max_query_length, self.spec.max_key_value_length)
        )
        return nothing_packed or 0 in (n.B, n.T, n.S, n.N)


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where packed sequences lie: what `Operands` and `AttentionSpec` hold of them."""

    query_offsets: jax.Array
    key_value_offsets: jax.Array
    max_query_length: int
    max_key_value_length: int


def prepare(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    window: _validate.Window = (None, None),
    scale: float | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
    deterministic: bool = False,
    return_residual: bool = False,
    packing: Packing | None = None,
) -> Call:
    """Check the arguments of `flash_attention` and bring them to canonical form.

    `window` is is_causal and local_window_size in one: keys to the left and to the right of the
    diagonal aligned to the bottom right, integers of either sign; None is unbounded. `packing` says
    which sequences are packed along T and S; it has been checked, and the offsets have `*B` in front.
    """
    query, key, value = _validate.query_key_value(query, key, value)
    *lead, T, N, H = query.shape
    batch_shape = tuple(lead)
    S = key.shape[-3]
    longest_query, longest_key_value = T, S
    if packing is not None:
        longest_query, longest_key_value = (
            min(T, packing.max_query_length),
            min(S, packing.max_key_value_length),
        )

    def with_batch(x: jax.Array) -> jax.Array:
        return x if batch_shape else x[None]

    def for_all(x: jax.Array) -> jax.Array:
        return _validate.reshaped(x, (1,) * max(len(batch_shape), 1) + x.shape)

    def per_logit(name: str, x: Any, kind: str) -> jax.Array | None:
        if x is None:
            return None
        x = _validate.broadcastable(name, x, (*batch_shape, N, T, S), "(*B, N, T, S)", kind)
        return with_batch(x)

    def per_batch(name: str, x: Any, size: int | None, letters: str) -> jax.Array | None:
        if x is None:
            return None
        shape = batch_shape if size is None else (*batch_shape, size)
        x = _validate.shaped(name, x, {letters: shape}, "integer").astype(jnp.int32)
        return with_batch(x)

    def lengths(name: str, x: Any, size: int) -> jax.Array | None:
        x = per_batch(name, x, None, "(*B,)")
        return None if x is None else jnp.clip(x, 0, size)

    if (query_segment_ids is None) != (key_value_segment_ids is None):
        given, absent = "query_segment_ids", "key_value_segment_ids"
        if query_segment_ids is None:
            given, absent = absent, given
        raise ValueError(f"{given} goes with {absent}; got the first alone")

    if alibi_slopes is not None:
        shapes = {"(N,)": (N,), "(*B, N)": (*batch_shape, N)}
        alibi_slopes = _validate.shaped("alibi_slopes", alibi_slopes, shapes, "floating").astype(jnp.float32)
        alibi_slopes = for_all(alibi_slopes) if alibi_slopes.ndim == 1 else alibi_slopes
    if sinks is not None:
        sinks = _validate.shaped("sinks", sinks, {"(N,)": (N,)}, "floating").astype(jnp.float32)
        sinks = for_all(sinks)

    rate, dropout_key = _validate.dropout(dropout_rate, dropout_key)
    rows = columns = None
    if dropout_key is not None:
        rows, columns = _dropout.hashes(dropout_key, math.prod(batch_shape), N, T, S)
        rows = _validate.reshaped(rows, (*(batch_shape or (1,)), N, T))
        columns = _validate.reshaped(columns, (*(batch_shape or (1,)), S))
    left, right = window
    spec = AttentionSpec(
        scale=1 / math.sqrt(H) if scale is None else _validate.number("scale", scale),
        # A side that reaches past the last key from every row is unbounded: one form for one meaning,
        # so that causal attention of a single row, as in decoding, needs no masking.
        left=None if left is None or left >= longest_key_value - 1 else left,
        right=None if right is None or right >= longest_query - 1 else right,
        logits_soft_cap=_validate.soft_cap(logits_soft_cap),
        dropout_rate=rate,
        deterministic=_validate.flag("deterministic", deterministic),
        return_residual=_validate.flag("return_residual", return_residual),
        max_query_length=None if packing is None else longest_query,
        max_key_value_length=None if packing is None else longest_key_value,
    )
    operands = Operands(
        query=with_batch(query),
        key=with_batch(key),
        value=with_batch(value),
        bias=per_logit("bias", bias, "floating"),
        mask=per_logit("mask", mask, "bool"),
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        query_seq_lengths=lengths("query_seq_lengths", query_seq_lengths, T),
        key_value_seq_lengths=lengths("key_value_seq_lengths", key_value_seq_lengths, S),
        query_segment_ids=per_batch("query_segment_ids", query_segment_ids, T, "(*B, T)"),
        key_value_segment_ids=per_batch("key_value_segment_ids", key_value_segment_ids, S, "(*B, S)"),
        query_offsets=None if packing is None else with_batch(jnp.clip(packing.query_offsets, 0, T)),
        key_value_offsets=None if packing is None else with_batch(jnp.clip(packing.key_value_offsets, 0, S)),
        dropout_rows=rows,
        dropout_columns=columns,
    )
    return Call(spec, operands, batch_shape)


def attend(call: Call, implementation: Any) -> Any:
    """Run `call`: out `(*B, T, N, V)`, and with the residual also lse `(*B, T, N)`."""
    names = _validate.implementations(implementation)
    if call.is_empty:
        return _nothing(call)
    chosen = _dispatch.select(call.spec, call.shapes, names, _device.current())
    results = autodiff.attend(call.spec, chosen, call.operands)
    if call.spec.return_residual:
        out, lse = results
        results = out, jnp.swapaxes(lse, -1, -2)
    return results if call.batch_shape else jax.tree.map(lambda x: x[0], results)


def _nothing(call: Call) -> Any:
    """The results where no row has a key to attend to."""
    n = sizes(call.shapes)
    out = jnp.zeros((*call.batch_shape, n.T, n.N, n.V), call.operands.query.dtype)
    if not call.spec.return_residual:
        return out
    return out, jnp.full((*call.batch_shape, n.T, n.N), -jnp.inf, jnp.float32)
