"""What it costs that kernels keep what isn't finite from queries and keys that don't see it, on one GPU.

    python benchmarks/isolation.py --out benchmarks/results/isolation_h200.json

Causal and windowed calls of finite inputs, forward and backward, with and without it
(jax_flash/_isolation.py), in shuffled rounds. Each row has a call, a pass and an implementation, the kernel
time of both, and their ratio: 1.00 is no cost. The lowering of `pallas` is what `JAX_FLASH_PALLAS` allows.
"""

import argparse
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import jax
import record
import rounds
import timing
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


def programs(case: Case, implementation: str, isolates: bool):
    """Forward, and the backward pass alone, with their arguments."""
    inputs = case.inputs()
    d_out = jax.random.normal(jax.random.key(3), inputs[0].shape, inputs[0].dtype)
    window = None if case.window is None else (case.window - 1, 0)
    attend = functools.partial(
        jax_flash.flash_attention,
        is_causal=case.causal,
        local_window_size=window,
        implementation=implementation,
    )
    jax.clear_caches()  # of what was traced under the other setting
    with mock.patch.object(_isolation, "KERNELS", isolates):
        forward = jax.jit(attend).lower(*inputs).compile()
        _, vjp = jax.vjp(attend, *inputs)
        backward = jax.jit(lambda vjp, d_out: vjp(d_out)).lower(vjp, d_out).compile()
    return {"forward": (forward, *inputs), "backward": (backward, vjp, d_out)}


def measure(case: Case, implementation: str, of_rounds: int) -> list[dict]:
    row = {"case": str(case), "implementation": implementation}
    try:
        runs = {name: programs(case, implementation, name == WITH) for name in (WITHOUT, WITH)}
    except Exception as error:  # the other calls are measured nevertheless
        return [row | {"error": record.error(error)}]
    rows = []
    for direction in ("forward", "backward"):
        times: dict[str, list[float]] = {WITHOUT: [], WITH: []}
        for order in rounds.orders(list(times), of_rounds):
            for name in order:
                times[name].append(timing.milliseconds(*runs[name][direction]))
        medians = {name: statistics.median(found) for name, found in times.items()}
        rows.append(row | {"pass": direction} | medians | {"ratio": medians[WITH] / medians[WITHOUT]})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--implementations", default="cuda,pallas")
    parser.add_argument("--rounds", type=int, default=rounds.ROUNDS)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    result = record.environment() | {"rows": []}
    print(record.heading(result))
    for implementation in options.implementations.split(","):
        for case in CASES:
            for row in measure(case, implementation, options.rounds):
                result["rows"].append(row)
                told = f"{row['ratio']:.3f}" if "ratio" in row else row["error"][:160]
                print(f"{row['case']:36} {implementation:7} {row.get('pass', ''):9} {told}", flush=True)
            if options.out:
                record.write(result, options.out)


if __name__ == "__main__":
    main()
