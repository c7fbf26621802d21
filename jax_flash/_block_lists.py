"""Lists of the blocks that a kernel's tiles visit, from the kinds of a block mask's own blocks.

A `BlockMask` has blocks of the user's size, and kernels have tiles of their own. A block of the kernel that
overlaps several of the user's is full if all of these are full, and hidden if all of them are hidden. Else it
is partial.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def pooled(
    kinds: jax.Array, block_size: tuple[int, int], lengths: tuple[int, int], tile: tuple[int, int]
) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest kind of the blocks that each tile overlaps."""
    low = high = kinds
    for axis, size, length, step in zip((2, 3), block_size, lengths, tile, strict=True):
        starts = np.arange(0, length, step)
        first, last = starts // size, (np.minimum(starts + step, length) - 1) // size
        if np.array_equal(first, np.arange(kinds.shape[axis])) and np.array_equal(first, last):
            continue  # a block each
        lows, highs = [], []
        for offset in range(int((last - first).max(initial=0)) + 1):
            there = np.minimum(first + offset, last)
            lows.append(jnp.take(low, there, axis=axis))
            highs.append(jnp.take(high, there, axis=axis))
        low, high = functools.reduce(jnp.minimum, lows), functools.reduce(jnp.maximum, highs)
    return low, high


def full_first(is_full: jax.Array, is_visited: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A list of all blocks for each tile, from whether each block is full and whether it is visited.

    Returns:
      the blocks, int32: full ones first, then partial ones, then those that are not visited, each in
      ascending order; and how many are full, and how many visited, int32 `(…, 2)`.
    """
    columns = is_visited.shape[-1]
    is_full = is_full & is_visited
    order = jnp.where(is_full, 0, jnp.where(is_visited, columns, 2 * columns))
    blocks = jnp.sort(order + jnp.arange(columns, dtype=jnp.int32), axis=-1) % columns
    counts = [jnp.sum(x, axis=-1, dtype=jnp.int32) for x in (is_full, is_visited)]
    return blocks.astype(jnp.int32), jnp.stack(counts, axis=-1)
