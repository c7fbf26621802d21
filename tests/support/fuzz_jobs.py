"""What became of the cases of a fuzz, and processes that share them and tell of it."""

import collections
import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import every_gpu
from attention_case import Case

SECONDS_BETWEEN_LINES = 10
SECONDS_PAST_DEADLINE = 60  # in which a case under way must end


@dataclasses.dataclass
class Report:
    """What became of the cases that were drawn, so far."""

    ran: int = 0
    refused: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    # Cases that fail, and how: all of them where the fuzz goes on, else the smallest found.
    failures: list[tuple[Case | None, str]] = dataclasses.field(default_factory=list)
    at_hand: Case | None = None  # runs now


class Progress:
    """Prints how far it is, from time to time; failures as soon as they are found, with `name_failure`."""

    def __init__(self, name_failure: Callable[[tuple[Case | None, str]], str] | None = None):
        self.started = self.told = time.monotonic()
        self.name_failure = name_failure
        self.named = collections.Counter()  # failures of each report

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def tell(self, reports: list[Report]):
        if self.name_failure is not None:
            for i, report in enumerate(reports):
                for failure in report.failures[self.named[i] :]:
                    print(self.name_failure(failure), flush=True)
                self.named[i] = len(report.failures)
        if time.monotonic() < self.told + SECONDS_BETWEEN_LINES:
            return
        self.told = time.monotonic()
        ran = sum(report.ran for report in reports)
        failed = sum(len(report.failures) for report in reports)
        print(f"{self.seconds:5.0f} s: {ran} cases, {failed} failed", flush=True)


def in_processes(
    work: Callable[..., Report],
    shares: list[tuple],
    deadline: float,
    progress: Progress,
) -> list[Report]:
    """The reports of `work(*share, deadline, tell)` in a process for each of `shares`.

    Each process sees one of the machine's GPUs. One that dies, or is ended as it is still at work long after
    the `deadline`, has failed with the case at hand.
    """
    spawn = multiprocessing.get_context("spawn")
    reports = [Report() for _ in shares]
    processes, job_of = [], {}
    gpus = every_gpu.gpus()
    for job, share in enumerate(shares):
        receiver, sender = spawn.Pipe(duplex=False)
        processes.append(spawn.Process(target=_work, args=(work, share, deadline, sender), daemon=True))
        with every_gpu.alone(gpus[job % len(gpus)]) if gpus else contextlib.nullcontext():
            processes[-1].start()
        sender.close()  # so that the pipe ends with the process
        job_of[receiver] = job
    while job_of and time.time() < deadline + SECONDS_PAST_DEADLINE:
        ready = multiprocessing.connection.wait(job_of, timeout=1)
        for receiver in [receiver for receiver in job_of if receiver in ready]:
            try:
                reports[job_of[receiver]] = receiver.recv()
            except EOFError:
                del job_of[receiver]
        progress.tell(reports)
    for job in job_of.values():
        processes[job].terminate()
    for process, report in zip(processes, reports, strict=True):
        process.join()
        if process.exitcode != 0:
            ended = report.at_hand, f"its process ended with {process.exitcode}"
            report.failures = report.failures or [ended]
    return reports


def _work(work, share, deadline, sender):
    work(*share, deadline, sender.send)
