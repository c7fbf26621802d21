"""Varlen sequences whose keys and values are in pages: `flash_attn_varlen_func` with a block_table."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import (
    _arguments,
    _cache_arguments,
    _cache_call,
    _sequence_arguments,
    _settings,
    _validate,
)
from jax_flash._arguments import Names
from jax_flash._cache_arguments import CacheArrays
from jax_flash._cache_call import CacheArguments
from jax_flash._call import Arguments
from jax_flash._validate import described, short
from jax_flash._varlen import VarlenSequences

_NAMES = Names(
    query="q",
    key="k",
    value="v",
    lengths="cu_seqlens_k",
    page_table="block_table",
    scale="softmax_scale",
    logits_soft_cap="softcap",
    return_residual="return_attn_probs",
)


def attend(arguments: Arguments, sequences: VarlenSequences, block_table: Any) -> Any:
    """`out (total_q, nheads, headdim_v)`; with `return_residual` the tuple `(out, lse, None)`, lse float32
    `(nheads, total_q)`."""
    table = _validate.unconverted("block_table", _validate.listed("block_table", block_table), "integer")
    q = _validate.array("q", arguments.query, "floating")
    if q.ndim != 3:
        raise ValueError(f"q must have shape (total_q, nheads, headdim); got {described(q)}")
    _check_dropout(arguments)
    _validate.flag("deterministic", arguments.deterministic)
    k = _validate.array("k", arguments.key, "floating")
    if k.ndim != 4:
        raise ValueError(
            "k must have shape (num_blocks, page_block_size, nheads_k, headdim) with a block_table; "
            f"got {described(k)}"
        )
    most_queries = _validate.size("max_seqlen_q", sequences.max_seqlen_q)
    most_keys = _validate.size("max_seqlen_k", sequences.max_seqlen_kv)
    of_queries = _validate.listed("cu_seqlens_q", sequences.cu_seqlens_q)
    offsets = _sequence_arguments.offsets(
        "cu_seqlens_q", of_queries, q.shape[0], most_queries, "max_seqlen_q"
    )
    B = offsets.shape[0] - 1
    of_keys = _validate.listed("cu_seqlens_k", sequences.cu_seqlens_kv)
    of_keys = _validate.unconverted("cu_seqlens_k", of_keys, "integer")
    if of_keys.shape != offsets.shape:
        raise ValueError(
            f"cu_seqlens_k must have shape (batch_size + 1,) = {offsets.shape} as cu_seqlens_q; "
            f"got {described(of_keys)}"
        )
    if table.ndim != 2 or table.shape[0] != B:
        raise ValueError(
            f"block_table must have shape (batch_size, max_num_blocks_per_seq) with batch_size = {B} as in "
            f"cu_seqlens_q; got {described(table)}"
        )
    capacity = min(table.shape[1] * k.shape[1], _validate.INT32_MAX)
    lengths = _lengths(_key_offsets(of_keys, capacity, most_keys), capacity)
    checked = _cache_arguments.cache(CacheArrays(k, arguments.value, lengths, table), None, _NAMES)
    call = _cache_call.prepare(
        CacheArguments(
            jnp.expand_dims(q, 0),
            checked.operands,
            _NAMES,
            window=arguments.window,
            scale=arguments.scale,
            logits_soft_cap=arguments.logits_soft_cap,
            alibi_slopes=arguments.alibi_slopes,
            query_offsets=_ascending(offsets),
            return_residual=arguments.return_residual,
        )
    )
    out, lse, *_ = _cache_call.attend(call, implementation=None)
    out = jnp.squeeze(out, 0)
    return (out, jnp.squeeze(lse, 0), None) if call.spec.attention.return_residual else out


def _check_dropout(arguments: Arguments) -> None:
    """Refuses dropout, and its arguments as the function without pages does."""
    rate = _arguments.dropout_rate("dropout_p", arguments.dropout_rate)
    if arguments.dropout_key is not None:
        _arguments.random_key("dropout_key", arguments.dropout_key)
    if rate != 0:
        raise NotImplementedError(
            f"dropout_p must be 0 with a block_table; got {short(arguments.dropout_rate)}"
        )


def _key_offsets(offsets: jax.Array | np.ndarray, capacity: int, longest: int) -> jax.Array:
    """cu_seqlens_k as int32. Values that are known are checked; traced lengths are clipped afterwards."""
    values = _validate.known(offsets)
    if values is None:
        return _validate.clipped(offsets, _validate.INT32_MAX)
    room = min((len(values) - 1) * capacity, _validate.INT32_MAX)
    checked = _sequence_arguments.offsets("cu_seqlens_k", offsets, room, longest, "max_seqlen_k")
    needed = int(np.max(values[1:] - values[:-1], initial=0))
    if needed > capacity:
        raise ValueError(
            f"cu_seqlens_k must leave each sequence at most {capacity} keys, for which a row of block_table "
            f"has pages; got {short(values.tolist())}"
        )
    return checked


@jax.jit
@_settings.as_written
def _ascending(offsets: jax.Array) -> jax.Array:
    """Offsets from 0 on, ascending whatever the caller's are."""
    return jax.lax.cummax(jnp.where(jnp.arange(offsets.shape[0]) == 0, 0, offsets))


@functools.partial(jax.jit, static_argnums=1)
@_settings.as_written
def _lengths(offsets: jax.Array, most: int) -> jax.Array:
    """How many keys each sequence has, at most `most`."""
    return jnp.clip(jnp.diff(offsets), 0, most)
