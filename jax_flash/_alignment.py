"""Alignment to the top left, query i at key i, as `jax.nn` and Flax have it.

`prepare` knows the alignment to the bottom right alone. `from_top_left` brings calls of the other to it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import _sequences, _validate
from jax_flash._call import Arguments

# Segment ids of padding, which never meet. They are greater than others, so that sorted ids stay sorted.
_QUERY_PADDING, _KEY_PADDING = _validate.INT32_MAX, _validate.INT32_MAX - 1


def from_top_left(arguments: Arguments) -> Arguments:
    """Arguments aligned to the top left as arguments for `prepare`, which aligns to the bottom right.

    query, key and value have passed their checks. Lengths leave this alignment alone, but move that of
    `prepare`. So where something is aligned, lengths become segments: padding gets ids of its own. ALiBi
    slopes need as many queries as keys.
    """
    T, S = arguments.query.shape[-3], arguments.key.shape[-3]
    moved = dataclasses.replace(arguments, window=arguments.window.from_top_left(T, S))
    is_aligned = not arguments.window.unbounded or arguments.alibi_slopes is not None
    if not is_aligned or (arguments.query_seq_lengths is None and arguments.key_value_seq_lengths is None):
        return moved
    queries, keys = _segment_ids(arguments)
    return dataclasses.replace(
        moved,
        query_seq_lengths=None,
        key_value_seq_lengths=None,
        query_segment_ids=_padded("query_seq_lengths", arguments.query_seq_lengths, queries, _QUERY_PADDING),
        key_value_segment_ids=_padded(
            "key_value_seq_lengths", arguments.key_value_seq_lengths, keys, _KEY_PADDING
        ),
    )


def _segment_ids(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    """The segment ids of the tokens, int32 less than those of padding: `(*B, T)` and `(*B, S)`."""
    shapes = arguments.query.shape[:-2], arguments.key.shape[:-2]
    given = arguments.query_segment_ids, arguments.key_value_segment_ids
    if all(x is None for x in given):
        return jnp.zeros(shapes[0], jnp.int32), jnp.zeros(shapes[1], jnp.int32)
    return _sequences.ranks(*_sequences.segment_ids(*given, *shapes))


def _padded(name: str, lengths: Any, ids: jax.Array, padding: int) -> jax.Array:
    """`ids (*B, size)`, but `padding` from the length on."""
    if lengths is None:
        return ids
    *batch, size = ids.shape
    return _where_within(_sequences.lengths(name, lengths, {"(*B,)": tuple(batch)}, size), ids, padding)


@functools.partial(jax.jit, static_argnums=2)
def _where_within(lengths: jax.Array, ids: jax.Array, padding: int) -> jax.Array:
    position = jax.lax.broadcasted_iota(jnp.int32, ids.shape, ids.ndim - 1)
    return jnp.where(position < jnp.expand_dims(lengths, -1), ids, padding)
