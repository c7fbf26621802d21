"""`flash_attention_varlen`: sequences of different lengths, one behind the other along one axis of tokens."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
from jax.typing import ArrayLike

from jax_flash import (
    _arguments,
    _function_arguments,
    _sequence_arguments,
    _settings,
    _validate,
    _varlen_unpacking,
)
from jax_flash._arguments import Names
from jax_flash._attention import ScoreMod
from jax_flash._block_mask import BlockMask
from jax_flash._call import Arguments, Call, Varlen, attend, prepare
from jax_flash._spec import AttentionSpec, BlockMaskSpec, Operands, accumulator


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
    scale: float | jax.Array | None = ...,
    is_causal: bool = ...,
    local_window_size: int | tuple[int | None, int | None] | None = ...,
    logits_soft_cap: float | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    dropout_rate: float = ...,
    dropout_key: ArrayLike | None = ...,
    deterministic: bool = ...,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | None = ...,
    quantization: Literal["fp8"] | None = ...,
    quantization_key: ArrayLike | None = ...,
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
    scale: float | jax.Array | None = ...,
    is_causal: bool = ...,
    local_window_size: int | tuple[int | None, int | None] | None = ...,
    logits_soft_cap: float | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    dropout_rate: float = ...,
    dropout_key: ArrayLike | None = ...,
    deterministic: bool = ...,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | None = ...,
    quantization: Literal["fp8"] | None = ...,
    quantization_key: ArrayLike | None = ...,
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
    scale: float | jax.Array | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
    deterministic: bool = False,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    quantization: Literal["fp8"] | None = None,
    quantization_key: ArrayLike | None = None,
    return_residual: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention over varlen sequences: each attends to itself alone.

    Sequence b holds the queries `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` and the keys `cu_seqlens_kv[b]` to
    `cu_seqlens_kv[b + 1]`. It gives the result of `flash_attention` on that sequence alone, with its own
    lengths in the alignment of causality, window and ALiBi. Either length may be 0.

    Letters as in `flash_attention`; `ΣT` and `ΣS` are tokens of all sequences, `B` is their number. Memory
    is linear in `ΣT` and `ΣS` in "cuda", which takes sequences as they are packed, and in `B * max_seqlen_q`
    and `B * max_seqlen_kv` in the others, which pad them, and in the forward pass of "cuda" in 8 bits.

    Args:
      query: `(ΣT, N, H)`, floating.
      key: `(ΣS, K, H)`, query's dtype.
      value: `(ΣS, K, V)`, query's dtype.
      cu_seqlens_q: `(B + 1,)`, integer, ascending from 0 to at most ΣT: where each sequence starts, and where
        the last one ends. Tokens behind the last are padding, and give 0 (lse −inf).
      cu_seqlens_kv: the same for keys.
      max_seqlen_q: at least the queries of the longest sequence; a Python int, since it is a shape.
      max_seqlen_kv: the same for keys.
      alibi_slopes: `(N,)` or `(B, N)`, floating. With `(B, N)`, all implementations pad.
      score_mod: as in `flash_attention`; its `batch` is the sequence's number, and positions are those in the
        sequence.
      block_mask: as in `flash_attention`, made for max_seqlen_q and max_seqlen_kv (or all tokens, if they are
        fewer), and for all sequences or each. Of a sequence its first blocks count. All implementations pad.
      scale, is_causal, local_window_size, logits_soft_cap, sinks, dropout_rate, dropout_key,
      deterministic, quantization, quantization_key, return_residual, implementation: as in
        `flash_attention`. A quantization's blocks of rows begin anew with each sequence. In dropout i and j
        count from the first packed token: what is kept is
        `dropout_mask(dropout_key, dropout_rate, (N, ΣT, ΣS))`.

    Offsets whose values are known are checked (JAX copies those on a device to the host once). Traced ones
    can't be. They are clipped to the tokens, so that nothing is read out of bounds. Tokens before the first
    are then padding; queries of a sequence beyond max_seqlen_q give 0, and keys beyond max_seqlen_kv are not
    attended to; where offsets descend, it is unspecified which sequence a token counts to.

    Returns:
      `(ΣT, N, V)` in query's dtype; with `return_residual`, also lse, `(ΣT, N)` in float32, or in float64 for
      float64 arrays.

    Raises:
      TypeError, ValueError, NotImplementedError: as `flash_attention` does, when traced.
    """
    arguments = Arguments(
        query,
        key,
        value,
        window=_arguments.window(is_causal, local_window_size),
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        deterministic=deterministic,
        score_mod=score_mod,
        block_mask=block_mask,
        quantization=quantization,
        quantization_key=quantization_key,
        return_residual=return_residual,
    )
    sequences = VarlenSequences(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    return attend_varlen(arguments, sequences, implementation)


class VarlenSequences(NamedTuple):
    """Where varlen sequences lie, as the caller passed it, unchecked."""

    cu_seqlens_q: Any
    cu_seqlens_kv: Any
    max_seqlen_q: Any
    max_seqlen_kv: Any


def attend_varlen(arguments: Arguments, sequences: VarlenSequences, implementation: Any) -> Any:
    """Attention of `arguments`, whose batch is packed as `sequences` says."""
    call, own = prepare_varlen(arguments, sequences)
    if own is None or call.is_empty:
        return attend(call, implementation)
    return _attend_unpacked(call, own, implementation)


class OfSequences(NamedTuple):
    """What differs from sequence to sequence, as operands have it for batch rows alone."""

    sequences: int
    slopes: jax.Array | None  # (B, N)
    block_mask: BlockMaskSpec | None
    operands: dict[str, jax.Array]  # of the block mask


def prepare_varlen(arguments: Arguments, sequences: VarlenSequences) -> tuple[Call, OfSequences | None]:
    """The checked call; and what it lacks, if sequences have something of their own."""
    names = arguments.names
    query = _packed(names["query"], arguments.query, "(ΣT, N, H)")
    key = _packed(names["key"], arguments.key, "(ΣS, K, H)")
    value = _packed(names["value"], arguments.value, "(ΣS, K, V)")
    varlen = _varlen_of(sequences, query.shape[0], key.shape[0], names)
    count, heads = varlen.query_offsets.size - 1, query.shape[1]
    slopes = _slopes_of_sequences(arguments.alibi_slopes, count, query)
    block_mask = arguments.block_mask
    if slopes is not None:
        arguments = dataclasses.replace(arguments, alibi_slopes=None)
    call = prepare(
        dataclasses.replace(arguments, query=query, key=key, value=value, varlen=varlen, block_mask=None)
    )
    if slopes is None and block_mask is None:
        return call, None
    lengths = call.spec.max_query_length, call.spec.max_key_value_length
    if isinstance(block_mask, BlockMask) and block_mask.lengths != lengths:
        raise ValueError(
            f"block_mask must be made for {lengths[0]} queries and {lengths[1]} keys, the longest that a "
            f"sequence may be; got one for {block_mask.lengths}"
        )
    _, of_mask, operands = _function_arguments.operands(None, block_mask, (count,), (*lengths, heads))
    return call, OfSequences(count, slopes, of_mask, operands)


def _varlen_of(sequences: VarlenSequences, queries: int, keys: int, names: Names) -> Varlen:
    cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv = sequences
    max_seqlen_q = _validate.size(names["max_seqlen_q"], max_seqlen_q)
    max_seqlen_kv = _validate.size(names["max_seqlen_kv"], max_seqlen_kv)
    offsets_q = _sequence_arguments.offsets(
        names["cu_seqlens_q"], cu_seqlens_q, queries, max_seqlen_q, names["max_seqlen_q"]
    )
    offsets_kv = _sequence_arguments.offsets(
        names["cu_seqlens_kv"], cu_seqlens_kv, keys, max_seqlen_kv, names["max_seqlen_kv"]
    )
    if offsets_q.shape != offsets_kv.shape:
        raise ValueError(
            f"{names.listed('cu_seqlens_q', 'cu_seqlens_kv')} must have the same shape (B + 1,); "
            f"got {offsets_q.shape} and {offsets_kv.shape}"
        )
    return Varlen(offsets_q, offsets_kv, max_seqlen_q, max_seqlen_kv)


def _slopes_of_sequences(alibi_slopes: Any, sequences: int, query: jax.Array) -> jax.Array | None:
    """The slopes if each sequence has its own."""
    if alibi_slopes is None:
        return None
    heads = query.shape[1]
    shapes = {"(N,)": (heads,), "(B, N)": (sequences, heads)}
    slopes = _validate.shaped("alibi_slopes", alibi_slopes, shapes, "floating")
    return None if slopes.ndim == 1 else slopes.astype(accumulator(query.dtype))


@_settings.as_written
def unpacked(call: Call, own: OfSequences) -> Call:
    """`call` with what sequences have of their own: each becomes a batch row."""
    spec, _ = _varlen_unpacking.unpacked_shapes(call.spec, call.shapes)
    spec = dataclasses.replace(spec, block_mask=own.block_mask)
    rows = _unpack(call.spec, call.operands).replace(**own.operands)
    if own.slopes is not None:
        rows = rows.replace(alibi_slopes=own.slopes)
    return Call(spec, rows, (own.sequences,))


@_settings.as_written
def _attend_unpacked(call: Call, own: OfSequences, implementation: Any) -> Any:
    results = attend(unpacked(call, own), implementation)
    if not call.spec.return_residual:
        return _pack(call.spec, call.operands, results, 0.0)
    out, lse = results
    return _pack(call.spec, call.operands, out, 0.0), _pack(call.spec, call.operands, lse, -math.inf)


# In a `jit` each: outside of one, operations send constants to the device, which a transfer guard refuses.
@functools.partial(jax.jit, static_argnums=0)
def _unpack(spec: AttentionSpec, operands: Operands) -> Operands:
    return _varlen_unpacking.unpack(spec, operands)[1]


@functools.partial(jax.jit, static_argnums=(0, 3))
def _pack(spec: AttentionSpec, operands: Operands, x: jax.Array, fill: float) -> jax.Array:
    """Rows of sequences `x (B, max_seqlen_q, …)` as they were packed."""
    queries, _ = _varlen_unpacking.token_axes(spec, operands)
    return queries.pack(x, 0, fill)[0]


def _packed(name: str, x: Any, letters: str) -> jax.Array:
    x = _validate.array(name, x, "floating")
    if x.ndim != 3:
        raise ValueError(f"{name} must have shape {letters}; got {_validate.described(x)}")
    return x
