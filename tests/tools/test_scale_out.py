"""benchmarks/scale_out.py: that each way computes the same, and its command line on simulated devices."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

import jax_flash


@pytest.fixture
def scale_out(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import scale_out

    return scale_out


@pytest.mark.parametrize(
    "way", ("batch", "jit", "ring", "all-gather, zigzag", "Ulysses", "ring × Ulysses, zigzag")
)
def test_ways_compute_the_same(scale_out, way):
    case = scale_out.Case(4, 32, 32, 4, 2, 8, causal=True, dtype="float32", calls=2)
    mesh = scale_out.mesh_of(way, jax.devices()[:4])
    call, spec = scale_out.sharded(way, case, mesh, "xla")
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    query, _, key, value, later_key, later_value = scale_out.inputs_of(case, alone)
    attend = jax.jit(scale_out.attend(case, "xla"))
    expected = attend(attend(query, key, value), later_key, later_value)
    query, d_out, *keys_and_values = scale_out.inputs_of(case, NamedSharding(mesh, spec))
    assert d_out.sharding.spec == spec
    inputs, forward = (query, *keys_and_values), jax.jit(scale_out.in_layers(call))
    if "zigzag" not in way:
        out = forward(*inputs)
    else:
        inputs = [jax_flash.reorder_for_load_balance(x, 1, 4, "zigzag") for x in inputs]
        out = jax_flash.restore_order(forward(*inputs), 1, 4, "zigzag")
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_command_line(scale_out, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(scale_out, "CASES", [scale_out.Case(1, 32, 32, 4, 2, 8, causal=True)])
    ways = ("jit", "ring, zigzag", "all-gather, striped")
    monkeypatch.setattr(
        scale_out,
        "WAYS",
        {"all-gather, striped": ("all_gather", "striped")} | {w: scale_out.WAYS[w] for w in ways[:2]},
    )
    out = tmp_path / "scale_out.json"
    scale_out.main(["--implementation", "xla", "--rounds", "1", "--links", "1", "--out", str(out)])
    result = json.loads(out.read_text())
    rows = result["rows"]
    collectives = {row["collective"] for row in result["links"] if row["milliseconds"] > 0}
    assert collectives == {"ppermute", "all_gather", "all_to_all", "psum_scatter"}
    assert "striped" in rows[0]["error"]
    measured = [(row["way"], row["pass"]) for row in rows[1:]]
    assert measured == [(way, direction) for direction in ("forward", "both") for way in ways[:2]]
    for row in rows[1:]:
        assert row["one"] == pytest.approx(sum(row["alone"]) / 2)
    assert all(row["efficiency"] > 0 for row in rows[1:])
    assert "ring, zigzag" in capsys.readouterr().out


def test_too_few_devices(scale_out):
    with pytest.raises(SystemExit, match="64 devices are needed, and there are 8"):
        scale_out.main(["--devices", "64"])


def test_long_calls_count_by_a_shorter_ones_rate(scale_out, monkeypatch):
    monkeypatch.setattr(scale_out, "ON_ONE", 16)
    case = scale_out.Case(1, 64, 64, 4, 2, 8, causal=True)
    rows = list(scale_out.rows(case, jax.devices()[:2], ["Ulysses"], 1, "xla"))
    assert [row["one_tokens"] for row in rows] == [16, 16]
    assert all(row["efficiency"] == row["one"] / row["all"] / 2 for row in rows)
