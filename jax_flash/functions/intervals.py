"""Bounds of what a function of scalars takes, where its arguments are anywhere in some intervals.

Interval arithmetic (Moore, "Interval Analysis", 1966) over a function's graph: each node's bounds are found
from those of its arguments. They hold for each value that the function takes, but it may not take all
between them, as a node's arguments are taken to be independent. What nothing is known of has the bounds of
its dtype. Bounds are arrays, so that many intervals are looked at at once.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash.functions.graph import BOOL, CONSTANT, FLOATS, INPUT, LOAD, Node, reachable

CHUNK = 128
"""Elements of a large captured array whose bounds are kept together. Those of other stretches are widened."""

LARGE = 1 << 16
"""Elements of arrays for which bounds of single elements would take too much memory."""

_SLACK = 2.0**-20
"""Relative to the bounds of a float: compilers may round otherwise than these bounds are rounded."""


class Interval(NamedTuple):
    """Bounds of scalars, both included: arrays of the scalars' dtype. False is below True.

    A float with an infinite bound may be NaN as well.
    """

    low: jax.Array
    high: jax.Array


Rule = Callable[..., Interval | None]
"""From a node and its arguments' bounds to its own; None where nothing is known."""


def bounds(output: Node, inputs: Mapping[str, Interval], captured: Sequence[Any]) -> Interval:
    """Bounds of a node.

    Args:
      inputs: bounds of the function's arguments by name. Their shapes broadcast.
      captured: the arrays that the function captures.

    Returns:
      Arrays of a shape that broadcasts to that of all inputs.
    """
    nodes = reachable([output])
    loaded = {node.detail for node in nodes if node.operation == LOAD}
    tables = {number: _Table(captured[number]) for number in loaded}
    found: dict[Node, Interval] = {}
    for node in nodes:
        if node.operation == INPUT:
            found[node] = inputs[node.detail]
        elif node.operation == CONSTANT:
            found[node] = _point(node.value, node.dtype)
        elif node.operation == LOAD:
            found[node] = tables[node.detail].over(found[node.arguments[0]])
        else:
            found[node] = _of_operation(node, [found[argument] for argument in node.arguments])
    return found[output]


def _of_operation(node: Node, arguments: Sequence[Interval]) -> Interval:
    rule = RULES.get(node.operation)
    result = None if rule is None else rule(node, *arguments)
    if result is None:
        return _anything(node.dtype)
    if node.dtype in FLOATS and node.operation != "select_n":
        # NaN gives NaN, though tanh(inf), say, is finite. A choice may be of the other argument.
        result = _unless(_may_be_nan(*arguments), node.dtype, result)
    return _checked(node.dtype, result)


def _point(value: Any, dtype: np.dtype) -> Interval:
    x = jnp.asarray(value, dtype)
    return _checked(dtype, Interval(x, x))


def _anything(dtype: np.dtype) -> Interval:
    if dtype in FLOATS:
        return Interval(jnp.asarray(-np.inf, dtype), jnp.asarray(np.inf, dtype))
    if dtype == BOOL:
        return Interval(jnp.asarray(False), jnp.asarray(True))
    info = jnp.iinfo(dtype)
    return Interval(jnp.asarray(info.min, dtype), jnp.asarray(info.max, dtype))


def _unless(is_unknown: jax.Array, dtype: np.dtype, interval: Interval) -> Interval:
    low, high = _anything(dtype)
    return Interval(jnp.where(is_unknown, low, interval.low), jnp.where(is_unknown, high, interval.high))


def _checked(dtype: np.dtype, interval: Interval) -> Interval:
    """With infinite bounds of floats that may be NaN, and slack for others."""
    if dtype not in FLOATS:
        return interval
    slack = jnp.asarray(_SLACK, dtype)
    low, high = interval.low - jnp.abs(interval.low) * slack, interval.high + jnp.abs(interval.high) * slack
    if dtype.itemsize == 2:  # whose own rounding is coarser than that
        low, high = jnp.nextafter(low, -jnp.inf), jnp.nextafter(high, jnp.inf)
    is_unknown = ~(jnp.isfinite(low) & jnp.isfinite(high))
    return _unless(is_unknown, dtype, Interval(low, high))


