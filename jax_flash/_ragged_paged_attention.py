"""`ragged_paged_attention`: prefill and decoding of many sequences in one call, over a paged cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash import _cache_call, _settings, _validate
from jax_flash._arguments import Names
from jax_flash._cache_call import CacheArguments
from jax_flash._mask import Window
from jax_flash._validate import described, short

_NAMES = Names(query="q", key="kv_pages", scale="sm_scale", logits_soft_cap="soft_cap")


def ragged_paged_attention(
    q: ArrayLike,
    kv_pages: ArrayLike,
    kv_lens: ArrayLike,
    page_indices: ArrayLike,
    cu_q_lens: ArrayLike,
    num_seqs: ArrayLike,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    implementation: Any = None,
) -> jax.Array:
    """Causal attention of packed queries to the pages of their sequences; the contract of JAX's TPU kernel.

    Sequence i has the queries from `cu_q_lens[i]` up to `cu_q_lens[i + 1]`, which are the last of its
    `kv_lens[i]` tokens: one of them in decoding, more of a prompt. Their keys and values are in the pages
    already. Key j is row `j % page` of page `page_indices[i, j // page]`. Not differentiable.

    Values of `cu_q_lens` and `num_seqs` that are known are checked (JAX copies those on a device to the host
    once). Traced ones are clipped, so that nothing is read out of bounds.

    Args:
      q: `(tokens, N, H)`, floating: the queries of all sequences, one after another.
      kv_pages: `(P, page, 2 · K, H)`, q's dtype or float8_e4m3fn; head 2k is key head k, and head 2k + 1 its
        values.
      kv_lens: `(max_seqs,)`, integer, in tokens.
      page_indices: `(max_seqs, pages_per_seq)`, integer. One outside of [0, P) is no page: its keys are
        hidden.
      cu_q_lens: `(max_seqs + 1,)`, integer, ascending from 0.
      num_seqs: `(1,)`, integer: how many sequences there are. What the arrays above have for others is not
        read.
      sm_scale: what logits are multiplied by: 1 by default, and not `1 / sqrt(H)`.
      sliding_window: how many keys a query sees, its own and those before it; None for all.
      soft_cap: c > 0: logits x become `c * tanh(x / c)`; None for no cap.
      k_scale, v_scale: what keys and values are multiplied by; None for 1.
      implementation: as of `flash_attention_with_cache`.

    Returns:
      `(tokens, N, H)` in q's dtype. Queries of no sequence get 0.

    Raises:
      TypeError, ValueError: an argument of another kind, dtype or shape.
      NotImplementedError: no implementation that was named can run the call; or it is differentiated.
    """
    call, v_factor = prepare(
        q,
        kv_pages,
        kv_lens,
        page_indices,
        cu_q_lens,
        num_seqs,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    out, *_ = _cache_call.attend(call, implementation)
    if v_factor != 1:
        out = _times(out, v_factor)
    return jnp.squeeze(out, 0)


def prepare(
    q: Any,
    kv_pages: Any,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    num_seqs: Any,
    *,
    sm_scale: Any = 1.0,
    sliding_window: Any = None,
    soft_cap: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> tuple[_cache_call.CacheCall, float]:
    """The checked call, and what its output is multiplied by."""
    q = _validate.array("q", q, "floating")
    pages = _validate.array("kv_pages", kv_pages, "floating or e4m3")
    if q.ndim != 3:
        raise ValueError(f"q must have shape (tokens, N, H); got {described(q)}")
    if pages.ndim != 4 or pages.shape[2] % 2 or 0 in pages.shape[1:] or pages.shape[3] != q.shape[2]:
        raise ValueError(
            f"kv_pages must have shape (P, page, 2 * K, H) with H = {q.shape[2]} as in q; "
            f"got {described(pages)}"
        )
    table = _validate.unconverted("page_indices", page_indices, "integer")
    if table.ndim != 2:
        raise ValueError(f"page_indices must have shape (max_seqs, pages_per_seq); got {described(table)}")
    P, page, _, _ = pages.shape
    sequences, capacity = table.shape[0], table.shape[1] * page
    tokens = q.shape[0]
    lengths = _validate.shaped_unconverted("kv_lens", kv_lens, {"(max_seqs,)": (sequences,)}, "integer")
    offsets = _validate.shaped_unconverted(
        "cu_q_lens", cu_q_lens, {"(max_seqs + 1,)": (sequences + 1,)}, "integer"
    )
    count = _validate.shaped_unconverted("num_seqs", num_seqs, {"(1,)": (1,)}, "integer")
    _check_known(offsets, count, sequences, tokens)
    if sliding_window is not None and _validate.integer("sliding_window", sliding_window) < 1:
        raise ValueError(f"sliding_window must be None or at least 1; got {short(sliding_window)}")
    factors = [
        1.0 if x is None else _validate.number(name, x)
        for name, x in (("k_scale", k_scale), ("v_scale", v_scale))
    ]
    arguments = CacheArguments(
        jnp.expand_dims(q, 0),
        {
            "key": pages,
            "lengths": _validate.narrowed(lengths, min(capacity, _validate.INT32_MAX)),
            "page_table": _validate.narrowed(table, P, _validate.NO_INDEX),
        },
        _NAMES,
        window=Window(None if sliding_window is None else sliding_window - 1, 0),
        scale=_validate.number("sm_scale", sm_scale) * factors[0],
        logits_soft_cap=soft_cap,
        query_offsets=_ascending(_validate.clipped(offsets, tokens), _validate.clipped(count, sequences)),
    )
    return _cache_call.prepare(arguments), factors[1]


def _check_known(
    offsets: jax.Array | np.ndarray, count: jax.Array | np.ndarray, sequences: int, tokens: int
) -> None:
    """Refuses values of `cu_q_lens` and `num_seqs` that make no sense. Traced ones can't be checked."""
    counts = _validate.known(count)
    if counts is None:
        return
    (known_count,) = counts.tolist()
    if not 0 <= known_count <= sequences:
        raise ValueError(
            f"num_seqs must be from 0 to {sequences}, the rows of page_indices; got {short(counts.tolist())}"
        )
    values = _validate.known(offsets)
    if values is None:
        return
    used = values[: known_count + 1]  # others may be anything
    if used[0] != 0 or np.any(used[1:] < used[:-1]) or used[-1] > tokens:
        raise ValueError(
            f"cu_q_lens must ascend from 0 to at most {tokens}, the tokens of q, as far as num_seqs = "
            f"{known_count} says; got {short(values.tolist())}"
        )


@jax.jit
@_settings.as_written
def _ascending(offsets: jax.Array, count: jax.Array) -> jax.Array:
    """The offsets of `count` sequences, ascending whatever the caller's are; others are empty."""
    offsets = jnp.where(jnp.arange(offsets.shape[0]) == 0, 0, offsets)
    offsets = jax.lax.cummax(offsets)
    return jnp.where(jnp.arange(offsets.shape[0]) <= count, offsets, jnp.take(offsets, count))


@functools.partial(jax.jit, static_argnums=1)
@_settings.as_written
def _times(x: jax.Array, factor: float) -> jax.Array:
    return (x.astype(jnp.promote_types(x.dtype, jnp.float32)) * factor).astype(x.dtype)
