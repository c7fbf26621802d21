"""Which blocks of the plane of queries and keys a mask function lets be seen: wholly, in part, or not at all.

A block of 128 × 128 pairs has 16384 values of the function, and a million tokens have 67 million blocks. So
bounds of the function over a block (functions/intervals.py) decide first. Only where they leave it open is
the function evaluated for each pair.
"""

import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash.functions import intervals
from jax_flash.functions.intervals import Interval
from jax_flash.functions.static import Arrays, StaticFunction, flat, static_mask_mod

MaskMod = Callable[..., Any]
"""`(batch, head, query_index, key_index) -> bool`, of int32 scalars; True attends."""

_PAIRS_AT_ONCE = 1 << 22
"""For which the function is evaluated in one step."""


class Kind(enum.IntEnum):
    HIDDEN = 0  # no query of the block sees a key of it
    PARTIAL = 1
    FULL = 2  # each query sees each key; both that are there, in a block that reaches over the end


class Lists(NamedTuple):
    """What is visited along one axis of the grid of blocks.

    Attributes:
      counts: int32 `(B, N, rows)`: how many blocks of a row of the grid are visited.
      blocks: int32 `(B, N, rows, columns)`: their columns in ascending order, twice each, plus 1 if the block
        is partial. What lies behind the count is 0.
    """

    counts: jax.Array
    blocks: jax.Array


def block_kinds(
    mask_mod: MaskMod, B: int, N: int, T: int, S: int, block_size: tuple[int, int] = (128, 128)
) -> jax.Array:
    """The `Kind` of each block, exactly.

    Memory is linear in the number of blocks. Time is too, plus that of all pairs in blocks that are partial
    and in those of which the function's bounds say nothing.

    Args:
      mask_mod: may capture arrays, and be any function that JAX can trace.
      B: batch rows for which it differs.
      N: query heads likewise.
      T: queries.
      S: keys.
      block_size: of queries and keys.

    Returns:
      int8 `(B, N, ceil(T / block_size[0]), ceil(S / block_size[1]))`.
    """
    function, captured = static_mask_mod(mask_mod)
    return kinds_of(function, (B, N), (T, S), block_size, [flat(x) for x in captured])


# One program, in which numbers are constants: sent to the device one by one, a transfer guard refuses them.
@functools.partial(jax.jit, static_argnums=range(4))
def kinds_of(
    mask_mod: StaticFunction,
    rows_and_heads: tuple[int, int],
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    captured: Arrays,
) -> jax.Array:
    """`block_kinds` of a traced function, and the arrays that it captures, flat."""
    queries, keys = (_starts(*sizes) for sizes in zip(lengths, block_size, strict=True))
    B, N = rows_and_heads
    shape = B, N, len(queries), len(keys)
    low, high = _bounds(mask_mod, captured, shape, lengths, block_size)
    kinds = jnp.where(low, Kind.FULL, jnp.where(high, Kind.PARTIAL, Kind.HIDDEN)).astype(jnp.int8)
    kinds = jnp.broadcast_to(kinds, shape)
    if kinds.size == 0:
        return kinds
    return _settled(mask_mod, captured, kinds, lengths, block_size)


@jax.jit
def lists(kinds: jax.Array) -> tuple[Lists, Lists]:
    """Key blocks of each block of queries, and query blocks of each block of keys."""
    return _lists(kinds), _lists(jnp.swapaxes(kinds, -1, -2))


def _lists(kinds: jax.Array) -> Lists:
    is_visited = kinds != Kind.HIDDEN
    columns = kinds.shape[-1]
    # A row of the grid is sorted, with what isn't visited behind all columns.
    entries = 2 * jnp.arange(columns, dtype=jnp.int32).reshape(1, 1, 1, -1) + (kinds == Kind.PARTIAL)
    ordered = jnp.sort(jnp.where(is_visited, entries, 2 * columns), axis=-1)
    counts = jnp.sum(is_visited, axis=-1, dtype=jnp.int32)
    return Lists(counts, jnp.where(ordered < 2 * columns, ordered, 0))


