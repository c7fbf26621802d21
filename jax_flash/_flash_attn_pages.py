"""Varlen sequences whose keys and values are in pages: `flash_attn_varlen_func` with a block_table."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import _cache_arguments, _cache_call, _settings, _validate
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
    table = _validate.unconverted("block_table", block_table, "integer")
    q = _validate.array("q", arguments.query, "floating")
    if q.ndim != 3:
        raise ValueError(f"q must have shape (total_q, nheads, headdim); got {described(q)}")
    if _validate.number("dropout_p", arguments.dropout_rate) != 0:
        raise NotImplementedError(
            f"dropout_p must be 0 with a block_table; got {short(arguments.dropout_rate)}"
        )
    _validate.flag("deterministic", arguments.deterministic)
    k = _validate.array("k", arguments.key, "floating")
    if k.ndim != 4:
        raise ValueError(
            "k must have shape (num_blocks, page_block_size, nheads_k, headdim) with a block_table; "
            f"got {described(k)}"
        )
    offsets = _offsets("cu_seqlens_q", sequences.cu_seqlens_q)
    of_keys = _offsets("cu_seqlens_k", sequences.cu_seqlens_kv)
    _validate.size("max_seqlen_q", sequences.max_seqlen_q)
    _validate.size("max_seqlen_k", sequences.max_seqlen_kv)
    B = offsets.shape[0] - 1
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
    lengths = _lengths(_validate.clipped(of_keys, _validate.INT32_MAX), capacity)
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
            query_offsets=_ascending(_validate.clipped(offsets, q.shape[0])),
            return_residual=arguments.return_residual,
        )
    )
    out, lse, *_ = _cache_call.attend(call, implementation=None)
    out = jnp.squeeze(out, 0)
    return (out, jnp.squeeze(lse, 0), None) if call.spec.attention.return_residual else out


def _offsets(name: str, x: Any) -> Any:
    x = _validate.unconverted(name, _validate.listed(name, x), "integer")
    if x.ndim != 1 or x.shape[0] == 0:
        raise ValueError(f"{name} must have shape (batch_size + 1,); got {described(x)}")
    return x


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
