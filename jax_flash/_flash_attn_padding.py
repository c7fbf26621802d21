"""`unpad_input` and `pad_input`: from a padded batch to packed tokens, and back."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from jax_flash import _settings, _validate


@_settings.as_written
def unpad_input(
    hidden_states: ArrayLike,
    attention_mask: ArrayLike,
    unused_mask: ArrayLike | None = None,
    *,
    size: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, int, jax.Array]:
    """The tokens of a padded batch that a mask selects, packed one behind the other.

    Args:
      hidden_states: `(batch, seqlen, …)`.
      attention_mask: `(batch, seqlen)`, bool or integer: not 0 selects the token.
      unused_mask: the same: tokens that get room too, but don't count in seqused.
      size: how many tokens to return, a Python int; by default as many as are selected. Under `jit`,
        where that number is not known, size is needed: fewer are filled up with zeros, and what is
        more is cut off.

    Returns:
      hidden_states: `(total, …)`, total being size where that is given.
      indices: int32 `(total,)`, of the tokens in `(batch * seqlen,)`; batch * seqlen where filled up.
      cu_seqlens: int32 `(batch + 1,)`, where each sequence starts, and where the last ends.
      max_seqlen_in_batch: int, the longest sequence; seqlen, which bounds it, where the mask is traced.
      seqused: int32 `(batch,)`, tokens selected by attention_mask alone.

    Raises:
      TypeError, ValueError: a mask's dtype or shape doesn't fit, or size is missing under `jit`.
    """
    hidden_states = _validate.array("hidden_states", hidden_states, "any")
    if hidden_states.ndim < 2:
        raise ValueError(
            f"hidden_states must have shape (batch, seqlen, …); got {_validate.described(hidden_states)}"
        )
    batch, seqlen = hidden_states.shape[:2]
    used = _token_mask("attention_mask", attention_mask, (batch, seqlen))
    selected = used if unused_mask is None else used | _token_mask("unused_mask", unused_mask, used.shape)
    is_traced = isinstance(selected, Tracer)
    if size is not None:
        size = _validate.size("size", size)
        if size > _validate.INT32_MAX:
            raise ValueError(f"size must be at most {_validate.INT32_MAX}; got {_validate.short(size)}")
    elif is_traced:
        raise ValueError("size must be an int when attention_mask is traced, as under jit; got None")
    else:
        size = _fetched(jnp.sum(selected, dtype=jnp.int32))
    tokens, indices, offsets, longest, seqused = _unpad(hidden_states, selected, used, size)
    return tokens, indices, offsets, seqlen if is_traced else _fetched(longest), seqused


# In a `jit`: outside of one, operations send constants to the device, which a transfer guard refuses.
@functools.partial(jax.jit, static_argnums=3)
def _unpad(
    hidden_states: jax.Array, selected: jax.Array, used: jax.Array, size: int
) -> tuple[jax.Array, ...]:
    """What `unpad_input` returns, with the longest length as an array."""
    batch, seqlen = selected.shape
    lengths = jnp.sum(selected, axis=1, dtype=jnp.int32)
    (indices,) = jnp.nonzero(selected.ravel(), size=size, fill_value=batch * seqlen)
    tokens = hidden_states.reshape(batch * seqlen, *hidden_states.shape[2:])
    return (
        tokens.at[indices].get(mode="fill", fill_value=0),
        indices.astype(jnp.int32),
        jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)]),
        jnp.max(lengths, initial=0),
        jnp.sum(used, axis=1, dtype=jnp.int32),
    )


@_settings.as_written
def pad_input(hidden_states: ArrayLike, indices: ArrayLike, batch: int, seqlen: int) -> jax.Array:
    """The inverse of `unpad_input`: packed tokens back in a padded batch, zeros elsewhere.

    Args:
      hidden_states: `(total, …)`.
      indices: `(total,)`, integer, from `unpad_input`; batch * seqlen and above are left out.
      batch: Python int.
      seqlen: Python int.

    Returns:
      `(batch, seqlen, …)`.
    """
    hidden_states = _validate.array("hidden_states", hidden_states, "any")
    positions = _validate.unconverted("indices", indices, "integer")
    if positions.ndim != 1 or hidden_states.shape[:1] != positions.shape:
        raise ValueError(
            "hidden_states and indices must have shapes (total, …) and (total,); "
            f"got {_validate.described(hidden_states)} and {_validate.described(positions)}"
        )
    batch, seqlen = _validate.size("batch", batch), _validate.size("seqlen", seqlen)
    if batch * seqlen > _validate.INT32_MAX:
        raise ValueError(
            f"batch * seqlen must be at most {_validate.INT32_MAX}; "
            f"got {_validate.short(batch)} and {_validate.short(seqlen)}"
        )
    positions = _validate.clipped(positions, batch * seqlen, least=-_validate.INT32_MAX)
    return _pad(hidden_states, positions, batch, seqlen)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _pad(hidden_states: jax.Array, positions: jax.Array, batch: int, seqlen: int) -> jax.Array:
    rest = hidden_states.shape[1:]
    tokens = jnp.zeros((batch * seqlen, *rest), hidden_states.dtype)
    return tokens.at[positions].set(hidden_states, mode="drop").reshape(batch, seqlen, *rest)


def _token_mask(name: str, mask: Any, shape: tuple[int, ...]) -> jax.Array:
    mask = _validate.shaped_unconverted(name, mask, {"(batch, seqlen)": shape}, "bool or integer")
    return jnp.asarray(mask.astype(bool))


def _fetched(x: jax.Array) -> int:
    """A number that becomes a shape. The device is asked for it explicitly, which a transfer guard allows."""
    return int(jax.device_get(x))
