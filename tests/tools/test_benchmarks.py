"""The benchmark's arithmetic, its command line on the CPU, and the chart; its GPU timing runs only there."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


def test_scripts_of_two_folders_share_no_module_name():
    """They import their neighbours by bare names, and one process may run the tests of both folders."""
    examples = {path.stem for path in (FOLDER.parent / "examples").glob("*.py")}
    assert not examples & {path.stem for path in FOLDER.glob("*.py")}


def test_counts_operations():
    import attention

    case = attention.Case(batch=2, seq_len=1000, heads=8, kv_heads=2, head_dim=64)
    assert case.forward_flops == 4 * 2 * 8 * 1000 * 1000 * 64
    assert case.backward_flops == 2.5 * case.forward_flops
    causal = attention.Case(2, 1000, 8, 2, 64, causal=True)
    assert causal.forward_flops == case.forward_flops / 2
    assert str(causal) == "b2 s1000 h8/2 d64 causal"


def test_default_cases_are_run_full_and_causal():
    import attention

    cases = attention.parse([]).cases
    assert len(cases) == 12 and sum(case.causal for case in cases) == 6
    assert [str(case) for case in attention.parse(["--causal"]).cases] == [
        str(case) for case in cases if case.causal
    ]


def test_flags_describe_a_case():
    import attention

    flags = (
        "--batch-size 1 --seq-len 512 2048 --num-heads 8 --num-kv-heads 2 --head-dim 96 --no-causal".split()
    )
    assert attention.parse(flags).cases == [
        attention.Case(1, 512, 8, 2, 96),
        attention.Case(1, 2048, 8, 2, 96),
    ]
    for wrong in (["--peers", "cudnn,nobody"], ["--num-heads", "8", "--num-kv-heads", "3"]):
        with pytest.raises(SystemExit):
            attention.parse(wrong)


def test_means_and_ratios():
    import attention

    rows = [
        {"peer": "cudnn", "case": "a", "forward": 100.0, "backward": 50.0},
        {"peer": "cudnn", "case": "b", "forward": 400.0, "error": "no backward"},
        {"peer": "jax_flash_cuda", "case": "a", "forward": 90.0, "backward": 40.0},
        {"peer": "jax_flash_cuda", "case": "b", "forward": 160.0, "backward": 30.0},
        {"peer": "tokamax", "case": "a", "error": "not here"},
    ]
    means = {(m["peer"], m["pass"]): m for m in attention.geometric_means(rows, baseline="cudnn")}
    assert means["cudnn", "forward"]["mean"] == pytest.approx(200)
    assert means["jax_flash_cuda", "forward"]["ratio"] == pytest.approx(math.sqrt(0.9 * 0.4))
    assert means["jax_flash_cuda", "backward"]["ratio"] == pytest.approx(0.8)  # of the case that both ran
    assert means["jax_flash_cuda", "backward"]["cases"] == 2
    assert not any(peer == "tokamax" for peer, _ in means)


def test_command_line_on_the_cpu(tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, FOLDER / "attention.py", "--peers", "jax_flash_xla,jax_flash_cuda"]
    command += "--batch-size 1 --seq-len 64 --num-heads 2 --num-kv-heads 1 --head-dim 16".split()
    command += ["--causal", "--dtype", "float32", "--out", out]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "b1 s64 h2/1 d16 causal" in printed
    result = json.loads(out.read_text())
    assert {"commit", "device", "versions", "driver", "date", "timing", "dtype", "rows"} <= set(result)
    ran, refused = result["rows"]
    assert ran["case"] == refused["case"] == "b1 s64 h2/1 d16 causal"
    assert ran["peer"] == "jax_flash_xla" and ran["forward"] > 0
    assert refused["peer"] == "jax_flash_cuda" and "forward" not in refused
    assert "needs a CUDA GPU" in refused["error"]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_chart_leaves_out_what_has_no_figures(tmp_path):
    import chart

    path = tmp_path / "made_up.json"
    rows = [
        {"case": "b1 s64 h2/1 d16", "peer": "jax_flash_cuda", "forward": 3.0},
        {"case": "b1 s64 h2/1 d16 causal", "peer": "cudnn", "forward": 2.0},
        {"case": "b1 s64 h2/1 d16", "peer": "tokamax", "error": "ImportError: no"},
    ]
    path.write_text(json.dumps({"device": "made up", "dtype": "bfloat16", "rows": rows}))
    assert chart.draw(path).stat().st_size > 1000
    path.write_text(json.dumps({"device": "made up", "dtype": "bfloat16", "rows": rows[2:]}))
    with pytest.raises(ValueError, match="no figures"):
        chart.draw(path)


def test_results_name_the_commit(tmp_path, monkeypatch):
    from measured_commit import measured_commit

    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        run = subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return run.stdout.strip()

    monkeypatch.setenv("JAX_FLASH_COMMIT", "that of the copy")
    assert measured_commit(tmp_path) == "that of the copy"
    monkeypatch.delenv("JAX_FLASH_COMMIT")
    assert measured_commit(tmp_path) == "unknown"
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD")
    assert measured_commit(tmp_path) == head
    (tmp_path / "file").write_text("two")
    assert measured_commit(tmp_path) == f"{head}-dirty"


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_contenders_take_turns_at_coming_first(count):
    import rounds

    orders = rounds.orders(["a", "b"], count)
    assert len(orders) == count and all(sorted(order) == ["a", "b"] for order in orders)
    firsts = [order[0] for order in orders]
    assert abs(firsts.count("a") - firsts.count("b")) == count % 2
