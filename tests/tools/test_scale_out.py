"""benchmarks/scale_out.py: that each way computes the same, and its command line on simulated devices."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding


@pytest.fixture
def scale_out(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import scale_out

    return scale_out


@pytest.mark.parametrize("way", ("batch", "jit", "ring", "all-gather, zigzag", "Ulysses"))
def test_ways_compute_the_same(scale_out, way):
    case = scale_out.Case(2, 32, 32, 4, 2, 8, causal=True, dtype="float32")
    axes = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), (scale_out.AXIS,), axes, devices=jax.devices()[:2])
    call, spec = scale_out.sharded(way, case, mesh, "xla")
    order = "zigzag" if "zigzag" in way else None
    inputs = case.inputs()

    def run(*arrays):
        return jax.jit(call)(*(jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays))

    expected = scale_out.attend(case, "xla")(*inputs)
    if order is not None:
        import jax_flash

        inputs = [jax_flash.reorder_for_load_balance(x, 1, 2, order) for x in inputs]
        out = jax_flash.restore_order(run(*inputs), 1, 2, order)
    else:
        out = run(*inputs)
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
    scale_out.main(["--implementation", "xla", "--rounds", "1", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert "striped" in rows[0]["error"]
    measured = [(row["way"], row["pass"]) for row in rows[1:]]
    assert measured == [(way, direction) for way in ways[:2] for direction in ("forward", "both")]
    assert all(row["efficiency"] > 0 for row in rows[1:])
    assert "ring, zigzag" in capsys.readouterr().out


def test_too_few_devices(scale_out):
    with pytest.raises(SystemExit, match="64 devices are needed, and there are 8"):
        scale_out.main(["--devices", "64"])
