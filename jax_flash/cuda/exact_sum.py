"""The gradient of an array that score_mod captures, bitwise the same from run to run.

Many CTAs add to each of its elements, in no certain order, and sums of floats depend on the order. How large
the terms are isn't known before the pass, as a bias's are (fixed_point.py): they have the function's
derivative as a factor. So the sums are exact. An element has a row of 64-bit words, each for 24 binary
places: 12 words hold all places of a float32. A term's mantissa lies in one word or in two neighbours, and
adds to each what lies there. This is the long accumulator of Kulisch (Computer Arithmetic and Validity,
2008), with room in each word so that nothing is carried while terms are added.

cuda/kernels/common/exact_sum.cuh adds.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jax_flash.cuda import fixed_point

BITS = 24
WORDS = 12
LOWEST = -149  # the place that the first word starts at
POSITIVE_INFINITY, NEGATIVE_INFINITY, NAN = 1, 2, 4  # flags of the word behind them
MOST_TERMS = 2**39  # of an element: each adds less than 2**24 to a word of 63 bits and a sign


def shape_of_sums(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a uint32 array of the sums of an array's elements: words, the low half of each first."""
    return (*shape, WORDS + 1, 2)


def to_float32(sums: jax.Array) -> jax.Array:
    """The sums, rounded, from the array that the kernel leaves."""
    digits, rest = _carried(sums[..., :WORDS, :])
    # The digits of a negative sum are those of its magnitude, less one in the lowest place, with zeros and
    # ones exchanged. That one is far below float32's rounding.
    negative = rest < 0
    digits = [jnp.where(negative, (1 << BITS) - 1 - x, x).astype(jnp.float32) for x in digits]
    rest = jnp.where(negative, -1 - rest, rest)
    # 2**LOWEST is no normal float32, so the lowest digit joins the next one. Nor would a power in two steps
    # be any, as the compiler multiplies constants with each other.
    first, second, *others = digits
    digits = [second + first * jnp.float32(2.0**-BITS), *others]
    terms = [jnp.where(rest > 0, jnp.inf, jnp.float32(0))]  # of 2**139 and more
    terms += [x * _power(place) for place, x in reversed(list(enumerate(digits, 1)))]
    magnitude = functools.reduce(jnp.add, terms)  # from the highest digit down
    return _or_not_finite(jnp.where(negative, -magnitude, magnitude), sums[..., WORDS, 0])


def _carried(words: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Digits below 2**24, from the lowest, and what is carried beyond the highest, signed."""
    digits, carry_low, carry_high = [], jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.uint32)
    for place in range(WORDS):
        low = words[..., place, 0] + carry_low
        high = words[..., place, 1] + carry_high + (low < carry_low).astype(jnp.uint32)
        digits.append(low & jnp.uint32((1 << BITS) - 1))
        carry_low = (low >> BITS) | (high << (32 - BITS))
        carry_high = jax.lax.bitcast_convert_type(
            jax.lax.bitcast_convert_type(high, jnp.int32) >> BITS, jnp.uint32
        )
    return digits, fixed_point.to_float32(jnp.stack([carry_low, carry_high], -1), jnp.float32(1))


def _power(place: int) -> jax.Array:
    """What a digit counts."""
    return jnp.float32(math.ldexp(1, BITS * place + LOWEST))


def _or_not_finite(x: jax.Array, flags: jax.Array) -> jax.Array:
    x = jnp.where(flags == POSITIVE_INFINITY, jnp.inf, x)
    x = jnp.where(flags == NEGATIVE_INFINITY, -jnp.inf, x)
    is_nan = (flags & NAN != 0) | (flags == (POSITIVE_INFINITY | NEGATIVE_INFINITY))
    return jnp.where(is_nan, jnp.nan, x)
