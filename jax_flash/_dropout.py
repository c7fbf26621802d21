"""Which attention probabilities dropout keeps: a pure function of (key, batch, head, i, j).

The key becomes one 64-bit seed for each batch row and head, outside of every implementation, so that
batching and sharding of the seeds are batching and sharding of any other operand. What is kept at
row `i`, column `j` is then an integer hash of (seed, i, j) alone: every implementation recomputes it
for whichever block it holds, forward and backward alike.

    kept(i, j)  =  mix(mix(seed[0] + i) + mix(seed[1] + j)) >= threshold(rate)

in wrapping uint32 arithmetic. The two inner mixes cost O(T + S) and are bijections, so no two rows of
a head, and no two columns, are ever the same stream; the outer one is nine cheap operations.
"""

import math

import jax
import jax.numpy as jnp


def seeds(key: jax.Array, batch: int, heads: int) -> jax.Array:
    """One seed for each batch row and head: uint32 `(batch, heads, 2)`."""
    return jax.random.bits(key, (batch, heads, 2), jnp.uint32)


def threshold(rate: float) -> int:
    """The least hash that is kept, as an integer below 2**32."""
    return min(round(rate * 2**32), 2**32 - 1)


def mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every input bit flips every output bit half of the time.

    Two rounds of xor-shift and multiply; the constants are those of the "lowbias32" search.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def keep(seeds: jax.Array, rows: jax.Array, columns: jax.Array, rate: float) -> jax.Array:
    """Which probabilities of a block are kept.

    Args:
      seeds: uint32 `(*L, 2)`.
      rows: integers `(R,)`, the query index of each row.
      columns: integers `(C,)`, the key index of each column.
      rate: the share to drop, in [0, 1).

    Returns:
      bool `(*L, R, C)`.
    """
    row_bits = mix(seeds[..., :1] + rows.astype(jnp.uint32))
    column_bits = mix(seeds[..., 1:] + columns.astype(jnp.uint32))
    bits = mix(row_bits[..., :, None] + column_bits[..., None, :])
    return bits >= jnp.uint32(threshold(rate))


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
    kept = keep(
        seeds(key, math.prod(batch), heads),
        jnp.arange(queries),
        jnp.arange(keys),
        rate,
    )
    return kept.reshape(shape)
