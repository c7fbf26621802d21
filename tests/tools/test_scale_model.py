"""benchmarks/scale_model.py: what it must say where the answer is plain, and its command line."""

import json
from pathlib import Path

import pytest

CASE = "b1 s65536 h32/8 d128 causal"


@pytest.fixture
def scale_model(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    pytest.importorskip("matplotlib")
    import scale_model

    return scale_model


COLLECTIVES = ("ppermute", "all_gather", "all_to_all", "psum_scatter")


def links(scale_model, rate):
    return {name: scale_model.Link(1e-6, rate) for name in COLLECTIVES}


def test_links_are_what_times_say(scale_model):
    rows = [
        {"collective": "ppermute", "bytes": sent, "milliseconds": 1e3 * (2e-5 + sent / 1e11)}
        for sent in (1, 10**6, 10**9)
    ]
    link = scale_model.links_of(rows)["ppermute"]
    assert link.latency == pytest.approx(2e-5, rel=1e-3) and link.rate == pytest.approx(1e11, rel=1e-3)


@pytest.mark.parametrize("backward", (False, True))
def test_efficiency_falls_with_slower_links(scale_model, backward):
    call = scale_model.Call.of(CASE)
    for way in (*scale_model.WAYS, "ring, striped"):
        fast, slow, slowest = (
            scale_model.seconds(way, call, 4, 0.1, links(scale_model, rate), backward)
            for rate in (1e20, 1e11, 1e8)
        )
        assert 0.1 / 4 < fast <= slow < slowest, way


def test_a_ring_hides_what_a_step_takes_longer_than(scale_model):
    call, fast = scale_model.Call.of(CASE), links(scale_model, 1e20)
    hidden = scale_model.seconds("ring, zigzag", call, 4, 1.0, links(scale_model, 1e11), False)
    assert hidden == pytest.approx(scale_model.seconds("ring, zigzag", call, 4, 1.0, fast, False), rel=1e-9)


def test_other_calls_are_left_out(scale_model):
    rows = [
        {"case": case, "way": "Ulysses", "pass": "forward", "one": 100.0, "efficiency": 0.5}
        for case in (CASE, "b8 s8192 h32/8 d128 causal", "b1 s64 h4/4 d8 window 16")
    ]
    found = scale_model.checked({"devices": 2, "rows": rows}, links(scale_model, 1e11))
    assert [row["case"] for row in found] == [CASE] and 0.5 < found[0]["predicted"] < 1


def test_command_line(scale_model, tmp_path, capsys):
    rows = [
        {"case": CASE, "way": way, "pass": direction, "one": 100.0, "all": 60.0, "efficiency": 0.83}
        for way in ("Ulysses", "ring, zigzag")
        for direction in ("forward", "both")
    ]
    measured = {
        "commit": "0", "device": "none", "date": "", "versions": {}, "devices": 2, "rows": rows,
        "links": [
            {"collective": name, "bytes": sent, "milliseconds": 0.1 + sent / 1e8}
            for name in COLLECTIVES
            for sent in (1000, 10**8)
        ],
    }  # fmt: skip
    path, out = tmp_path / "two.json", tmp_path / "model.json"
    path.write_text(json.dumps(measured))
    scale_model.main([str(path), "--check", str(path), "--out", str(out)])
    found = json.loads(out.read_text())
    assert len(found["check"]) == 8 and out.with_suffix(".png").exists()
    assert {point[0] for curve in found["curves"] for point in curve["points"]} == set(scale_model.DEVICES)
    assert "predicted" in capsys.readouterr().out
