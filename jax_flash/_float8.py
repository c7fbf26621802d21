"""Rounding of queries, keys and values to e4m3, by blocks of rows, and back.

An e4m3 number has 4 significant bits, and is between 2**-9 and 448 in magnitude. So a block of rows is
divided by its descale, which brings its largest element to 448 at most. All heads of a group share the
descale, for queries too, as a kernel's tile holds them together. Descales are powers of two. Dividing by one
is exact, so that the same numbers are rounded on every device; and an e4m3 number times its descale is exact
in bfloat16.

Incoherent processing (FlashAttention-3, section 3.3; QuIP, https://arxiv.org/abs/2307.13304) spreads outliers
first. Queries and keys are multiplied by one orthogonal matrix, which leaves their products as they are:
random signs on the diagonal, times a Hadamard matrix. Where the head dim is no power of two, the matrix has
blocks of the largest that divides it.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._rounding import round_to
from jax_flash._spec import AttentionSpec, Operands

DTYPE = jnp.float8_e4m3fn
MAX = 448.0
ROWS_PER_DESCALE = 128


def is_float8(dtype: np.dtype) -> bool:
    return dtype == DTYPE


def descales_of(rows: int) -> int:
    """How many descales so many rows have, if each block of them has one."""
    return -(-rows // ROWS_PER_DESCALE)


def hadamard_size(head_dim: int) -> int:
    """The largest power of two that divides the head dim."""
    return head_dim & -head_dim


# In a `jit` each: outside of one, constants are sent to the device, which a transfer guard refuses.
@functools.partial(jax.jit, static_argnums=1)
def random_signs(key: jax.Array, head_dim: int) -> jax.Array:
    """`(H,)` float32, each 1 or -1."""
    return jax.random.rademacher(key, (head_dim,), jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def fixed_signs(head_dim: int) -> jax.Array:
    """The same each time, whatever JAX's random numbers are made by."""
    bits = np.random.RandomState(0).randint(0, 2, head_dim)
    return jnp.asarray(2 * bits - 1, jnp.float32)


