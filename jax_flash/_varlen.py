"""Packed sequences: many of different lengths, one behind the other along one axis of tokens."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash import _attention, _packing, _validate


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
    is linear in `ΣT` and `ΣS` where the implementation takes sequences as they are packed ("cuda"), and in
    `B * max_seqlen_q` and `B * max_seqlen_kv` where it pads them.

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
      alibi_slopes: `(N,)` or `(B, N)`, floating. Those of each sequence by itself make all implementations
        pad.
      scale, is_causal, local_window_size, logits_soft_cap, sinks, dropout_rate, dropout_key,
      deterministic, return_residual, implementation: as in `flash_attention`. In dropout i and j count
        from the first packed token: what is kept is `dropout_mask(dropout_key, dropout_rate, (N, ΣT, ΣS))`.

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

    slopes_of_sequences = _slopes_of_sequences(
        alibi_slopes, sequences=offsets_q.size - 1, heads=query.shape[1]
    )
    call = _attention.prepare(
        query,
        key,
        value,
        window=_validate.window(is_causal, local_window_size),
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes if slopes_of_sequences is None else None,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        deterministic=deterministic,
        return_residual=return_residual,
        packing=_attention.Packing(offsets_q, offsets_kv, max_seqlen_q, max_seqlen_kv),
    )
    if slopes_of_sequences is None or call.is_empty:
        return _attention.attend(call, implementation)
    return _attend_unpacked(call, slopes_of_sequences, implementation)


def _slopes_of_sequences(alibi_slopes: Any, sequences: int, heads: int) -> jax.Array | None:
    """The slopes where each sequence has its own."""
    if alibi_slopes is None:
        return None
    shapes = {"(N,)": (heads,), "(B, N)": (sequences, heads)}
    slopes = _validate.shaped("alibi_slopes", alibi_slopes, shapes, "floating")
    return None if slopes.ndim == 1 else slopes.astype(jnp.float32)


def _attend_unpacked(call: _attention.Call, slopes: jax.Array, implementation: Any) -> Any:
    """`call` with slopes for each sequence, which is a batch row here: operands have them for those alone."""
    queries, _ = _packing.sides(call.spec, call.operands)
    spec, rows = _packing.unpack(call.spec, call.operands)
    rows = _attention.Call(spec, rows.replace(alibi_slopes=slopes), slopes.shape[:1])
    results = _attention.attend(rows, implementation)
    if not spec.return_residual:
        return queries.pack(results, 0)[0]
    out, lse = results
    return queries.pack(out, 0)[0], queries.pack(lse, 0, -jnp.inf)[0]


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
