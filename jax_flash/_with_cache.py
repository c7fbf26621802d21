"""`flash_attention_with_cache`: append to a key-value cache and attend to it, for decoding and prefill."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash import _arguments, _cache, _cache_arguments, _cache_call
from jax_flash._attention import ScoreMod
from jax_flash._block_kinds import MaskMod
from jax_flash._cache import KVCache, PagedKVCache
from jax_flash._cache_call import CacheArguments, CacheCall
from jax_flash._validate import short

Cache = TypeVar("Cache", KVCache, PagedKVCache)


def flash_attention_with_cache(
    query: ArrayLike,
    cache: Cache,
    key: ArrayLike | None = None,
    value: ArrayLike | None = None,
    *,
    scale: float | jax.Array | None = None,
    is_causal: bool = True,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    rotary_cos: ArrayLike | None = None,
    rotary_sin: ArrayLike | None = None,
    rotary_interleaved: bool = False,
    layer: ArrayLike | None = None,
    num_splits: int | None = None,
    return_residual: bool = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Any:
    """Attention of the last queries of each sequence to all that a cache holds of it.

    Given `key` and `value`, they are rotated, appended to the cache and attended to. The results are those of
    `cache.append`, then `flash_attention` with `key_value_seq_lengths=cache.lengths`: the T queries are the
    last of their sequence. Not differentiable.

    Under `jit`, a cache that is donated, or a loop's carry, is changed in place. `T = 1` is a step of
    decoding; more are a chunk of a prompt, or speculative decoding.

    Letters: `B` sequences, `T` queries of each, `N` query heads, `K` key heads (`N % K == 0`), `H` head dim
    of queries and keys, `V` head dim of values.

    Args:
      query: `(B, T, N, H)`, floating.
      cache: a `KVCache` or `PagedKVCache`, of query's dtype or of float8_e4m3fn. A length beyond its capacity
        counts as the capacity.
      key: `(B, T_new, K, H)`, query's dtype; goes with value.
      value: `(B, T_new, K, V)`, query's dtype.
      scale: of the logits; `1 / sqrt(H)` by default. A traced one multiplies query, rounded once more.
      is_causal: query t sees the keys up to its own position, `length - T + t`; length is that after the
        append.
      local_window_size: `(left, right)`, keys that a query sees on either side of its position. None or -1 on
        a side is unbounded; an int w means `(w, w)`.
      logits_soft_cap: c > 0: logits x become `c * tanh(x / c)`; None for no cap.
      alibi_slopes: `(N,)` or `(B, N)`, floating: `slope * |distance|` is subtracted from logits.
      sinks: `(N,)`, floating: for each query head, a logit that takes part in the sum and has no value.
      rotary_cos, rotary_sin: `(positions, R / 2)`, floating, R ≤ H: queries and new keys are rotated at their
        positions by `apply_rotary`. The cache holds keys that are rotated. A position that these lack gives
        NaN.
      rotary_interleaved: column 2i is paired with column 2i + 1; by default column i with i + R / 2.
      layer: an int32 scalar, the layer whose cache it is; for a cache of all layers.
      num_splits: in how many parts at most a sequence's keys are attended to at once; None for as many as
        keep the GPU busy. It changes rounding and time, and nothing else.
      return_residual: return lse beside the output.
      score_mod: `(score, batch, head, query_index, key_index) -> score`, as `flash_attention` takes it. Both
        indices are positions in the sequence: query t is at `length - T + t`, with the length after the
        append. So a function that a model was trained with decodes as it is.
      mask_mod: `(batch, head, query_index, key_index) -> bool`, True attends; of the same indices. It may be
        a mask of `jax_flash.masks`: an array of tokens in one has an element for each position, up to the
        cache's capacity. A query sees what the mask, is_causal and the window all let it see. These two skip
        blocks of keys, and the mask skips none.
      implementation: "cuda", "pallas" or "xla", or a sequence of them tried in order; None for the fastest
        that supports the call on this device.

    Returns:
      `(out, cache)`, or `((out, lse), cache)` with `return_residual`: out `(B, T, N, V)` in query's dtype,
      lse `(B, T, N)` in float32, or in float64 for float64 arrays, and the cache after the append. A query
      that sees no key gives out 0 and lse −inf.

    Raises:
      TypeError: an argument is of the wrong dtype or kind.
      ValueError: an argument has a shape or value that doesn't fit.
      NotImplementedError: no implementation that was named can run the call; or it is differentiated.

    References:
      Flash-Decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html); PagedAttention
      (https://arxiv.org/abs/2309.06180); rotary embeddings (https://arxiv.org/abs/2104.09864).
    """
    call, checked = prepare(
        query,
        cache,
        key,
        value,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        layer=layer,
        num_splits=num_splits,
        return_residual=return_residual,
        score_mod=score_mod,
        mask_mod=mask_mod,
    )
    out, lse, key_after, value_after = _cache_call.attend(call, implementation)
    results = (out, jnp.swapaxes(lse, -1, -2)) if call.spec.attention.return_residual else out
    if call.operands.new_key is None:
        return results, cache
    lengths = checked.lengths_after(call.operands)
    changed = {"key": key_after, "value": value_after, "lengths": lengths}
    return results, cache.with_arrays(dataclasses.replace(cache.arrays(), **changed))


def prepare(
    query: Any,
    cache: Any,
    key: Any = None,
    value: Any = None,
    *,
    is_causal: Any = True,
    local_window_size: Any = None,
    layer: Any = None,
    **options: Any,
) -> tuple[CacheCall, _cache_arguments.CheckedCache]:
    """The checked call, and its checked cache."""
    if not isinstance(cache, KVCache | PagedKVCache):
        raise TypeError(f"cache must be a KVCache or a PagedKVCache; got {short(cache)}")
    names = _cache.NAMES if isinstance(cache, KVCache) else _cache.PAGED_NAMES
    checked = _cache_arguments.cache(cache.arrays(), layer, names)
    if (key is None) != (value is None):
        given, absent = ("key", "value") if value is None else ("value", "key")
        raise ValueError(f"{given} goes with {absent}; got {absent}=None")
    arguments = CacheArguments(
        query,
        checked.operands,
        names,
        window=_arguments.window(is_causal, local_window_size),
        new=None if key is None else _cache_arguments.appended(key, value, checked, names),
        **options,
    )
    return _cache_call.prepare(arguments), checked