def rotated(x: jax.Array, signs: jax.Array) -> jax.Array:
    """`x (…, H)` in float32 times the orthogonal matrix of these signs, which broadcast to `x`.

    Additions are in one order everywhere: neighbours first, then pairs of neighbours, and so on.
    """
    size = hadamard_size(x.shape[-1])
    x = x.astype(jnp.float32) * signs
    for stage in range(size.bit_length() - 1):
        half = 2**stage
        pairs = x.reshape(*x.shape[:-1], x.shape[-1] // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([low + high, low - high], -2).reshape(x.shape)
    return x * np.float32(1 / math.sqrt(size))


def power_of_two_above(largest: jax.Array) -> jax.Array:
    """The smallest power of two that brings a float32 of that magnitude to `MAX` at most; 1 for 0."""
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF  # the exponent is biased by 127
    exponent = exponent - 8 + (mantissa > 0x600000)  # 448 is 1.75 * 2**8
    power = jax.lax.bitcast_convert_type(jnp.clip(exponent, 1, 253) << 23, jnp.float32)
    return jnp.where(largest == 0, jnp.ones_like(power), power)


def rounded(
    x: jax.Array, key_heads: int, valid: jax.Array | None = None, by: str = "block"
) -> tuple[jax.Array, jax.Array]:
    """`x (B, rows, heads, D)` as e4m3 numbers, and their descales, float32 `(B, K, blocks)`.

    Elements that aren't finite become NaN, and count for no descale.

    Args:
      valid: bool `(B, rows)`: rows of padding count for no descale either.
      by: whether each "block" of rows has a descale, each "head" (`(B, K, 1)`), or the "tensor" as a whole.
    """
    batch, rows, heads, _ = x.shape
    x = x.astype(jnp.float32)
    largest = largest_of_blocks(x, valid)
    grouped = largest.reshape(batch, key_heads, heads // max(key_heads, 1), largest.shape[-1])
    largest = grouped.max(2, initial=0)
    if by != "block":
        largest = largest.max(2 if by == "head" else None, initial=0, keepdims=True)
        largest = jnp.broadcast_to(largest, (batch, key_heads, 1))
    descales = power_of_two_above(largest)
    return converted(x / of_rows(descales, rows, heads)), descales


def largest_of_blocks(x: jax.Array, valid: jax.Array | None = None) -> jax.Array:
    """`(B, heads, blocks)`: the largest magnitudes of `x (B, rows, heads, D)` that count for a descale."""
    batch, rows, heads, dim = x.shape
    magnitude = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
    if valid is not None:
        magnitude = jnp.where(valid[:, :, None, None], magnitude, 0)
    blocks = descales_of(rows)
    magnitude = jnp.pad(magnitude, ((0, 0), (0, blocks * ROWS_PER_DESCALE - rows), (0, 0), (0, 0)))
    by_block = magnitude.reshape(batch, blocks, ROWS_PER_DESCALE, heads, dim)
    return by_block.max((2, 4), initial=0).swapaxes(1, 2)


def converted(x: jax.Array) -> jax.Array:
    """`x` in e4m3: what exceeds its largest number becomes that, and infinities NaN."""
    return round_to(jnp.where(jnp.isinf(x), jnp.nan, jnp.clip(x, -MAX, MAX)), DTYPE)


def of_rows(descales: jax.Array, rows: int, heads: int) -> jax.Array:
    """`(B, rows, heads, 1)` of descales `(B, K, blocks)`, or `(B, K, 1)` for all rows."""
    _, key_heads, blocks = descales.shape
    if blocks > 1:
        length = blocks * ROWS_PER_DESCALE
        descales = jnp.repeat(descales, ROWS_PER_DESCALE, axis=2, total_repeat_length=length)[:, :, :rows]
    by_head = jnp.repeat(descales, heads // max(key_heads, 1), axis=1, total_repeat_length=heads)
    return by_head.swapaxes(1, 2)[..., None]


def quantized(spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """The call on e4m3 numbers that a call with `spec.quantization` is."""
    n_keys = operands.key.shape[2]
    query, key = operands.query, operands.key
    if operands.rotation_signs is not None:
        signs = operands.rotation_signs[:, None, None]
        query, key = rotated(query, signs), rotated(key, signs)
    queries_valid = _valid(operands, "query", query.shape[1])
    keys_valid = _valid(operands, "key_value", key.shape[1])
    query, query_descale = rounded(query, n_keys, queries_valid)
    key, key_descale = rounded(key, n_keys, keys_valid)
    value, value_descale = rounded(operands.value, n_keys, keys_valid)
    changed = {"query": query, "key": key, "value": value}
    changed |= {"query_descale": query_descale, "key_descale": key_descale, "value_descale": value_descale}
    others = {name: x for name, x in operands.present().items() if name != "rotation_signs"}
    out_dtype = np.dtype(operands.query.dtype).name
    return dataclasses.replace(spec, quantization=None, out_dtype=out_dtype), Operands.of(others | changed)


def _valid(operands: Operands, of: str, rows: int) -> jax.Array | None:
    """Which rows are no padding, bool `(B, rows)`; None where all are."""
    lengths, offsets = getattr(operands, f"{of}_seq_lengths"), getattr(operands, f"{of}_offsets")
    row = jnp.arange(rows)
    if lengths is not None:
        return row < lengths[:, None]
    if offsets is not None:
        return (offsets[:, :1] <= row) & (row < offsets[:, -1:])
    return None


def dequantized(operands: Operands) -> Operands:
    """The operands of a call on e4m3 numbers, in float32."""
    key_heads = operands.key.shape[2]
    arrays = operands.present()
    for name in ("query", "key", "value"):
        x = arrays[name].astype(jnp.float32)
        descales = arrays.pop(f"{name}_descale", None)
        if descales is not None:
            assert descales.shape[1] == key_heads
            x = x * of_rows(descales, x.shape[1], x.shape[2])
        arrays[name] = x
    return Operands.of(arrays)
