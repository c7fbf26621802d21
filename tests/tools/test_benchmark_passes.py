"""The comparisons of one pass over many calls: their arithmetic, and their command lines on the CPU."""

import dataclasses
import functools
import json
import logging
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash._device import H100
from jax_flash._mask import Window
from jax_flash._spec import Operands
from jax_flash.cuda.sm90 import backward_plan, forward_plan
from jax_flash.cuda.sm90.forward_tiles import TileRequirements, tile_options

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    # The programs silence their peers, which outlasts them.
    monkeypatch.setattr(warnings, "filterwarnings", lambda *_, **__: None)
    monkeypatch.setattr(logging, "disable", lambda _: None)


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

    tile = tile_options(TileRequirements(64, 64, Window(None, None)))[0].tile
    tile = dataclasses.replace(tile, consumers=1, pingpong=False, keys=16, early_pv_steps=1)
    monkeypatch.setattr(forward_plan, "choose_tile", lambda *_: tile)
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


@pytest.mark.parametrize("queries,keys", ((300, 300), (200, 450), (450, 200)))
@pytest.mark.parametrize("causal,window", ((False, None), (True, None), (True, 1), (True, 70), (True, 300)))
def test_backward_counts_what_is_attended_to_and_what_is_visited(queries, keys, causal, window):
    import backward

    case = backward.Case(2, queries, keys, 4, 2, 40, causal, window)
    pairs = np.array(brute_force_pairs(case))
    assert backward.backward_flops(case) == 10 * 2 * 4 * 40 * pairs.sum()

    plan = backward_plan.plan_backward(case.spec(), Operands(*case.shapes()), H100)
    (main,) = (launch for launch in plan.launches if launch.kernel.entry == "backward")
    defines = dict(main.kernel.defines)
    rows, columns = defines["QUERIES"], defines["KEYS"]
    blocks = 0
    for first in range(0, keys, columns):
        (seeing,) = np.nonzero(pairs[:, first : first + columns].any(axis=1))
        if len(seeing):
            blocks += max(seeing) // rows - min(seeing) // rows + 1
    assert backward.visited_flops(case, H100) == 10 * 2 * 4 * 48 * rows * columns * blocks


def test_cases_have_names_of_their_own():
    import backward
    import forward

    for cases in (*forward.GROUPS.values(), *backward.GROUPS.values()):
        assert len({str(case) for case in cases}) == len(cases)
    assert str(forward.Case(4, 1000, 4096, 16, 2, 80, True)) == "b4 t1000 s4096 h16/2 d80 causal"
    assert str(forward.Case(1, 64, 64, 2, 2, 64, True, 16, "float16")) == "b1 s64 h2/2 d64 window 16 float16"


@pytest.mark.parametrize("wrong", (["--groups", "short,long"], ["--peers", "nobody"], ["--add"]))
def test_unknown_names_are_refused(wrong):
    import backward
    import forward

    for program in (forward, backward):
        with pytest.raises(SystemExit):
            program.main(wrong)


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


def test_compares_with_the_best_peer_with_fa3_and_with_variants():
    import comparison

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
    assert comparison.compare(rows, "forward") == [
        {"group": "short", "case": "a", "best": "cudnn", "to_best": 0.9, "to_fa3": 1.5},
        {"group": "odd", "case": "a", "best": "cudnn", "to_best": 1.25},
    ]
    assert comparison.window_ratios(rows) == {"jax_flash_cuda": {"d64 window 9": 0.95}}
    assert comparison.compare_variants(rows, "forward", {"odd": "jax_flash_xla"}) == [
        {"group": "odd", "case": "a", "longer": 50 / 80}
    ]


def test_forward_command_line_on_the_cpu(tmp_path, monkeypatch, capsys):
    import forward

    groups = {
        "windows": [forward.Case(1, 48, 48, 2, 1, 16, causal=True, window=9)],
        "launch": [forward.Case(1, 16, 16, 2, 2, 16, calls=3)],
    }
    monkeypatch.setattr(forward, "GROUPS", groups)
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


@pytest.fixture
def with_portable_kernels(monkeypatch):
    """The implementation that runs here, under the names of those that do not."""
    import contenders

    ours = contenders._ours
    portable = {"implementation": "xla"}
    monkeypatch.setitem(contenders.CONTENDERS, "jax_flash_cuda", functools.partial(ours, **portable))
    for name, options in (
        ("deterministic", {"deterministic": True}),
        ("with_residual", {"return_residual": True}),
    ):
        monkeypatch.setitem(contenders.VARIANTS, name, functools.partial(ours, **portable, **options))


def test_backward_refuses_answers_to_another_question(monkeypatch):
    import backward
    import contenders

    @jax.custom_vjp
    def doubled(x):
        return x

    xla = contenders.CONTENDERS["jax_flash_xla"]
    doubled.defvjp(lambda x: (x, None), lambda _, gradient: (2 * gradient,))
    monkeypatch.setitem(contenders.CONTENDERS, "cudnn", lambda q, k, v, **mask: xla(q, k, doubled(v), **mask))
    case = backward.Case(1, 256, 256, 4, 2, 32, causal=True, dtype="float32")
    ran, other = backward.measure("short", case, ("jax_flash_xla", "cudnn"))
    assert ran["backward"] == pytest.approx(backward.backward_flops(case) / ran["milliseconds"] / 1e9)
    assert "backward" not in other and "differs from the first one's" in other["error"]


def test_backward_command_line_on_the_cpu(tmp_path, monkeypatch, capsys, with_portable_kernels):
    import backward

    case = backward.Case(1, 256, 256, 4, 2, 32, causal=True, dtype="float32")
    monkeypatch.setattr(backward, "GROUPS", {name: [case] for name in ("gqa", "deterministic", "residual")})
    out = tmp_path / "result.json"
    backward.main(["--peers", "jax_flash_cuda,jax_flash_xla,fa3_cu12", "--out", str(out)])
    result = json.loads(out.read_text())
    assert {"device", "versions", "date", "timing", "rows", "ratios", "window_ratios", "variants"} <= set(
        result
    )
    assert [(row["group"], row["peer"], "backward" in row) for row in result["rows"]] == [
        ("gqa", "jax_flash_cuda", True),
        ("gqa", "jax_flash_xla", True),
        ("gqa", "fa3_cu12", False),
        ("deterministic", "jax_flash_cuda", True),
        ("deterministic", "deterministic", True),
        ("residual", "jax_flash_cuda", True),
        ("residual", "with_residual", True),
    ]
    assert [ratio["group"] for ratio in result["variants"]] == ["deterministic", "residual"]
    printed = capsys.readouterr().out
    assert "b1 s256 h4/2 d32 causal" in printed and "times as long" in printed

    backward.main(["--groups", "residual", "--out", str(out), "--add"])
    again = json.loads(out.read_text())
    assert again["rows"][:5] == result["rows"][:5]
    assert [row["group"] for row in again["rows"][5:]] == ["residual", "residual"]


def test_a_backward_pass_lost_in_noise_has_no_rate():
    import backward

    case = backward.Case(1, 256, 256, 4, 2, 32)
    assert "noise" in backward.rates(case, -0.1, None)["error"]
    assert backward.rates(case, 2.0, 4 * 10**9) == {"backward": case.flops * 2.5 / 2e9, "visited": 2.0}
