"""The bounds that results are held to: what is right passes, and what is slightly wrong is caught."""

import numpy as np
import pytest
import rounding
from agreement import SUMS_OVER_ROWS, Yardsticks
from attention_case import Case, draw
from exhaustive import thorough

from jax_flash._spec import DIFFERENTIABLE
from jax_flash.cuda import fixed_point

SIZES = dict(T=65, S=90, H=40, N=4, K=2)
EVERYTHING = ("bias:1N1S", "alibi_slopes", "sinks")
RESULTS = ("out", "lse", *(f"d_{name}" for name in DIFFERENTIABLE))


class Run:
    """A right run of a case: the definition's results, rounded to the dtypes that they have."""

    def __init__(self, case: Case):
        _, spec, operands, d_out, d_lse = draw(case)
        self.dtype = case.dtype
        self.yardsticks = Yardsticks(case, spec, operands, d_out, d_lse)
        self.results = self.rounded(self.yardsticks.references)

    def rounded(self, results):
        """Results as a run gives them: in their dtypes, and delta found from the output in its own."""
        out = results["out"].astype(self.dtype)
        results = rounding.with_delta_of(out, self.yardsticks.terms, results)
        operands = self.yardsticks.operands.present()
        dtypes = {
            "out": self.dtype,
            "lse": np.float32,
            **{f"d_{name}": x.dtype for name, x in operands.items()},
        }
        return {name: x.astype(dtypes[name]) for name, x in results.items()}

    def check(self, **changed):
        results = self.results | changed
        out, lse = results.pop("out"), results.pop("lse")
        return self.yardsticks.check((out, lse, {name.removeprefix("d_"): x for name, x in results.items()}))


DTYPES = ["bfloat16", *thorough("float32", "float16")]


@pytest.fixture(scope="module", params=DTYPES)
def run(request):
    # Of this seed, sums over all rows are no smaller than they are wont to be.
    return Run(Case("feature", request.param, features=EVERYTHING, is_causal=True, seed=2, **SIZES))


@pytest.fixture(scope="module", params=DTYPES)
def long(request):
    """Whose rows are so many that one of them is lost in the norm of all; the last keys have few queries."""
    return Run(Case("length", request.param, T=400, S=400, H=16, is_causal=True, seed=0))


def test_right_results_pass(run, long):
    run.check()
    long.check()


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("sign", (1, -1))
def test_what_is_a_little_too_large_or_small_is_caught(name, sign, run):
    epsilon = {"float32": 1e-5, "bfloat16": 0.0075, "float16": 0.001}[run.dtype]
    scaled = (run.results[name].astype(np.float64) * (1 + sign * epsilon)).astype(run.results[name].dtype)
    with pytest.raises(AssertionError, match=f"{name}: error"):
        run.check(**{name: scaled})


@pytest.mark.parametrize("name", RESULTS)
def test_zeros_are_caught(name, run):
    with pytest.raises(AssertionError, match=f"{name}: error"):
        run.check(**{name: np.zeros_like(run.results[name])})


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("feature", ("alibi_slopes", "sinks"))
def test_small_errors_are_caught_in_sums_over_all_rows(feature, is_causal, dtype):
    run = Run(Case("feature", dtype, T=65, S=65, N=4, features=(feature,), is_causal=is_causal, seed=1))
    run.check()
    name = f"d_{feature}"
    for factor in (0, 0.99, 1.01):
        wrong = run.results[name] * np.float32(factor)
        with pytest.raises(AssertionError, match=f"{name}: error"):
            run.check(**{name: wrong})


def zeroed(x):
    x[1, 300, 1] = 0


def swapped(x):
    x[0, [300, 301], 1] = x[0, [301, 300], 1]


def of_another_head(x):
    x[0, 250, 0] = x[0, 250, 1]


def slightly_scaled(x):
    x[1, 399, 0] = x[1, 399, 0] * 1.1


def one_number_wrong(x):
    x[0, 350, 0, 7] *= -1


@pytest.mark.parametrize("spoil", (zeroed, swapped, of_another_head, slightly_scaled, one_number_wrong))
@pytest.mark.parametrize("name", ("out", "d_query", "d_key", "d_value"))
def test_one_wrong_row_of_many_is_caught(name, spoil, long):
    wrong = long.results[name].copy()
    spoil(wrong)
    change = np.linalg.norm((wrong - long.results[name]).astype(np.float64))
    assert 0 < change < 0.05 * np.linalg.norm(long.results[name].astype(np.float64))
    with pytest.raises(AssertionError, match="rows are wrong"):
        long.check(**{name: wrong})


def test_one_wrong_log_sum_exp_is_caught(long):
    wrong = long.results["lse"].copy()
    wrong[0, 350, 1] += 1e-3
    with pytest.raises(AssertionError, match=r"lse: 1 of 1600 rows are wrong, most \(0, 350, 1\)"):
        long.check(lse=wrong)


@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("name", ("out", "lse", "d_key"))
def test_what_is_not_finite_is_caught(name, value, run):
    wrong = run.results[name].copy()
    wrong.flat[5] = value
    with pytest.raises(AssertionError, match=f"{name} (has 1 of|is -inf)"):
        run.check(**{name: wrong})


def test_gradients_of_a_bias_in_multiples_of_a_unit():
    """Far from all keys ALiBi leaves rows to the sinks, and the bias's gradient there is below the unit."""
    features = ("bias:B1T1", "alibi_slopes", "sinks", "deterministic")
    run = Run(Case("feature", "bfloat16", T=300, S=64, features=features, seed=3))
    data = run.yardsticks
    lse = data.references["lse"].transpose(0, 2, 1)
    (factor,) = fixed_point.factor(data.spec, data.operands, lse, data.d_out, data.d_lse)
    d_bias = run.results["d_bias"].astype(np.float64)

    def in_multiples_of(unit):
        return (np.rint(d_bias / unit) * unit).astype(run.results["d_bias"].dtype)

    assert np.any((np.abs(d_bias) < 1 / factor) & (d_bias != 0))
    run.check(d_bias=in_multiples_of(1 / factor))
    with pytest.raises(AssertionError, match="rows are wrong"):
        run.check(d_bias=in_multiples_of(2.0**12 / factor))


def test_probabilities_that_are_rounded_alike():
    """A scale of 0 makes those of a row equal, and a bias of one number a row gets the sum of all."""
    of_a_row = dict(features=("bias:B1T1", "sinks"), bias_dtype="float32", T=60)
    run = Run(Case("feature", "bfloat16", N=1, K=1, S=400, scale=0.0, seed=3, **of_a_row))
    terms, d_bias = run.yardsticks.terms, run.results["d_bias"]
    p = terms.p.astype(run.dtype).astype(np.float64)
    off = np.sum((p - terms.p) * (terms.d_p - terms.delta), -1, keepdims=True)
    run.check(d_bias=(d_bias + off).astype(d_bias.dtype))
    with pytest.raises(AssertionError, match="rows are wrong"):
        run.check(d_bias=(d_bias + 10 * off).astype(d_bias.dtype))


def test_plain_attention_agrees(run):
    ratios = run.check(**run.rounded(run.yardsticks.plains))
    others = [ratio for name, ratio in ratios.items() if name not in SUMS_OVER_ROWS]  # they are rounded once
    assert others and all(0.999 < ratio < 1.001 for ratio in others)
