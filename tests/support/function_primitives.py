"""Functions of users that have one primitive, or a few, and edge values for their arguments."""

import jax.numpy as jnp
import numpy as np
from jax import lax, nn

FLOATS = np.array(
    [
        *(0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 3, -7.25, 1e-3, 0.199, 0.2, 0.999, 20, -20, 88, -88),
        *(1e10, -1e10),
        *(2.0**31, -(2.0**31), 2.0**32, 2.0**31 - 128, 3e38, -3e38, np.inf, -np.inf, np.nan),
    ],
    np.float32,
)
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
INTEGERS = np.array(
    [0, 1, -1, 2, -2, 3, 7, -7, 31, 32, 33, -31, 1000, 65536, INT_MAX, INT_MIN, INT_MIN + 1], np.int32
)


def as_float(x):
    """The bits of an integer: as a float's value it may be rounded."""
    return lax.bitcast_convert_type(x, jnp.float32)


def as_unsigned(x):
    return lax.bitcast_convert_type(x, jnp.uint32)


# How closely C's functions agree with XLA's on a CPU.
CLOSE = 2e-5
EXACT = {
    "neg": lax.neg,
    "abs": lax.abs,
    "sign": lax.sign,
    "floor": lax.floor,
    "ceil": lax.ceil,
    "round_even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "round_away": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "square": lax.square,
    "divided_by_8": lambda x: x / -8,
    "is_finite": lambda x: lax.convert_element_type(lax.is_finite(x), jnp.float32),
    "cube": lambda x: lax.integer_pow(x, 3),
    "power_0": lambda x: lax.integer_pow(x, 0),
    "relu": nn.relu,
    "to_int": lambda x: as_float(lax.convert_element_type(x, jnp.int32)),
    "to_uint": lambda x: as_float(lax.convert_element_type(x, jnp.uint32)),
    "to_bool": lambda x: jnp.where(lax.convert_element_type(x, jnp.bool_), 1.0, 2.0),
    "to_bfloat16": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "to_float16": lambda x: x.astype(jnp.float16).astype(jnp.float32),
    "in_bfloat16": lambda x: (x.astype(jnp.bfloat16) * 3 + 1).astype(jnp.float32),
    "in_float16": lambda x: (x.astype(jnp.float16) * 3 + 1).astype(jnp.float32),
    "clip": lambda x: jnp.clip(x, -1.0, 2.0),
    "isnan": lambda x: jnp.where(jnp.isnan(x), 1.0, x),
    "nan_to_num": jnp.nan_to_num,
    "bits": lambda x: as_float(lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF),
    "constants": lambda x: x * jnp.log(jnp.float32(8.0)) + 2.0**-3,
}
TRANSCENDENTAL = {
    name: getattr(lax, name)
    for name in (
        "exp exp2 log log1p expm1 tanh sqrt rsqrt cbrt logistic erf erfc atan asinh acosh atanh sinh cosh"
    ).split()
} | {
    "asin": lax.asin,
    "acos": lax.acos,
    "power_-2": lambda x: lax.integer_pow(x, -2),
    "softplus": nn.softplus,
    "gelu": nn.gelu,
    "silu": nn.silu,
    "log2": jnp.log2,
    "reciprocal": lambda x: 1 / x,
    "divided_by_3": lambda x: x / 3,
}
TRIGONOMETRIC = {"sin": lax.sin, "cos": lax.cos, "tan": lax.tan, "lgamma": lax.lgamma}
BINARY = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "rem": lax.rem,
    "max": lax.max,
    "min": lax.min,
    "clamp": lambda a, b: lax.clamp(jnp.float32(-2), a, b),
    "nextafter": lambda a, b: lax.nextafter(jnp.where(a == 0, 1.0, a), b),
    "compared": lambda a, b: (
        (a < b) + 2.0 * (a <= b) + 4.0 * (a > b) + 8.0 * (a >= b) + 16.0 * (a == b) + 32.0 * (a != b)
    ),
    "select": lambda a, b: jnp.where((a < b) & ~(a == -1) | (b == 3) ^ (a > 0), a, b),
}
CLOSE_BINARY = {"pow": lax.pow, "atan2": lax.atan2, "logaddexp": jnp.logaddexp}
INTEGER = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "rem": lax.rem,
    "floor_divide": jnp.floor_divide,
    "remainder": jnp.remainder,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "not": lambda a, b: lax.bitwise_not(a),
    "shift_left": lax.shift_left,
    "shift_right_logical": lax.shift_right_logical,
    "shift_right_arithmetic": lax.shift_right_arithmetic,
    "population_count": lambda a, b: lax.population_count(a),
    "clz": lambda a, b: lax.clz(a),
    "sign": lambda a, b: lax.sign(a),
    "cube": lambda a, b: lax.integer_pow(a, 3),
    "select_n": lambda a, b: lax.select_n(lax.min((b & 3).astype(jnp.int32), 2), a, b, a + b),
    "compared": lambda a, b: jnp.where(a < b, a, b) + jnp.where(a >= b, b, a) * 3,
}
SIGNED = {
    "neg": lambda a, b: lax.neg(a),
    "abs": lambda a, b: lax.abs(a),
    "to_float": lambda a, b: a.astype(jnp.float32),
    "to_int8": lambda a, b: (a.astype(jnp.int8) + b.astype(jnp.int8)).astype(jnp.int32),
    "to_uint16": lambda a, b: (a.astype(jnp.uint16) * b.astype(jnp.uint16)).astype(jnp.int32),
    "unsigned_to_float": lambda a, b: as_unsigned(a).astype(jnp.float32),
}


def _bits(x):
    return x if x.dtype == jnp.float32 else as_float(x)


def _unary(f):
    return lambda score, b, h, q, k: f(score)


def _binary(f):
    return lambda score, b, h, q, k: f(score, as_float(k))


# Integers come as batch and head: positions are never large, and code for sums of them relies on it.
def _integer(f):
    return lambda score, b, h, q, k: _bits(f(b, h))


def _unsigned(f):
    return lambda score, b, h, q, k: as_float(f(as_unsigned(b), as_unsigned(h)))


SMALL = FLOATS[np.abs(FLOATS) < 1e4]
CASES = {}
"""Of each the score_mod, the values that its arguments take in all pairs, and the relative error that it may
have."""
for make, group, values, tolerance in (
    (_unary, EXACT, FLOATS, 0),
    (_unary, TRANSCENDENTAL, FLOATS, CLOSE),
    (_unary, TRIGONOMETRIC, SMALL, 1e-4),
    (_binary, BINARY, FLOATS, 0),
    (_binary, CLOSE_BINARY, FLOATS, CLOSE),
    (_integer, INTEGER | SIGNED, INTEGERS, 0),
    (_unsigned, INTEGER, INTEGERS, 0),
):
    for name, f in group.items():
        CASES[f"{make.__name__[1:]}-{name}"] = (make(f), values, tolerance)


def arguments_of(name):
    _, values, _ = CASES[name]
    a, b = (x.ravel() for x in np.meshgrid(values, values))
    none = np.zeros(a.shape, np.int32)
    if values.dtype == np.float32:
        return a, none, none, none, b.view(np.int32)
    return none.astype(np.float32), a, b, none, none
