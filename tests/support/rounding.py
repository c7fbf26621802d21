"""How far rounding may take each number of a result from its definition.

The sizes are standard deviations found in float64: independent errors add up in squares. They hold for an
implementation that keeps no T × S array. Plain attention's own error, the other yardstick of agreement.py,
lacks one of them: it never sees the output rounded. Each reason for an error is a function of its own.

The gradients of bias, slopes and sinks are sums over rows, in which terms cancel. Rounding the output
takes them far off, but a run's output is known, and so is what its rounding does: `with_delta_of`.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import _reference
from jax_flash._spec import AttentionSpec, Operands, sizes

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Absolute: of the smallest normal numbers, below which float32 and bfloat16 may be taken for 0.
SMALLEST = {"float32": 2.0**-126, "float16": 2.0**-25, "bfloat16": 2.0**-126}
FLOAT32 = UNIT_ROUNDOFF["float32"]
OF_NEAREST = 0.41  # rounding to nearest, over the unit roundoff: in the mean over mantissas
# Of each term in float32. In half precision kernels use approximate exponentials, and tensor cores, which
# sum products with fewer bits.
ARITHMETIC = {"float32": 2.0**-22, "float16": 2.0**-17, "bfloat16": 2.0**-17}
# Tensor cores cut off what a sum has beyond float32, each time that they have added this many products.
TENSOR_CORE_DEPTH = 16
TANH = 2.0**-23  # the absolute error of tanh


@dataclasses.dataclass(frozen=True)
class Terms:
    """What the definition computes on its way, in float64. Heads come before rows, and keys have all heads.

    `w` is a probability after dropout, `p` before it.
    """

    spec: AttentionSpec
    operands: Operands
    dtype: str
    p_is_converted: bool  # to 16 bits, before dS is made of it
    rows_of_a_step: int | None  # of a scan: the batch rows that a call sees
    query: np.ndarray  # (B, N, T, H)
    key: np.ndarray  # (B, N, S, H)
    value: np.ndarray  # (B, N, S, V)
    d_out: np.ndarray  # (B, N, T, V)
    out: np.ndarray  # (B, N, T, V)
    lse: np.ndarray  # (B, N, T, 1); 0 in rows that see nothing
    delta: np.ndarray  # (B, N, T, 1); less the cotangent of lse
    scores: np.ndarray  # (B, N, T, S): what score_mod takes
    logits: np.ndarray  # (B, N, T, S)
    p: np.ndarray  # (B, N, T, S)
    kept: np.ndarray  # what dropout multiplies p by
    score_grad: np.ndarray  # of logits by scores
    sink_p: np.ndarray  # (B, N, T, 1)

    @functools.cached_property
    def w(self):
        return self.p * self.kept

    @property
    def arithmetic(self):
        return ARITHMETIC[self.dtype]

    @property
    def has_sums_over_rows(self):
        """Whether a gradient is one: of bias, slopes, sinks or what a score_mod captures."""
        operands = self.operands
        arrays = operands.bias, operands.alibi_slopes, operands.sinks
        return bool(operands.captured) or any(x is not None for x in arrays)

    @functools.cached_property
    def d_p(self):
        return self.kept * (self.d_out @ _t(self.value))

    @functools.cached_property
    def d_logits(self):
        return self.p * (self.d_p - self.delta)


def terms_of(
    dtype, spec, operands, references, d_out, d_lse, p_is_converted=True, rows_of_a_step=None
) -> Terms:
    """Of a call of that dtype.

    Args:
      references: the definition's results by name, `out` `(B, T, N, V)` and `lse` `(B, T, N)` among them.
      d_out: `(B, T, N, V)`.
      d_lse: `(B, T, N)`, or None.
      p_is_converted: whether the implementation makes dS of probabilities in 16 bits.
      rows_of_a_step: where the call is made in a scan, how many batch rows each step has.
    """
    size = sizes(operands)
    out, lse = references["out"], references["lse"]
    query, key, value, out, d_out = (
        np.asarray(x).astype(np.float64).transpose(0, 2, 1, 3)
        for x in (operands.query, operands.key, operands.value, out, d_out)
    )
    key, value = (np.repeat(x, size.group, axis=1) for x in (key, value))
    logits = spec.scale * (query @ _t(key))
    score_grad = np.ones(())
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * np.tanh(logits / spec.logits_soft_cap)
        score_grad = 1 - (logits / spec.logits_soft_cap) ** 2
    scores = logits
    if spec.score_mod is not None:
        logits, derivative = _of_score_mod(spec, operands, scores)
        score_grad = score_grad * derivative
    if operands.bias is not None:
        logits = logits + np.asarray(operands.bias).astype(np.float64)
    if operands.alibi_slopes is not None:
        slopes = np.asarray(operands.alibi_slopes, np.float64)[:, :, None, None]
        logits = logits - slopes * np.abs(np.asarray(_distances(spec, operands)))
    lse = np.asarray(lse, np.float64).transpose(0, 2, 1)[..., None]
    seen = np.isfinite(lse)
    lse = np.where(seen, lse, 0)
    allowed = np.asarray(_allowed(spec, operands)) & seen & ~np.isneginf(logits)
    logits = np.where(allowed, logits, 0)
    p = np.where(allowed, np.exp(np.where(allowed, logits - lse, 0)), 0)
    kept = np.asarray(_kept(spec, operands), np.float64)
    sink_p = np.zeros(())
    if operands.sinks is not None:
        sinks = np.asarray(operands.sinks, np.float64)[:, :, None, None]
        sink_p = np.where(seen, np.exp(np.where(seen, sinks - lse, 0)), 0)
    delta = np.sum(d_out * out, -1, keepdims=True)
    if d_lse is not None:
        delta = delta - np.asarray(d_lse, np.float64).transpose(0, 2, 1)[..., None]
    arrays = query, key, value, d_out, out, lse, delta, scores, logits, p, kept, score_grad, sink_p
    return Terms(spec, operands, dtype, p_is_converted, rows_of_a_step, *arrays)


def deviations(terms: Terms, references: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The standard deviation of each number of each result, in the shape that the definition gives it.

    That of sums over rows is from what `with_delta_of` gives.
    """
    operands = terms.operands
    squares = {
        "out": _rows_first(of_out(terms)),
        "lse": of_lse(terms).transpose(0, 2, 1),
        "d_query": _rows_first(of_d_query(terms)),
        "d_key": _rows_first(_sum_of_groups(terms, of_d_key(terms))),
        "d_value": _rows_first(_sum_of_groups(terms, of_d_value(terms))),
    }
    if operands.bias is not None:
        squares["d_bias"] = of_d_bias(terms)
    if operands.alibi_slopes is not None:
        squares["d_alibi_slopes"] = of_d_alibi_slopes(terms)
    if operands.sinks is not None:
        squares["d_sinks"] = of_d_sinks(terms)
    squares |= of_d_captured(terms)
    return {
        name: np.sqrt(x.reshape(references[name].shape) + of_rounded_result(name, terms, references[name]))
        for name, x in squares.items()
    }


