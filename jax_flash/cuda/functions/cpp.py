"""Scalar primitives as C++ expressions (cuda/kernels/common/scalar_functions.cuh).

16-bit floats are held as float, and rounded after each operation. Bytes and halves are held as int, and
wrapped.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jax_flash.functions.graph import (
    BFLOAT16,
    BOOL,
    CONSTANT,
    FLOAT16,
    FLOAT32,
    FLOATS,
    INT32,
    NARROW,
    UINT32,
    Node,
)

_INTEGERS = (INT32, UINT32)
_TYPES = {
    BFLOAT16: "float",
    FLOAT16: "float",
    FLOAT32: "float",
    INT32: "int",
    UINT32: "uint32_t",
    BOOL: "bool",
    **dict.fromkeys(NARROW, "int"),
}
_WRAPPED = dict(zip(NARROW, ("signed char", "unsigned char", "short", "uint16_t"), strict=True))
ELEMENTS = {
    BFLOAT16: "bfloat16",
    FLOAT16: "float16",
    FLOAT32: "float",
    INT32: "int32_t",
    UINT32: "uint32_t",
    BOOL: "unsigned char",
    **_WRAPPED,
}
"""Types of elements in memory."""

Write = Callable[..., str]
_ALL = (*FLOATS, *_INTEGERS, BOOL, *NARROW)
_NUMBERS = (*FLOATS, *_INTEGERS, *NARROW)


def type_of(node: Node) -> str:
    """The C++ type of the variable that holds a node."""
    return _TYPES[node.dtype]


def unsupported(name: str, arguments: Sequence[np.dtype], result: np.dtype) -> str | None:
    """Why a primitive can't be written for arguments of these types, or None."""
    if name not in _WRITERS:
        return "CUDA code can't be written for this primitive"
    # Of `select_n` the predicate is first. All other primitives decide by their first argument.
    deciding = arguments[1 if name == "select_n" else 0]
    allowed = _WRITERS[name][0]
    if deciding not in allowed:
        return f"CUDA code can't be written for this primitive of {deciding.name}"
    if name == "convert_element_type" and result in NARROW and deciding in FLOATS:
        return f"CUDA code can't be written for this primitive from {deciding.name} to {result.name}"
    if name == "bitcast_convert_type" and result not in (FLOAT32, *_INTEGERS):
        return f"CUDA code can't be written for this primitive to {result.name}"
    return None


def expression(node: Node, arguments: Sequence[str]) -> str:
    """A primitive's result as a C++ expression of its arguments', which are names or literals."""
    _, write = _WRITERS[node.operation]
    written = write(node, *arguments)
    if node.operation in _ROUNDS_ITSELF:
        return written
    if node.dtype in (BFLOAT16, FLOAT16):
        return f"scalar::rounded<{ELEMENTS[node.dtype]}>({written})"
    if node.dtype in NARROW:
        return f"static_cast<{_WRAPPED[node.dtype]}>({written})"
    return written


def literal(node: Node) -> str:
    """A constant in C++."""
    value = node.value
    if node.dtype == BOOL:
        return "true" if value else "false"
    if node.dtype in FLOATS:
        number = np.float32(value)
        if np.isfinite(number):
            return f"{float(number).hex()}f"
        return f"__uint_as_float(0x{number.view(np.uint32):08x}u)"
    number = int(value)
    if node.dtype == UINT32:
        return f"{number}u"
    return "(-2147483647 - 1)" if number == -(2**31) else f"({number})" if number < 0 else str(number)


def _infix(sign: str, functions_of_integers: str | None = None) -> Write:
    def write(node: Node, a: str, b: str) -> str:
        if functions_of_integers and node.arguments[0].dtype not in FLOATS:
            return f"scalar::{functions_of_integers}({a}, {b})"
        return f"{a} {sign} {b}"

    return write


def _divide(node: Node, a: str, b: str) -> str:
    factor = reciprocal(node.arguments[1])
    return f"scalar::divide({a}, {b})" if factor is None else f"{a} * {factor}"


def reciprocal(divisor: Node) -> str | None:
    """That of a constant in C++, if it has one in float32; else None. XLA also multiplies by it."""
    if divisor.dtype not in FLOATS or divisor.operation != CONSTANT:
        return None
    x = float(divisor.value)
    return f"{float(np.float32(1 / x)).hex()}f" if 2.0**-100 < abs(x) < 2.0**100 else None


def _bitwise(sign: str) -> Write:
    def write(node: Node, a: str, b: str) -> str:
        # Of bool, C++ makes int.
        return f"({a} {sign} {b}) != 0" if node.dtype == BOOL else f"{a} {sign} {b}"

    return write


def _function(name: str) -> Write:
    return lambda node, *arguments: f"{name}({', '.join(arguments)})"


def _by_type(of_floats: str, of_integers: str) -> Write:
    def write(node: Node, *arguments: str) -> str:
        name = of_floats if node.dtype in FLOATS else of_integers
        return f"{name}({', '.join(arguments)})"

    return write


def _negate(node: Node, x: str) -> str:
    return f"-{x}" if node.dtype in FLOATS else f"scalar::negate({x})"


def _not(node: Node, x: str) -> str:
    return f"!{x}" if node.dtype == BOOL else f"~{x}"


def _round(node: Node, x: str) -> str:
    away_from_zero = node.detail == (int(jax.lax.RoundingMethod.AWAY_FROM_ZERO),)
    return f"roundf({x})" if away_from_zero else f"rintf({x})"


