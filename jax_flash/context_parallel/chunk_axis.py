"""All chunks of a device in one ordinary call: the axis of chunks is the last of its batch axes.

This is right if each chunk of queries sees one chunk of keys alone. The tokens of a chunk are consecutive in
the device's memory, so query, key, value and output need no copy:

    (*B, chunks * t, N, H)   as   (*B, chunks, t, N, H)

With one chunk there is no such axis.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_flash._axes import axes_of, axis_of
from jax_flash._spec import Operands
from jax_flash.context_parallel.sharded import Sharded


def split(of: Sharded, name: str, x: jax.Array) -> jax.Array:
    """`x`, of the device's queries or of its keys, with an axis of chunks."""
    if of.chunks == 1:
        return x
    tokens = _axis_of_tokens(name, x)
    parts = x.reshape(*x.shape[:tokens], of.chunks, -1, *x.shape[tokens + 1 :])
    return jnp.moveaxis(parts, tokens, x.ndim - len(axes_of(name)))


def merged(of: Sharded, name: str, x: jax.Array) -> jax.Array:
    """The inverse of `split`."""
    if of.chunks == 1:
        return x
    tokens = _axis_of_tokens(name, x)
    parts = jnp.moveaxis(x, _axis_of_chunks(name, x), tokens - 1)
    return parts.reshape(*parts.shape[: tokens - 1], -1, *parts.shape[tokens + 1 :])


def as_one_call(of: Sharded, operands_of: Callable[[int], Operands]) -> Operands:
    """The operands of the calls on each chunk as those of one call.

    What the calls share has one element along the axis of chunks. Their gradients are summed over it.
    """
    if of.chunks == 1:
        return operands_of(0)
    first, *others = (operands_of(chunk).present() for chunk in range(of.chunks))

    def together(name: str, x: jax.Array) -> jax.Array:
        axis = x.ndim - len(axes_of(name))
        if all(other[name] is x for other in others):  # no call takes a part of it
            return jnp.expand_dims(x, axis)
        return jnp.stack([x, *(other[name] for other in others)], axis)

    return Operands.of({name: together(name, x) for name, x in first.items()})


def parts(of: Sharded, name: str, x: jax.Array) -> list[jax.Array]:
    """Those of each chunk, of an operand with that axis or of its gradient.

    There is one part if the chunks share it; then no axis of tokens is longer than 1.
    """
    if of.chunks == 1:
        return [x]
    axis = _axis_of_chunks(name, x)
    return [jax.lax.index_in_dim(x, chunk, axis, keepdims=False) for chunk in range(x.shape[axis])]


def _axis_of_chunks(name: str, x: jax.Array) -> int:
    return x.ndim - len(axes_of(name)) - 1


def _axis_of_tokens(name: str, x: jax.Array) -> int:
    return axis_of(name, x, "T" if "T" in axes_of(name) else "S")
