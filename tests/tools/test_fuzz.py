"""A short fuzz of the portable implementation, and that a fuzz finds what is wrong and makes it small."""

import dataclasses
import itertools
import json
import math
import os
import time
import types

import float8_bounds
import fuzz
import fuzz_jobs
import fuzzed_caches
import hypothesis
import jax
import numpy as np
import pairwise_suite
import pytest
from attention_case import Case
from exhaustive import thorough
from flawed import add_flawed_implementation
from fuzzed_caches import FuzzedCache

from jax_flash import _device
from jax_flash._spec import shapes_of
from jax_flash.cuda import decoding
from jax_flash.cuda.sm90 import plan_decode, prefill_plan
from jax_flash.cuda.sm90.backward_plan import plan_backward


# Always the same calls: others are for the command line.
@pytest.mark.parametrize("seed", (0, *thorough(1, 2, 3)))
def test_random_calls_agree_with_the_definition(seed):
    report = fuzz.fuzz(fuzz.Xla(), 7, seed)
    assert not report.failures, fuzz.describe("xla", report.failures[0])
    assert report.ran == 7
    assert not report.refused


class XlaFp8(fuzz.CudaFp8, fuzz.Xla):
    """The fuzz of kernels in e4m3, with what defines them in their place."""

    implementation = "xla"
    dtypes = fuzz.Fuzzed.dtypes
    head_dims = (16, 40)

    def __init__(self):
        fuzz.Xla.__init__(self)


def test_random_calls_in_8_bits():
    report = fuzz.fuzz(XlaFp8(), 4, 0)
    assert not report.failures, report.failures[0]
    assert report.ran == 4


def test_bounds_of_8_bits():
    random = np.random.default_rng(0)
    out, lse, value = random.normal(size=(2, 9, 4, 16)), random.normal(size=(2, 4, 9)), np.ones((2, 9, 4, 16))
    lse[0, 0, 0], out[0, 0, 0] = -np.inf, 0
    rounded = out * (1 + 0.02 * random.normal(size=out.shape))
    small = np.full((2, 9, 4, 16), 1e-3)  # of query and key: their products' error counts for nothing
    float8_bounds.check((rounded, lse), (out, lse), small, small, value)
    large = 3 * np.ones_like(small)
    float8_bounds.check((rounded, lse + 3e-3), (out, lse), large, large, value)
    one_row = rounded.copy()
    one_row[1, 3, 2] += 0.2
    for wrong in ((1.05 * out, lse), (one_row, lse), (out, lse + 0.01), (out, np.maximum(lse, -9))):
        with pytest.raises(AssertionError):
            float8_bounds.check(wrong, (out, lse), small, small, value)


class Flawed(fuzz.Xla):
    implementation = "flawed"
    lengths = (7,)
    head_dims = (16,)

    def environment(self):
        return jax.disable_jit()  # or each case would be compiled

    def factors(self):
        factors = super().factors()
        kept = ("dtype", "lengths", "H", "logits_soft_cap", "sinks", "segment_ids", "dropout")
        return {name: factors[name] for name in kept}


def test_a_fault_of_two_features_together_is_found_and_made_small(monkeypatch, capsys):
    add_flawed_implementation(monkeypatch)
    monkeypatch.setitem(fuzz.FUZZED, "flawed", Flawed)
    status = fuzz.main(["--implementation", "flawed", "--cases", "60", "--seed", "0"])
    assert status == 1
    said = capsys.readouterr().out
    assert "--seed 0" in said and "  no dropout of bfloat16 → " in said and "  no segments → 1\n" in said
    assert "AssertionError: " in said and "lse: error" in said
    again = said.splitlines()[-1].partition("--case '")[2].removesuffix("'")
    case = fuzz.from_json(again)
    assert str(case) == f"{Case('fuzz', 'float32', T=7, S=7, H=16)}-logits_soft_cap-sinks"
    with pytest.raises(AssertionError, match="lse: error"):
        fuzz.main(["--implementation", "flawed", "--case", again])


