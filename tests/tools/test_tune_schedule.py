"""benchmarks/tune_schedule.py, without a GPU: which schedules it times, and what it expects of them."""

from pathlib import Path

import pytest

from jax_flash import _device
from jax_flash.cuda.sm90.backward_units import Units


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    with _device.assume(_device.H100):
        yield


def test_what_the_plan_picks_is_among_the_candidates_and_expected_to_be_the_fastest():
    import tune_schedule

    for call in tune_schedule.CALLS:
        case = tune_schedule.case_of(*call)
        candidates = tune_schedule.candidates(case)
        assert candidates[0].units == Units()
        assert len(set(candidates)) == len(candidates)
        picked = tune_schedule.picked(case)
        assert picked in candidates
        expected = {schedule: tune_schedule.estimate(case, schedule) for schedule in candidates}
        assert expected[picked] <= 1.02 * min(expected.values())


def test_calls_with_few_key_heads_are_divided_and_others_are_not():
    import tune_schedule

    divided = {
        str(case): tune_schedule.picked(case).units != Units()
        for case in (tune_schedule.case_of(*call) for call in tune_schedule.CALLS)
    }
    assert divided["b2 s8192 h8/1 d128 causal"] and divided["b2 s4096 h16/1 d128"]
    assert not divided["b4 s4096 h32/8 d128 causal"] and not divided["b1 s4096 h8/8 d128 causal"]
