"""benchmarks/batch.py, with commands that need no GPU."""

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def batch(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import batch

    return batch


def test_tasks_run_within_their_limits(batch, tmp_path, monkeypatch):
    lines = """
# a comment
first  60 {python} -c "import os; print(os.environ['CUDA_VISIBLE_DEVICES']); open('{out}/made', 'w')"
fails  60 {python} -c "raise SystemExit(3)"
hangs 0.5 {python} -c "import time; time.sleep(600)"
"""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    (tmp_path / "tasks.txt").write_text(lines)
    batch.main([str(tmp_path / "tasks.txt"), "--seconds", "120", "--out", str(tmp_path / "out")])
    rows = {row["task"]: row for row in json.loads((tmp_path / "out" / "batch.json").read_text())}
    assert {name: row["status"] for name, row in rows.items()} == {"first": 0, "fails": 3, "hangs": -9}
    assert (tmp_path / "out" / "first.log").read_text().strip() == rows["first"]["gpu"]
    assert rows["first"]["gpu"] in ("5", "7") and (tmp_path / "out" / "made").exists()


def test_what_finds_no_time_is_told(batch, tmp_path):
    tasks = batch.read("a 1 true\nb 1 true")
    assert [row["status"] for row in batch.run_all(tasks, ["0"], tmp_path, 0)] == [None, None]


@pytest.mark.parametrize(
    "text, message", [("a 1", "line 1 must be"), ("a x true", "line 1"), ("a 1 b\na 2 c", "same name: a")]
)
def test_malformed_batches(batch, text, message):
    with pytest.raises(ValueError, match=message):
        batch.read(text)


def test_what_is_unmeasured_has_commands_that_are_there(batch):
    for task in batch.read((BENCHMARKS / "unmeasured.txt").read_text()):
        script = next(
            x for x in task.arguments(Path("results")) if x.startswith(("benchmarks/", "tests/", "examples/"))
        )
        assert (BENCHMARKS.parent / script).exists(), task
