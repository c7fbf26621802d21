"""The two alignments of queries with keys: the last of each together, or query i with key i.

Implementations know the first alone, to the bottom right. Calls that are aligned to the top left, as `jax.nn`
and Flax have it, are brought to it here.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from jax_flash import _sequence_arguments, _validate

if TYPE_CHECKING:  # which imports this module
    from jax_flash._call import Arguments

Alignment = Literal["bottom_right", "top_left"]
BOTTOM_RIGHT: Alignment = "bottom_right"
TOP_LEFT: Alignment = "top_left"

# Segment ids of padding, which never meet. They are greater than others, so that sorted ids stay sorted.
_QUERY_PADDING, _KEY_PADDING = _validate.INT32_MAX, _validate.INT32_MAX - 1


def to_bottom_right(arguments: Arguments) -> Arguments:
    """Arguments of either alignment as arguments that are aligned to the bottom right.

    query, key and value have passed their checks. Lengths leave the alignment to the top left alone, but move
    the other. So where something is aligned, lengths become segments: padding gets ids of its own.
    """
    if _validate.one_of("alignment", arguments.alignment, (BOTTOM_RIGHT, TOP_LEFT)) == BOTTOM_RIGHT:
        return arguments
    arguments = dataclasses.replace(arguments, alignment=BOTTOM_RIGHT)
    T, S = arguments.query.shape[-3], arguments.key.shape[-3]
    if arguments.alibi_slopes is not None and T != S:
        raise ValueError(
            'alibi_slopes must be None with alignment="top_left" where there are not as many keys as queries '
            f"(a bias may hold distances); got {_validate.short(arguments.alibi_slopes)} with {T} queries "
            f"and {S} keys"
        )
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
        return _zeros(shapes[0]), _zeros(shapes[1])
    return _sequence_arguments.ranks(*_sequence_arguments.segment_ids(*given, *shapes))


def _padded(name: str, lengths: Any, ids: jax.Array, padding: int) -> jax.Array:
    """`ids (*B, size)`, but `padding` from the length on."""
    if lengths is None:
        return ids
    *batch, size = ids.shape
    return _where_within(
        _sequence_arguments.lengths(name, lengths, {"(*B,)": tuple(batch)}, size), ids, padding
    )


@functools.partial(jax.jit, static_argnums=2)
def _where_within(lengths: jax.Array, ids: jax.Array, padding: int) -> jax.Array:
    position = jax.lax.broadcasted_iota(jnp.int32, ids.shape, ids.ndim - 1)
    return jnp.where(position < jnp.expand_dims(lengths, -1), ids, padding)


# In a `jit`: outside of one it sends its constant to the device, which a transfer guard refuses.
@functools.partial(jax.jit, static_argnums=0)
def _zeros(shape: tuple[int, ...]) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)
