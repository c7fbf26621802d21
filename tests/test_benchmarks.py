"""The benchmark's arithmetic, its command line on the CPU, and the chart; its GPU timing runs only there."""

import dataclasses
import functools
import json
import logging
import math
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash.cuda.window import Window

FOLDER = Path(__file__).parents[1] / "benchmarks"


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
    assert {"device", "versions", "driver", "date", "timing", "dtype", "rows"} <= set(result)
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


def brute_force_pairs(case):
    def sees(i, j):
        diagonal = i + case.keys - case.queries
        if case.causal and j > diagonal:
            return False
        return case.window is None or j > diagonal - case.window

    return [[sees(i, j) for j in range(case.keys)] for i in range(case.queries)]


@pytest.mark.parametrize(
    "queries,keys,heads,pack",  # the heads of one key head that fill tiles of 64 rows best, of its 2, 4 or 3
    ((50, 50, 6, 1), (30, 70, 6, 2), (70, 30, 6, 2), (40, 60, 12, 4), (30, 70, 9, 1)),
)
@pytest.mark.parametrize("causal,window", ((False, None), (True, None), (True, 1), (True, 20), (True, 100)))
def test_forward_counts_what_is_attended_to_and_what_is_visited(
    queries, keys, heads, pack, causal, window, monkeypatch
):
    import forward

    from jax_flash._device import H100
    from jax_flash.cuda import forward_plan
    from jax_flash.cuda.forward_tiles import choices

    tile = choices(64, Window(None, None))[0].tile
    tile = dataclasses.replace(tile, consumers=1, pingpong=False, keys=16, split=1)
    monkeypatch.setattr(forward_plan, "tile", lambda *_: tile)
    case = forward.Case(2, queries, keys, heads, 3, 40, causal, window)
    pairs = brute_force_pairs(case)
    assert case.flops == 4 * 2 * heads * 40 * sum(map(sum, pairs))

    blocks = 0
    pack_rows = [row for row in pairs for _ in range(pack)]  # a query's rows, one a head, stand together
    for first in range(0, len(pack_rows), 64):
        rows = pack_rows[first : first + 64]
        seen = [j for j in range(keys) if any(row[j] for row in rows)]
        if seen:  # the blocks between the first key and the last that any row sees
            blocks += max(seen) // 16 - min(seen) // 16 + 1
    assert forward.visited_flops(case, H100) == 4 * 2 * (heads // pack) * 48 * 64 * 16 * blocks


def test_forward_cases_have_names_of_their_own():
    import forward

    for cases in forward.GROUPS.values():
        assert len({str(case) for case in cases}) == len(cases)
    assert str(forward.Case(4, 1000, 4096, 16, 2, 80, True)) == "b4 t1000 s4096 h16/2 d80 causal"
    assert str(forward.Case(1, 64, 64, 2, 2, 64, True, 16, "float16")) == "b1 s64 h2/2 d64 window 16 float16"
    for wrong in (["--groups", "short,long"], ["--peers", "nobody"]):
        with pytest.raises(SystemExit):
            forward.parse(wrong)


def test_a_chain_computes_what_its_calls_compute():
    import contenders
    import forward

    case = forward.Case(2, 24, 24, 4, 2, 16, dtype="float32", calls=32)
    attend = functools.partial(contenders.CONTENDERS["jax_flash_xla"], causal=True, window=5)
    query, key, value = case.inputs()
    chained = forward.chain(attend, case.calls)(query, key, value)
    for _ in range(32):
        query = attend(query, key, value)
    np.testing.assert_allclose(chained, query, rtol=1e-5, atol=1e-6)


def test_forward_refuses_answers_to_another_question(monkeypatch):
    import contenders
    import forward

    xla = contenders.CONTENDERS["jax_flash_xla"]
    monkeypatch.setitem(contenders.CONTENDERS, "tokamax", lambda *x, causal, window: xla(*x, not causal))
    monkeypatch.setitem(contenders.CONTENDERS, "cudnn", lambda *x, causal, window: xla(*x, causal) * jnp.nan)
    case = forward.Case(1, 48, 48, 2, 1, 16, causal=True, dtype="float32")
    ran, other, nan = forward.measure("short", case, ("jax_flash_xla", "tokamax", "cudnn"))
    assert ran["forward"] == pytest.approx(case.flops / ran["milliseconds"] / 1e9)
    for row in (other, nan):
        assert "forward" not in row and "differs from the first one's" in row["error"]


def test_contenders_mask_causally_in_windows_aligned_to_the_last_key():
    import contenders
    import forward

    case = forward.Case(1, 30, 50, 2, 1, 16, causal=True, window=7, dtype="float32")
    query, key, value = case.inputs()
    out = contenders.CONTENDERS["jax_flash_xla"](query, key, value, causal=True, window=7)
    logits = jnp.einsum("btnh,bskh->bnts", query, key) / 4
    weights = jax.nn.softmax(jnp.where(np.array(brute_force_pairs(case)), logits, -jnp.inf))
    np.testing.assert_allclose(out, jnp.einsum("bnts,bskh->btnh", weights, value), rtol=1e-4, atol=1e-5)
    assert contenders._fa3_mask(True, 7) == {"is_causal": False, "window_size": (6, 0)}
    assert contenders._fa3_mask(True, None) == {"is_causal": True}
    for name in ("cudnn", "tokamax", "jax_mgpu"):
        with pytest.raises((NotImplementedError, ImportError)):
            contenders.CONTENDERS[name](query, key, value, causal=True)


def test_forward_compares_with_the_best_peer_and_with_fa3():
    import forward

    def row(group, case, peer, **figures):
        return {"group": group, "case": case, "peer": peer, **figures}

    rows = [
        row("short", "a", "jax_flash_cuda", forward=90.0),
        row("short", "a", "cudnn", forward=100.0),
        row("short", "a", "fa3_cu13", forward=60.0),
        row("odd", "a", "jax_flash_cuda", forward=50.0),
        row("odd", "a", "jax_flash_xla", forward=80.0),  # ours too, not a peer
        row("odd", "a", "cudnn", forward=40.0),
        row("odd", "a", "tokamax", error="not here"),
        row("windows", "d64", "jax_flash_cuda", forward=300.0, visited=400.0),
        row("windows", "d64 window 9", "jax_flash_cuda", forward=200.0, visited=380.0),
    ]
    assert forward.compare(rows) == [
        {"group": "short", "case": "a", "best": "cudnn", "to_best": 0.9, "to_fa3": 1.5},
        {"group": "odd", "case": "a", "best": "cudnn", "to_best": 1.25},
    ]
    assert forward.window_ratios(rows) == {"d64 window 9": 0.95}


def test_forward_command_line_on_the_cpu(tmp_path, monkeypatch, capsys):
    import forward

    groups = {
        "windows": [forward.Case(1, 48, 48, 2, 1, 16, causal=True, window=9)],
        "launch": [forward.Case(1, 16, 16, 2, 2, 16, calls=3)],
    }
    monkeypatch.setattr(forward, "GROUPS", groups)
    monkeypatch.setattr(warnings, "filterwarnings", lambda *_: None)
    monkeypatch.setattr(logging, "disable", lambda _: None)
    out = tmp_path / "result.json"
    forward.main(["--peers", "jax_flash_xla,jax_flash_cuda", "--out", str(out)])
    result = json.loads(out.read_text())
    assert {"device", "versions", "date", "timing", "rows", "ratios", "window_ratios"} <= set(result)
    assert [(row["group"], row["peer"], "forward" in row) for row in result["rows"]] == [
        ("windows", "jax_flash_xla", True),
        ("windows", "jax_flash_cuda", False),
        ("launch", "jax_flash_xla", True),
        ("launch", "jax_flash_cuda", False),
    ]
    assert "needs a CUDA GPU" in result["rows"][1]["error"]
    assert result["rows"][2]["call_microseconds"] > 0
    printed = capsys.readouterr().out
    assert "b1 s48 h2/1 d16 window 9" in printed and "µs a call" in printed
