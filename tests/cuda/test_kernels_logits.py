"""The Hopper kernels, run on a CPU, where logits are huge, very low or not finite."""

import dataclasses

import numpy as np
import pytest
from emulated_case import DEVICE, Case, draw
from exhaustive import thorough

from jax_flash import _reference
from jax_flash._spec import shapes_of
from jax_flash.cuda.sm90.backward_plan import plan_backward
from jax_flash.cuda.sm90.forward_plan import plan_forward


@pytest.mark.parametrize("magnitude", (1e4, *thorough(1e3, 1e5, 1e15)))
@pytest.mark.parametrize("head_dim", (64, 256))
def test_huge_logits_give_no_nan(magnitude, head_dim, emulator):
    """Logits whose own rounding is far more than 1: there is no number to compare with."""
    case = Case(H=head_dim, T=130, S=130, right=0)
    spec, operands, d_out, _, seed = draw(case)
    arrays = {name: np.asarray(x) for name, x in operands.present().items()}
    for name in ("query", "key"):
        arrays[name] = (arrays[name].astype(np.float32) * magnitude).astype(arrays[name].dtype)
    results = emulator.run(plan_forward(spec, shapes_of(operands), DEVICE), arrays, seed)
    arrays |= dict(out=results["out"], lse=results["lse"], d_out=d_out)
    plan = plan_backward(spec, shapes_of(operands), DEVICE)
    results |= emulator.run(plan, arrays, seed, resident=DEVICE.sm_count)
    for name in ("out", "d_query", "d_key", "d_value"):
        assert np.isfinite(results[name].astype(np.float64)).all(), name
    huge = operands.replace(query=arrays["query"], key=arrays["key"])
    _, lse, _ = _reference.reference_with_gradients(spec, huge, d_out)
    np.testing.assert_allclose(results["lse"], lse, rtol=1e-5)


@pytest.mark.parametrize("value", (np.nan, np.inf))
@pytest.mark.parametrize("name", ("query", "key"))
def test_log_sum_exp_is_nan_where_a_logit_is_not_finite(name, value, emulator):
    """But for -inf, which hides a key."""
    case = Case(H=64, T=130, S=130, right=0)
    spec, operands, d_out, _, seed = draw(case)
    arrays = {name: np.array(x) for name, x in operands.present().items()}
    arrays[name][:, 70, :, 3] = value
    lse = emulator.run(plan_forward(spec, shapes_of(operands), DEVICE), arrays, seed)["lse"]
    _, expected, _ = _reference.reference_with_gradients(spec, operands.replace(**arrays), d_out)
    assert np.isnan(expected).sum() >= (1 if name == "query" else 20)
    np.testing.assert_allclose(lse, expected, rtol=1e-4)


@pytest.mark.parametrize("low", (-1e38, float(np.finfo(np.float32).min)))
def test_rows_whose_bias_is_very_low_have_a_mean(low, emulator):
    """The lowest number, which users add to hide keys, hides none where all keys have it."""
    case = Case(H=128, T=70, S=300, N=2, bias="BNTS", B=2)
    spec, operands, d_out, _, seed = draw(case)
    arrays = {name: np.array(x) for name, x in operands.present().items()}
    arrays["bias"][:, 0, 20:] = low
    arrays["bias"][:, 0, 30, 100:] = 0
    results = emulator.run(plan_forward(spec, shapes_of(operands), DEVICE), arrays, seed)
    lowered = operands.replace(bias=arrays["bias"])
    out, lse, _ = _reference.reference_with_gradients(spec, lowered, d_out)
    np.testing.assert_allclose(results["lse"], lse, rtol=1e-5)
    np.testing.assert_allclose(results["out"].astype(np.float64), out, rtol=0.02, atol=0.02)
    arrays |= dict(out=results["out"], lse=results["lse"], d_out=d_out)
    results = emulator.run(plan_backward(spec, shapes_of(lowered), DEVICE), arrays, seed, DEVICE.sm_count)
    for name in ("d_query", "d_key", "d_value", "d_bias"):
        assert np.isfinite(results[name].astype(np.float64)).all(), name


