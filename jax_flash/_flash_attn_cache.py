"""`flash_attn_with_kvcache` of the `flash_attn` package."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash import _arguments, _cache_arguments, _cache_call, _validate
from jax_flash._arguments import Names
from jax_flash._cache_arguments import CacheArrays
from jax_flash._cache_call import CacheArguments
from jax_flash._cache_spec import CacheOperands, cache_sizes
from jax_flash._validate import described, short

_NAMES = Names(
    query="q",
    key="k_cache",
    value="v_cache",
    lengths="cache_seqlens",
    page_table="block_table",
    new_key="k",
    new_value="v",
    left_padding="cache_leftpad",
    scale="softmax_scale",
    logits_soft_cap="softcap",
    return_residual="return_softmax_lse",
)


def flash_attn_with_kvcache(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    k: ArrayLike | None = None,
    v: ArrayLike | None = None,
    rotary_cos: ArrayLike | None = None,
    rotary_sin: ArrayLike | None = None,
    cache_seqlens: int | ArrayLike | None = None,
    cache_batch_idx: ArrayLike | None = None,
    cache_leftpad: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    softmax_scale: float | jax.Array | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: ArrayLike | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention to a key-value cache, after appending `k` and `v` to it. Not differentiable.

    In place of updating the caches, it returns them. Under `jit`, caches that are donated, or a loop's carry,
    are changed in place.

    Args:
      q: `(batch_size, seqlen, nheads, headdim)`, floating.
      k_cache: `(batch_size_cache, seqlen_cache, nheads_k, headdim)`, or with a block_table
        `(num_blocks, page_block_size, nheads_k, headdim)`, of any page size; q's dtype.
      v_cache: as k_cache, with headdim_v.
      k, v: `(batch_size, seqlen_new, nheads_k, …)`: appended from cache_seqlens on. What doesn't fit is
        dropped.
      rotary_cos, rotary_sin: `(seqlen_ro, rotary_dim / 2)`: k is rotated at cache_seqlens, cache_seqlens + 1,
        and so on; so is q if causal or window_size limits what it sees, else all of it at cache_seqlens. A
        size of the window that is at least the cache's capacity limits nothing.
      cache_seqlens: an int, or integers `(batch_size,)`: the lengths before the append; None for the whole
        cache.
      cache_batch_idx: `(batch_size,)`, integer: which sequences of the cache they are; by default the first.
      cache_leftpad: `(batch_size,)`, integer: the keys before it are hidden.
      block_table: `(batch_size, max_num_blocks_per_seq)`, integer. One outside of the cache is no page: its
        keys are hidden, and what would be appended to it is dropped.
      softmax_scale: of the logits; `1 / sqrt(headdim)` by default.
      causal: row i sees the keys `j <= i + seqlen_k - seqlen_q`: aligned to the bottom right.
      window_size: `(left, right)` around that diagonal; -1 is unbounded.
      softcap: logits x become `softcap * tanh(x / softcap)`; 0 for no cap.
      rotary_interleaved: pair columns 0 and 1, 2 and 3, …; else 0 and rotary_dim / 2, ….
      alibi_slopes: `(nheads,)` or `(batch_size, nheads)`: `-slope * |i + seqlen_k - seqlen_q - j|` is added
        to the logits.
      num_splits: in how many parts at most a sequence's keys are attended to at once; 0 for as many as keep
        the GPU busy.
      return_softmax_lse: return softmax_lse too.

    Returns:
      out `(batch_size, seqlen, nheads, headdim_v)` in q's dtype. With `return_softmax_lse` softmax_lse
      follows, float32 `(batch_size, nheads, seqlen)`, and where k and v are given k_cache and v_cache.

    Raises:
      TypeError, ValueError: as `jax_flash.flash_attention_with_cache`, when traced.
    """
    q = _validate.array("q", q, "floating")
    if q.ndim != 4:
        raise ValueError(f"q must have shape (batch_size, seqlen, nheads, headdim); got {described(q)}")
    cache = _cache(q.shape[0], k_cache, v_cache, cache_seqlens, cache_batch_idx, block_table)
    new = _new(k, v, cache)
    if new is None and rotary_cos is not None:
        raise ValueError("rotary_cos goes with k and v, which it rotates; got it alone")
    if new is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens must say where k and v go; got None")
    capacity = cache_sizes(CacheOperands(q, **cache)).S
    window = _arguments.official_window(window_size, causal, capacity)
    cap = _validate.number("softcap", softcap)
    arguments = CacheArguments(
        q,
        cache,
        _NAMES,
        window=window,
        new=new,
        left_padding=_validate.listed("cache_leftpad", cache_leftpad),
        scale=softmax_scale,
        logits_soft_cap=cap if cap > 0 else None,
        alibi_slopes=alibi_slopes,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        query_positions="first" if window.unbounded else "appended",
        num_splits=_validate.size("num_splits", num_splits) or None,
        return_residual=return_softmax_lse,
    )
    call = _cache_call.prepare(arguments)
    out, lse, key, value = _cache_call.attend(call, implementation=None)
    results = (out, lse) if call.spec.attention.return_residual else (out,)
    if call.operands.new_key is not None:
        results = (*results, key, value)
    return results if len(results) > 1 else out


