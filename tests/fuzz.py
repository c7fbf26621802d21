"""Random calls of an implementation, against the definition.

    python tests/fuzz.py --implementation xla --cases 200
    python tests/fuzz.py --implementation cuda --cases 2000 --jobs 16     on a machine with a GPU
    python tests/fuzz.py --implementation xla --case '{"dtype": "float32", …}'     a case again, as printed

Values of all factors of a call are drawn at random, those that the implementation refuses left out; output,
residual and gradients are compared as everywhere in the tests. A case that fails is made smaller while it
still fails (five minutes at most), and printed with the command that runs it.

Nearly all of the time goes into compiling: a second or two a case, on one core of the CPU even for the
CUDA kernels, whose definition is computed there. So `--jobs` processes share the work; those on a GPU
share it too.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import os
import secrets
import sys

import call_factors
import hypothesis
import jax
from attention_case import Case
from call_factors import Factors
from hypothesis import strategies
from implementation_suite import Implementation
from pairwise import pairs
from pairwise_suite import supported
from small_blocks import small_blocks

from jax_flash.pallas import compat

FORMS = (*call_factors.BROADCAST_FORMS, "NTS", "N1S", "TS", "1S", "S")
SIDES = (None, -1, 0, 1, 5, 20, 50)
CASES_UNTIL_CLEARED = 100  # as compiled programs are kept for ever


class Fuzzed(Implementation):
    """An implementation and the sizes of its calls, of each the one first that failures shrink to."""

    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    lengths: tuple[int, ...] = (7, 1, 2, 64, 129, 200, 333)
    head_dims: tuple[int, ...] = (64, 8, 40, 80, 96, 100, 128, 160, 192, 256)
    value_head_dim: int = 48
    reports_errors = False

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


FUZZED = {fuzzed.implementation: fuzzed for fuzzed in (Cuda, Pallas, Xla)}


@dataclasses.dataclass
class Report:
    """What became of the cases that were drawn."""

    ran: int = 0
    refused: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    failure: tuple[Case, str] | None = None  # the smallest case found, and how it fails


def cases(factors: Factors) -> strategies.SearchStrategy[Case]:
    """Cases of any values that may meet. A feature that can be left out is, every other time."""

    def values(of_factor):
        plain, *others = of_factor
        if of_factor[plain] or not others:
            return strategies.sampled_from(list(of_factor))
        return strategies.one_of(strategies.just(plain), strategies.sampled_from(others))

    rows = strategies.fixed_dictionaries({name: values(of_factor) for name, of_factor in factors.items()})
    rows = rows.filter(lambda row: all(call_factors.may_meet(*pair) for pair in pairs(row)))
    seeds = strategies.integers(0, 2**32 - 1)
    return strategies.builds(
        lambda row, seed: call_factors.case_of(factors, row, "fuzz", seed=seed), rows, seeds
    )


def fuzz(fuzzed: Fuzzed, count: int, seed: int) -> Report:
    """Runs up to `count` cases, until one fails; those that the implementation refuses come on top."""
    report = Report()
    factors, refused_alone = supported(fuzzed, fuzzed.factors())
    report.refused.update(fuzzed.refusal(case) for case in refused_alone)

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases(factors))
    def run(case):
        refusal = fuzzed.refusal(case)
        if refusal is not None:
            report.refused[refusal] += 1
            fuzzed.check_refused(case, refusal)
            hypothesis.reject()
        try:
            fuzzed.check(case)
        except Exception as error:
            report.failure = case, f"{type(error).__name__}: {error}"  # the last is the smallest
            raise
        report.ran += report.failure is None
        if report.ran % CASES_UNTIL_CLEARED == 0:
            jax.clear_caches()

    try:
        run()
    except Exception:
        if report.failure is None:  # the fuzz itself has failed
            raise
    return report


def fuzz_by_name(name: str, count: int, seed: int) -> Report:
    return fuzz(FUZZED[name](), count, seed)


def in_processes(jobs: int, name: str, count: int, seed: int) -> list[Report]:
    """The reports of `jobs` processes, each with its share of the cases and a seed of its own."""
    spawn = multiprocessing.get_context("spawn")
    shares = [count // jobs + (job < count % jobs) for job in range(jobs)]
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        work = [pool.submit(fuzz_by_name, name, share, seed + job) for job, share in enumerate(shares)]
        return [each.result() for each in work]


def to_json(case: Case) -> str:
    fields = {field.name: field for field in dataclasses.fields(case)}
    return json.dumps({name: x for name in fields if (x := getattr(case, name)) != fields[name].default})


def from_json(text: str) -> Case:
    return Case(**{name: tuple(x) if isinstance(x, list) else x for name, x in json.loads(text).items()})


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--implementation", choices=FUZZED, required=True)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, help="of everything that is drawn; a fresh one by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--case", type=from_json, help="run this one alone")
    options = parser.parse_args(arguments)
    # Before a backend starts: processes share the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    name = options.implementation
    if options.case is not None:
        FUZZED[name]().check(options.case)
        print("agrees with the definition")
        return 0
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"--seed {seed} --jobs {options.jobs}", flush=True)
    if options.jobs == 1:
        reports = [fuzz_by_name(name, options.cases, seed)]
    else:
        reports = in_processes(options.jobs, name, options.cases, seed)
    refused = sum((report.refused for report in reports), collections.Counter())
    print(f"ran {sum(report.ran for report in reports)}, refused {refused.total()}")
    for reason, times in refused.most_common():
        print(f"  {reason} → {times}")
    failures = [report.failure for report in reports if report.failure is not None]
    for case, error in failures:
        print(f"\nFAILED {case}\n{error}")
        print(f"python tests/fuzz.py --implementation {name} --case '{to_json(case)}'")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
