"""The benchmark of decoding: its calls and arithmetic, its rows, and its command line on the CPU."""

import dataclasses
import json
import logging
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_case import CacheCase, Draw

from jax_flash._device import H100
from jax_flash._spec import shapes_of
from jax_flash.cuda.sm90 import decode_plan

FOLDER = Path(__file__).parents[2] / "benchmarks"
TINY = dict(batch=3, capacity=64, heads=4, kv_heads=2, head_dim=16)


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    # The program silences its peers, which outlasts it.
    monkeypatch.setattr(warnings, "filterwarnings", lambda *_, **__: None)
    monkeypatch.setattr(logging, "disable", lambda _: None)


def tiny_cases():
    """A case of each group that a CPU measures in milliseconds."""
    from decode_cases import APPENDED, PREFILL, SPECULATIVE, Call, Case

    call = Call(**TINY)

    def case(group, variants):
        return Case(group, {name: dataclasses.replace(call, **changes) for name, changes in variants.items()})

    prefill = {
        name: {"queries": 9} | options for name, options in PREFILL.items() if options.get("page", 1) <= 16
    }
    return {
        "contiguous": [case("contiguous", {"": {}})],
        "lengths": [case("lengths", {"": {"lengths": "uniform"}})],
        "paged": [case("paged", {"contiguous": {}, "pages of 16": {"page": 16}, "pages of 1": {"page": 1}})],
        "speculative": [case("speculative", dict(list(SPECULATIVE.items())[:2]))],
        "8 bits": [case("8 bits", {"": {"cache_dtype": "float8_e4m3fn"}})],
        "append": [case("append", APPENDED)],
        "prefill": [case("prefill", prefill)],
    }


def test_cases_are_those_that_have_targets():
    from decode_cases import GROUPS, MEGABYTE, TARGETS

    assert (
        list(GROUPS)
        == list(TARGETS)
        == ["contiguous", "lengths", "paged", "speculative", "8 bits", "append", "prefill"]
    )
    labels = [case.label for case in GROUPS["contiguous"]]
    assert len(labels) == len(set(labels)) == 9
    assert "decode b1 s1024 h32/8 d128/128 q1 bfloat16" in labels
    assert "decode b4 s32768 h32/32 d128/128 q1 bfloat16" in labels
    large = [case for case in GROUPS["contiguous"] if case.calls[""].bytes_read >= 256 * MEGABYTE]
    assert len(large) == 6
    (paged,) = GROUPS["paged"]
    assert [call.page for call in paged.calls.values()] == [None, 16, 64, 256, 1]
    for cases in GROUPS.values():
        for case in cases:
            assert len({call.bytes_read for call in case.calls.values()}) == 1
            variants = {name for target in TARGETS[case.group] for name in target.variants}
            assert variants <= set(case.calls)


def test_bytes_are_those_of_keys_that_sequences_have():
    from decode_cases import Call

    full = Call(**TINY)
    assert list(full.key_lengths) == [64, 63, 62]
    assert full.bytes_read == (64 + 63 + 62) * 2 * (16 + 16) * 2
    assert full.label == "decode b3 s64 h4/2 d16/16 q1 bfloat16"
    of_8_bits = dataclasses.replace(full, cache_dtype="float8_e4m3fn")
    assert of_8_bits.bytes_read == full.bytes_read / 2
    assert of_8_bits.label == "decode b3 s64 h4/2 d16/16 q1 float8_e4m3fn"
    uniform = dataclasses.replace(full, batch=2000, lengths="uniform")
    assert uniform.key_lengths.min() == 1 and uniform.key_lengths.max() == 64
    one = Call(64, 131072, 16, 2, lengths="one long")
    assert sorted(one.key_lengths)[-2:] == [sorted(one.key_lengths)[-2], 131072]
    assert sorted(one.key_lengths)[-2] <= 1024 and one.key_lengths.min() >= 256


