"""What a call of attention costs on the host, in microseconds: ours and cuDNN's.

    python benchmarks/host_time.py --out benchmarks/results/host_time_h200.json
    python benchmarks/host_time.py --against FOLDER       also an earlier version of ours

The call is so small that its kernels take less time than launching them. It is made in these ways:

  chain     32 calls in one jitted function, each on the output of the one before; XLA launches each
  graph     the same as XLA runs it unless told otherwise: as a CUDA graph
  gradient  the gradient of such a chain, launched like `chain`: two calls, forward and backward, count as one
  eager     calls from Python, one by one

`dispatch` is the time until control is back, with the device idle at the start: the host's own. `span` is the
time until the results are there, which is the device's where that is the slower one. Both are divided by the
number of calls, and the median of all rounds counts.

FOLDER is where an earlier version of the package can be imported from, as `pip install --no-deps --target
FOLDER CHECKOUT` leaves it. It is measured in a process of its own.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import contenders
import jax
import jax.numpy as jnp
import record

CALLS = 32  # in a chain
RUNS = {"chain": 4, "graph": 4, "gradient": 2, "eager": 64}  # a round's; fewer kernels than a stream queues
ROUNDS = 30
SHAPE = (1, 128, 2, 64)
PEERS = ("jax_flash_cuda", "cudnn")

# XLA launches every kernel itself then, rather than as CUDA graphs.
_NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default=",".join(PEERS), help="of contenders.py, with commas between")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="an earlier version of jax_flash")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, help="the results as JSON")
    options = parser.parse_args(arguments)
    known = {**contenders.CONTENDERS, **contenders.VARIANTS}
    names = options.peers.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--peers has {', '.join(unknown)}; there are {', '.join(known)}")
    rows = []
    if options.against:
        rows += measured_against(options.against, options.rounds)
        _show(rows)
    for name in names:
        found = rows_of(name, functools.partial(_attend, known[name]), options.rounds)
        _show(found)
        rows += found
    if options.out:
        result = {**record.environment(), "timing": f"wall clock, median of {options.rounds} rounds"}
        result |= {"shape": SHAPE, "calls": CALLS, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def _attend(contender: Callable, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return contender(query, key, value, False)


def rows_of(peer: str, attend: Callable, rounds: int) -> list[dict]:
    """A row for each way of calling: the figures, or why there are none."""
    query, key, value = (jax.random.normal(jax.random.key(i), SHAPE, jnp.bfloat16) for i in range(3))
    rows = []
    for case in RUNS:
        row = {"case": case, "peer": peer}
        try:
            function, calls = program(case, attend, query, key, value)
            row |= times(function, (query, key, value), RUNS[case], calls, rounds)
        except Exception as error:  # of whatever kind: a peer that can't is a result
            row["error"] = record.error(error)
        rows.append(row)
    return rows


def program(case: str, attend: Callable, *arrays: jax.Array) -> tuple[Callable, int]:
    """What is run, and how many calls it makes."""
    if case == "eager":
        return attend, 1

    def chain(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        for _ in range(CALLS):
            query = attend(query, key, value)
        return query

    def gradient(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return jax.grad(lambda *xs: chain(*xs).astype(jnp.float32).sum(), (0, 1, 2))(*operands)

    function = gradient if case == "gradient" else chain
    on_gpu = jax.default_backend() == "gpu"
    no_graphs = _NO_GRAPHS if on_gpu and case != "graph" else {}
    return jax.jit(function).lower(*arrays).compile(compiler_options=no_graphs), CALLS


def times(
    function: Callable, arguments: tuple[jax.Array, ...], runs: int, calls: int, rounds: int
) -> dict[str, float]:
    """Microseconds of a call, where a run of `function` makes `calls` and a round `runs`."""
    for _ in range(3):
        jax.block_until_ready(function(*arguments))
    found: dict[str, list[float]] = {"dispatch": [], "span": []}
    for _ in range(rounds):
        start = time.perf_counter()
        results = [function(*arguments) for _ in range(runs)]
        found["dispatch"].append(time.perf_counter() - start)
        jax.block_until_ready(results)
        found["span"].append(time.perf_counter() - start)
    scale = 1e6 / (runs * calls)
    return {name: round(statistics.median(seconds) * scale, 3) for name, seconds in found.items()}


def measured_against(folder: Path, rounds: int) -> list[dict]:
    """The rows of the version of jax_flash that is imported from `folder`, as a peer "jax_flash_before"."""
    program = f"""if True:
        import functools, json, sys
        # The finder of an editable install would come ahead of the folder.
        sys.meta_path[:] = [f for f in sys.meta_path if "jax_flash" not in type(f).__module__]
        sys.path[:0] = [{str(folder.resolve())!r}, {str(Path(__file__).parent)!r}]
        import jax_flash, contenders, host_time
        if not jax_flash.__file__.startswith({str(folder.resolve())!r}):
            sys.exit("jax_flash came from " + jax_flash.__file__)
        attend = functools.partial(host_time._attend, contenders.CONTENDERS["jax_flash_cuda"])
        print(json.dumps(host_time.rows_of("jax_flash_before", attend, {rounds})))
    """
    # One process at a time has the device's memory.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"measuring {folder} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _show(rows: Sequence[dict]) -> None:
    for row in rows:
        figures = row.get("error") or f"dispatch {row['dispatch']:8.2f} µs   span {row['span']:8.2f} µs"
        print(f"{row['case']:<10}{row['peer']:<20}{figures}", flush=True)


if __name__ == "__main__":
    main()
