"""What every GPU test starts from, and the summary that the suite leaves behind.

    pytest tests/gpu [-n 8 [--one-gpu-each]] [--gpu-summary FILE]

Without a CUDA device each file is skipped as a whole, and says so. Time on a GPU can be short: a failure is
shown at once, and a run that SIGTERM ends leaves a summary too, if it was asked for one.
"""

import collections
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

# Parallel test processes, which inherit this, share the GPU's memory and the cores: with a thread a core for
# NumPy's products in each of them, the suite takes twice as long.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("NPROC", "2")  # of XLA's threads on the CPU, where yardsticks are computed
# Without this, XLA compiles and times many versions of each matrix product of the yardsticks.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import every_gpu
import jax
import pytest
from refusals import count_refused
from run_environment import environment

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

_started = time.time()
_was_ended = False  # by SIGTERM
_reports: list[pytest.TestReport] = []
_uncollected: set[str] = set()  # files and classes whose tests could not be collected


def pytest_addoption(parser):
    parser.addoption(
        "--gpu-summary",
        default=None,
        help="where to write the suite's summary, JSON (benchmarks/results/gpu_suite_<device>.json)",
    )
    parser.addoption(
        "--one-gpu-each",
        action="store_true",
        help="each process of -n sees one of the machine's GPUs; it takes -n, and skips tests of several",
    )


class Skipped(pytest.Module):
    """A test file that isn't even imported, as the GPUs it needs aren't there."""

    def collect(self):
        needed = "two CUDA devices" if _devices_needed(self.path) == 2 else "a CUDA device"
        there = len(cuda_devices()) or "none"
        pytest.skip(f"{self.path.name} needs {needed}; JAX sees {there}", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if len(cuda_devices()) < _devices_needed(module_path):
        return Skipped.from_parent(parent, path=module_path)
    return None


def _devices_needed(path):
    return 2 if "several_gpus" in path.name else 1


def pytest_configure(config):
    if _is_controller():
        signal.signal(signal.SIGTERM, _end)
    elif config.getoption("--one-gpu-each"):
        names = every_gpu.gpus()
        number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        if names:  # JAX looks at it when it first uses a device
            os.environ["CUDA_VISIBLE_DEVICES"] = names[number % len(names)]


def _end(*_) -> None:
    """Ends the run as ctrl-C does. pytest's exit status doesn't show a signal that comes at its end."""
    global _was_ended
    _was_ended = True
    signal.raise_signal(signal.SIGINT)


def pytest_runtest_logreport(report):
    if "tests/gpu" not in report.nodeid:
        return
    _reports.append(report)
    if report.failed and _is_controller():
        print(f"\nfailed: {report.nodeid} ({report.when})\n{report.longreprtext[-3000:]}", flush=True)


def pytest_collectreport(report):
    if report.failed and "tests/gpu" in report.nodeid:
        _uncollected.add(report.nodeid)


def _is_controller() -> bool:
    """Whether this process sees the reports of all: it is no worker of xdist."""
    return "PYTEST_XDIST_WORKER" not in os.environ


def pytest_sessionfinish(session, exitstatus):
    """Writes the summary, from the process that sees all reports, if a GPU test ran."""
    # A process that crashes leaves a report too, with a `when` of its own.
    calls = [r for r in _reports if r.when == "call" or not r.passed]
    if not _is_controller() or not any(r.when == "call" for r in calls):
        return
    options = session.config.option
    on = environment(cuda_devices()[0])
    # Those that a test sees.
    devices = 1 if options.one_gpu_each and options.numprocesses else len(cuda_devices())
    summary = {
        **on,
        "devices": devices,
        **summarise(calls),
        "uncollected": sorted(_uncollected),
        "seconds": round(time.time() - _started),
        "complete": _is_complete(exitstatus) and not (session.shouldstop or session.shouldfail),
    }
    kind = re.sub(r"\W+", "_", summary["device"].lower().replace("nvidia", "")).strip("_")
    # A run of some tests must not pass for the suite: it is written only where it is asked to be.
    partial = options.keyword or options.markexpr or len(calls) < 20 or not summary["complete"]
    path = session.config.getoption("--gpu-summary", None)
    if path is None and partial:
        return
    count = f"{devices}x" if devices > 1 else ""
    path = Path(path or RESULTS / f"gpu_suite_{count}{kind}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=1) + "\n")
    print(f"\nsummary in {path}")


def _is_complete(exitstatus: int) -> bool:
    """Whether pytest came to its end. A signal can also end it as an error of its own."""
    ran = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    return ran and not _uncollected and not _was_ended


def cuda_devices() -> list[jax.Device]:
    try:
        return jax.devices("cuda")
    except RuntimeError:  # no such backend
        return []


def summarise(reports) -> dict:
    """Counts, what was refused, the worst error by implementation and category, what the sanitizer said.

    Errors are multiples of plain attention's error in the same dtype on the same inputs, where that is
    what bounds them (see agreement.py).
    """
    outcomes = [r.outcome for r in reports]
    worst: dict[str, dict[str, float]] = {}
    sanitizer = {}
    for report in reports:
        properties = dict(report.user_properties)
        for result, ratio in properties.get("error_ratios", {}).items():
            where = f"{properties['implementation']} {properties['category']}"
            ratios = worst.setdefault(where, {})
            ratios[result] = max(ratios.get(result, 0.0), round(ratio, 3))
        sanitizer |= properties.get("sanitizer", {})
    failed = [r.nodeid for r in reports if r.outcome == "failed"]
    seconds: collections.Counter[str] = collections.Counter()
    for report in reports:
        seconds[report.nodeid.removeprefix("tests/gpu/").split("[")[0]] += report.duration
    skipped = {r.longrepr[2] for r in reports if r.skipped and isinstance(r.longrepr, tuple)}
    return {
        "counts": {outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")},
        "failed": failed,
        "skipped": sorted(skipped),
        "refused": count_refused(reports),
        "worst_error_over_plain": worst,
        "sanitizer": sanitizer or "not run",
        "seconds_by_test": {name: round(x) for name, x in seconds.most_common()},
    }