def test_flops_are_those_of_pairs_that_see_each_other():
    from decode_cases import Call

    call = Call(**TINY, queries=3)
    pairs = sum(length - t for length in (64, 63, 62) for t in range(3))
    assert call.flops == pairs * 4 * 2 * 2 * 16


def test_pages_hold_the_keys_of_the_contiguous_cache():
    from decode_cases import Call
    from decode_programs import Arrays, shapes

    call = Call(**TINY)
    arrays = Arrays(call)
    of_pages = dataclasses.replace(call, page=16)
    _, cache, *_ = arrays.inputs(of_pages)
    table = np.asarray(cache.page_table)
    assert sorted(table.ravel()) == list(range(12)) and list(table.ravel()) != list(range(12))
    np.testing.assert_array_equal(cache.key_pages[table].reshape(3, 64, 2, 16), arrays.key)
    append = dataclasses.replace(call, appended=1, rotary=True)
    of_8_bits = dataclasses.replace(call, cache_dtype="float8_e4m3fn")
    assert Arrays(of_8_bits).inputs(of_8_bits)[1].key.dtype == jnp.float8_e4m3fn
    for each in (call, of_pages, append):
        got, described = (jax.tree.flatten(x) for x in (arrays.inputs(each), shapes(each)))
        assert got[1] == described[1]
        assert [(x.shape, x.dtype) for x in got[0]] == [(x.shape, x.dtype) for x in described[0]]
    lengths = np.asarray(arrays.inputs(append)[1].lengths)
    np.testing.assert_array_equal(lengths, append.key_lengths - 1)


def test_a_chain_of_one_call_is_that_call():
    from decode_cases import Call
    from decode_programs import Arrays, attend, chain, copy

    call = Call(**TINY, appended=1, rotary=True)
    inputs = Arrays(call).inputs(call)
    one = attend(call, "jax_flash_xla")(*inputs)
    np.testing.assert_array_equal(chain("jax_flash_xla", 1)(*inputs), one)
    again = attend(call, "jax_flash_xla")(one, *inputs[1:])
    np.testing.assert_array_equal(chain("jax_flash_xla", 2)(*inputs), again)
    assert copy(jnp.uint32(7), jnp.uint32(0)) == 7


def test_ratios_and_targets():
    import decode
    from decode_cases import GROUPS

    case = GROUPS["contiguous"][0]
    bytes_read = case.calls[""].bytes_read

    def row(contender, kernel_us):
        described = {"group": "contiguous", "case": case.label, "variant": "", "contender": contender}
        return described | {"bytes": bytes_read, "kernel_us": kernel_us, "step_us": 2 * kernel_us}

    rows = [row("jax_flash_cuda", 125.0), row("cudnn", 120.0), row("fa3", 150.0), row("copy", 110.0)]
    ours, *others = decode.with_ratios(rows, case)
    assert others == rows[1:]
    assert ours["to_best_peer"] == ours["to_cudnn"] == pytest.approx(0.96)
    assert ours["step_to_best_peer"] == pytest.approx(0.96)
    assert ours["to_copy"] == pytest.approx(0.88) and "to_base" not in ours
    assert [target["is_met"] for target in decode.targets([ours, *others])] == [False, False, False]

    case = GROUPS["append"][0]
    rows = [
        row("jax_flash_cuda", us) | {"group": "append", "variant": variant, "device_us": 3 * us}
        for variant, us in (("attention", 100.0), ("append", 101.5), ("append rotary", 102.5))
    ]
    rows = decode.with_ratios(rows, case)
    assert rows[2]["beyond_base_us"] == 2.5 and rows[2]["to_base"] == pytest.approx(100 / 102.5)
    assert rows[2]["step_beyond_base_us"] == 5
    (target,) = decode.targets(rows)
    assert target["variant"] == "append rotary" and target["figure"] == 7.5 and not target["is_met"]


