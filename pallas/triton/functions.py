"""A user's function of scalars in kernels by Triton: its graph, computed for a tile of scores at once.

Each node is a tile, a row or a column of one, or a single number (functions/evaluation.py). Numbers of 16
bits are widened for each operation and rounded after it. Where Triton's instructions promise less than JAX's
primitives, the difference is made up for here: a maximum with NaN, a division of integers by 0, a shift by
more bits than there are.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash.functions.evaluation import Load, by_jax, evaluate
from jax_flash.functions.graph import (
    BFLOAT16,
    BOOL,
    CONSTANT,
    DTYPES,
    FLOAT16,
    FLOAT32,
    FLOATS,
    INT32,
    NARROW,
    UINT32,
    Node,
)
from jax_flash.functions.static import StaticFunction

_WORDS = (INT32, UINT32)
_INTEGERS = (*_WORDS, *NARROW)
_NUMBERS = (*FLOATS, *_INTEGERS)
_SIGNED = tuple(x for x in _INTEGERS if x.kind == "i")

_OF_FLOATS = (
    "sqrt rsqrt cbrt exp exp2 expm1 log log2 log1p logistic pow tanh sin cos tan asin acos atan atan2 sinh "
    "cosh asinh acosh atanh erf_inv floor ceil is_finite one_minus_square polynomial"
).split()
_TAKES: dict[str, tuple[np.dtype, ...]] = {
    **dict.fromkeys(_OF_FLOATS, FLOATS),
    **dict.fromkeys("add add_any sub mul neg sign square max min clamp".split(), _NUMBERS),
    **dict.fromkeys(("div", "rem"), (*FLOATS, *_WORDS)),
    "abs": (*FLOATS, *_SIGNED),
    "integer_pow": (*FLOATS, *_WORDS),
    **dict.fromkeys("and or xor not".split(), (*_INTEGERS, BOOL)),
    **dict.fromkeys("shift_left shift_right_logical shift_right_arithmetic".split(), _WORDS),
    **dict.fromkeys(("population_count", "clz"), _WORDS),
    **dict.fromkeys("lt le gt ge eq ne select_n convert_element_type".split(), DTYPES),
    "bitcast_convert_type": (FLOAT32, *_WORDS),
    "nextafter": (FLOAT32,),
}
"""For each primitive the types of the argument that decides, as `unsupported` says."""


def unsupported(name: str, arguments: Sequence[np.dtype], result: np.dtype) -> str | None:
    """Why a kernel can't have a primitive of arguments of these types, or None."""
    if name not in _TAKES:
        return "the Triton lowering of Pallas has no such primitive"
    # Of `select_n` the predicate is first. All other primitives decide by their first argument.
    deciding = arguments[1 if name == "select_n" else 0]
    is_narrowed = name == "convert_element_type" and result in NARROW and deciding in FLOATS
    if is_narrowed or (name == "bitcast_convert_type" and result not in _TAKES[name]):
        return f"kernels by Triton don't have this primitive from {deciding.name} to {result.name}"
    if deciding not in _TAKES[name]:
        return f"kernels by Triton don't have this primitive of {deciding.name}"
    return None


@functools.cache
def score_mod_limit(function: StaticFunction, deterministic: bool) -> str | None:
    """Why kernels can't run a score_mod, forward and backward, or None."""
    if (reason := function.limit(unsupported)) is not None:
        return reason
    return function.limit_of_order() if deterministic else None


@functools.cache
def mask_mod_limit(function: StaticFunction) -> str | None:
    """Why kernels can't run a mask_mod, or None."""
    return function.limit(unsupported)


def values(outputs: Sequence[Node], inputs: Mapping[str, jax.Array], load: Load) -> list[jax.Array]:
    """What the nodes are for a tile, each with axes of 1 along which it is the same."""
    return evaluate(outputs, inputs, load, _apply)


def _apply(node: Node, arguments: Sequence[jax.Array]) -> jax.Array:
    moves = node.operation in ("select_n", "convert_element_type")
    if not moves:
        arguments = [x.astype(FLOAT32) if x.dtype in (BFLOAT16, FLOAT16) else x for x in arguments]
    kind = "float" if arguments[-1].dtype.kind == "f" else "integer"
    rule = _RULES.get((node.operation, kind), by_jax)
    return rule(node, arguments).astype(node.dtype)


Rule = Callable[[Node, Sequence[jax.Array]], jax.Array]
"""A primitive of arguments of one shape, as kernels compute it."""


