"""What it costs that kernels keep what isn't finite from queries and keys that don't see it, on one GPU.

    python benchmarks/isolation.py --out benchmarks/results/isolation_h200.json

Causal and windowed calls of finite inputs, forward and backward, with and without it
(jax_flash/_isolation.py), in shuffled rounds. Each row has a call, a pass and an implementation, the kernel
time of both, and their ratio: 1.00 is no cost. The lowering of `pallas` is what `JAX_FLASH_PALLAS` allows.
Processes compile side by side and measure one after another.
"""

import argparse
import functools
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import passes
import record
import rounds
from calls import Case

import jax_flash
from jax_flash import _isolation

CASES = [
    Case(16, 512, 512, 16, 16, 128, causal=True),
    Case(1, 1024, 1024, 16, 16, 128, causal=True),
    Case(8, 2048, 2048, 16, 16, 128, causal=True),
    Case(4, 4096, 4096, 16, 16, 128, causal=True),
    Case(1, 16384, 16384, 16, 16, 128, causal=True),
    Case(4, 4096, 4096, 32, 8, 128, causal=True, window=1024),
    Case(4, 4096, 4096, 32, 32, 64, causal=True),
    Case(16, 1024, 1024, 32, 32, 64, causal=True),
    Case(4, 4096, 4096, 8, 8, 192, causal=True),
    Case(4, 4096, 4096, 8, 8, 256, causal=True),
]
WITHOUT, WITH = "without", "with"
COMPILING_SECONDS, MEASURING_SECONDS = 900.0, 120.0
"""After which a process is taken to hang: when it compiles all its programs, when it measures a call."""


def programs(case: Case, implementation: str) -> passes.Programs:
    window = None if case.window is None else (case.window - 1, 0)
    attend = functools.partial(
        jax_flash.flash_attention,
        is_causal=case.causal,
        local_window_size=window,
        implementation=implementation,
    )
    return passes.compiled(attend, [], case.inputs())


Key = tuple[str, Case]  # the implementation


def compile_both(key: Key) -> dict[str, dict[str, tuple] | Exception]:
    """The programs of a call, without and with it; or what compiling them raised."""
    implementation, case = key
    found = {}
    for name in (WITHOUT, WITH):
        jax.clear_caches()  # of what was traced under the other setting
        with mock.patch.object(_isolation, "KERNELS", name == WITH):
            try:
                found[name] = programs(case, implementation)
            except Exception as error:  # the other calls are measured nevertheless
                found[name] = error
    return found


def serve(keys: Sequence[Key], of_rounds: int, connection: Connection) -> None:
    """Compiles the programs of all keys and says so, then measures a key each time that it is asked."""
    compiled = {key: compile_both(key) for key in keys}
    connection.send("compiled")
    while (key := connection.recv()) is not None:
        connection.send(measure(compiled[key], of_rounds))


class Worker:
    """A process that compiles while others do, and measures while no other does."""

    def __init__(self, keys: Sequence[Key], of_rounds: int):
        self.keys = keys
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        context.Process(target=serve, args=(keys, of_rounds, theirs), daemon=True).start()
        theirs.close()

    def wait(self) -> None:
        """Until all is compiled. Raises EOFError if the process died, TimeoutError if it hangs."""
        self._answer(COMPILING_SECONDS)

    def rows(self, key: Key) -> list[dict]:
        self._connection.send(key)
        return self._answer(MEASURING_SECONDS)

    def _answer(self, seconds: float) -> Any:
        if not self._connection.poll(seconds):
            raise TimeoutError(f"a process gave no answer in {seconds} s")
        return self._connection.recv()

    def close(self) -> None:
        self._connection.send(None)


def measure(runs: dict[str, dict[str, tuple] | Exception], of_rounds: int) -> list[dict]:
    of_both: dict[str, dict[str, tuple]] = {}
    for name, run in runs.items():
        if isinstance(run, Exception):
            return [{"error": record.error(run)}]
        of_both[name] = run
    return [
        {"pass": direction} | times | {"ratio": times[WITH] / times[WITHOUT]}
        for direction, times in passes.milliseconds(of_both, of_rounds).items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--implementations", default="cuda,pallas")
    parser.add_argument("--match", default="", help="cases that have one of these texts, by commas")
    parser.add_argument("--rounds", type=int, default=rounds.ROUNDS)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    result = record.environment() | {"rows": []}
    print(record.heading(result))
    cases = [case for case in CASES if any(text in str(case) for text in options.match.split(","))]
    keys = [(name, case) for name in options.implementations.split(",") for case in cases]
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # processes share the GPU's memory
    count = min(len(keys), os.cpu_count() or 1)
    workers = [Worker(keys[i::count], options.rounds) for i in range(count)]
    for worker in workers:
        worker.wait()
    for implementation, case in keys:
        worker = next(worker for worker in workers if (implementation, case) in worker.keys)
        for row in worker.rows((implementation, case)):
            row = {"case": str(case), "implementation": implementation} | row
            result["rows"].append(row)
            told = f"{row['ratio']:.3f}" if "ratio" in row else row["error"][:160]
            print(f"{row['case']:36} {implementation:7} {row.get('pass', ''):9} {told}", flush=True)
        if options.out:
            record.write(result, options.out)
    for worker in workers:
        worker.close()


if __name__ == "__main__":
    main()