def _integer_power(node: Node, x: str) -> str:
    assert isinstance(node.detail, tuple)
    (power,) = node.detail
    if power == 0:
        return "1"
    of_magnitude = f"scalar::integer_power<{abs(power)}>({x})"
    return of_magnitude if power > 0 else f"scalar::divide(1.0f, {of_magnitude})"


def _polynomial(node: Node, x: str, *coefficients: str) -> str:
    """From the lowest degree to the highest, by Horner's rule."""
    sum = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        sum = f"{coefficient} + {x} * ({sum})"
    return sum


def _select(node: Node, which: str, *cases: str) -> str:
    if node.arguments[0].dtype == BOOL:
        return f"{which} ? {cases[1]} : {cases[0]}" if len(cases) == 2 else cases[0]
    chosen = [f"{which} <= {number} ? {case} : " for number, case in enumerate(cases[:-1])]
    return "".join(chosen) + cases[-1]


def _clamp(node: Node, low: str, x: str, high: str) -> str:
    return f"scalar::minimum(scalar::maximum({x}, {low}), {high})"


def _extremum(name: str, of_bool: str) -> Write:
    def write(node: Node, a: str, b: str) -> str:
        return f"{a} {of_bool} {b}" if node.dtype == BOOL else f"scalar::{name}({a}, {b})"

    return write


def _convert(node: Node, x: str) -> str:
    source, to = node.arguments[0].dtype, node.dtype
    if to == BOOL:
        return f"{x} != 0"
    if to in FLOATS:
        return x if source in FLOATS else f"static_cast<float>({x})"
    if source in FLOATS:
        return f"scalar::to_unsigned({x})" if to == UINT32 else f"scalar::to_int({x})"
    return f"static_cast<{_TYPES[to]}>({x})"


def _bitcast(node: Node, x: str) -> str:
    return f"scalar::bit_pattern<{type_of(node)}>({x})"


_ROUNDS_ITSELF = ("select_n", "max", "min", "clamp", "sign", "floor", "ceil", "round")
"""Operations whose result is one of their arguments, or fits as they do."""

_SHIFTS = ("shift_left", "shift_right_logical", "shift_right_arithmetic")
_OF_FLOATS = {
    name: f"{name}f"
    for name in (
        "floor ceil exp exp2 log log2 log1p expm1 sin cos tan asin acos atan atan2 sinh cosh "
        "asinh acosh atanh sqrt cbrt erf erfc lgamma"
    ).split()
}
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}

_WRITERS: dict[str, tuple[tuple[np.dtype, ...], Write]] = {
    "add": (_NUMBERS, _infix("+", "add")),
    "add_any": (_NUMBERS, _infix("+", "add")),
    "sub": (_NUMBERS, _infix("-", "subtract")),
    "mul": (_NUMBERS, _infix("*", "multiply")),
    "div": ((*FLOATS, *_INTEGERS), _divide),
    "rem": ((*FLOATS, *_INTEGERS), _by_type("fmodf", "scalar::remainder")),
    "neg": (_NUMBERS, _negate),
    "abs": (_NUMBERS, _by_type("fabsf", "scalar::absolute")),
    "sign": (_NUMBERS, _function("scalar::sign")),
    "max": (_ALL, _extremum("maximum", "||")),
    "min": (_ALL, _extremum("minimum", "&&")),
    "clamp": (_NUMBERS, _clamp),
    "and": ((*_INTEGERS, BOOL, *NARROW), _bitwise("&")),
    "or": ((*_INTEGERS, BOOL, *NARROW), _bitwise("|")),
    "xor": ((*_INTEGERS, BOOL, *NARROW), _bitwise("^")),
    "not": ((*_INTEGERS, BOOL, *NARROW), _not),
    **{name: (_INTEGERS, _function(f"scalar::{name}")) for name in _SHIFTS},
    "population_count": (_INTEGERS, _function("scalar::population_count")),
    "clz": (_INTEGERS, _function("scalar::leading_zeros")),
    **{name: (_ALL, _infix(sign)) for name, sign in _COMPARISONS.items()},
    "select_n": (_ALL, _select),
    "convert_element_type": (_ALL, _convert),
    "bitcast_convert_type": ((FLOAT32, *_INTEGERS), _bitcast),
    **{name: (FLOATS, _function(function)) for name, function in _OF_FLOATS.items()},
    "round": (FLOATS, _round),
    "rsqrt": (FLOATS, lambda node, x: f"scalar::divide(1.0f, sqrtf({x}))"),
    "tanh": (FLOATS, _function("tanh_of")),
    "logistic": (FLOATS, _function("scalar::logistic")),
    "pow": (FLOATS, lambda node, x, y: f"powf({x}, static_cast<float>({y}))"),
    "integer_pow": ((*FLOATS, *_INTEGERS), _integer_power),
    "square": ((*FLOATS, *_INTEGERS), lambda node, x: f"scalar::multiply({x}, {x})"),
    "one_minus_square": (FLOATS, lambda node, x: f"__fmaf_rn(-{x}, {x}, 1.0f)"),
    "polynomial": (FLOATS, _polynomial),
    "nextafter": ((FLOAT32,), _function("nextafterf")),
    "is_finite": (FLOATS, _function("scalar::is_finite")),
    **dict.fromkeys(
        ("copy", "copy_p", "stop_gradient", "optimization_barrier", "pvary", "name", "reshard"),
        (_ALL, lambda node, x: x),
    ),
}
"""For each primitive the types of the argument that decides, and how it is written."""