@pytest.mark.parametrize("dtype", ("float16", *thorough("bfloat16")))
def test_what_is_added_to_all_logits_of_a_row_changes_nothing(dtype, emulator):
    """Small or large, in rows of one warp. All scores are 0 or multiples of 1/8: no sum is rounded."""
    case = Case(H=64, T=130, S=500, N=2, bias="1NT1", dtype=dtype, return_residual=True)
    spec, operands, d_out, _, seed = draw(case)
    arrays = {name: np.array(x) for name, x in operands.present().items()}
    for name in ("query", "key"):
        arrays[name] = arrays[name].astype(np.float32).round().astype(arrays[name].dtype)
    added = np.resize(np.array([0, 300, 2**16, -(2**17), -3, 2**20, -1e9], np.float32), case.T)
    arrays["bias"][:] = added[:, None]
    arrays["query"][:, added == -1e9] = 0
    given = operands.replace(query=arrays["query"], key=arrays["key"], bias=arrays["bias"])
    assert spec.scale == 1 / 8
    results = emulator.run(plan_forward(spec, shapes_of(given), DEVICE), arrays, seed)
    out, lse, _ = _reference.reference_with_gradients(spec, given, d_out)
    assert (abs(results["lse"] - lse) <= 1e-5 + abs(added) * 2**-23).all()
    np.testing.assert_allclose(results["out"].astype(np.float64), out, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("magnitude", (1e3, *thorough(1e4)))
def test_huge_logits_overflow_no_float16(magnitude, emulator):
    """Probabilities are relative to a maximum that lags: by no more than 2^8, however logits are rounded."""
    case = Case(H=256, T=130, S=500, dtype="float16")
    spec, operands, _, _, seed = draw(case)
    arrays = {name: np.asarray(x) for name, x in operands.present().items()}
    for name in ("query", "key"):
        arrays[name] = (arrays[name].astype(np.float32) * magnitude).astype(np.float16)
    results = emulator.run(plan_forward(spec, shapes_of(operands), DEVICE), arrays, seed)
    assert np.isfinite(results["out"].astype(np.float64)).all()


@pytest.mark.parametrize("head_dim", (64, *thorough(128, 256)))
def test_soft_caps_are_exact_for_scores_of_every_size(head_dim, emulator):
    """With one key the log-sum-exp is its logit. tanh has three forms, by the size of its argument, and warps
    without large ones leave forms out."""
    case = Case(H=head_dim, T=384, S=1, soft_cap=2.0, return_residual=True)
    spec, operands, _, _, seed = draw(case)
    spec = dataclasses.replace(spec, scale=1 / 8)
    arrays = {name: np.array(x) for name, x in operands.present().items()}
    for name in ("query", "key"):
        arrays[name][:] = 0
    arrays["key"][..., 0] = 1
    # What tanh takes: 128 queries for each form. A warp has scores of 16 queries forward, of 64 backward.
    below_one, below_sixth, above_sixth = 1 - 2.0**-8, 170 / 1024, 171 / 1024  # next to it in bfloat16
    sixth, one = np.geomspace(1e-5, below_sixth, 128), np.geomspace(above_sixth, below_one, 128)
    every = np.geomspace(1e-5, 100, 128)
    every[[20, 40]] = above_sixth, 1  # each the largest of a warp of 16 rows
    magnitudes = np.concatenate([sixth, one, every])
    signs = np.where(np.arange(case.T) % 3 == 0, -1, 1)
    arrays["query"][..., 0] = (signs * magnitudes * 2 / spec.scale)[None, :, None]
    results = emulator.run(plan_forward(spec, shapes_of(operands), DEVICE), arrays, seed)
    scores = arrays["query"][..., 0].astype(np.float64) * spec.scale
    arguments = abs(scores[0, :, 0]) / 2
    assert arguments[:128].max() == below_sixth < 1 / 6 < above_sixth == arguments[128:256].min()
    assert arguments[128:256].max() < 1 and (arguments[256:] > 1).sum() > 20
    assert np.isin((above_sixth, 1), arguments[256:]).all()
    expected = 2 * np.tanh(scores / 2)
    # Up to 1 the error is 2.5e-7 at most. Roundings add the rest.
    for rows, tolerance in ((slice(256), 4e-7), (slice(256, None), 5e-6)):
        of_rows = expected[:, rows].swapaxes(1, 2)
        np.testing.assert_allclose(results["lse"][:, :, rows], of_rows, rtol=tolerance, atol=0)

    # With a cotangent of it alone, dQ is the derivative of a logit by its score, times the scale.
    d_out, d_lse = np.zeros_like(results["out"]), np.ones_like(results["lse"])
    arrays |= dict(out=results["out"], lse=results["lse"], d_out=d_out, d_lse=d_lse)
    results = emulator.run(plan_backward(spec, shapes_of(operands), DEVICE), arrays, seed, DEVICE.sm_count)
    derivative = spec.scale * (1 - np.tanh(scores / 2) ** 2)
    found = results["d_query"][..., 0].astype(np.float64)
    np.testing.assert_allclose(found, derivative, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("factor", (8, 800, np.nan, np.inf))
@pytest.mark.parametrize("modification", (dict(soft_cap=6.0), dict(score_mod="mildly_capped")), ids=str)
def test_bits_of_a_capped_logit_depend_on_its_score_alone(modification, factor, emulator):
    """Some rows of each warp are large, or not finite: it takes other forms of tanh for all of them."""
    case = Case(H=64, T=256, S=70, return_residual=True, **modification)
    spec, operands, d_out, d_lse, seed = draw(case)
    spec = dataclasses.replace(spec, scale=1 / 64)  # so that all scores are below a sixth of the cap
    arrays = {name: np.array(x) for name, x in operands.present().items()}
    query, key = (arrays[name][0, :, 0].astype(np.float64) for name in ("query", "key"))
    assert abs(query @ key.T).max() * spec.scale < 1
    is_changed = np.arange(case.T) % 16 == 5
    results = []
    for own_factor in (1, factor):
        own = arrays | dict(query=arrays["query"].copy())
        own["query"][:, is_changed] *= np.asarray(own_factor, own["query"].dtype)
        found = emulator.run(plan_forward(spec, shapes_of(operands), DEVICE), own, seed)
        own |= dict(out=found["out"], lse=found["lse"], d_out=d_out, d_lse=d_lse)
        plan = plan_backward(spec, shapes_of(operands), DEVICE)
        found |= emulator.run(plan, own, seed, resident=DEVICE.sm_count)
        results.append(found)
    for name, axis in (("out", 1), ("lse", 2), ("d_query", 1)):
        clean, found = (np.compress(~is_changed, result[name], axis) for result in results)
        np.testing.assert_array_equal(found, clean, name)
