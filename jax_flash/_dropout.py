"""Which attention probabilities dropout keeps: a pure function of (key, batch, head, i, j).

Each row of each head has a hash, and each column of each batch row has one: odd uint32 numbers that are made
from the key before an implementation is picked. They are operands like any other, linear in the sequence;
they are batched, sharded and gathered as queries and keys are. The hashes of a row and of a column decide
about their probability, so every implementation recomputes the decision for whichever block it holds, forward
and backward alike:

    keep(i, j)  =  bits 16 to 30 of row[i] * column[j]  >=  threshold(rate)

in wrapping uint32 arithmetic, two and a half instructions on a GPU. A product is random enough for two
reasons. The hashes are odd, so its upper bits take all values equally often. The hashes are random, so two
rows or two columns agree only if the ratio of their hashes is one of small numbers, as it is for one pair in
2**28.

No two rows of a batch row have the same hash, whatever their heads, and no two columns of a call. A hash is a
position that a bijection of 30-bit numbers permutes, made odd. The key selects the bijection, for rows with
the number of the batch row, and two keys select unrelated ones. A line is a head (for columns: a batch row);
index `i` of line `l` has the position

    i  xor  (the 30 bits of l in reverse order)

Indices fill the position's bits from the lowest up and lines fill them from the highest down. So positions
differ as long as the bits of the largest index and of the largest line number are at most 30 together:
`N * T <= 2**30` and `B * S <= 2**30` if these are powers of two. Positions don't depend on B, N, T or S.

Rows of different batch rows may have the same hash, but their columns have different ones, so no decision is
repeated. A larger call repeats hashes, in another order: line `l` has those of lines that are a multiple of
`2**30 / T` away.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jax_flash import _arguments, _validate

_RATE_BITS = 15  # bits of a product that decide; the kernels compare them as magnitudes of 16-bit numbers
_POSITION_BITS = 30
_POSITION_MASK = 2**_POSITION_BITS - 1
# Shifts and multipliers are those of the 32-bit hash "triple32", but for 16 instead of 17. With 30 bits too,
# each input bit flips each output bit half of the time.
_ROUNDS = ((16, 0xED5AD4BB), (11, 0xAC4C1B51), (14, 0x31848BAB))
_LAST_SHIFT = 15


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def hashes(key: jax.Array, batch: int, heads: int, queries: int, keys: int) -> tuple[jax.Array, jax.Array]:
    """The hashes of rows, uint32 `(batch, heads, queries)`, and of columns, `(batch, keys)`."""
    return hashes_at(key, batch, jnp.arange(heads), jnp.arange(queries), jnp.arange(keys))


def hashes_at(
    key: jax.Array, batch: int, heads: jax.Array, rows: jax.Array, columns: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The hashes of some rows of some heads, and of some columns, whatever there are besides.

    Args:
      heads: int32 `(N,)`.
      rows: int32 `(T,)`.
      columns: int32 `(S,)`.

    Returns:
      uint32 `(batch, N, T)` and `(batch, S)`.
    """
    row_key, column_key = jax.random.split(key)
    batch_rows = jnp.arange(batch, dtype=jnp.uint32)
    of_rows = jax.vmap(lambda batch_row: _round_keys(jax.random.fold_in(row_key, batch_row)))(batch_rows)
    return (
        _hash_lines(of_rows.T, heads, rows),
        _hash_lines(_round_keys(column_key), batch_rows, columns),
    )


def threshold(rate: float) -> int:
    """The least value that is kept of the product's bits: `rate` in units of 2**-15, rounded, below 2**15."""
    return min(round(rate * 2**_RATE_BITS), 2**_RATE_BITS - 1)


def keep_probability(rate: float) -> float:
    """The share of probabilities that is kept, and what the kept ones are divided by.

    This is 1 minus the rate in force, `rate` rounded to a multiple of 2**-15. A rate of at most 2**-16 keeps
    everything. Rates are rounded to less than 1, so every rate keeps at least one probability in 2**15.
    """
    return 1 - threshold(rate) / 2**_RATE_BITS


