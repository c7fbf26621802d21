"""benchmarks/block_sparsity.py: its layouts, and its command line on the CPU."""

import json
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import block_sparsity

    return block_sparsity


def test_layouts(benchmark):
    for share in (1, 0.5, 0.25):
        assert np.array_equal(benchmark.random_layout(share, 16).sum(1), np.full(16, 16 * share))
    assert benchmark.random_layout(0.05, 16).any(1).all()
    seen = benchmark.butterfly(8)
    assert np.array_equal(np.flatnonzero(seen[5]), [1, 4, 5, 7])
    assert np.array_equal(seen, seen.T)


def test_command_line(benchmark, monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "CASES", [benchmark.Case(1, 32, 32, 2, 2, 16)])
    monkeypatch.setattr(benchmark, "BLOCK", 8)
    names = ("random 50%", "butterfly")
    monkeypatch.setattr(benchmark, "LAYOUTS", {name: benchmark.LAYOUTS[name] for name in names})
    out = tmp_path / "sparse.json"
    benchmark.main(["--implementation", "xla", "--rounds", "1", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(x["layout"], x["pass"]) for x in rows] == [
        (n, p) for n in names for p in ("forward", "backward")
    ]
    assert all(x["rate"] > 0 for x in rows) and rows[0]["share"] == 0.5


def test_what_cant_run_is_recorded(benchmark):
    (row,) = benchmark.rows(benchmark.Case(1, 128, 128, 2, 2, 16), 1, "cuda")
    assert "NVIDIA" in row["error"] or "CUDA GPU" in row["error"]
