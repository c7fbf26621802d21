"""Runs a script of small calls under compute-sanitizer, and reads its verdict."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
TOOLS = ("racecheck", "memcheck", "synccheck")  # the slowest first

needs_sanitizer = pytest.mark.skipif(
    not Path(SANITIZER).exists(), reason="compute-sanitizer is not installed"
)


def assert_finds_nothing(
    tool: str, script: str, group: str, record_property: Callable[[str, object], None], *options: str
) -> None:
    """`script` runs the calls of `group`, and prints the group's name and "done" at their end."""
    calls = [sys.executable, script, group]
    if tool == "racecheck":
        calls.append("--for-racecheck")
    command = [
        SANITIZER,
        f"--tool={tool}",
        "--error-exitcode=99",
        "--launch-timeout=120",
        "--target-processes=application-only",
        # Probing the device for features fails by design here and there; what counts is our launches.
        "--report-api-errors=no",
        *options,
        *calls,
    ]
    # Launches one by one, not as CUDA graphs, so that each is checked and named.
    environment = {**os.environ, "XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
    result = subprocess.run(command, capture_output=True, text=True, timeout=560, env=environment)
    output = result.stdout + result.stderr
    if "not supported" in output and f"{group} done" not in output:
        record_property("sanitizer", {f"{tool} {group}": "the tool can't run on this machine"})
        pytest.skip(f"compute-sanitizer can't run on this machine: {output[-300:]}")
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", output)
    verdict = summary[-1] if summary else f"no summary, exit status {result.returncode}"
    record_property("sanitizer", {f"{tool} {group}": verdict})
    told = "\n".join(line for line in output.splitlines() if "Host Frame" not in line)
    told = f"{told[:3000]}\n...\n{told[-2000:]}"
    assert f"{group} done" in output, told
    assert result.returncode == 0, told
    assert summary, told
