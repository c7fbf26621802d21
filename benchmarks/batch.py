"""Runs a batch of checks and benchmarks, one at a time on each GPU, each within a limit of time.

    python benchmarks/batch.py benchmarks/unmeasured.txt --seconds 500 --out results

A line of the batch has a name, a limit in seconds and a command, in which `{out}` stands for the folder of
results and `{python}` for this Python. Lines that start with `#` are comments. A GPU that is free takes the
next line, so that the first ones are sure to run. Each command's output goes to `<name>.log`. `batch.json`
says how each ended: its status, -9 if it was stopped at its limit, and None if it didn't start in time.
"""

import argparse
import dataclasses
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Task:
    name: str
    seconds: float
    command: str

    def arguments(self, out: Path) -> list[str]:
        return shlex.split(self.command.format(out=out, python=sys.executable))


def read(text: str) -> list[Task]:
    """The tasks of a batch. Raises ValueError if two have the same name, or a line isn't a task."""
    tasks = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            name, seconds, command = line.split(maxsplit=2)
            tasks.append(Task(name, float(seconds), command))
        except ValueError:
            raise ValueError(f"line {number} must be a name, seconds and a command; got {line!r}") from None
    names = [task.name for task in tasks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"tasks with the same name: {', '.join(twice)}")
    return tasks


def run(task: Task, out: Path, environment: dict[str, str], seconds: float) -> int:
    """The command's exit status, or -9 if it was stopped after that time, with all that it started."""
    with (out / f"{task.name}.log").open("w") as log:
        started = subprocess.Popen(
            task.arguments(out), stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            return started.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
            return -9


def run_all(tasks: Sequence[Task], gpus: Sequence[str], out: Path, seconds: float) -> list[dict]:
    """Runs tasks in order, one at a time on each GPU, and returns how each ended."""
    end = time.monotonic() + seconds
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    ended: dict[str, dict] = {}

    def work(gpu: str) -> None:
        while (left := end - time.monotonic()) > 0:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            start = time.monotonic()
            status = run(task, out, os.environ | {"CUDA_VISIBLE_DEVICES": gpu}, min(left, task.seconds))
            ended[task.name] = {"status": status, "seconds": round(time.monotonic() - start, 1), "gpu": gpu}

    workers = [threading.Thread(target=work, args=(gpu,)) for gpu in gpus]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    unstarted = {"status": None, "seconds": 0.0, "gpu": None}
    return [{"task": task.name, **ended.get(task.name, unstarted)} for task in tasks]


def gpus_here() -> list[str]:
    """The GPUs that this process may use, by number."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu for gpu in visible.split(",") if gpu]
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True)
    return [str(i) for i in range(len(listed.stdout.splitlines()))]


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("batch", type=Path)
    parser.add_argument("--seconds", type=float, required=True, help="after which everything is stopped")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = run_all(read(options.batch.read_text()), gpus_here(), options.out, options.seconds)
    (options.out / "batch.json").write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
