"""Summaries of several runs of the GPU tests as one."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

import join_summaries


def summary(**changes) -> dict:
    of_run = dict.fromkeys(join_summaries.SAME, "same")
    return {
        **of_run,
        "devices": 1,
        "date": "2026-01-01",
        "counts": {"passed": 3, "failed": 0, "skipped": 1},
        "failed": [],
        "skipped": ["no second GPU"],
        "refused": {"cuda": {"head dim": 2}},
        "worst_error_over_plain": {"cuda window": {"out": 1.0, "d_key": 1.2}},
        "sanitizer": "not run",
        "seconds_by_test": {"test_cuda_gpu.py::test_this": 5},
        "seconds": 10,
        "complete": True,
        **changes,
    }


def test_runs_are_joined(tmp_path):
    other = summary(
        date="2026-01-02",
        devices=4,
        counts={"passed": 5, "failed": 1, "skipped": 0},
        failed=["test_that"],
        skipped=[],
        refused={"cuda": {"head dim": 1, "dtype": 4}, "pallas": {"dtype": 1}},
        worst_error_over_plain={"cuda window": {"out": 1.1, "d_key": 1.0}, "cuda cross": {"out": 0.5}},
        sanitizer={"memcheck plain": "0 errors"},
        seconds_by_test={"test_cuda_gpu.py::test_this": 2, "test_pallas_gpu.py::test_that": 9},
        complete=False,
    )
    paths = [tmp_path / "one.json", tmp_path / "other.json"]
    for path, content in zip(paths, (summary(), other), strict=True):
        path.write_text(json.dumps(content))
    join_summaries.main([*map(str, paths), "--out", str(tmp_path / "joined.json")])
    assert json.loads((tmp_path / "joined.json").read_text()) == {
        **dict.fromkeys(join_summaries.SAME, "same"),
        "devices": 4,
        "date": "2026-01-02",
        "runs": 2,
        "counts": {"passed": 8, "failed": 1, "skipped": 1},
        "failed": ["test_that"],
        "uncollected": [],
        "skipped": ["no second GPU"],
        "refused": {"cuda": {"head dim": 3, "dtype": 4}, "pallas": {"dtype": 1}},
        "worst_error_over_plain": {"cuda window": {"out": 1.1, "d_key": 1.2}, "cuda cross": {"out": 0.5}},
        "sanitizer": {"memcheck plain": "0 errors"},
        "seconds_by_test": {"test_pallas_gpu.py::test_that": 9, "test_cuda_gpu.py::test_this": 7},
        "seconds": 20,
        "complete": False,
    }


def test_runs_of_different_commits_are_refused():
    with pytest.raises(ValueError, match="commit differs: same, other"):
        join_summaries.join([summary(), summary(commit="other")])
