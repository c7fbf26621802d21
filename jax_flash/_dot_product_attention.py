"""`dot_product_attention`: what `jax.nn.dot_product_attention` means, by our implementations."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash import _arguments, _validate
from jax_flash._alignment import TOP_LEFT, Alignment
from jax_flash._call import Arguments, attend, prepare
from jax_flash._mask import Window


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: float | jax.Array | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | Sequence[int] | None = ...,
    key_value_seq_lengths: ArrayLike | Sequence[int] | None = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    implementation: str | Sequence[str] | None = ...,
    return_residual: Literal[False] = ...,
    dropout_rate: float = ...,
    dropout_key: ArrayLike | None = ...,
    alignment: Alignment = ...,
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: float | jax.Array | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | Sequence[int] | None = ...,
    key_value_seq_lengths: ArrayLike | Sequence[int] | None = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    implementation: str | Sequence[str] | None = ...,
    return_residual: Literal[True],
    dropout_rate: float = ...,
    dropout_key: ArrayLike | None = ...,
    alignment: Alignment = ...,
) -> tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | jax.Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | Sequence[int] | None = None,
    key_value_seq_lengths: ArrayLike | Sequence[int] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
    alignment: Alignment = TOP_LEFT,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""A drop-in for `jax.nn.dot_product_attention`, with memory linear in the sequence.

    .. math::

        \mathrm{out} = \mathrm{softmax}(\mathrm{scale} \cdot Q K^T + \mathrm{bias}) \, V

    Everything means what it means in JAX, whose causal masks and windows are aligned to the top left, also
    where T ≠ S or lengths are given (`flash_attention` aligns to the bottom right). Beyond it: a row with
    nothing to attend to gives 0 (and residual −inf), values may have a head dim of their own, and
    probabilities may be dropped.

    Letters: `B` batch, `T` queries, `S` keys, `N` query heads, `K` key heads (`N % K == 0`), `H` head dim of
    queries and keys, `V` head dim of values.

    Args:
      query: `(B, T, N, H)` or `(T, N, H)`, floating.
      key: `(B, S, K, H)` or `(S, K, H)`, query's dtype.
      value: `(B, S, K, V)` or `(S, K, V)`, query's dtype.
      bias: broadcastable to `(B, N, T, S)`, floating or integer. Added to the logits.
      mask: broadcastable to `(B, N, T, S)`, bool. True attends.
      scale: of the logits; `1 / sqrt(H)` by default. One that is traced, such as a learned one, multiplies
        query, which is rounded once more, and has a gradient.
      is_causal: row i sees the keys `j <= i`.
      query_seq_lengths: `(B,)`, integer, in tokens. Rows from there on give 0.
      key_value_seq_lengths: `(B,)`, integer, in tokens. Keys from there on are masked out.
      local_window_size: `(left, right)`: row i sees `i - left <= j <= i + right`; an int w means `(w, w)`.
        A side may be negative if left + right is not; None on a side is unbounded.
      implementation: "cuda", "pallas" or "xla", or a sequence of them tried in order; None for the
        fastest that supports the call on this device.
      return_residual: return the log-sum-exp of each row too. As in JAX it has query's dtype, and no
        gradient flows through it; `flash_attention` returns it in float32 and differentiable.
      dropout_rate: the share of probabilities to drop, in [0, 1), as in `flash_attention`.
      dropout_key: one key, as from `jax.random.key`; needed when `dropout_rate > 0`.
      alignment: "top_left" as above, or "bottom_right": causal masks and windows as in `flash_attention`.

    Returns:
      `(B, T, N, V)` or `(T, N, V)` as query has it; with `return_residual`, also `(B, T, N)` or `(T, N)`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `flash_attention` does, when traced.
    """
    given = _checked("query", query), _checked("key", key), _checked("value", value)
    with_batch = (x if x.ndim == 4 else jnp.expand_dims(x, 0) for x in given)
    query, key, value = _arguments.query_key_value(*with_batch, given=given)
    if bias is not None:
        bias = _validate.array("bias", bias, "floating or integer")
        if jnp.issubdtype(bias.dtype, jnp.integer):
            bias = bias.astype(jnp.float32)

    window = _window(local_window_size)
    if _validate.flag("is_causal", is_causal):
        window = window.causal()
    arguments = Arguments(
        query,
        key,
        value,
        bias,
        mask,
        window=window,
        scale=scale,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        return_residual=return_residual,
        alignment=alignment,
    )
    call = prepare(arguments)
    results = attend(call, implementation)
    if call.spec.return_residual:
        out, lse = results
        results = out, jax.lax.stop_gradient(lse.astype(query.dtype))
    lead = given[0].shape[:-3]
    return jax.tree.map(lambda x: _validate.reshaped(x, (*lead, *x.shape[1:])), results)


def _checked(name: str, x: Any) -> jax.Array:
    x = _validate.array(name, x, "floating")
    if x.ndim not in (3, 4):
        letters = {"query": "TNH", "key": "SKH", "value": "SKV"}[name]
        axes = ", ".join(letters)
        raise ValueError(f"{name} must have shape (B, {axes}) or ({axes}); got {_validate.described(x)}")
    return x


def _window(local_window_size: Any) -> Window:
    window = _arguments.window_pair("local_window_size", local_window_size)
    if window.hides_all:
        raise ValueError(
            "local_window_size must hold sizes (left, right) with left + right of at least 0, or None for "
            f"unbounded: no row would see a key; got {_validate.short(local_window_size)}"
        )
    return window
