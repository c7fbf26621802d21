"""benchmarks/tune_entries.py, without a GPU: the schedules that it times, its rows and its command line."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_flash import _device
from jax_flash.cuda.sm90.backward_units import Units


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    with _device.assume(_device.H100):
        yield


def planned():
    """Calls as plans make them: with few key heads, without groups, and one key tile."""
    import tune_schedule

    calls = (((2, 8192, 8, 1, 128), True), ((4, 4096, 16, 16, 128), False), ((64, 128, 16, 16, 64), False))
    return [tune_schedule.call_of(tune_schedule.case_of(*call)) for call in calls]


def test_candidates_begin_with_what_the_plan_picks():
    import tune_entries

    for call in planned():
        found = tune_entries.candidates(call)
        assert found[0].units == call.units and found[0].main_writes_dq == call.main_writes_dq
        assert len(set(found)) == len(found)
        assert all(call.n.group % schedule.units.shares == 0 for schedule in found)
        assert {schedule.main_writes_dq for schedule in found} == {True, False} or call.tile.split_products


def test_parts_are_tried_where_key_tiles_are_few():
    import tune_entries

    few, many, one_tile = ({x.units.parts for x in tune_entries.candidates(call)} for call in planned())
    assert few == one_tile == set(range(1, tune_entries.MOST_PARTS + 1))
    assert many == {1}


@pytest.fixture
def passes_on_the_cpu(monkeypatch):
    """Stands in for `Passes`, which needs a GPU: every schedule adds up an array; one raises."""
    import timing
    import tune_entries

    (call, *_) = planned()

    class Passes:
        def __init__(self, entry):
            self.planned = []

        def compile(self, schedule):
            self.planned.append(call)
            if schedule is not None and schedule.units == Units(8):
                raise RuntimeError("too many shares")
            return jax.jit(jnp.sum), jnp.ones(4)

    monkeypatch.setattr(tune_entries, "Passes", Passes)
    monkeypatch.setattr(timing, "milliseconds", lambda run, x: 0.5)
    monkeypatch.setattr(tune_entries, "candidates", lambda call: candidates(call))
    return call


def candidates(call):
    from jax_flash.cuda.sm90.backward_call import Schedule

    units = (call.units, Units(2), Units(8))
    return [Schedule(x, call.main_writes_dq, None, call.l2_head_group) for x in dict.fromkeys(units)]


def test_each_schedule_has_a_row(passes_on_the_cpu):
    import tune_entries
    from model_entries import ENTRIES

    rows = tune_entries.measure(ENTRIES[0], 1)
    assert len(rows) == len(candidates(passes_on_the_cpu))
    for row in rows:
        assert row["case"] == ENTRIES[0].name
        assert row.keys() >= {"shares", "parts", "main_writes_dq", "l2_head_group", "slots", "picked"}
        assert ("error" in row) == (row["shares"] == 8) != (row.get("milliseconds") == 0.5)
    assert [row["picked"] for row in rows] == [True] + [False] * (len(rows) - 1)


def test_command_line(passes_on_the_cpu, tmp_path, capsys):
    import tune_entries

    out = tmp_path / "tune.json"
    tune_entries.main(
        ["--entries", "llama3-8b-segments,bert-large-padded", "--rounds", "1", "--out", str(out)]
    )
    rows = json.loads(out.read_text())["rows"]
    assert [row["case"] for row in rows if row["picked"]] == ["llama3-8b-segments", "bert-large-padded"]
    printed = capsys.readouterr().out
    assert "0.5000 ms picked" in printed and "too many shares" in printed


@pytest.mark.parametrize("wrong", (["--entries", "nothing"], []))
def test_unknown_names_are_refused(wrong):
    import tune_entries

    with pytest.raises(SystemExit):
        tune_entries.main(wrong)