def with_delta_of(out: np.ndarray, terms: Terms, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`results` by name, in which sums over rows have a delta that is found from `out` `(B, T, N, V)`.

    That is the output of a run, which is rounded. Where results aren't sums over rows they stay as they are.
    """
    if not terms.has_sums_over_rows:
        return results
    out = out.astype(np.float64).transpose(0, 2, 1, 3)
    out = np.where(np.isfinite(out), out, terms.out)  # numbers that aren't finite are complaints of their own
    off = np.sum(terms.d_out * (out - terms.out), -1, keepdims=True)
    d_logits, distance = -terms.p * off, _distance(terms)
    shifts = {"d_bias": d_logits, "d_alibi_slopes": -d_logits * distance, "d_sinks": -terms.sink_p * off}
    shifted = {}
    for name, shift in shifts.items():
        if name in results:
            x = results[name]
            shape = x.shape if name == "d_bias" else (*x.shape, 1, 1)
            shifted[name] = x + _sum_to(shift, shape).reshape(x.shape)
    of_captured = {f"d_{name}": x for name, x in _of_captured(terms, d_logits).items()}
    shifted |= {name: results[name] + x for name, x in of_captured.items() if name in results}
    return results | shifted


# Squared errors, a function a reason or a result.


def once(function):
    """Of a call's terms: found when it is first asked for, and kept beside them."""
    name = f"_{function.__name__}"

    @functools.wraps(function)
    def found(terms):
        if name not in terms.__dict__:
            terms.__dict__[name] = function(terms)
        return terms.__dict__[name]

    return found


def of_rounding(dtype, x):
    """Of numbers that are rounded to nearest; small ones to a multiple of the smallest, or to 0."""
    return (OF_NEAREST * UNIT_ROUNDOFF[dtype] * x) ** 2 + SMALLEST[dtype] ** 2


def of_rounded_result(name, terms, reference):
    float32 = ("lse", "d_alibi_slopes", "d_sinks")
    dtype = "float32" if name in float32 else terms.dtype
    operand = name.removeprefix("d_")
    if name == "d_bias" or operand in terms.operands.captured:
        dtype = np.dtype(terms.operands.present()[operand].dtype).name
    if terms.spec.is_wide("out" if name == "out" else operand):
        dtype = "float32"
    return of_rounding(dtype, np.where(np.isfinite(reference), reference, 0))


@once
def of_p(terms):
    """Relative, `(B, N, T, S)`: of the exponential, and of what it is taken of: logits and lse in float32."""
    products = np.abs(terms.spec.scale) * np.sqrt(terms.query**2 @ _t(terms.key**2))
    exponent = FLOAT32 * (np.abs(terms.logits) + np.abs(terms.lse) + products)
    return terms.arithmetic**2 + (exponent + cut_off(terms)) ** 2


@once
def cut_off(terms):
    """Of scores, `(B, N, T, S)`. Tensor cores cut sums off, by half a unit in the last place each time.

    That is a unit of the sum so far, which may be far larger than the whole one.
    """
    if terms.dtype == "float32":
        return np.zeros(())
    so_far, sizes_of_sums = 0.0, 0.0
    for first in range(0, terms.query.shape[-1], TENSOR_CORE_DEPTH):
        columns = slice(first, first + TENSOR_CORE_DEPTH)
        so_far = so_far + terms.query[..., columns] @ _t(terms.key[..., columns])
        sizes_of_sums = sizes_of_sums + np.abs(so_far)
    return FLOAT32 * np.abs(terms.spec.scale) / 2 * sizes_of_sums


@once
def of_out(terms):
    """Probabilities are rounded before they meet values. By what else they are off, their sum is off too."""
    rounded = of_rounding(terms.dtype, terms.w) @ terms.value**2
    off = terms.w**2 * of_p(terms)
    total = np.sum(off, -1, keepdims=True)
    spread = off @ terms.value**2 - 2 * terms.out * (off @ terms.value) + terms.out**2 * total
    return rounded + np.maximum(spread, 0)


def of_lse(terms):
    """A relative error of all probabilities of a row is one of their sum, absolute in its logarithm."""
    return np.sum(terms.p * of_p(terms), -1) + (FLOAT32 * (1 + np.abs(terms.lse[..., 0]))) ** 2


def of_d_value(terms):
    """Probabilities are computed again from lse, and rounded before they meet the cotangent of the output."""
    off = of_rounding(terms.dtype, terms.w) + terms.w**2 * of_p(terms)
    return _t(off) @ terms.d_out**2


@once
def of_delta(terms):
    """`(B, N, T, 1)`. Delta is found from the output when that has been rounded."""
    off = of_out(terms) + of_rounding(terms.dtype, terms.out)
    return np.sum(terms.d_out**2 * off, -1, keepdims=True)


@once
def of_d_logits(terms):
    """Of P * (dP - delta) in float32, but for what delta is off, which the numbers of a row share.

    P has an error, and the two whose difference is taken have: dP is a sum of products that may cancel.
    """
    products = FLOAT32 / terms.arithmetic * terms.kept * np.sqrt(terms.d_out**2 @ _t(terms.value**2))
    off = terms.arithmetic * terms.p * (np.abs(terms.d_p) + np.abs(terms.delta) + products)
    return terms.d_logits**2 * of_p(terms) + off**2


@once
def of_converted_p(terms):
    """What P in half precision adds. Kernels keep it for both products; in float16 small ones lose digits."""
    return of_rounding(terms.dtype, terms.p) * (terms.d_p - terms.delta) ** 2


@once
def of_d_scores(terms):
    """Before the soft cap, and as operands of a product. The derivative of a soft cap, 1 - tanh², is small
    where it is the difference of numbers near 1, and may be rounded as well."""
    rounded = of_rounding(terms.dtype, terms.d_logits) + of_converted_p(terms)
    capped = terms.score_grad**2 * (of_d_logits(terms) + rounded)
    if terms.spec.logits_soft_cap is None:
        return capped
    derivative = of_rounding(terms.dtype, terms.score_grad) + (2 * TANH) ** 2
    with_p = of_rounding(terms.dtype, terms.p * terms.score_grad)  # for kernels that multiply P by it first
    return capped + derivative * terms.d_logits**2 + with_p * (terms.d_p - terms.delta) ** 2


def of_d_query(terms):
    shared = of_delta(terms) * ((terms.p * terms.score_grad) @ terms.key) ** 2
    return terms.spec.scale**2 * (of_d_scores(terms) @ terms.key**2 + shared)


def of_d_key(terms):
    off = of_d_scores(terms) + of_delta(terms) * (terms.p * terms.score_grad) ** 2
    return terms.spec.scale**2 * (_t(off) @ terms.query**2)


def of_sum_of_delta(terms):
    """`(B, N, T, 1)`: of delta, given the output that it is found from."""
    return terms.arithmetic**2 * np.sum((terms.d_out * terms.out) ** 2, -1, keepdims=True)


def of_d_logits_in_sums(terms):
    """Of those that are summed over rows: before they are rounded for a product."""
    return of_d_logits(terms) + (of_converted_p(terms) if terms.p_is_converted else 0)


def of_d_bias(terms):
    shape = terms.operands.bias.shape
    p = np.sum(terms.p, -1, keepdims=True) if shape[-1] == 1 else terms.p
    rows = _sum_to(of_d_logits_in_sums(terms), shape) + _sum_to(of_sum_of_delta(terms) * p**2, shape)
    return rows + of_probabilities_alike(terms, shape) + of_steps(terms) + of_fixed_point(terms)


def of_probabilities_alike(terms, shape):
    """Probabilities that are alike are rounded alike, and what that adds to a sum doesn't cancel: a row has
    equal ones where its logits are. So all that rounding them does to the sum counts once more."""
    if not terms.p_is_converted:
        return 0
    rounded = terms.p.astype(jnp.dtype(terms.dtype)).astype(np.float64)
    return _sum_to((rounded - terms.p) * (terms.d_p - terms.delta), shape) ** 2


def of_fixed_point(terms):
    """A deterministic sum over CTAs is one of multiples of a unit (jax_flash/cuda/fixed_point.py), so small
    that the largest sum that these data allow has 59 bits at least. Terms below half of it are all lost."""
    shape = terms.operands.bias.shape
    shared = math.prod(n for n, axis in zip(terms.p.shape[:3], shape, strict=False) if axis == 1)
    if not terms.spec.deterministic or shape == terms.p.shape:
        return 0
    largest = 2 * terms.value.shape[-1] * np.max(np.abs(terms.d_out)) * np.max(np.abs(terms.value))
    unit = largest * 2.0 ** math.ceil(math.log2(shared)) / 2.0**59
    return _sum_to(np.minimum(np.abs(terms.d_logits), unit / 2), shape) ** 2


def of_steps(terms):
    """A scan adds the gradients of a bias that its steps share, in the bias's dtype."""
    bias = terms.operands.bias
    if terms.rows_of_a_step is None or bias.shape[0] > 1:
        return 0
    steps = np.split(terms.d_logits, len(terms.d_logits) // terms.rows_of_a_step)
    steps = np.stack([_sum_to(step, bias.shape) for step in steps])
    dtype = np.dtype(bias.dtype).name
    return np.sum(of_rounding(dtype, steps) + of_rounding(dtype, np.cumsum(steps, 0)), 0)


def of_d_alibi_slopes(terms):
    distance = _distance(terms)
    shape = (*terms.operands.alibi_slopes.shape, 1, 1)
    shared = of_sum_of_delta(terms) * np.sum(terms.p * distance, -1, keepdims=True) ** 2
    return _sum_to(of_d_logits_in_sums(terms) * distance**2, shape) + _sum_to(shared, shape)


def of_d_sinks(terms):
    """Sums over rows of the sink's probability times delta."""
    own = terms.arithmetic**2 + (FLOAT32 * np.abs(terms.lse)) ** 2
    shape = (*terms.operands.sinks.shape, 1, 1)
    return _sum_to(terms.sink_p**2 * (of_sum_of_delta(terms) + own * terms.delta**2), shape)


def of_d_captured(terms):
    """From sums whose terms have random signs: each term its own, and delta one for its row."""
    generator = np.random.default_rng(0)
    own, shared = np.sqrt(of_d_logits_in_sums(terms)), terms.p * np.sqrt(of_sum_of_delta(terms))
    squares: dict[str, np.ndarray] = {}
    if terms.spec.score_mod is None:
        return squares
    draws = 16
    for _ in range(draws):
        signs = generator.choice([-1.0, 1.0], own.shape)
        of_rows = generator.choice([-1.0, 1.0], (*own.shape[:-1], 1))
        for name, x in _of_captured(terms, own * signs + shared * of_rows).items():
            squares[f"d_{name}"] = squares.get(f"d_{name}", 0) + x**2 / draws
    return squares


# Compiled as a whole: operation by operation it takes several times as long, to compile each for each shape.
_quickly = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
_allowed = _quickly(_reference._allowed, static_argnums=0)
_kept = _quickly(_reference._kept, static_argnums=0)
_distances = _quickly(_reference._distance, static_argnums=0)


@functools.partial(_quickly, static_argnums=0)
def _values_of_score_mod(spec, operands, scores):
    def values(scores):
        return _reference._of_function(spec.score_mod, "score_mod", operands, jnp.float64, scores)

    logits, vjp = jax.vjp(values, scores)
    return logits, vjp(jnp.ones_like(logits))[0]


def _of_score_mod(spec, operands, scores):
    """The values of score_mod, and their derivative by the score. 0 where that isn't finite, as of -inf."""
    with jax.enable_x64(True):
        logits, derivative = _values_of_score_mod(spec, operands, jnp.asarray(scores))
    logits, derivative = np.asarray(logits), np.asarray(derivative)
    hidden = np.isneginf(logits)
    return logits, np.where(hidden, 0, derivative)


@functools.partial(_quickly, static_argnums=0)
def _gradients_of_captured(spec, operands, floats, scores, d_logits):
    def values(floats):
        of_floats = operands.replace(**floats)
        return _reference._of_function(spec.score_mod, "score_mod", of_floats, jnp.float64, scores)

    _, vjp = jax.vjp(values, floats)
    return vjp(d_logits)[0]


def _of_captured(terms, d_logits):
    """The gradients of what score_mod captures, by name, for gradients of its values."""
    if terms.spec.score_mod is None:
        return {}
    with jax.enable_x64(True):
        wide = {
            name: jnp.asarray(np.asarray(x).astype(np.float64))
            for name, x in terms.operands.differentiable().items()
            if name in terms.operands.captured
        }
        of_call = terms.spec, terms.operands, wide, jnp.asarray(terms.scores), jnp.asarray(d_logits)
        return {name: np.asarray(x) for name, x in _gradients_of_captured(*of_call).items()}


def _distance(terms):
    return np.abs(np.asarray(_distances(terms.spec, terms.operands)))


def _sum_to(x, shape):
    axes = tuple(i for i, size in enumerate(shape) if size == 1)
    return np.sum(x, axes, keepdims=True)


def _sum_of_groups(terms, x):
    """Over the query heads of each key head."""
    size = sizes(terms.operands)
    return x.reshape(size.B, size.K, size.group, size.S, -1).sum(2)


def _rows_first(x):
    return x.transpose(0, 2, 1, 3)


def _t(x):
    return np.swapaxes(x, -1, -2)
