"""Which attention probabilities dropout keeps: a pure function of (key, batch, head, i, j).

The key becomes a word for each row of each head and one for each column, outside of every implementation:
operands like any other, linear in the sequence, that are batched, sharded, gathered and packed as queries and
keys are. What is kept at row `i`, column `j` is a function of their two words alone, so that every
implementation recomputes it for whichever block it holds, forward and backward alike:

    kept(i, j)  =  bits 16 to 30 of row[i] * column[j]  >=  threshold(rate)

in wrapping uint32 arithmetic, two and a half instructions on a GPU. Why that is enough: words are odd, so
the products' upper bits take all values equally often; and they are hashes themselves, so that two rows or
columns come out alike only where their words are in a ratio of small numbers, as one pair in 2**28 is. All
heads of a batch row share the columns' words; each has rows of its own.
"""

import math

import jax
import jax.numpy as jnp

_BITS = 15  # of a hash that decide; the kernels compare them as magnitudes of 16-bit numbers
_POSITIONS = 2**30 - 1


def words(key: jax.Array, batch: int, heads: int, queries: int, keys: int) -> tuple[jax.Array, jax.Array]:
    """The words of rows, uint32 `(batch, heads, queries)`, and of columns, `(batch, keys)`."""
    row_key, column_key = jax.random.split(key)
    row_seeds = jax.random.bits(row_key, (batch, heads), jnp.uint32)
    column_seeds = jax.random.bits(column_key, (batch,), jnp.uint32)
    return _stream(row_seeds, queries), _stream(column_seeds, keys)


def threshold(rate: float) -> int:
    """The least hash that is kept, of `_BITS` bits: `rate` to the nearest multiple of 2**-15, below 1."""
    return min(round(rate * 2**_BITS), 2**_BITS - 1)


def keep(rows: jax.Array, columns: jax.Array, rate: float) -> jax.Array:
    """Which probabilities of a block are kept.

    Args:
      rows: the words of its rows, `(*L, R)`.
      columns: those of its columns, `(*L, C)`; axes `L` broadcast.
      rate: the share to drop, in [0, 1).

    Returns:
      bool `(*L, R, C)`.
    """
    return keep_each(rows[..., :, None], columns[..., None, :], rate)


def keep_each(rows: jax.Array, columns: jax.Array, rate: float) -> jax.Array:
    """Which probabilities are kept, from the words of their rows and columns, which broadcast."""
    bits = rows * columns
    # Less the uppermost bit, and the lower ones don't matter, as the threshold has none.
    return bits << 1 >= jnp.uint32(threshold(rate) << 17)


def _stream(seeds: jax.Array, length: int) -> jax.Array:
    """Odd words for positions 0 to `length - 1` of each seed, `(*seeds, length)`, no two of a seed alike."""
    return 2 * _mix(seeds[..., None] + jnp.arange(length, dtype=jnp.uint32)) + 1


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of 30-bit numbers in which every input bit flips every output bit half of the time.

    Two rounds of xor-shift and multiply; the constants are those of the "lowbias32" search.
    """
    x &= _POSITIONS
    x = (x ^ (x >> 15)) * jnp.uint32(0x7FEB352D) & _POSITIONS
    x = (x ^ (x >> 14)) * jnp.uint32(0x846CA68B) & _POSITIONS
    return x ^ (x >> 15)


def dropout_mask(key: jax.Array, rate: float, shape: tuple[int, ...]) -> jax.Array:
    """The probabilities that `flash_attention(..., dropout_rate=rate, dropout_key=key)` keeps.

    Args:
      key: the `dropout_key` of the call.
      rate: the `dropout_rate` of the call, in [0, 1).
      shape: `(*B, N, T, S)` of the call: its leading batch axes, query heads, queries and keys.

    Returns:
      bool of that shape, True where the probability is kept (and divided by `1 - rate`).

    Raises:
      ValueError: `shape` has fewer than three axes, or `rate` is outside of [0, 1).
    """
    if len(shape) < 3:
        raise ValueError(f"shape must be (*batch, heads, queries, keys), but it is {tuple(shape)}")
    if not 0 <= rate < 1:
        raise ValueError(f"rate must be at least 0 and below 1, but it is {rate}")
    *batch, heads, queries, keys = shape
    rows, columns = words(key, math.prod(batch), heads, queries, keys)
    return keep(rows, columns[:, None], rate).reshape(shape)
