"""Checks of lengths, segment ids and offsets: integers that say where sequences lie.

They come back as int32, whatever integers they were, and mean the same: JAX wraps what it narrows, so they
are clipped or compared first.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import _validate
from jax_flash._validate import described, short

Integers = jax.Array | np.ndarray


def lengths(name: str, value: Any, shapes: _validate.Shapes, most: int) -> jax.Array:
    """Lengths in tokens, an array or a list, clipped to [0, most]."""
    value = _validate.listed(name, value)
    return _validate.clipped(_validate.shaped_unconverted(name, value, shapes, "integer"), most)


def segment_ids(
    query_ids: Any, key_value_ids: Any, query_shape: tuple[int, ...], key_value_shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """The segment ids of queries and keys, equal exactly where they were equal."""
    names = "query_segment_ids", "key_value_segment_ids"
    if query_ids is None or key_value_ids is None:
        given, absent = names if key_value_ids is None else names[::-1]
        raise ValueError(f"{given} goes with {absent}; got the first alone")
    query_ids = _validate.shaped_unconverted(names[0], query_ids, {"(*B, T)": query_shape}, "integer")
    key_value_ids = _validate.shaped_unconverted(
        names[1], key_value_ids, {"(*B, S)": key_value_shape}, "integer"
    )
    if _fits_int32(query_ids) and _fits_int32(key_value_ids):
        return _int32(query_ids), _int32(key_value_ids)
    return ranks(query_ids, key_value_ids)


def ranks(query_ids: Integers, key_value_ids: Integers) -> tuple[jax.Array, jax.Array]:
    """For each id, how many distinct smaller ones there are among the queries and keys of its batch row."""
    words = (
        # NumPy's on the host, where they have all their bits; JAX's in a `jit`, with its constants.
        jax.jit(_words)(ids) if isinstance(ids, jax.Array) else _words(ids)
        for ids in (query_ids, key_value_ids)
    )
    return _ranks(*words)


def _fits_int32(ids: Integers) -> bool:
    info = jnp.iinfo(ids.dtype)
    if info.bits < 32 or ids.dtype == jnp.int32 or ids.size == 0:
        return True
    if isinstance(ids, jax.Array):
        return False
    return -_validate.INT32_MAX <= int(ids.min()) and int(ids.max()) <= _validate.INT32_MAX


def _int32(x: Integers) -> jax.Array:
    if isinstance(x, jax.Array):
        return x if x.dtype == jnp.int32 else x.astype(jnp.int32)
    return jnp.asarray(x.astype(np.int32))


Words = tuple[Integers, Integers, Integers]


@jax.jit
def _ranks(query_words: Words, key_value_words: Words) -> tuple[jax.Array, jax.Array]:
    """`ranks` of ids as words."""
    words = [jnp.concatenate(pair, axis=-1) for pair in zip(query_words, key_value_words, strict=True)]
    if words[0].size == 0:
        return jnp.zeros(query_words[0].shape, jnp.int32), jnp.zeros(key_value_words[0].shape, jnp.int32)
    place = jax.lax.broadcasted_iota(jnp.int32, words[0].shape, words[0].ndim - 1)
    *words, place = jax.lax.sort((*words, place), num_keys=len(words))
    is_new = functools.reduce(operator.or_, (x[..., 1:] != x[..., :-1] for x in words))
    is_new = jnp.pad(is_new, [(0, 0)] * (is_new.ndim - 1) + [(1, 0)])
    _, ranks = jax.lax.sort((place, jnp.cumsum(is_new, axis=-1, dtype=jnp.int32)), num_keys=1)
    queries = query_words[0].shape[-1]
    return ranks[..., :queries], ranks[..., queries:]


def _words(ids: Integers) -> Words:
    """Of each id: whether it is at least 0, its upper half and its lower half.

    In this order they compare as the integers do, whatever the dtype of each.
    """
    upper = ids >> 32 if jnp.iinfo(ids.dtype).bits > 32 else -(ids < 0).astype(np.int32)
    return ids >= 0, upper.astype(np.uint32), ids.astype(np.uint32)


def offsets(name: str, value: Any, tokens: int, longest: int, longest_name: str) -> jax.Array:
    """Where varlen sequences start, `(B + 1,)`, within [0, tokens].

    Offsets whose values are known are checked against the tokens and the longest length. Traced ones are
    clipped, so that nothing is read out of bounds.
    """
    x = _validate.unconverted(name, value, "integer")
    if x.ndim != 1 or x.size < 1:
        raise ValueError(f"{name} must have shape (B + 1,); got {described(x)}")
    values = _validate.known(x)
    if values is None:
        return _validate.clipped(x, tokens)
    _check_offsets(name, values, tokens, longest, longest_name)
    return _int32(x)


def _check_offsets(name: str, values: np.ndarray, tokens: int, longest: int, longest_name: str) -> None:
    first, last = int(values[0]), int(values[-1])
    is_ascending = bool(np.all(values[1:] >= values[:-1]))
    if first != 0 or not is_ascending or last > tokens:
        advice = ""
        if values.min() >= 0 and sum(values.tolist()) <= tokens:
            advice = " (if these are lengths: pass their cumulative sum, with 0 in front)"
        raise ValueError(
            f"{name} must ascend from 0 to at most {tokens}, the number of tokens; "
            f"got {short(values.tolist())}{advice}"
        )
    needed = int(np.max(values[1:] - values[:-1], initial=0))
    if needed > longest:
        raise ValueError(
            f"{longest_name} must be at least {needed}, the longest sequence of {name}; got {short(longest)}"
        )