def test_spans_of_a_profile():
    import timing

    def line(name, *events):
        return SimpleNamespace(
            name=name, events=[SimpleNamespace(start_ns=start, duration_ns=d) for start, d in events]
        )

    # Of two calls: a copy, and three steps of two kernels, the second of which begins before the first ends.
    def events(begin):
        of_steps = [(begin + 100.0 + 50.0 * i + after, 30.0) for i in range(3) for after in (0.0, 20.0)]
        return [(begin, 70.0), *of_steps]

    streams = [line("Stream #1", *events(0.0)), line("Stream #2", *events(1000.0))]
    planes = [
        SimpleNamespace(name="/host:CPU", lines=[line("Stream #1", (0.0, 500.0))]),
        SimpleNamespace(name="/device:GPU:0", lines=[*streams, line("XLA Ops", (0.0, 900.0))]),
    ]
    long = timing.by_call(timing.device_events(planes), 2)
    assert [len(call) for call in long] == [7, 7]
    short = [call[:3] for call in long]
    assert timing.sum_and_period(short, long, 2, 3) == pytest.approx((60e-6, 50e-6))
    with pytest.raises(RuntimeError, match="no whole steps"):
        timing.sum_and_period(short, [call[:6] for call in long], 2, 3)
    with pytest.raises(RuntimeError, match="14 kernels and copies of 3"):
        timing.by_call(timing.device_events(planes), 3)


def test_other_programs_rows_are_merged(tmp_path):
    import decode
    from decode_cases import GROUPS

    path = tmp_path / "theirs.json"
    label = "decode b16 s8192 h32/8 d128/128 q4 bfloat16"
    theirs = [
        {"case": label, "peer": "fa3", "us": 138.0, "GB/s": 1.0},
        {"case": label, "peer": "fa3", "error": "no"},
        {"case": "another", "peer": "fa3", "us": 1.0},
    ]
    path.write_text(json.dumps({"device": "made up", "rows": theirs}))
    case = GROUPS["speculative"][0]
    (row,) = decode.merged(case, path, "made up")
    assert row["variant"] == "4 queries" and row["contender"] == "fa3" and row["kernel_us"] == 138.0
    assert row["GB/s"] == pytest.approx(case.calls["4 queries"].bytes_read / 138e-6 / 1e9)
    assert decode.merged(GROUPS["paged"][0], path, "made up") == []
    with pytest.raises(ValueError, match="made up"):
        decode.merged(case, path, "another")


def test_command_line_on_the_cpu(tmp_path, monkeypatch, capsys):
    import decode
    import decode_programs
    import timing

    groups = tiny_cases()
    monkeypatch.setattr(decode, "GROUPS", groups)
    monkeypatch.setattr(decode_programs, "LONG_CHAIN", 2)
    monkeypatch.setattr(decode, "LONG_CHAIN", 2)
    monkeypatch.setattr(timing, "ITERATIONS", 2)
    monkeypatch.setattr(timing, "CALLS_IN_FLIGHT", 3)
    out = tmp_path / "result.json"
    command = ["--contenders", "jax_flash_cuda,jax_flash_xla,cudnn,copy", "--rounds", "1", "--out", str(out)]
    decode.main([*command, "--groups", ",".join(groups)])
    result = json.loads(out.read_text())
    assert {"commit", "device", "versions", "date", "timing", "rows", "targets"} <= set(result)
    assert "failed" not in result
    rows = {(row["group"], row["variant"], row["contender"]): row for row in result["rows"]}
    for group, (case,) in groups.items():
        for variant, call in case.calls.items():
            row = rows[group, variant, "jax_flash_xla"]
            assert row["case"] == case.label and row["bytes"] == call.bytes_read
            assert {"kernel_us", "step_us"} <= set(row) and "error" not in row
            assert "needs a CUDA GPU" in rows[group, variant, "jax_flash_cuda"]["error"]
    for group in ("contiguous", "lengths", "paged"):
        variant = groups[group][0].base
        assert "kernel_us" in rows[group, variant, COPY] and "error" in rows[group, variant, "cudnn"]
        assert "to_copy" in rows[group, variant, "jax_flash_xla"]
    assert ("append", "attention", "cudnn") not in rows and ("paged", "pages of 16", COPY) not in rows
    assert "to_base" in rows["paged", "pages of 16", "jax_flash_xla"]
    assert {"to_base", "TFLOP/s"} <= set(rows["prefill", "cache", "jax_flash_xla"])
    assert "beyond_base_us" in rows["append", "append rotary", "jax_flash_xla"]
    assert result["targets"] == [] and "0 of 0 targets met" in capsys.readouterr().out