def keep(rows: jax.Array, columns: jax.Array, rate: float) -> jax.Array:
    """Which probabilities of a block are kept.

    Args:
      rows: the hashes of its rows, `(*L, R)`.
      columns: those of its columns, `(*L, C)`; axes `L` broadcast.
      rate: the share to drop, in [0, 1).

    Returns:
      bool `(*L, R, C)`.
    """
    return keep_each(rows[..., :, None], columns[..., None, :], rate)


def keep_each(rows: jax.Array, columns: jax.Array, rate: float) -> jax.Array:
    """Which probabilities are kept, from the hashes of their rows and columns, which broadcast."""
    product = rows * columns
    # The shift removes bit 31. Bits 0 to 15 don't matter, as the threshold has none.
    return product << 1 >= jnp.uint32(threshold(rate) << 17)


def _round_keys(key: jax.Array) -> jax.Array:
    """Those of the bijection that a key selects, uint32 `(rounds,)`."""
    return jax.random.bits(key, (len(_ROUNDS),), jnp.uint32)


def _hash_lines(round_keys: jax.Array, lines: jax.Array, indices: jax.Array) -> jax.Array:
    """The hashes of those indices of those lines, `(*B, lines, indices)`, by round keys `(rounds, *B)`."""
    positions = _position(lines.astype(jnp.uint32)[:, None], indices.astype(jnp.uint32)[None])
    positions = jnp.expand_dims(positions, range(round_keys.ndim - 1))
    return _permute(positions, round_keys[..., None, None]) << 1 | 1


def _position(line: jax.Array, index: jax.Array) -> jax.Array:
    """A 30-bit number for each line and index, which broadcast."""
    return (index ^ _reverse_bits(line) >> 32 - _POSITION_BITS) & _POSITION_MASK


def _reverse_bits(x: jax.Array) -> jax.Array:
    """Bit 0 becomes bit 31, and so on."""
    for bits, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        mask = jnp.uint32(mask)
        x = (x & mask) << bits | x >> bits & mask
    return x << 16 | x >> 16


def _permute(x: jax.Array, round_keys: jax.Array) -> jax.Array:
    """The bijection of 30-bit numbers that `round_keys` select.

    A round xors its key into all bits, xors upper bits into lower ones and multiplies by an odd number.
    """
    for round_key, (shift, multiplier) in zip(round_keys, _ROUNDS, strict=True):
        x = (x ^ round_key) & _POSITION_MASK
        x = (x ^ x >> shift) * jnp.uint32(multiplier) & _POSITION_MASK
    return x ^ x >> _LAST_SHIFT


def dropout_mask(key: jax.Array, rate: float, shape: tuple[int, ...]) -> jax.Array:
    """The probabilities that `flash_attention(..., dropout_rate=rate, dropout_key=key)` keeps.

    Args:
      key: the `dropout_key` of the call.
      rate: the `dropout_rate` of the call, in [0, 1).
      shape: `(*B, N, T, S)` of the call: its leading batch axes, query heads, queries and keys.

    Returns:
      bool of that shape, True where the probability is kept (and divided by `1 - rate`, with the rate rounded
      to a multiple of 2**-15 below 1).

    Raises:
      TypeError, ValueError: as `flash_attention` does, when traced; `shape` has fewer than three axes.
    """
    key = _arguments.random_key("key", key)
    rate = _arguments.dropout_rate("rate", rate)
    if not isinstance(shape, tuple | list):
        raise TypeError(f"shape must be a tuple of Python integers; got {_validate.short(shape)}")
    shape = tuple(_validate.size("shape", size) for size in shape)
    if len(shape) < 3 or math.prod(shape) > _validate.INT32_MAX**2:
        raise ValueError(
            f"shape must be (*B, N, T, S), with fewer than 2**62 elements; got {_validate.short(shape)}"
        )
    return _dropout_mask(key, rate, shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _dropout_mask(key: jax.Array, rate: float, shape: tuple[int, ...]) -> jax.Array:
    *batch, heads, queries, keys = shape
    rows, columns = hashes(key, math.prod(batch), heads, queries, keys)
    return keep(rows, columns[:, None], rate).reshape(shape)