def _extremum(of_floats: Callable[[jax.Array, jax.Array], jax.Array]) -> Rule:
    """The larger or smaller of two floats. Triton's own of NaN and a number is the number."""

    def rule(node: Node, arguments: Sequence[jax.Array]) -> jax.Array:
        a, b = arguments
        return jnp.where(of_floats(a, b) | (a != a), a, b)

    return rule


_larger, _smaller = _extremum(lax.gt), _extremum(lax.lt)


def _clamp(node: Node, arguments: Sequence[jax.Array]) -> jax.Array:
    low, x, high = arguments
    return _smaller(node, (_larger(node, (x, low)), high))


def _divide(node: Node, arguments: Sequence[jax.Array]) -> jax.Array:
    """Integers by integers. JAX has -1, all bits, for a quotient by 0."""
    (x, _), (divisor, is_zero, is_minus_one) = arguments, _divisor(node, arguments)
    quotient = lax.div(x, divisor)
    if is_minus_one is not None:
        quotient = jnp.where(is_minus_one, -x, quotient)
    return quotient if is_zero is None else jnp.where(is_zero, ~jnp.zeros_like(x), quotient)


def _remainder(node: Node, arguments: Sequence[jax.Array]) -> jax.Array:
    """Of integers. JAX has the dividend for a remainder by 0."""
    (x, _), (divisor, is_zero, is_minus_one) = arguments, _divisor(node, arguments)
    remainder = lax.rem(x, divisor)
    if is_minus_one is not None:
        remainder = jnp.where(is_minus_one, jnp.zeros_like(x), remainder)
    return remainder if is_zero is None else jnp.where(is_zero, x, remainder)


def _divisor(
    node: Node, arguments: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """A divisor with 1 in place of 0 and -1, and where it is 0 and where -1. None where that can't be."""
    _, by = arguments
    constant = node.arguments[1]
    if constant.operation == CONSTANT and constant.value not in (0, -1):
        return by, None, None
    is_zero = by == 0
    is_minus_one = by == -1 if node.dtype in _SIGNED else None
    is_taken = ~is_zero if is_minus_one is None else ~(is_zero | is_minus_one)
    return jnp.where(is_taken, by, jnp.ones_like(by)), is_zero, is_minus_one


def _shift(node: Node, arguments: Sequence[jax.Array]) -> jax.Array:
    """Words by any number of bits. Those of more bits than a word has leave none, or copies of the sign."""
    x, bits = arguments
    is_beyond = (bits < 0) | (bits >= 32)
    most = 31 if node.operation == "shift_right_arithmetic" else 0
    shifted = by_jax(node, (x, jnp.where(is_beyond, jnp.full_like(bits, most), bits)))
    return shifted if most else jnp.where(is_beyond, jnp.zeros_like(x), shifted)


def _select(node: Node, arguments: Sequence[jax.Array]) -> jax.Array:
    """The case that a number says, the first or last where it says none; that of False and True is JAX's."""
    which, *cases = arguments
    if which.dtype == BOOL:
        return by_jax(node, arguments)
    chosen = cases[-1]
    for number in reversed(range(len(cases) - 1)):
        chosen = jnp.where(which <= number, cases[number], chosen)
    return chosen


def _log2(node: Node, arguments: Sequence[jax.Array]) -> jax.Array:
    (x,) = arguments
    return lax.log(x) * (1 / math.log(2))


def _one_minus_square(node: Node, arguments: Sequence[jax.Array]) -> jax.Array:
    (x,) = arguments
    return (1.0 + x) * (1.0 - x)


def _polynomial(node: Node, arguments: Sequence[jax.Array]) -> jax.Array:
    """From the lowest degree to the highest, by Horner's rule."""
    x, *coefficients = arguments
    return functools.reduce(lambda total, c: c + x * total, reversed(coefficients))


_RULES: dict[tuple[str, str], Rule] = {
    ("max", "float"): _larger,
    ("min", "float"): _smaller,
    ("clamp", "float"): _clamp,
    ("div", "integer"): _divide,
    ("rem", "integer"): _remainder,
    **{(name, "integer"): _shift for name in ("shift_left", "shift_right_logical", "shift_right_arithmetic")},
    **{("select_n", kind): _select for kind in ("float", "integer")},
    ("log2", "float"): _log2,
    ("one_minus_square", "float"): _one_minus_square,
    ("polynomial", "float"): _polynomial,
}
"""Primitives that aren't left to the lowering, by the kind of their last argument."""