def test_failures_are_printed_as_they_are_found_where_the_fuzz_goes_on(monkeypatch, capsys):
    add_flawed_implementation(monkeypatch)
    monkeypatch.setitem(fuzz.FUZZED, "flawed", Flawed)
    command = ["--implementation", "flawed", "--cases", "30", "--seed", "0", "--go-on"]
    assert fuzz.main(command) == 1
    found, ran, _ = capsys.readouterr().out.partition("ran 30 in ")
    assert ran and found.count("FAILED") > 1 and "lse: error" in found


def test_a_printed_case_is_the_same_case(monkeypatch, capsys):
    case = Case("fuzz", "bfloat16", T=3, local_window_size=(None, 3), features=("sinks", "mask:B11S"), seed=5)
    assert fuzz.from_json(fuzz.to_json(case)) == case
    monkeypatch.setattr(fuzz.Xla, "check", lambda self, case: print(case))
    fuzz.main(["--implementation", "xla", "--case", fuzz.to_json(case)])
    assert str(case) in capsys.readouterr().out


def test_processes_share_the_cases(tmp_path, capsys):
    out = tmp_path / "summary.json"
    assert fuzz.main([*"--implementation xla --cases 3 --jobs 2 --seed 0 --out".split(), str(out)]) == 0
    summary = json.loads(out.read_text())
    assert summary["cases"] == 3 and summary["seed"] == 0 and summary["device"] == "cpu"
    assert not summary["failures"] and not summary["refused"]
    assert "ran 3 in " in capsys.readouterr().out


def test_time_runs_out(monkeypatch):
    monkeypatch.setattr(fuzz, "time", types.SimpleNamespace(time=itertools.count().__next__))
    report = fuzz.fuzz(fuzz.Xla(), 1000, seed=0, deadline=3)
    assert 0 < report.ran <= 4 and not report.failures and report.at_hand is None


CASE = Case("fuzz", "bfloat16")


def die(deadline, tell):
    tell(fuzz_jobs.Report(ran=2, at_hand=CASE))
    os._exit(3)


def hang(deadline, tell):
    tell(fuzz_jobs.Report(ran=1, at_hand=CASE))
    time.sleep(1000)


class UntilAllHang:
    """A clock that passes every deadline as soon as all processes have said that they hang."""

    def __init__(self):
        self.now = 0.0

    def time(self):
        return self.now

    def tell(self, reports):
        if all(report.ran == 1 for report in reports):
            self.now = math.inf


@pytest.mark.parametrize("work,code", ((die, 3), (hang, -15)))
def test_a_process_that_dies_or_hangs_has_failed(work, code, monkeypatch):
    clock = UntilAllHang()
    monkeypatch.setattr(fuzz_jobs, "time", clock)
    (report,) = fuzz_jobs.in_processes(work, [()], deadline=1.0, progress=clock)
    assert report.ran in (1, 2) and report.failures == [(CASE, f"its process ended with {code}")]


def test_cases_of_a_list_have_the_same_kernels():
    """But for what depends on the lengths: the forward kernel's tile, sums of a broadcast bias, schedules."""

    class Cuda(fuzz.Cuda):
        def environment(self):
            return _device.assume(_device.H100)

    fuzzed = Cuda()
    factors, _ = pairwise_suite.supported(fuzzed, fuzzed.factors())
    several = 0

    @hypothesis.seed(0)
    @hypothesis.settings(max_examples=40, database=None, deadline=None)
    @hypothesis.given(fuzz.cases(factors, fuzzed.varied))
    def check(cases):
        nonlocal several
        several += len(set(cases)) > 2
        cases = [case for case in cases if fuzzed.refusal(case) is None]
        plans = [plan_backward(case.spec(), case.operands(), _device.H100) for case in cases]
        names = ("BIAS_SUM", "DQ_SUMS", "KEY_SUMS", "DQ_STAGES", "WRITER_STAGES", "SHARED_BYTES")
        of_lengths = dict.fromkeys(names, "any")
        defines = [dict(plan.launches[1].kernel.defines) | of_lengths for plan in plans]
        assert all(one == defines[0] for one in defines)

    check()
    assert several > 10


@pytest.mark.parametrize("count", (2, *thorough(4)))
def test_random_calls_on_caches_agree_with_the_definition(count):
    report = fuzz.fuzz(fuzz.XlaDecoding(), count, 0)
    assert not report.failures, fuzz.describe("xla-decoding", report.failures[0])
    assert report.ran == count


