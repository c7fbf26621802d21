"""The benchmark of training steps: a model of a few parameters on the CPU, its arithmetic, and the chart."""

import json
import logging
import warnings
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALL = "--tokens 96 --layers 2 --heads 2 --width 32 --vocabulary 64 --dtype float32".split()


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(warnings, "filterwarnings", lambda *_, **__: None)
    monkeypatch.setattr(logging, "disable", lambda _: None)


@pytest.fixture
def made_up():
    def row(case, sequence, remat, peer, **figures):
        described = {"case": case, "sequence": sequence, "batch": 1, "remat": remat, "peer": peer}
        return described | {"memory": 5_000_000_000 if figures else 0} | figures

    return [
        row("s1024 b1", 1024, False, "jax_flash_cuda", milliseconds=50.0),
        row("s1024 b1", 1024, False, "cudnn", milliseconds=60.0),
        row("s1024 b1", 1024, False, "plain", milliseconds=100.0),
        row("s4096 b1 remat", 4096, True, "jax_flash_cuda", milliseconds=80.0),
        row("s4096 b1 remat", 4096, True, "cudnn", error="RuntimeError: no cuDNN"),
        row(
            "s4096 b1 remat", 4096, True, "plain", error="XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory"
        ),
    ]


def test_command_line_on_the_cpu(tmp_path, capsys):
    import train

    out = tmp_path / "result.json"
    peers = ("jax_flash_xla", "plain", "jax_flash_cuda")
    train.main([*SMALL, "--cases", "32,48+remat", "--peers", ",".join(peers), "--out", str(out)])
    result = json.loads(out.read_text())
    assert {"device", "versions", "date", "timing", "model", "tokens", "rows", "speed_ups"} <= set(result)
    assert result["model"]["parameters"] == 64 * 32 + 2 * (12 * 32**2 + 2 * 32) + 32
    assert [(row["case"], row["peer"]) for row in result["rows"]] == [
        (case, peer) for case in ("s32 b3", "s48 b2 remat") for peer in peers
    ]
    for row in result["rows"]:
        if row["peer"] == "jax_flash_cuda":
            assert "needs a CUDA GPU" in row["error"] and "milliseconds" not in row
        else:
            assert row["milliseconds"] > 0 and row["memory"] > 3 * 4 * result["model"]["parameters"]
            assert row["tokens_per_second"] == pytest.approx(96e3 / row["milliseconds"])
    for ratio in result["speed_ups"]:
        times = {
            row["peer"]: row.get("milliseconds") for row in result["rows"] if row["case"] == ratio["case"]
        }
        assert ratio["over"] == {"plain": pytest.approx(times["plain"] / times["jax_flash_xla"])}
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    printed = capsys.readouterr().out
    train.main(["--table", str(out)])
    assert capsys.readouterr().out in printed

    again = [*SMALL, "--cases", "48+remat,48", "--peers", "plain", "--out", str(out)]
    train.main([*again, "--add"])
    rows = json.loads(out.read_text())["rows"]
    assert rows[:3] == result["rows"][:3]
    assert [(row["case"], row["peer"]) for row in rows[3:]] == [
        ("s48 b2 remat", "plain"),
        ("s48 b2", "plain"),
    ]
    with pytest.raises(ValueError, match="can't be added to: its tokens is 96, not 192"):
        train.main([*again, "--add", "--tokens", "192"])


def test_another_answer_is_refused(monkeypatch):
    import train

    def full(*inputs, is_causal, implementation):
        return jax.nn.dot_product_attention(*inputs)

    monkeypatch.setitem(train.ATTENTION, "plain", {"attention": full, "implementation": None})
    options = train.parse([*SMALL, "--cases", "32"])
    config = train.gpt.GPTConfig(layers=2, heads=2, key_heads=2, width=32, vocabulary=64)
    rows = train.measure(train.Trainer(config), options.cases[0], ("jax_flash_xla", "plain"), 64)
    assert "milliseconds" in rows[0]
    assert "milliseconds" not in rows[1] and "differs from the first one's" in rows[1]["error"]


