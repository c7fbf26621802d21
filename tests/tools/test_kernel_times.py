"""benchmarks/kernel_times.py, without a GPU: how it reads a profile, its rows and its command line."""

import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

ENTRY = dict(batch=1, queries=24, keys=24, heads=2, kv_heads=1, head_dim=16, value_head_dim=16)


@pytest.fixture
def kernel_times(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import kernel_times
    import timing

    monkeypatch.setattr(timing, "WARM_UP_SECONDS", 0.0)
    return kernel_times


@pytest.fixture
def entry(kernel_times):
    from model_entry import Entry

    return Entry(name="small", model="Model", source="made up", group="made up", dtype="float32", **ENTRY)


def profiles(*calls):
    """A profiler that saw these calls, each a list of kernels' names and milliseconds."""
    return types.SimpleNamespace(
        measure=lambda function, **_: lambda *inputs: (function(*inputs), calls or None)
    )


def test_a_kernels_time_is_the_median_of_the_calls(kernel_times, monkeypatch):
    calls = [[("first", a), ("second", b)] for a, b in ((1.0, 9.0), (3.0, 7.0), (2.0, 8.0))]
    monkeypatch.setattr(kernel_times, "profiler", profiles(*calls))
    assert kernel_times.kernels(lambda x: x, [jnp.zeros(1)]) == [("first", 2.0), ("second", 8.0)]


def test_a_call_without_kernels_is_refused(kernel_times, monkeypatch):
    monkeypatch.setattr(kernel_times, "profiler", profiles())
    with pytest.raises(RuntimeError, match="launched no kernel"):
        kernel_times.kernels(lambda x: x, [jnp.zeros(1)])


def test_each_kernel_of_both_passes_has_a_row(kernel_times, entry, monkeypatch):
    import model_programs

    programs = model_programs.compile_all([entry], ["jax_flash_xla", "jax_flash_cuda"], ["backward"])["small"]
    seen = []

    def kernels(function, inputs):
        seen.append([x.shape for x in jax.tree.leaves(function(*inputs))])
        return [("a" * 200, 0.25), ("b", 0.5)]

    monkeypatch.setattr(kernel_times, "kernels", kernels)
    first, second = kernel_times.measure(entry, "jax_flash_xla", programs)
    assert first == {
        "case": "small",
        "peer": "jax_flash_xla",
        "place": 0,
        "kernel": "a" * 120,
        "milliseconds": 0.25,
    }
    assert second["place"] == 1 and second["milliseconds"] == 0.5
    assert seen == [[(1, 24, 2, 16), (1, 24, 1, 16), (1, 24, 1, 16)]]  # gradients of query, key and value
    (refused,) = kernel_times.measure(entry, "jax_flash_cuda", programs)
    assert refused["peer"] == "jax_flash_cuda" and "needs a CUDA GPU" in refused["error"]


def test_command_line(kernel_times, entry, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kernel_times, "ENTRIES", [entry])
    monkeypatch.setattr(kernel_times, "kernels", lambda *_: [("main", 0.25), ("postprocess", 0.5)])
    out = tmp_path / "times.json"
    kernel_times.main(["--entries", "small", "--peers", "jax_flash_xla,jax_flash_cuda", "--out", str(out)])
    result = json.loads(out.read_text())
    assert {"device", "versions", "date", "rows"} <= set(result)
    assert [(row["peer"], row.get("kernel")) for row in result["rows"]] == [
        ("jax_flash_xla", "main"),
        ("jax_flash_xla", "postprocess"),
        ("jax_flash_cuda", None),
    ]
    assert "small jax_flash_xla: 0.7500 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong", (["--entries", "nothing"], ["--entries", "sd2.1-cross", "--peers", "nobody"], [])
)
def test_unknown_names_are_refused(kernel_times, wrong):
    with pytest.raises(SystemExit):
        kernel_times.main(wrong)