def _new(k: Any, v: Any, cache: dict[str, Any]) -> tuple[jax.Array, jax.Array] | None:
    """Keys and values to append that fit the cache; None if there are none."""
    if (k is None) != (v is None):
        given, absent = ("k", "v") if v is None else ("v", "k")
        raise ValueError(f"{given} goes with {absent}; got {absent}=None")
    if k is None:
        return None
    key, value, B = cache["key"], cache["value"], cache["lengths"].shape[0]
    (K, H), V = key.shape[-2:], value.shape[-1]
    return _cache_arguments.fitting(k, v, B, K, H, V, key.dtype, _NAMES)


def _cache(
    B: int, k_cache: Any, v_cache: Any, seqlens: Any, batch_idx: Any, block_table: Any
) -> dict[str, Any]:
    """The operands of a checked cache."""
    k_cache = _validate.array("k_cache", k_cache, "floating")
    if k_cache.ndim != 4:
        raise ValueError(
            "k_cache must have shape (batch_size_cache, seqlen_cache, nheads_k, headdim), or with a "
            f"block_table (num_blocks, page_block_size, nheads_k, headdim); got {described(k_cache)}"
        )
    if block_table is None:
        sequences, capacity = k_cache.shape[:2]
    else:
        block_table = _validate.listed("block_table", block_table)
        block_table = _validate.unconverted("block_table", block_table, "integer")
        if block_table.ndim != 2 or block_table.shape[0] != B:
            raise ValueError(
                f"block_table must have shape (batch_size, max_num_blocks_per_seq) with batch_size = {B} as "
                f"in q; got {described(block_table)}"
            )
        if batch_idx is not None:
            raise ValueError(
                "cache_batch_idx must be None with a block_table, whose rows may be in any order; "
                f"got {short(batch_idx)}"
            )
        sequences, capacity = B, block_table.shape[1] * k_cache.shape[1]
    # The checks of a cache ask for a length of each sequence that it has.
    anything = _filled(sequences, 0)
    arrays = CacheArrays(k_cache, v_cache, anything, block_table)
    checked = _cache_arguments.cache(arrays, None, _NAMES)
    index = None
    if batch_idx is not None:
        batch_idx = _validate.listed("cache_batch_idx", batch_idx)
        index = _validate.shaped_unconverted("cache_batch_idx", batch_idx, {"(batch_size,)": (B,)}, "integer")
        index = _validate.clipped(index, sequences, _validate.NO_INDEX)
    elif sequences < B:
        raise ValueError(f"k_cache must hold at least {B} sequences, as q does; got {described(k_cache)}")
    elif sequences > B:
        index = jnp.arange(B, dtype=jnp.int32)
    return checked.operands | {"lengths": _lengths(seqlens, B, capacity), "batch_index": index}


def _lengths(seqlens: Any, B: int, capacity: int) -> jax.Array:
    if seqlens is None:
        return _filled(B, capacity)
    if not hasattr(seqlens, "ndim") and not isinstance(seqlens, list | tuple):
        return _filled(B, min(_validate.size("cache_seqlens", seqlens), capacity))
    seqlens = _validate.listed("cache_seqlens", seqlens)
    seqlens = _validate.shaped_unconverted(
        "cache_seqlens", seqlens, {"()": (), "(batch_size,)": (B,)}, "integer"
    )
    return jnp.broadcast_to(_validate.clipped(seqlens, capacity), (B,))


def _filled(sequences: int, value: int) -> jax.Array:
    if isinstance(sequences, int):
        return jax.device_put(np.full(sequences, value, np.int32))
    return jnp.full(sequences, value, jnp.int32)  # of symbolic size, so in a program
