"""Packed sequences: many of different lengths, one behind the other along one axis of tokens.

Each sequence is unpacked to a batch row of its own, padded to the longest, so that alignment and window
are those of the sequence by itself; the results are packed back. Dropout's words are made for the packed
tokens, and unpacked with them, so that they don't depend on the layout.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash import _attention, _dropout, _validate


@overload
def flash_attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    scale: float | None = ...,
    is_causal: bool = ...,
    local_window_size: int | tuple[int | None, int | None] | None = ...,
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
def flash_attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    scale: float | None = ...,
    is_causal: bool = ...,
    local_window_size: int | tuple[int | None, int | None] | None = ...,
    logits_soft_cap: float | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    dropout_rate: float = ...,
    dropout_key: ArrayLike | None = ...,
    deterministic: bool = ...,
    return_residual: Literal[True],
    implementation: str | Sequence[str] | None = ...,
) -> tuple[jax.Array, jax.Array]: ...


def flash_attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
    deterministic: bool = False,
    return_residual: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention over packed sequences: each attends to itself alone.

    Sequence b holds the queries `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` and the keys `cu_seqlens_kv[b]` to
    `cu_seqlens_kv[b + 1]`, and what it gives is what `flash_attention` gives for it by itself, with its
    own lengths in the alignment of causality, window and ALiBi. Either length may be 0.

    Letters as in `flash_attention`; `ΣT` and `ΣS` are tokens of all sequences, `B` is their number. Memory
    is linear in `B * max_seqlen_q` and `B * max_seqlen_kv`.

    Args:
      query: `(ΣT, N, H)`, floating.
      key: `(ΣS, K, H)`, query's dtype.
      value: `(ΣS, K, V)`, query's dtype.
      cu_seqlens_q: `(B + 1,)`, integer, ascending: where each sequence starts, and where the last one
        ends. Tokens before the first and behind the last are padding, and give 0 (lse −inf).
      cu_seqlens_kv: the same for keys.
      max_seqlen_q: at least the queries of the longest sequence; a Python int, since it is a shape. What
        a sequence has beyond it gives 0.
      max_seqlen_kv: the same for keys. What a sequence has beyond it is not attended to.
      alibi_slopes: `(N,)` or `(B, N)`, floating.
      scale, is_causal, local_window_size, logits_soft_cap, sinks, dropout_rate, dropout_key,
      deterministic, return_residual, implementation: as in `flash_attention`. In dropout, there is one
        batch row, and i and j count all tokens: what is kept are the sequences' parts of
        `dropout_mask(dropout_key, dropout_rate, (N, ΣT, ΣS))`.

    Returns:
      `(ΣT, N, V)` in query's dtype; with `return_residual`, also lse, float32 `(ΣT, N)`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `flash_attention` does, when traced.
    """
    query = _packed("query", query, "(ΣT, N, H)")
    key = _packed("key", key, "(ΣS, K, H)")
    value = _packed("value", value, "(ΣS, K, V)")
    if value.shape[0] != key.shape[0]:
        raise ValueError(
            f"value must have shape (ΣS, K, V) with ΣS = {key.shape[0]} as in key; "
            f"got {_validate.described(value)}"
        )
    offsets_q = _offsets("cu_seqlens_q", cu_seqlens_q)
    offsets_kv = _offsets("cu_seqlens_kv", cu_seqlens_kv)
    if offsets_q.shape != offsets_kv.shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_kv must have the same shape (B + 1,); "
            f"got {offsets_q.shape} and {offsets_kv.shape}"
        )
    max_seqlen_q = _length("max_seqlen_q", max_seqlen_q)
    max_seqlen_kv = _length("max_seqlen_kv", max_seqlen_kv)

    call = _attention.prepare(
        _unpack(query, offsets_q, max_seqlen_q),
        _unpack(key, offsets_kv, max_seqlen_kv),
        _unpack(value, offsets_kv, max_seqlen_kv),
        window=_validate.window(is_causal, local_window_size),
        query_seq_lengths=jnp.diff(offsets_q),
        key_value_seq_lengths=jnp.diff(offsets_kv),
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        deterministic=deterministic,
        return_residual=return_residual,
    )
    tokens = query.shape[0]
    _, seed = _validate.dropout(dropout_rate, dropout_key)
    if seed is not None:
        rows, columns = _dropout.words(seed, 1, query.shape[1], tokens, key.shape[0])
        operands = call.operands.replace(
            dropout_rows=_unpack(rows[0].T, offsets_q, max_seqlen_q).swapaxes(1, 2),
            dropout_columns=_unpack(columns[0], offsets_kv, max_seqlen_kv),
        )
        call = dataclasses.replace(call, operands=operands)
    results = _attention.attend(call, implementation)
    if not call.spec.return_residual:
        return _pack(results, offsets_q, tokens, 0)
    out, lse = results
    return _pack(out, offsets_q, tokens, 0), _pack(lse, offsets_q, tokens, -jnp.inf)


def _packed(name: str, x: Any, letters: str) -> jax.Array:
    x = _validate.array(name, x, "floating")
    if x.ndim != 3:
        raise ValueError(f"{name} must have shape {letters}; got {_validate.described(x)}")
    return x


def _offsets(name: str, x: Any) -> jax.Array:
    x = _validate.array(name, x, "integer")
    if x.ndim != 1 or x.size < 1:
        raise ValueError(f"{name} must have shape (B + 1,); got {_validate.described(x)}")
    return x.astype(jnp.int32)


def _length(name: str, value: Any) -> int:
    value = _validate.integer(name, value)
    if value < 0:
        raise ValueError(f"{name} must be at least 0; got {value}")
    return value


def _unpack(x: jax.Array, offsets: jax.Array, length: int) -> jax.Array:
    """`(tokens, …)` as `(B, length, …)`, with zeros behind each sequence."""
    batch = offsets.size - 1
    if 0 in (x.shape[0], batch, length):
        return jnp.zeros((batch, length, *x.shape[1:]), x.dtype)
    within = jnp.arange(length)
    rows = offsets[:-1, None] + within
    rows = jnp.where(rows < offsets[1:, None], rows, x.shape[0])
    return x.at[rows].get(mode="fill", fill_value=0)


def _pack(x: jax.Array, offsets: jax.Array, tokens: int, fill: float) -> jax.Array:
    """`(B, length, …)` as `(tokens, …)`, with `fill` for tokens of no sequence."""
    batch, length = x.shape[:2]
    if 0 in (tokens, batch, length):
        return jnp.full((tokens, *x.shape[2:]), fill, x.dtype)
    token = jnp.arange(tokens)
    sequence = jnp.searchsorted(offsets, token, side="right") - 1
    within = token - offsets[sequence]
    # Behind the last sequence and beyond the length, the index is out of bounds, which gives `fill`;
    # before the first it would be negative, and count from the end.
    return x.at[jnp.where(sequence < 0, batch, sequence), within].get(mode="fill", fill_value=fill)
