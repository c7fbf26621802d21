"""Bounds of functions of scalars hold at every point, and are exact where they can be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_flash.functions import intervals, trace_score_mod
from jax_flash.functions.intervals import Interval

TABLE = jnp.asarray(np.random.default_rng(0).normal(size=200), jnp.float32)
LARGE = jnp.asarray(np.random.default_rng(1).integers(-99, 99, intervals.LARGE + 77), jnp.int16)
FLAGS = jnp.asarray(np.arange(100) % 7 == 0)
SPOILED = TABLE.at[60].set(jnp.nan)
HALVES = TABLE.astype(jnp.bfloat16)

# Of a score s from -3 to 4, and indices q from -20 to 70 and k from 5 to 60.
FUNCTIONS = {
    "sum": lambda s, q, k: q + k - 3,
    "product": lambda s, q, k: q * k,
    "of floats": lambda s, q, k: s * (q - 0.5 * k) - s,
    "wraps": lambda s, q, k: q * 100_000_000 + k,
    "negative": lambda s, q, k: -jnp.abs(q) + jnp.abs(s),
    "quotient": lambda s, q, k: lax.div(q, k) + lax.div(q, jnp.int32(-7)),
    "by zero": lambda s, q, k: lax.div(k, q),
    "of floats by floats": lambda s, q, k: s / (k + 0.5) + k / s,
    "remainder": lambda s, q, k: lax.rem(q, jnp.int32(9)) + lax.rem(k, jnp.int32(64)),
    "remainder of a run": lambda s, q, k: lax.rem(q - 80, jnp.int32(200)),
    "remainder of runs": lambda s, q, k: lax.rem(q - 80, jnp.int32(64)) - lax.rem(k - 70, jnp.int32(60)),
    "remainder of the least": lambda s, q, k: lax.rem(jnp.minimum(q * 100_000_000, 0), jnp.int32(7)),
    "floor": lambda s, q, k: q // 8 + q % 8,
    "exp": lambda s, q, k: jnp.exp(s) + jnp.exp2(s) + jnp.exp(30.0 * k),
    "log": lambda s, q, k: jnp.log(s) + jnp.log1p(jnp.abs(s)),
    "tanh": lambda s, q, k: jnp.tanh(s) + jax.nn.sigmoid(s) + jnp.arctan(s) + jnp.sign(s),
    "round": lambda s, q, k: jnp.floor(s) + jnp.ceil(s) + jnp.round(s),
    "powers": lambda s, q, k: s**2 + s**3 + lax.square(q) + s**-1,
    "least": lambda s, q, k: jnp.minimum(q, k) - jnp.maximum(s, 0) + jnp.clip(q, 3, 50),
    "casts": lambda s, q, k: s.astype(jnp.int32) + q.astype(jnp.int8) + k.astype(jnp.uint8) + (q > 3),
    "unsigned": lambda s, q, k: (q.astype(jnp.uint32) >> 3).astype(jnp.float32) + k.astype(jnp.uint32),
    "halves": lambda s, q, k: s.astype(jnp.bfloat16) * 1.7 + HALVES[k] + q.astype(jnp.float16),
    "bits": lambda s, q, k: (q & 15) + (k | 3) + (k ^ q) + (k >> 2) + (q >> 1) + (q << 2) + ~k,
    "logic": lambda s, q, k: ((q > 3) & (k < 9)) | ~(s <= 1) ^ (q != k) ^ (q == 4) ^ (s >= 2),
    "select": lambda s, q, k: jnp.where(q > 100, s, jnp.where(k > 4, q, s)),
    "cases": lambda s, q, k: lax.select_n(jnp.clip(q, 0, 2), s, s + 5.0, k.astype(jnp.float32)),
    "loads": lambda s, q, k: TABLE[k] + TABLE[q + 30] * FLAGS[k] + LARGE[1000 * k + q],
    "loads of NaN": lambda s, q, k: SPOILED[k],
    "beyond": lambda s, q, k: TABLE.at[3 * k + q].get(mode="fill", fill_value=7.0) + TABLE[-1],
    "unknown": lambda s, q, k: jnp.sin(s) + lax.population_count(k),
}
SCORES = np.linspace(-3, 4, 13, dtype=np.float32)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bounds_hold(name):
    function = FUNCTIONS[name]

    def of_score(score, batch, head, query, key):
        return jnp.asarray(function(score, query, key)).astype(jnp.float32)

    boxes = [
        ((-20, 70), (5, 60), (-3, 4)),
        ((0, 7), (8, 15), (0, 1)),
        ((33, 33), (33, 33), (2, 2)),
        ((-9, -1), (59, 60), (-1, 0)),
    ]
    lows, highs = (jnp.asarray([[axis[end] for axis in box] for box in boxes], jnp.int32).T for end in (0, 1))
    traced = trace_score_mod(of_score)
    inputs = {"query": Interval(lows[0], highs[0]), "key": Interval(lows[1], highs[1])}
    inputs["score"] = Interval(*(x[2].astype(jnp.float32) for x in (lows, highs)))
    zero = jnp.zeros((), jnp.int32)
    inputs |= {"batch": Interval(zero, zero), "head": Interval(zero, zero)}
    low, high = (
        np.broadcast_to(x, len(boxes)) for x in intervals.bounds(traced.output, inputs, traced.captured)
    )
    evaluate = jax.jit(jax.vmap(lambda s, q, k: of_score(s, zero, zero, q, k)))
    for number, ((q0, q1), (k0, k1), (s0, s1)) in enumerate(boxes):
        scores = SCORES[(SCORES >= s0) & (SCORES <= s1)]
        points = np.meshgrid([s0, *scores, s1], np.arange(q0, q1 + 1), np.arange(k0, k1 + 1))
        s, q, k = (x.reshape(-1) for x in points)
        found = np.asarray(evaluate(jnp.float32(s), jnp.int32(q), jnp.int32(k)))
        if np.isfinite([low[number], high[number]]).all():
            assert (found >= low[number]).all() and (found <= high[number]).all()
        else:
            assert low[number] == -np.inf and high[number] == np.inf


@pytest.mark.parametrize(
    "name,low,high",
    [
        ("sum", -18, 127),
        ("product", -1200, 4200),
        ("least", -21, 110),
        ("remainder of a run", -100, -10),
        ("select", -20, 70),
        ("logic", 0, 1),
    ],
)
def test_bounds_are_as_narrow_as_can_be(name, low, high):
    """As interval arithmetic has it."""
    function = FUNCTIONS[name]
    traced = trace_score_mod(lambda s, b, h, q, k: jnp.asarray(function(s, q, k)).astype(jnp.float32))
    box = {"query": (-20, 70), "key": (5, 60), "score": (-3.0, 4.0), "batch": (0, 0), "head": (0, 0)}
    inputs = {name: Interval(*map(jnp.asarray, ends)) for name, ends in box.items()}
    found = intervals.bounds(traced.output, inputs, traced.captured)
    np.testing.assert_allclose([float(x) for x in found], [low, high], rtol=1e-5)