def _starts(length: int, block: int) -> np.ndarray:
    return np.arange(0, length, block, dtype=np.int32)


def _bounds(
    mask_mod: StaticFunction,
    captured: Arrays,
    shape: tuple[int, ...],
    lengths: tuple[int, int],
    block_size: tuple[int, int],
) -> Interval:
    """Of the function over each block; unknown where it has no graph."""
    if mask_mod.value is None:
        return Interval(jnp.asarray(False), jnp.asarray(True))
    B, N, *_ = shape
    batch, head = np.arange(B, dtype=np.int32), np.arange(N, dtype=np.int32)
    (first_query, last_query), (first_key, last_key) = (
        (first := _starts(length, block), np.minimum(first + block, length).astype(np.int32) - 1)
        for length, block in zip(lengths, block_size, strict=True)
    )

    def along(axis: int, low: np.ndarray, high: np.ndarray) -> Interval:
        shape = [-1 if axis == own else 1 for own in range(4)]
        return Interval(*(jnp.asarray(x.reshape(shape)) for x in (low, high)))

    inputs = {
        "batch": along(0, batch, batch),
        "head": along(1, head, head),
        "query": along(2, first_query, last_query),
        "key": along(3, first_key, last_key),
    }
    return intervals.bounds(mask_mod.value, inputs, captured)


def _settled(
    mask_mod: StaticFunction,
    captured: Arrays,
    kinds: jax.Array,
    lengths: tuple[int, int],
    block_size: tuple[int, int],
) -> jax.Array:
    """Kinds as they are, from those in which PARTIAL stands for what bounds leave open."""
    shape, flat = kinds.shape, kinds.reshape(-1)
    at_once = min(flat.size, max(1, _PAIRS_AT_ONCE // (block_size[0] * block_size[1])))
    open_blocks = jnp.nonzero(flat == Kind.PARTIAL, size=flat.size, fill_value=flat.size)[0]
    # So that the last step has as many.
    open_blocks = jnp.concatenate([open_blocks, jnp.full(at_once, flat.size, open_blocks.dtype)])
    count = jnp.sum(flat == Kind.PARTIAL)
    kind_of = jax.vmap(functools.partial(_kind_by_pairs, mask_mod, captured, shape, lengths, block_size))

    def step(state):
        done, flat = state
        chosen = jax.lax.dynamic_slice_in_dim(open_blocks, done, at_once)
        found = kind_of(jnp.minimum(chosen, flat.size - 1).astype(jnp.int32))
        return done + at_once, flat.at[chosen].set(found, mode="drop")

    zero = jnp.zeros((), count.dtype)
    _, flat = jax.lax.while_loop(lambda state: state[0] < count, step, (zero, flat))
    return flat.reshape(shape)


def _kind_by_pairs(
    mask_mod: StaticFunction,
    captured: Arrays,
    shape: tuple[int, ...],
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    number: jax.Array,
) -> jax.Array:
    """Of the block of that number, by each of its pairs."""
    batch, head, row, column = jnp.unravel_index(number, shape)
    query, key = (
        first.astype(jnp.int32) * block + jnp.arange(block, dtype=jnp.int32)
        for first, block in zip((row, column), block_size, strict=True)
    )
    is_there = (query < lengths[0])[:, None] & (key < lengths[1])[None]
    # What isn't there is not asked for.
    query, key = jnp.minimum(query, lengths[0] - 1), jnp.minimum(key, lengths[1] - 1)
    inputs = {"batch": batch, "head": head, "query": query[:, None], "key": key}
    inputs = {name: x.reshape((1,) * (2 - x.ndim) + x.shape) for name, x in inputs.items()}
    sees = mask_mod(inputs, captured)
    is_full, is_hidden = jnp.all(sees | ~is_there), ~jnp.any(sees & is_there)
    return jnp.where(is_full, Kind.FULL, jnp.where(is_hidden, Kind.HIDDEN, Kind.PARTIAL)).astype(jnp.int8)
