"""Random calls of an implementation, against the definition.

    python tests/fuzz.py --implementation xla --cases 200
    python tests/fuzz.py --implementation cuda --cases 2000 --jobs 15 --out FILE     on a machine with a GPU
    python tests/fuzz.py --implementation cuda-decoding --cases 2000 --jobs 15     calls on key-value caches
    python tests/fuzz.py --implementation cuda-fp8 --cases 1000 --jobs 15     forward in e4m3
    python tests/fuzz.py --implementation xla --case '{"dtype": "float32", …}'     a case again, as printed

Values of all factors of a call are drawn at random, those that the implementation refuses left out; output,
residual and gradients are compared as everywhere in the tests; of a call on a cache, output, residual and the
cache. A case that fails is made smaller while it still fails (five minutes at most), and printed with the
command that runs it. With `--go-on` it is printed as soon as it is found, and the fuzz goes on.

Nearly all of the time goes into compiling on the CPU, the CUDA kernels first: a few seconds for those of a
call. So calls that have the same kernels are drawn together, and `--jobs` processes share the work; those on
a GPU share it too.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))

import call_factors
import call_forms
import float8_bounds
import fuzz_jobs
import hypothesis
import jax
from attention_case import Case, draw
from call_factors import Factors
from fuzz_jobs import Report
from fuzzed_caches import CudaDecoding, FuzzedDecoding, PallasDecoding, XlaDecoding
from hypothesis import strategies
from implementation_suite import Implementation
from pairwise import pairs
from pairwise_suite import supported
from run_environment import environment
from small_blocks import small_blocks

from jax_flash import _device, _dispatch
from jax_flash.pallas import compat

FORMS = (*call_factors.BROADCAST_FORMS, "NTS", "N1S", "TS", "1S", "S")
SIDES = (None, -1, 0, 1, 5, 20, 50)
CASES_UNTIL_CLEARED = 100  # as compiled programs are kept for ever
CASES_OF_A_LIST = 12  # beyond the first, at most; in the mean five


class Fuzzed(Implementation):
    """An implementation and the sizes of its calls, of each the one first that failures shrink to."""

    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    lengths: tuple[int, ...] = (7, 1, 2, 64, 129, 200, 333)
    head_dims: tuple[int, ...] = (64, 8, 40, 80, 96, 100, 128, 160, 192, 256)
    value_head_dim: int = 48
    varied: tuple[str, ...] = ()  # factors whose values don't decide what has to be compiled, absent or not
    reports_errors = False
    case_type = Case

    def lists(self, report: Report) -> strategies.SearchStrategy[list[Case]]:
        """Lists of cases that the implementation may run; what it refuses is counted in `report`."""
        factors, refused_alone = supported(self, self.factors())
        report.refused.update(self.refusal(case) for case in refused_alone)
        return cases(factors, self.varied)

    def factors(self) -> Factors:
        factors = call_factors.factors(
            self.dtypes,
            itertools.product(self.lengths, self.lengths),
            self.head_dims,
            self.value_head_dim,
            heads=((1, 1), (2, 1), (2, 2), (3, 1), (6, 2), (8, 1)),
            windows=(0, 9, *itertools.product(SIDES, SIDES)),
            masks=FORMS,
            biases=FORMS,
        )
        factors["batch axes"] |= {f"B={B}": {"B": B} for B in (1, 3)}
        factors["scale"] = {"scale": {}, **{f"scale {x}": {"scale": x} for x in (0.3, -0.2, 0.0)}}
        factors["magnitude"] = {"magnitude": {}, **{f"magnitude {x}": {"magnitude": x} for x in (0.1, 3.0)}}
        return factors


class Cuda(Fuzzed):
    implementation = "cuda"
    varied = (
        "lengths",
        "mask",
        "bias",
        "alibi_slopes",
        "seq_lengths",
        "packed",
        "residual",
        "transform",
        "batch axes",
        "magnitude",
    )

    def __init__(self):  # of what XLA makes around the kernels; those are compiled as ever
        self.compiler_options = {
            "xla_backend_optimization_level": 0,
            "xla_llvm_disable_expensive_passes": True,
        }


class CudaFp8(Cuda):
    """Forward with `quantization="fp8"`, against "xla", which defines it."""

    definition = "xla"

    def refusal(self, case):
        spec = dataclasses.replace(case.spec(), quantization="fp8")
        return _dispatch.reason(self.implementation, spec, case.operands(), _device.current())

    def check(self, case):
        arguments, *_ = draw(case)

        @functools.partial(jax.jit, static_argnums=1, compiler_options=self.compiler_options)
        def run(arrays, implementation):
            options = {"quantization": "fp8", "implementation": implementation}
            attend = functools.partial(call_forms.attend, **options)
            return call_forms.in_form_of(case, attend)(arguments | arrays, return_residual=True)

        arrays = {name: x for name, x in arguments.items() if hasattr(x, "shape")}
        with self.environment():
            found, right = (run(arrays, name) for name in (self.implementation, self.definition))
        operands = (arguments[name] for name in ("query", "key", "value"))
        float8_bounds.check(found, right, *operands, arguments.get("scale"))
        return {}


class Pallas(Fuzzed):
    implementation = "pallas"

    def environment(self):
        return super().environment() if jax.default_backend() == "gpu" else compat.interpret()


class Xla(Fuzzed):
    implementation = "xla"
    dtypes = ("float32", "bfloat16", "float16")
    lengths = (7, 1, 2, 33, 64, 70)
    head_dims = (16, 1, 40)
    value_head_dim = 24

    def __init__(self):
        if jax.default_backend() == "cpu":  # half the time to compile
            self.compiler_options = {"xla_backend_optimization_level": 0}

    def environment(self):
        return small_blocks()


FUZZED = {fuzzed.implementation: fuzzed for fuzzed in (Cuda, Pallas, Xla)} | {
    f"{fuzzed.implementation}-decoding": fuzzed for fuzzed in (CudaDecoding, PallasDecoding, XlaDecoding)
}
FUZZED["cuda-fp8"] = CudaFp8


class Enough(BaseException):
    """Raised through Hypothesis to end a run: all cases are done, or the time is up."""


def cases(factors: Factors, varied: tuple[str, ...] = ()) -> strategies.SearchStrategy[list[Case]]:
    """Lists of cases of any values that may meet. A feature that can be left out is, every other time.

    The cases of a list differ in the values of the `varied` factors, and all have a feature or none has it.
    """

    def values(of_factor):
        plain, *others = of_factor
        if of_factor[plain] or not others:
            return strategies.sampled_from(list(of_factor))
        return strategies.one_of(strategies.just(plain), strategies.sampled_from(others))

    def present(name, value):
        return "features" in factors[name][value]

    def forms(name):
        return strategies.sampled_from([x for x in factors[name] if present(name, x)] or list(factors[name]))

    def cases_of(row, seed, variations):
        rows = {seed: row}
        for seed, variation in variations.items():
            same = (name for name in varied if present(name, variation[name]) == present(name, row[name]))
            rows[seed] = row | {name: variation[name] for name in same}
        return [
            call_factors.case_of(factors, row, "fuzz", seed=seed)
            for seed, row in rows.items()
            if may_meet(row)
        ]

    def may_meet(row):
        return all(call_factors.may_meet(*pair) for pair in pairs(row))

    seeds = strategies.integers(0, 2**32 - 1)
    rows = strategies.fixed_dictionaries({name: values(of_factor) for name, of_factor in factors.items()})
    variation = strategies.fixed_dictionaries({name: forms(name) for name in varied})
    variations = strategies.dictionaries(seeds, variation, max_size=CASES_OF_A_LIST if varied else 0)
    return strategies.builds(cases_of, rows.filter(may_meet), seeds, variations)


def fuzz(
    fuzzed: Fuzzed | FuzzedDecoding,
    count: int,
    seed: int,
    deadline: float = math.inf,
    tell: Callable[[Report], object] = lambda report: None,
    go_on: bool = False,
) -> Report:
    """Runs `count` cases, or until one fails; those that the implementation refuses come on top.

    Args:
      deadline: the `time.time()` from which on no other is begun.
      tell: called with the report so far before each case, which it names.
      go_on: after a failure, rather than make the case smaller.
    """
    report = Report()
    lists = fuzzed.lists(report)
    seen = set()

    def check(case):
        shrinking = report.failures and not go_on
        if time.time() > deadline or (report.ran == count and not shrinking):
            raise Enough
        if case in seen and not shrinking:
            return
        seen.add(case)
        refusal = fuzzed.refusal(case)
        if refusal is not None:
            report.refused[refusal] += 1
            fuzzed.check_refused(case, refusal)
            return
        report.at_hand = case
        tell(report)
        try:
            fuzzed.check(case)
        except Exception as error:
            failure = case, f"{type(error).__name__}: {error}"
            if not go_on:
                report.failures = [failure]  # the last is the smallest
                raise
            report.failures.append(failure)
        report.ran += not shrinking
        if report.ran % CASES_UNTIL_CLEARED == 0:
            jax.clear_caches()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=100 * count,  # of which there are enough before
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(lists)
    def run(cases):
        for case in cases:
            check(case)

    try:
        run()
    except Enough:
        pass
    except Exception:
        if not report.failures:  # the fuzz itself has failed
            raise
    report.at_hand = None
    tell(report)
    return report


def fuzz_by_name(name: str, *arguments) -> Report:
    return fuzz(FUZZED[name](), *arguments)


def go_on_by_name(name: str, *arguments) -> Report:
    return fuzz(FUZZED[name](), *arguments, go_on=True)


def fuzz_in_jobs(
    name: str, count: int, seed: int, jobs: int, seconds: float, go_on: bool = False
) -> list[Report]:
    """The reports of `jobs` processes, each with its share of the cases and a seed of its own."""
    progress = fuzz_jobs.Progress(functools.partial(describe, name) if go_on else None)
    work = go_on_by_name if go_on else fuzz_by_name
    deadline = time.time() + seconds
    if jobs == 1:
        return [work(name, count, seed, deadline, lambda report: progress.tell([report]))]
    shares = [(name, count // jobs + (job < count % jobs), seed + job) for job in range(jobs)]
    return fuzz_jobs.in_processes(work, shares, deadline, progress)


def describe(name: str, failure: tuple[Case | None, str]) -> str:
    """A failure, and the command that runs its case again."""
    case, error = failure
    again = "null" if case is None else to_json(case)
    return f"\nFAILED {case}\n{error}\npython tests/fuzz.py --implementation {name} --case '{again}'"


def to_json(case: Case) -> str:
    fields = {field.name: field for field in dataclasses.fields(case)}
    return json.dumps({name: x for name in fields if (x := getattr(case, name)) != fields[name].default})


def from_json(text: str, case_type: type = Case) -> Case:
    return case_type(**{name: tuple(x) if isinstance(x, list) else x for name, x in json.loads(text).items()})


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--implementation", choices=FUZZED, required=True)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, help="of everything that is drawn; a fresh one by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no other case is begun")
    parser.add_argument("--go-on", action="store_true", help="after a failure, rather than make it smaller")
    parser.add_argument("--out", type=Path, help="where to write a summary, JSON")
    parser.add_argument("--case", help="run this one alone")
    options = parser.parse_args(arguments)
    # Before a backend starts: processes share the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    name = options.implementation
    if options.case is not None:
        fuzzed = FUZZED[name]()
        fuzzed.check(from_json(options.case, fuzzed.case_type))
        print("agrees with the definition")
        return 0
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"--seed {seed} --jobs {options.jobs}", flush=True)
    started = time.monotonic()
    reports = fuzz_in_jobs(name, options.cases, seed, options.jobs, options.seconds, options.go_on)
    summary = {
        "implementation": name,
        **environment(jax.devices()[0]),
        "seed": seed,
        "jobs": options.jobs,
        "seconds": round(time.monotonic() - started),
        **summarise(reports),
    }
    if options.out is not None:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    refused = summary["refused"]
    print(f"ran {summary['cases']} in {summary['seconds']} s, refused {sum(refused.values())}")
    for reason, times in refused.items():
        print(f"  {reason} → {times}")
    failures = [failure for report in reports for failure in report.failures]
    for failure in [] if options.go_on else failures:  # else they are printed already
        print(describe(name, failure))
    return 1 if failures else 0


def summarise(reports: list[Report]) -> dict:
    """How many cases agreed with the definition, those that failed, and what was refused how often."""
    refused = sum((report.refused for report in reports), collections.Counter())
    failures = [failure for report in reports for failure in report.failures]
    return {
        "cases": sum(report.ran for report in reports),
        "failures": [
            {"description": str(case), "error": error, "case": None if case is None else to_json(case)}
            for case, error in failures
        ],
        "refused": dict(refused.most_common()),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
