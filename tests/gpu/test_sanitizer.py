"""compute-sanitizer finds nothing in our kernels: accesses out of bounds, and races in shared memory.

It can't follow the tensor memory accelerator's copies into shared memory, so racecheck sees what threads
read and write themselves.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sanitize

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


@pytest.fixture(scope="module", autouse=True)
def kernels_compiled():
    """So that the time limit of the slow runs below is not spent on compilation."""
    for name in sanitize.CASES:
        sanitize.run(**sanitize.CASES[name])


@pytest.mark.skipif(not Path(SANITIZER).exists(), reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("name", sanitize.CASES)
@pytest.mark.parametrize("tool", ("memcheck", "racecheck"))
def test_finds_nothing(tool, name, record_property):
    command = [
        SANITIZER,
        f"--tool={tool}",
        "--error-exitcode=99",
        "--launch-timeout=120",
        "--target-processes=application-only",
        # Probing the device for features fails by design here and there; what counts is our launches.
        "--report-api-errors=no",
        sys.executable,
        sanitize.__file__,
        name,
    ]
    # Launches one by one, not as CUDA graphs, so that each is checked and named.
    environment = {**os.environ, "XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    output = result.stdout + result.stderr
    if "not supported" in output and f"{name} done" not in output:
        record_property("sanitizer", {f"{tool} {name}": "the tool can't run on this machine"})
        pytest.skip(f"compute-sanitizer can't run on this machine: {output[-300:]}")
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", output)
    verdict = summary[-1] if summary else f"no summary, exit status {result.returncode}"
    record_property("sanitizer", {f"{tool} {name}": verdict})
    assert f"{name} done" in output, output[-4000:]
    assert result.returncode == 0, output[-4000:]
    assert summary, output[-4000:]
