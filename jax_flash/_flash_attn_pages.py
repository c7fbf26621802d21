"""Varlen sequences whose keys and values are in pages: `flash_attn_varlen_func` with a block_table."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import _arguments, _cache_arguments, _cache_call, _settings, _validate
from jax_flash._arguments import Names
from jax_flash._cache_arguments import CacheArrays
from jax_flash._cache_call import CacheArguments
from jax_flash._validate import described, short

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


def attend(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    block_table: Any,
    *,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    return_attn_probs: Any,
) -> Any:
    """`(total_q, nheads, headdim_v)`; with `return_attn_probs` the tuple `(out, softmax_lse, None)`."""
    table = _validate.unconverted("block_table", block_table, "integer")
    q = _validate.array("q", q, "floating")
    if q.ndim != 3:
        raise ValueError(f"q must have shape (total_q, nheads, headdim); got {described(q)}")
    if _validate.number("dropout_p", dropout_p) != 0:
        raise NotImplementedError(f"dropout_p must be 0 with a block_table; got {short(dropout_p)}")
    k = _validate.array("k", k, "floating")
    if k.ndim != 4:
        raise ValueError(
            "k must have shape (num_blocks, page_block_size, nheads_k, headdim) with a block_table; "
            f"got {described(k)}"
        )
    offsets = _offsets("cu_seqlens_q", cu_seqlens_q)
    B = offsets.shape[0] - 1
    of_keys = _offsets("cu_seqlens_k", cu_seqlens_k)
    if of_keys.shape != offsets.shape or table.ndim != 2 or table.shape[0] != B:
        raise ValueError(
            "cu_seqlens_k must have shape (batch_size + 1,) and block_table (batch_size, "
            f"max_num_blocks_per_seq) with batch_size = {B} as in cu_seqlens_q; "
            f"got {described(of_keys)} and {described(table)}"
        )
    capacity = min(table.shape[1] * k.shape[1], _validate.INT32_MAX)
    lengths = _lengths(_validate.clipped(of_keys, _validate.INT32_MAX), capacity)
    checked = _cache_arguments.cache(CacheArrays(k, v, lengths, table), None, _NAMES)
    cap = _validate.number("softcap", softcap)
    call = _cache_call.prepare(
        CacheArguments(
            jnp.expand_dims(q, 0),
            checked.operands,
            _NAMES,
            window=_arguments.official_window(window_size, causal),
            scale=softmax_scale,
            logits_soft_cap=cap if cap > 0 else None,
            alibi_slopes=alibi_slopes,
            query_offsets=_ascending(_validate.clipped(offsets, q.shape[0])),
            return_residual=return_attn_probs,
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
    """How many keys each sequence has."""
    return jnp.clip(jnp.diff(offsets), 0, most)
