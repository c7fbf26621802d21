"""A benchmark in parts, one on each GPU of the machine, at the same time.

What a benchmark compares is measured on one GPU: each part has cases of its own, with all of their peers.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
GRACE = 20.0  # seconds from SIGTERM to SIGKILL


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    # CUDA counts those that it sees from 0, whatever the numbers of their files.
    return [str(number) for number, _ in enumerate(_files())]


def _files() -> list[Path]:
    return list(Path("/dev").glob("nvidia[0-9]*"))


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Processes that are started within see this GPU and no other."""
    before = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[VISIBLE]
        else:
            os.environ[VISIBLE] = before


def run(part: Callable[[int, int], Sequence[str]], seconds: float, names: Sequence[str]) -> list[int]:
    """Runs a command on each GPU, which sees no other, and waits for all.

    Args:
      part: from the part's number and their count to its command.
      seconds: after which commands that still run get SIGTERM, as they do if this process gets it.
      names: of the GPUs.

    Returns:
      the exit status of each.
    """
    processes: list[subprocess.Popen] = []
    end = time.monotonic() + seconds
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for number, name in enumerate(names):
            with alone(name):
                processes.append(subprocess.Popen(part(number, len(names))))
        _wait(processes, end)
    finally:
        _end(processes)
        signal.signal(signal.SIGTERM, before)
    return [process.returncode for process in processes]


def _wait(processes: Sequence[subprocess.Popen], end: float) -> None:
    for process in processes:
        try:
            process.wait(max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            return


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """Ends all that still run, at the same time."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    _wait(processes, time.monotonic() + GRACE)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def own_command(*more: str) -> list[str]:
    """The command that this process runs, with these arguments behind it."""
    return [sys.executable, *sys.argv, *more]
