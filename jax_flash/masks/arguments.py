"""Checks of what masks are made of, and how they read arrays."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash import _arguments, _validate
from jax_flash._validate import described, short

Array = jax.Array | np.ndarray

LONGEST = 2**29
"""Tokens of the longest sequence, and the largest offset. So int32 holds a position plus any distance."""

FARTHEST = 2**30
"""No query and key are as far apart. Windows, steps and sizes of chunks are clipped to it."""


def block_size(value: Any) -> tuple[int, int]:
    """Of queries and of keys."""
    queries, keys = several("block_size", value, 2)
    _check_block_size(queries, value)
    _check_block_size(keys, value)
    return queries, keys


def square_block_size(value: Any) -> int:
    """Of queries and keys alike."""
    size = positive("block_size", value)
    _check_block_size(size, value)
    return size


def _check_block_size(size: int, value: Any) -> None:
    """Indices are int32, and what divides them."""
    if size > _validate.INT32_MAX:
        raise ValueError(f"block_size must be at most {_validate.INT32_MAX}; got {short(value)}")


def positive(name: str, value: Any) -> int:
    result = _validate.integer(name, value)
    if result < 1:
        raise ValueError(f"{name} must be at least 1; got {short(value)}")
    return result


def several(name: str, value: Any, count: int) -> tuple[int, ...]:
    """A positive int for each of `count` axes, of one int or a tuple of them."""
    if not isinstance(value, tuple | list):
        return (positive(name, value),) * count
    if len(value) != count:
        raise ValueError(f"{name} must be an int or {count} of them; got {short(value)}")
    return tuple(positive(name, x) for x in value)


def window(name: str, value: Any) -> tuple[int | None, int | None]:
    """An int or a pair, as `local_window_size` of `flash_attention`: None or -1 is unbounded."""
    sides = _arguments.window_pair(name, value)
    if min(sides.left or 0, sides.right or 0) < -1:
        raise ValueError(
            f"{name} must hold sizes of at least 0, or None or -1 for unbounded; got {short(value)}"
        )
    left, right = (None if side in (None, -1) else min(side, FARTHEST) for side in (sides.left, sides.right))
    return left, right


def of_rows(name: str, value: Any, least: int = -LONGEST, advice: str = "") -> int | Array:
    """An integer from `least` to LONGEST, or an array of them, `()` or `(B,)`, which is clipped to these."""
    if isinstance(value, list | tuple):
        raise TypeError(
            f"{name} must be a Python integer, or an integer array of shape () or (B,); got {short(value)}"
            f"{advice}"
        )
    if not isinstance(value, jax.Array | np.ndarray):
        number = _validate.integer(name, value)
        if not least <= number <= LONGEST:
            raise ValueError(f"{name} must be from {least} to {LONGEST}; got {short(value)}")
        return number
    return clipped(ranked(name, value, {"()": 0, "(B,)": 1}, "integer"), least, LONGEST)


def clipped(x: Array, least: int, most: int) -> Array:
    """As int32, in NumPy if it was. Integers are clipped before they are narrowed."""
    if isinstance(x, jax.Array):
        return _validate.clipped(x, most, least)
    return frozen(np.clip(x, max(least, np.iinfo(x.dtype).min), min(most, np.iinfo(x.dtype).max)), np.int32)


def ranked(name: str, value: Any, ranks: Mapping[str, int], kind: str) -> Array:
    """An array of one of these ranks, by their letters. NumPy arrays are copied, so that none changes."""
    x = _validate.unconverted(name, value, kind)
    if x.ndim not in ranks.values():
        raise ValueError(f"{name} must have shape {' or '.join(ranks)}; got {described(x)}")
    return x if isinstance(x, jax.Array) else frozen(x, x.dtype)


def frozen(x: np.ndarray, dtype: Any) -> np.ndarray:
    """A copy that can't be written to."""
    x = np.array(x, dtype)
    x.setflags(write=False)
    return x


def row_of(x: int | Array, batch: jax.Array) -> int | jax.Array:
    """What `of_rows` has for a batch row."""
    if isinstance(x, int):
        return x
    return jnp.asarray(x) if x.ndim == 0 else element(jnp.asarray(x), batch)


def position(query: jax.Array, offset: int | Array, batch: jax.Array) -> jax.Array:
    """Where a query stands among the keys."""
    return query if isinstance(offset, int) and offset == 0 else query + row_of(offset, batch)


def quotient(x: jax.Array, by: int) -> jax.Array:
    """Rounded to 0: down, of indices."""
    return x if by == 1 else lax.div(x, np.int32(by))


def remainder(x: jax.Array, by: int) -> jax.Array:
    """With the sign of x."""
    return lax.rem(x, np.int32(by))


def element(x: jax.Array, *index: jax.Array) -> jax.Array:
    """`x[index]`, moved into the array. An axis of size 1 is read at 0; leading axes may be absent."""
    own = index[len(index) - x.ndim :]
    own = tuple(0 if size == 1 else i for i, size in zip(own, x.shape, strict=True))
    return x.at[own].get(mode="clip", wrap_negative_indices=False)


def check_axis(name: str, x: int | Array, axis: int, letter: str, size: int | None) -> None:
    """Raises ValueError if an axis of an array, if it has that, is neither 1 nor as long as it must be.

    Args:
      axis: counted from the end, negative.
      size: None where the user gave none, and all batch rows or heads are alike.
    """
    if isinstance(x, int) or x.ndim < -axis or x.shape[axis] in (1, size):
        return
    if size is None:
        raise ValueError(f"{letter} must be {x.shape[axis]}, as {name} is {described(x)}; got None")
    raise ValueError(f"{name} is {described(x)}; its axis {axis} must be {letter} = {size}")


def check_length(name: str, x: Array, axis: int, letter: str, size: int, advice: str = "") -> None:
    """`check_axis` of an axis that must be as long, even if it is 1."""
    if x.shape[axis] != size:
        raise ValueError(f"{name} is {described(x)}; its axis {axis} must be {letter} = {size}{advice}")