class _Table:
    """Bounds of any stretch of a flat array: of two overlapping powers of two of its chunks."""

    def __init__(self, array: Any):
        flat = jnp.asarray(array).reshape(-1)
        self.dtype = np.dtype(flat.dtype)
        self.size = flat.size
        if self.dtype == BOOL:
            flat = flat.astype(jnp.int8)
        self.chunk = CHUNK if self.size > LARGE else 1
        short = -self.size % self.chunk
        padded = jnp.concatenate([flat, jnp.broadcast_to(flat[-1:], (short,))]) if short else flat
        chunks = padded.reshape(-1, self.chunk)
        low, high = [jnp.min(chunks, axis=1)], [jnp.max(chunks, axis=1)]
        for level in range(max(chunks.shape[0], 1).bit_length() - 1):
            step = 1 << level
            low.append(jnp.minimum(low[-1][:-step], low[-1][step:]))
            high.append(jnp.maximum(high[-1][:-step], high[-1][step:]))
        self.starts = np.cumsum([0, *(len(x) for x in low)])[:-1].astype(np.int32)
        self.low, self.high = jnp.concatenate(low), jnp.concatenate(high)

    def over(self, index: Interval) -> Interval:
        """Of the elements at an index that is within the array."""
        if self.size == 0:
            return _anything(self.dtype)
        first, last = (jnp.clip(x, 0, self.size - 1) // self.chunk for x in index)
        level = 31 - jax.lax.clz(last - first + 1)
        start = jnp.asarray(self.starts)[level]
        one, other = start + first, start + last + 1 - (1 << level)
        low = jnp.minimum(self.low[one], self.low[other])
        high = jnp.maximum(self.high[one], self.high[other])
        return _checked(self.dtype, Interval(low.astype(self.dtype), high.astype(self.dtype)))


def _hull(values: Sequence[jax.Array]) -> Interval:
    return Interval(functools.reduce(jnp.minimum, values), functools.reduce(jnp.maximum, values))


def _is_float(node: Node) -> bool:
    return node.dtype in FLOATS


def _is_signed(node: Node) -> bool:
    return node.dtype.kind == "i"


def _of_size(x: jax.Array) -> jax.Array:
    """A number's size in float32, a little more or less than it is."""
    return jnp.abs(x.astype(jnp.float32))


def _sum(node: Node, low: jax.Array, high: jax.Array, sizes: jax.Array) -> Interval:
    """An integer that wraps may be anything. `sizes` is how large the parts are together."""
    if _is_float(node):
        return Interval(low, high)
    limit = float(jnp.iinfo(node.dtype).max) * (1 - 2.0**-20)
    return _unless(sizes > limit, node.dtype, Interval(low, high))


def _add(node: Node, a: Interval, b: Interval) -> Interval | None:
    if not (_is_float(node) or _is_signed(node)):
        return None
    sizes = jnp.maximum(_of_size(a.low), _of_size(a.high)) + jnp.maximum(_of_size(b.low), _of_size(b.high))
    return _sum(node, a.low + b.low, a.high + b.high, sizes)


def _subtract(node: Node, a: Interval, b: Interval) -> Interval | None:
    if not (_is_float(node) or _is_signed(node)):
        return None
    sizes = jnp.maximum(_of_size(a.low), _of_size(a.high)) + jnp.maximum(_of_size(b.low), _of_size(b.high))
    return _sum(node, a.low - b.high, a.high - b.low, sizes)


def _multiply(node: Node, a: Interval, b: Interval) -> Interval | None:
    if not (_is_float(node) or _is_signed(node)):
        return None
    sizes = jnp.maximum(_of_size(a.low), _of_size(a.high)) * jnp.maximum(_of_size(b.low), _of_size(b.high))
    corners = _hull([x * y for x in a for y in b])
    return _sum(node, *corners, sizes)


def _negate(node: Node, a: Interval) -> Interval | None:
    return _sum(node, -a.high, -a.low, _of_size(a.low)) if _is_float(node) or _is_signed(node) else None


def _absolute(node: Node, a: Interval) -> Interval | None:
    if not (_is_float(node) or _is_signed(node)):
        return a
    low = jnp.maximum(jnp.maximum(a.low, -a.high), jnp.zeros((), node.dtype))
    return _sum(node, low, jnp.maximum(jnp.abs(a.low), jnp.abs(a.high)), _of_size(a.low))


def _divide(node: Node, a: Interval, b: Interval) -> Interval | None:
    if not (_is_float(node) or _is_signed(node)):
        return None
    has_zero = (b.low <= 0) & (b.high >= 0)
    one = jnp.ones((), node.dtype)
    divisors = [jnp.where(has_zero, one, x) for x in b]
    corners = _hull([jax.lax.div(*jnp.broadcast_arrays(x, y)) for x in a for y in divisors])
    wraps = _of_size(a.low) > 2.0**31 * (1 - 2.0**-20) if _is_signed(node) else jnp.asarray(False)
    return _unless(has_zero | wraps, node.dtype, corners)


def _remainder(node: Node, a: Interval, b: Interval) -> Interval | None:
    """Of a known divisor: as large as the divisor at most, and no more if nothing wraps in between."""
    if not _is_signed(node):
        return None
    by = jnp.where(b.low == 0, jnp.ones((), node.dtype), b.low)
    is_known = (b.low == b.high) & (b.low > 0)
    first, last = (jax.lax.rem(*jnp.broadcast_arrays(x, by)) for x in a)
    # The remainder has the sign of the number.
    is_one_run = ((a.low >= 0) | (a.high < 0)) & (a.high - a.low < by) & (first <= last)
    widest = jnp.where(a.low >= 0, 0, 1 - by), jnp.where(a.high <= 0, 0, by - 1)
    low, high = (jnp.where(is_one_run, x, y) for x, y in zip((first, last), widest, strict=True))
    return _unless(~is_known, node.dtype, Interval(low, high))


def _monotone(node: Node, a: Interval) -> Interval:
    assert node.bind is not None
    return Interval(node.bind(a.low), node.bind(a.high))


def _convert(node: Node, a: Interval) -> Interval | None:
    source = node.arguments[0].dtype
    if node.dtype == BOOL:
        return _not_equal(node, a, Interval(*(jnp.zeros((), source) for _ in range(2))))
    if source.kind == "u" and node.dtype.kind == "i" and source.itemsize == node.dtype.itemsize:
        return None
    if node.dtype.kind in "iu" and source.kind in "iu" and node.dtype.itemsize < source.itemsize:
        return None
    if source.kind == "i" and node.dtype.kind == "u":
        return _unless(a.low < 0, node.dtype, _monotone(node, a))
    if node.dtype.kind in "iu" and source in FLOATS:
        is_large = jnp.maximum(_of_size(a.low), _of_size(a.high)) >= float(jnp.iinfo(node.dtype).max) / 2
        return _unless(is_large | (a.low < 0) & (node.dtype.kind == "u"), node.dtype, _monotone(node, a))
    return _monotone(node, a)


def _power(node: Node, a: Interval) -> Interval | None:
    assert isinstance(node.detail, tuple)
    (y,) = node.detail
    if not _is_float(node) or y < 0:
        return None
    return _monotone(node, a if y % 2 else _absolute(node, a))


def _may_be_nan(*intervals: Interval) -> jax.Array:
    unknown = [
        ~(jnp.isfinite(x.low) & jnp.isfinite(x.high))
        for x in intervals
        if jnp.issubdtype(x.low.dtype, jnp.floating)
    ]
    return functools.reduce(jnp.logical_or, unknown, jnp.asarray(False))


def _known(always: jax.Array, ever: jax.Array, a: Interval, b: Interval) -> Interval:
    """Of a comparison of `a` and `b`, which NaN makes false."""
    unknown = _may_be_nan(a, b)
    return Interval(always & ~unknown, ever | unknown)


def _less(node: Node, a: Interval, b: Interval) -> Interval:
    return _known(a.high < b.low, a.low < b.high, a, b)


def _less_or_equal(node: Node, a: Interval, b: Interval) -> Interval:
    return _known(a.high <= b.low, a.low <= b.high, a, b)


def _greater(node: Node, a: Interval, b: Interval) -> Interval:
    return _less(node, b, a)


def _greater_or_equal(node: Node, a: Interval, b: Interval) -> Interval:
    return _less_or_equal(node, b, a)


def _equal(node: Node, a: Interval, b: Interval) -> Interval:
    is_point = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return _known(is_point, (a.low <= b.high) & (b.low <= a.high), a, b)


def _not_equal(node: Node, a: Interval, b: Interval) -> Interval:
    low, high = _equal(node, a, b)
    return Interval(~high, ~low)


def _and(node: Node, a: Interval, b: Interval) -> Interval | None:
    if node.dtype == BOOL:
        return Interval(a.low & b.low, a.high & b.high)
    zero = jnp.zeros((), node.dtype)
    return _unless((a.low < 0) | (b.low < 0), node.dtype, Interval(zero, jnp.minimum(a.high, b.high)))


def _or(node: Node, a: Interval, b: Interval) -> Interval | None:
    return Interval(a.low | b.low, a.high | b.high) if node.dtype == BOOL else None


def _xor(node: Node, a: Interval, b: Interval) -> Interval | None:
    return _not_equal(node, a, b) if node.dtype == BOOL else None


def _not(node: Node, a: Interval) -> Interval:
    return Interval(~a.high, ~a.low)


def _shift_right(node: Node, a: Interval, b: Interval) -> Interval | None:
    assert node.bind is not None
    is_unknown = (b.low != b.high) | (b.low < 0) | (b.low > 8 * node.dtype.itemsize - 1) | (a.low < 0)
    by = jnp.where(is_unknown, jnp.zeros((), node.dtype), b.low)
    shifted = Interval(*(jnp.right_shift(x, by) for x in a))
    return _unless(is_unknown, node.dtype, shifted)


def _select(node: Node, which: Interval, *cases: Interval) -> Interval | None:
    if len(cases) != 2 or which.low.dtype != BOOL:
        return _hull_of(cases)
    if_false, if_true = cases
    both = _hull_of(cases)
    return Interval(
        *(
            jnp.where(which.low, x, jnp.where(which.high, z, y))
            for x, y, z in zip(if_true, if_false, both, strict=True)
        )
    )


def _hull_of(cases: Sequence[Interval]) -> Interval:
    least = jnp.minimum if cases[0].low.dtype != BOOL else jnp.logical_and
    most = jnp.maximum if cases[0].low.dtype != BOOL else jnp.logical_or
    return Interval(
        functools.reduce(least, (x.low for x in cases)), functools.reduce(most, (x.high for x in cases))
    )


def _max(node: Node, a: Interval, b: Interval) -> Interval:
    return Interval(*(x | y if node.dtype == BOOL else jnp.maximum(x, y) for x, y in zip(a, b, strict=True)))


def _min(node: Node, a: Interval, b: Interval) -> Interval:
    return Interval(*(x & y if node.dtype == BOOL else jnp.minimum(x, y) for x, y in zip(a, b, strict=True)))


def _clamp(node: Node, low: Interval, x: Interval, high: Interval) -> Interval:
    return _min(node, _max(node, x, low), high)


_MONOTONE = ("sign", "floor", "ceil", "round", "exp", "exp2", "expm1", "log1p", "tanh", "logistic", "atan")

RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _subtract,
    "mul": _multiply,
    "neg": _negate,
    "abs": _absolute,
    "div": _divide,
    "rem": _remainder,
    "max": _max,
    "min": _min,
    "clamp": _clamp,
    "convert_element_type": _convert,
    "integer_pow": _power,
    "square": lambda node, a: _multiply(node, b := _absolute(node, a), b),
    "lt": _less,
    "le": _less_or_equal,
    "gt": _greater,
    "ge": _greater_or_equal,
    "eq": _equal,
    "ne": _not_equal,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "not": lambda node, a: _not(node, a) if node.dtype == BOOL else None,
    "shift_right_logical": _shift_right,
    "shift_right_arithmetic": _shift_right,
    "select_n": _select,
    **dict.fromkeys(_MONOTONE, _monotone),
}
"""By primitive. Of others nothing is known."""
