"""`dot_product_attention`: what `jax.nn.dot_product_attention` means, by our implementations."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash import _attention, _validate


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    implementation: str | Sequence[str] | None = ...,
    return_residual: Literal[False] = ...,
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    implementation: str | Sequence[str] | None = ...,
    return_residual: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""A drop-in for `jax.nn.dot_product_attention`, with memory linear in the sequence.

    .. math::

        \mathrm{out} = \mathrm{softmax}(\mathrm{scale} \cdot Q K^T + \mathrm{bias}) \, V

    Everything means what it means in JAX, whose causal masks and windows are aligned to the top left, also
    where T ≠ S or lengths are given (`flash_attention` aligns to the bottom right). Beyond it: a row with
    nothing to attend to gives 0 (and residual −inf), and values may have a head dim of their own.

    Letters: `B` batch, `T` queries, `S` keys, `N` query heads, `K` key heads (`N % K == 0`), `H` head dim of
    queries and keys, `V` head dim of values.

    Args:
      query: `(B, T, N, H)` or `(T, N, H)`, floating.
      key: `(B, S, K, H)` or `(S, K, H)`, query's dtype.
      value: `(B, S, K, V)` or `(S, K, V)`, query's dtype.
      bias: broadcastable to `(B, N, T, S)`, floating or integer. Added to the logits.
      mask: broadcastable to `(B, N, T, S)`, bool. True attends.
      scale: of the logits; `1 / sqrt(H)` by default.
      is_causal: row i sees the keys `j <= i`.
      query_seq_lengths: `(B,)`, integer, in tokens. Rows from there on give 0.
      key_value_seq_lengths: `(B,)`, integer, in tokens. Keys from there on are masked out.
      local_window_size: `(left, right)`: row i sees `i - left <= j <= i + right`; an int w means `(w, w)`.
        Sizes are taken as they are, negative ones too; None on a side is unbounded.
      implementation: "cuda", "pallas" or "xla", or a sequence of them tried in order; None for the
        fastest that supports the call on this device.
      return_residual: return the log-sum-exp of each row too. As in JAX it has query's dtype, and no
        gradient flows through it; `flash_attention` returns it in float32 and differentiable.

    Returns:
      `(B, T, N, V)` or `(T, N, V)` as query has it; with `return_residual`, also `(B, T, N)` or `(T, N)`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `flash_attention` does, when traced.
    """
    query = _validate.array("query", query)
    lead = query.shape[: max(query.ndim - 3, 0)]
    query, key, value = (
        _with_batch_axis(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    query, key, value = _validate.query_key_value(query, key, value)
    B, T, S = query.shape[0], query.shape[1], key.shape[1]
    if bias is not None:
        bias = _validate.array("bias", bias)
        if jnp.issubdtype(bias.dtype, jnp.integer):
            bias = bias.astype(jnp.float32)

    left, right = _validate.window_pair(local_window_size)
    if _validate.flag("is_causal", is_causal):
        right = 0 if right is None else min(right, 0)
    if query_seq_lengths is not None:
        query_seq_lengths = _lengths("query_seq_lengths", query_seq_lengths, B)
    if key_value_seq_lengths is not None:
        key_value_seq_lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, B)

    padding: dict[str, Any] = {
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
    }
    has_lengths = query_seq_lengths is not None or key_value_seq_lengths is not None
    if has_lengths and (left, right) != (None, None):
        # With lengths, `flash_attention` aligns each batch row to its own bottom right corner. Segments
        # mask the padding and leave the alignment alone: tokens are of segment 0, and padding of two
        # others, one for queries and one for keys, that never meet.
        padding = {
            "query_segment_ids": _segments(query_seq_lengths, B, T, padding_id=1),
            "key_value_segment_ids": _segments(key_value_seq_lengths, B, S, padding_id=2),
        }
    # From the top left to the bottom right.
    window = (
        None if left is None else left + S - T,
        None if right is None else right + T - S,
    )
    call = _attention.prepare(
        query,
        key,
        value,
        bias,
        mask,
        window=window,
        scale=scale,
        return_residual=return_residual,
        **padding,
    )
    results = _attention.attend(call, implementation)
    if call.spec.return_residual:
        out, lse = results
        results = out, jax.lax.stop_gradient(lse.astype(query.dtype))
    return jax.tree.map(lambda x: _validate.reshaped(x, (*lead, *x.shape[1:])), results)


def _with_batch_axis(name: str, x: Any) -> jax.Array:
    x = _validate.array(name, x)
    if x.ndim not in (3, 4):
        letters = {"query": "TNH", "key": "SKH", "value": "SKV"}[name]
        axes = ", ".join(letters)
        raise ValueError(f"{name} must have shape (B, {axes}) or ({axes}); got {_validate.described(x)}")
    return x if x.ndim == 4 else x[None]


def _lengths(name: str, lengths: Any, batch: int) -> jax.Array:
    return _validate.shaped(name, lengths, {"(B,)": (batch,)}, "integer")


def _segments(lengths: jax.Array | None, batch: int, size: int, padding_id: int) -> jax.Array:
    """Segment ids int32 `(batch, size)`: 0 within the length (everywhere where there is none)."""
    if lengths is None:
        return jnp.zeros((batch, size), jnp.int32)
    return jnp.where(jnp.arange(size) < lengths[:, None], 0, padding_id).astype(jnp.int32)
