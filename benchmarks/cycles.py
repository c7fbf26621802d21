"""Cycles that kernels of versions of jax_flash take, by Nsight Compute.

    PYTHONPATH=FOLDER python benchmarks/cycles.py --packages jax_flash_before,jax_flash --out FILE

FOLDER is where `before.py` has installed another version. Times of one kernel differ by 2% from round to
round, as the chip's clock follows power and temperature; its cycles hardly do. They are what a change of
code alone is judged by. What it costs in power shows in times only (`attention.py`).

Each package runs in a process of its own, under `ncu`, clocks as they are: every default case of
`attention.py`, several times; the median counts.
"""

import argparse
import csv
import importlib
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import record
from attention import DEFAULT_CASES, Case, shapes

RUNS = 7  # the first of them is left out, as caches and tensor maps are cold
PASSES = ("forward", "backward")  # what the kernels are called
METRIC = "sm__cycles_elapsed.max"
NCU = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"


def run(package: str) -> None:
    """Calls the package's attention: each case's forward pass `RUNS` times, then both passes as often."""
    attention = importlib.import_module(package).flash_attention
    for case in DEFAULT_CASES:
        keys = jax.random.split(jax.random.key(0), 4)
        drawn = (
            jax.random.normal(key, x.shape, x.dtype)
            for key, x in zip(keys, shapes(case, "bfloat16"), strict=True)
        )
        query, key, value, d_out = drawn

        def attend(query, key, value, is_causal=case.causal):
            return attention(query, key, value, is_causal=is_causal, implementation="cuda")

        def differentiate(query, key, value, d_out, attend=attend):
            return jax.vjp(attend, query, key, value)[1](d_out)

        for program, arrays in ((attend, ()), (differentiate, (d_out,))):
            program = jax.jit(program)
            for _ in range(RUNS):
                jax.block_until_ready(program(query, key, value, *arrays))


def profile(package: str) -> dict[tuple[Case, str], float]:
    """The cycles of each case's kernels, found by running this file under ncu."""
    metrics = ["--metrics", METRIC, "--clock-control", "none", "--cache-control", "none"]
    kernels = ["--kernel-name", f"regex:^({'|'.join(PASSES)})$"]
    program = [sys.executable, __file__, "--run", package]
    # Launches one by one: ncu doesn't see into CUDA graphs.
    environment = {**os.environ, "XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
    command = [NCU, "--csv", "--page", "raw", *metrics, *kernels, *program]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    rows = csv.DictReader(line for line in output.splitlines() if line.startswith('"'))
    return in_order((row["Kernel Name"], row[METRIC]) for row in rows if row["ID"])


def in_order(launches: Iterable[tuple[str, str]]) -> dict[tuple[Case, str], float]:
    """The medians of launches that came in the order of `run`."""
    of_pass: dict[str, list[float]] = {name: [] for name in PASSES}
    for kernel, cycles in launches:
        of_pass[kernel.split("(")[0]].append(float(cycles.replace(",", "")))
    # The program that differentiates runs the forward pass as well.
    expected = {"forward": 2 * RUNS * len(DEFAULT_CASES), "backward": RUNS * len(DEFAULT_CASES)}
    counted = {name: len(found) for name, found in of_pass.items()}
    if counted != expected:
        raise RuntimeError(f"ncu saw {counted} launches, not {expected}")
    medians = {}
    for name, step in (("forward", 2 * RUNS), ("backward", RUNS)):
        for i, case in enumerate(DEFAULT_CASES):
            medians[case, name] = statistics.median(of_pass[name][i * step + 1 : i * step + RUNS])
    return medians


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--packages", help="separated by commas; ratios are to the first one's cycles")
    parser.add_argument("--run", metavar="PACKAGE", help="only call its attention, for ncu to watch")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    chosen = parser.parse_args(arguments)
    if chosen.run:
        return run(chosen.run)
    if not chosen.packages:
        parser.error("--packages: say which")
    found = {package: profile(package) for package in chosen.packages.split(",")}
    first = next(iter(found.values()))
    rows = [
        {
            "case": str(case),
            "pass": name,
            "peer": package,
            "cycles": cycles,
            "ratio": cycles / first[case, name],
        }
        for package, cycles_of in found.items()
        for (case, name), cycles in cycles_of.items()
    ]
    for row in rows:
        print(f"{row['case']:34} {row['pass']:9} {row['peer']:18} {row['cycles']:12.0f} {row['ratio']:.4f}")
    if chosen.out:
        record.write(record.environment() | {"timing": METRIC, "rows": rows}, chosen.out)


if __name__ == "__main__":
    main()