COPY = "copy"


def test_two_profilers_are_not_mixed(monkeypatch, capsys):
    import decode

    assert "append" not in decode.parse([]).groups
    assert decode.parse(["--groups", "append"]).groups == ["append"]
    monkeypatch.setattr(decode, "_on_gpu", lambda: True)
    with pytest.raises(SystemExit):
        decode.parse(["--groups", "contiguous,append"])
    assert "in a run of its own" in capsys.readouterr().err


def test_lists_its_calls(capsys):
    import decode

    decode.main(["--list", "--groups", "paged,append"])
    said = capsys.readouterr().out
    assert "pages of 256" in said and "append rotary" in said and "contiguous:" not in said
    for wrong in (["--groups", "other"], ["--contenders", "nobody"]):
        with pytest.raises(SystemExit):
            decode.parse(wrong)


@pytest.mark.exhaustive
def test_layers_on_the_cpu(tmp_path, monkeypatch):
    import decode_layers

    tiny = {"HEADS": 2, "KEY_HEADS": 1, "HEAD_DIM": 8, "STEPS": 2}
    for name, value in tiny.items():
        monkeypatch.setattr(decode_layers, name, value)
    out = tmp_path / "layers.json"

    def rows(*options):
        usual = ("--implementation=xla", "--layers=2", "--rounds=1", f"--out={out}")
        decode_layers.main([*usual, *options])
        found = json.loads(out.read_text())["rows"]
        assert all(row["microseconds_of_a_layer"] > 0 for row in found)
        return [(row["case"], row["peer"]) for row in found]

    names = [case.split(", ")[0] for case, _ in rows("--sizes=1x8,2x9")]
    assert names == ["b1 s8 h2/1 d8"] * 2 + ["b2 s9 h2/1 d8"] * 2
    settings = ("as it is", "tiles are whole")
    options = ("--rotary", "--lengths=uniform", "--cache-dtype=float8_e4m3fn", "--ways=scanned")
    case = "b2 s9 h2/1 d8, 2 layers scanned, rotary, float8_e4m3fn, uniform lengths"
    expected = [(case, setting) for setting in settings]
    assert rows("--sizes=2x9", f"--settings={','.join(settings)}", *options) == expected


@pytest.mark.parametrize("kind", ("full", "uniform", "one long"))
def test_layers_have_lengths_that_fit(kind):
    import decode_layers

    lengths = decode_layers.lengths_of(5, 100, kind)
    assert lengths.shape == (5,) and lengths.min() >= 1 and lengths.max() <= 100
    assert (kind == "full") == (lengths.min() == 100)


@pytest.mark.parametrize(
    "setting, are_shared, case",
    (
        ("tiles are whole", False, CacheCase(B=300, S=1300, N=1, K=1, H=16)),
        ("short tiles are shared", True, CacheCase(B=300, S=300, N=1, K=1, H=16)),
    ),
)
def test_a_setting_changes_the_plan(setting, are_shared, case):
    import tune_decode

    shapes = shapes_of(Draw(case).operands)

    def planned():
        """Whether CTAs may share tiles."""
        (launch,) = decode_plan.plan_decode(case.spec, shapes, H100).launches
        return dict(launch.kernel.defines)["SPLIT"]

    with tune_decode.set_to(tune_decode.SETTINGS[setting]):
        assert planned() == are_shared
    assert planned() != are_shared