def drawn_caches(count):
    drawn = []

    @hypothesis.seed(0)
    @hypothesis.settings(max_examples=count, database=None, deadline=None)
    @hypothesis.given(fuzz.CudaDecoding().lists(None))
    def draw(cases):
        drawn.append(cases)

    draw()
    return drawn


def tells_its_gpu(deadline, tell):
    report = fuzz_jobs.Report(ran=1)
    report.refused[os.environ["CUDA_VISIBLE_DEVICES"]] += 1
    tell(report)
    return report


def test_jobs_share_the_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    clock = fuzz_jobs.Progress()
    reports = fuzz_jobs.in_processes(tells_its_gpu, [()] * 3, time.time() + 60, clock)
    assert [list(report.refused) for report in reports] == [["3"], ["5"], ["3"]]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"


def test_calls_on_caches_that_are_drawn_are_calls_that_the_cuda_kernels_take():
    """Those of a list have the same decode kernel, but for its rows, what divides tiles, whether it appends,
    and whether calls are plain. Of prompts, those that are packed may have another.
    """
    several, prompts, tables, lengths = 0, 0, set(), set()
    for cases in drawn_caches(40):
        kernels = set()
        for case in cases:
            draw = fuzzed_caches.FuzzedDraw(dataclasses.replace(case, S=min(case.S, 4 * (case.page or 64))))
            operands = shapes_of(draw.operands)
            assert decoding.supports(case.spec, operands, _device.H100) is None
            launches = {x.kernel.entry: x for x in plan_decode(case.spec, operands, _device.H100).launches}
            of_rows = ["SPLIT", "PAIRS", "CLUSTER", "QUERY_ROWS", "STAGES", "CTAS_OF_SM", "SHARED_BYTES"]
            of_rows += ["PARTIALS_APART", "APPENDS", "PLAIN", "QUERY_TMA"]
            of_rows += ["KEYS"] * case.float8  # few rows have smaller blocks of a cache in 8 bits
            if "decode" in launches:
                defines = {name: x for name, x in launches["decode"].kernel.defines if name not in of_rows}
                kernels.add(tuple(defines.items()))
            is_prompt = case.T == fuzzed_caches.PROMPT_QUERIES
            if is_prompt and prefill_plan.can_run(case.spec, operands):
                assert "forward" in launches
                prompts += 1
            tables.add(case.table)
            lengths.add(case.lengths)
        several += len(cases) > 1
        assert len(kernels) <= 1 + any(case.T == fuzzed_caches.PROMPT_QUERIES for case in cases)
    assert (
        several > 10
        and prompts > 0
        and tables == set(fuzzed_caches.TABLES)
        and lengths == set(fuzzed_caches.LENGTHS)
    )


@pytest.mark.parametrize("lengths", fuzzed_caches.LENGTHS)
@pytest.mark.parametrize("table", fuzzed_caches.TABLES)
def test_page_tables_that_are_drawn(table, lengths):
    """No page that a sequence appends to is another's, and only a small pool has stale entries."""
    case = FuzzedCache(B=4, S=60, page=4, U=2, table=table, lengths=lengths, seed=3)
    draw = fuzzed_caches.FuzzedDraw(case)
    pages = draw.operands.page_table
    after = np.minimum(draw.lengths + case.U, case.S)
    appended = [
        {pages[b, j // case.page] for j in range(draw.lengths[b], after[b])} - {-1} for b in range(case.B)
    ]
    used = [set(pages[b, : -(-after[b] // case.page)]) for b in range(case.B)]
    for b, mine in enumerate(appended):
        assert not any(mine & theirs for other, theirs in enumerate(used) if other != b)
    assert len(draw.operands.key) <= case.B * case.S // case.page + 5
    if table == "small pool" and lengths == "empty":
        assert len(draw.operands.key) == case.B + 1


def test_a_printed_call_on_a_cache_is_the_same_call(monkeypatch, capsys):
    case = FuzzedCache(T=3, page=8, lengths="one long", seed=5)
    assert fuzz.from_json(fuzz.to_json(case), FuzzedCache) == case
    monkeypatch.setattr(fuzz.XlaDecoding, "check", lambda self, case: print(case))
    fuzz.main(["--implementation", "xla-decoding", "--case", fuzz.to_json(case)])
    assert str(case) in capsys.readouterr().out
