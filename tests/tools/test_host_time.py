"""The benchmark of host time: its command line and its arithmetic, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


def test_command_line(tmp_path):
    out = tmp_path / "host_time.json"
    flags = ["--peers", "jax_flash_xla,jax_flash_cuda", "--rounds", "1", "--out", out]
    command = [sys.executable, FOLDER / "host_time.py", *flags]
    quick = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compilation takes most of its time
    done = subprocess.run(command, capture_output=True, text=True, env=quick)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert len(result["commit"]) >= 40 or result["commit"] == "unknown"
    rows = {(row["peer"], row["case"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == len(done.stdout.splitlines()) == 8
    for case in ("chain", "graph", "gradient", "eager"):
        row = rows["jax_flash_xla", case]
        assert 0 < row["dispatch"] <= row["span"]
        assert "needs a CUDA GPU" in rows["jax_flash_cuda", case]["error"]


def test_a_chain_makes_all_its_calls(monkeypatch):
    import host_time

    made = []

    def attend(query, key, value):
        made.append(query)
        return query + key + value

    arrays = [jax.numpy.ones((2, 3))] * 3
    function, calls = host_time.program("chain", attend, *arrays)
    assert calls == len(made) == 32
    assert (function(*arrays) == 1 + 2 * 32).all()
    function, calls = host_time.program("gradient", attend, *arrays)
    assert calls == 32 and len(made) == 64
    assert [float(x[0, 0]) for x in function(*arrays)] == [1, 32, 32]
    assert host_time.program("eager", attend, *arrays) == (attend, 1)


def test_figures_are_of_one_call(monkeypatch):
    import host_time

    clock = iter([0.0, 1.0, 3.0] * 5)
    monkeypatch.setattr(host_time.time, "perf_counter", lambda: next(clock))
    found = host_time.times(lambda: 0, (), runs=10, calls=2, rounds=5)
    assert found == {"dispatch": 50_000.0, "span": 150_000.0}


def test_a_folder_without_the_package_is_refused(tmp_path):
    import host_time

    with pytest.raises(SystemExit, match=r"measuring .* failed"):
        host_time.measured_against(tmp_path, rounds=1)