def test_who_runs_out_of_memory_among_the_rounds_leaves_the_others_theirs(monkeypatch):
    import train

    calls = []

    def step_seconds(step, state, tokens):
        calls.append(step)
        if len(calls) == 2:
            step(state, tokens)  # and so the memory of the state is gone
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return measured(step, state, tokens)

    measured = train.step_seconds
    monkeypatch.setattr(train, "step_seconds", step_seconds)
    case = train.parse([*SMALL, "--cases", "32"]).cases[0]
    config = train.gpt.GPTConfig(layers=1, heads=2, key_heads=2, width=32, vocabulary=64)
    rows = train.measure(train.Trainer(config), case, ("jax_flash_xla", "plain"), 64)
    assert sorted("milliseconds" in row for row in rows) == [False, True]
    assert sorted(train.train_chart.out_of_memory(row) for row in rows) == [False, True]
    assert len(calls) == 1 + train.ROUNDS


@pytest.mark.parametrize("host", [0.0, 0.02])
def test_a_step_is_timed_beside_what_the_host_does(host, monkeypatch):
    import train

    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    class Loss:
        def __init__(self, end):
            self.end = end

        def block_until_ready(self):
            clock.now = max(clock.now, self.end)

    def step(state, tokens):  # of a device that is at work for 40 ms, one step after another
        clock.now += host
        end = max(state, clock.now) + 0.04
        return end, Loss(end)

    clock = Clock()
    monkeypatch.setattr(train, "time", clock)
    _, seconds = train.step_seconds(step, 0.0, None)
    assert seconds == pytest.approx(0.04)


def test_plain_attention_that_cannot_fit_is_not_tried(monkeypatch):
    import train

    class Device:
        def memory_stats(self):
            return {"bytes_limit": 80 * 10**9}

    monkeypatch.setattr(train.jax, "devices", lambda: [Device()])
    config = train.gpt.GPTConfig(layers=24, heads=16, key_heads=16, width=1024, dtype="bfloat16")
    case = train.Case(4096, 4, remat=False)
    assert case.weights_bytes(config) == 24 * 16 * 4 * 4096**2 * 6
    with pytest.raises(MemoryError, match="not tried: its weights take 155 GB, of 80 GB"):
        train.check_memory(case, "plain", config)
    train.check_memory(case, "cudnn", config)
    train.check_memory(train.Case(4096, 4, remat=True), "plain", config)


def test_cases_and_flags():
    import train

    assert [str(case) for case in train.parse([]).cases] == [
        "s1024 b16",
        "s4096 b4 remat",
        "s16384 b1 remat",
        "s4096 b4",
        "s16384 b1",
    ]
    for wrong in (
        ["--add"],
        ["--cases", "1000"],
        ["--cases", "1024+more"],
        ["--cases", "0"],
        ["--peers", "nobody"],
    ):
        with pytest.raises(SystemExit):
            train.parse(wrong)


def test_speed_ups_and_their_table(made_up):
    import train

    ratios = train.speed_ups(made_up, "jax_flash_cuda")
    assert [(ratio["case"], ratio["over"]) for ratio in ratios] == [
        ("s1024 b1", {"cudnn": 1.2, "plain": 2.0}),
        ("s4096 b1 remat", {}),
    ]
    lines = train.table({"rows": made_up, "speed_ups": ratios}).splitlines()
    assert lines[2] == "| s1024 b1 | 50.0 ms, 5 GB | 60.0 ms, 5 GB | 100.0 ms, 5 GB | 1.20 | 2.00 |"
    assert lines[3] == "| s4096 b1 remat | 80.0 ms, 5 GB | – | out of memory | – | – |"


def test_the_chart_says_what_ran_out_of_memory(tmp_path, made_up):
    import train
    import train_chart

    model = {"parameters": 353e6, "dtype": "bfloat16"}
    result = {"device": "made up", "model": model, "tokens": 16384, "rows": made_up}
    path = tmp_path / "made_up.json"
    path.write_text(json.dumps(result | {"speed_ups": train.speed_ups(made_up, "jax_flash_cuda")}))
    assert train_chart.draw(path).stat().st_size > 1000
    assert [train_chart.out_of_memory(row) for row in made_up] == [False] * 5 + [True]
    path.write_text(json.dumps(result | {"speed_ups": []}))
    with pytest.raises(ValueError, match="no figures"):
        train_chart.draw(path)
