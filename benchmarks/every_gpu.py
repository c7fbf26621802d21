"""A benchmark in parts, one on each GPU of the machine, at the same time.

GPUs that compute at the same time don't slow each other down, but what a benchmark compares must be measured
on one of them: so each part has cases of its own, with all of their peers.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

GRACE = 20.0  # seconds in which a part that was told to end may write what it has


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    found = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return sorted(found, key=int)


def run(part: Callable[[int, int], Sequence[str]], seconds: float, names: Sequence[str]) -> list[int]:
    """Runs a command on each GPU, which sees no other, and waits for all.

    Args:
      part: from the part's number and their count to its command.
      seconds: after which commands that still run get SIGTERM.
      names: of the GPUs.

    Returns:
      the exit status of each.
    """
    processes = [
        subprocess.Popen(part(number, len(names)), env=os.environ | {"CUDA_VISIBLE_DEVICES": name})
        for number, name in enumerate(names)
    ]
    end = time.monotonic() + seconds
    try:
        return [_wait(process, end) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen, end: float) -> int:
    try:
        return process.wait(max(end - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def own_command(*more: str) -> list[str]:
    """The command that this process runs, with these arguments behind it."""
    return [sys.executable, *sys.argv, *more]
