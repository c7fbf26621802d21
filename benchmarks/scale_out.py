"""Attention to sequences that are sharded over several GPUs against the same work on one.

    python benchmarks/scale_out.py --out benchmarks/results/scale_out_2xh100.json

Causal calls of 32K to 512K tokens, a window, and for comparison a sharded batch: by each strategy and order
of tokens, and under a sharded `jit`. One device runs the whole call. Times are wall clock with calls in
flight, transfers among them, in shuffled rounds. Each row has a call, how it is sharded, a pass, the time of
both, and the efficiency: the time on one device over that on all, times their number. 1.00 is linear.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import record
import rounds
import timing
from calls import Case
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

AXIS = "devices"
CASES = [
    Case(1, 32768, 32768, 32, 8, 128, causal=True),
    Case(1, 131072, 131072, 32, 8, 128, causal=True),
    Case(1, 524288, 524288, 32, 8, 128, causal=True),
    Case(1, 262144, 262144, 48, 12, 128, causal=True, window=512),
    Case(1, 262144, 262144, 48, 12, 128, causal=True),
    Case(8, 8192, 8192, 32, 8, 128, causal=True),
]
ONE = "one device"
BATCH, JIT = "batch", "jit"
WAYS = {
    BATCH: None,
    JIT: None,
    "ring": ("ring", None),
    "ring, zigzag": ("ring", "zigzag"),
    "ring, striped": ("ring", "striped"),
    "all-gather, zigzag": ("all_gather", "zigzag"),
    "Ulysses": ("ulysses", None),
}
"""How a call is sharded: along its batch; along its sequence under `jit`; or by a strategy and an order."""


def attend(case: Case, implementation: str) -> Callable[..., jax.Array]:
    window = None if case.window is None else (case.window - 1, 0)
    return functools.partial(
        jax_flash.flash_attention,
        is_causal=case.causal,
        local_window_size=window,
        implementation=implementation,
    )


def sharded(way: str, case: Case, mesh: Mesh, implementation: str) -> tuple[Callable[..., jax.Array], P]:
    """The call on all devices, and how its arrays are sharded."""
    call = attend(case, implementation)
    along_sequence = P(None, AXIS)
    if way == BATCH:
        return call, P(AXIS)
    if way == JIT:
        return call, along_sequence
    strategy, order = WAYS[way]
    call = functools.partial(
        jax_flash.context_parallel_attention,
        axis_name=AXIS,
        strategy=strategy,
        load_balance=order,
        **call.keywords,
    )
    return jax.shard_map(call, mesh=mesh, in_specs=along_sequence, out_specs=along_sequence), along_sequence


def compiled(call: Callable[..., jax.Array], inputs: Sequence[jax.Array]) -> dict[str, tuple]:
    """By pass, forward and both together, compiled, with its arguments. Results stay as they are sharded."""
    d_out = jax.device_put(
        jax.random.normal(jax.random.key(3), inputs[0].shape, inputs[0].dtype), inputs[0].sharding
    )

    def both(d_out: jax.Array, *inputs: jax.Array) -> Any:
        out, vjp = jax.vjp(call, *inputs)
        return out, *vjp(d_out)

    forward = jax.jit(call).lower(*inputs).compile()
    return {
        "forward": (forward, *inputs),
        "both": (jax.jit(both).lower(d_out, *inputs).compile(), d_out, *inputs),
    }


def programs(way: str, case: Case, devices: Sequence[jax.Device], implementation: str) -> dict[str, tuple]:
    inputs = case.inputs()
    if way == ONE:
        return compiled(attend(case, implementation), [jax.device_put(x, devices[0]) for x in inputs])
    mesh = jax.make_mesh((len(devices),), (AXIS,), (jax.sharding.AxisType.Auto,), devices=devices)
    call, spec = sharded(way, case, mesh, implementation)
    return compiled(call, [jax.device_put(x, NamedSharding(mesh, spec)) for x in inputs])


def rows(case: Case, devices: Sequence[jax.Device], of_rounds: int, implementation: str) -> list[dict]:
    """A row of each way and pass; of a way that doesn't take the call, why."""
    of_one, found = programs(ONE, case, devices, implementation), []
    for way in WAYS:
        if way == BATCH and case.batch % len(devices):
            continue
        try:
            of_all = programs(way, case, devices, implementation)
        except Exception as error:  # the other ways are measured nevertheless
            found.append({"way": way, "error": record.error(error)})
            continue
        for direction in of_one:
            times: dict[str, list[float]] = {ONE: [], way: []}
            for order in rounds.orders(list(times), of_rounds):
                for name in order:
                    of = of_one if name == ONE else of_all
                    times[name].append(timing.span_milliseconds(*of[direction], calls=4))
            one, every = (statistics.median(times[name]) for name in (ONE, way))
            efficiency = one / (every * len(devices))
            found.append({"way": way, "pass": direction, "one": one, "all": every, "efficiency": efficiency})
        del of_all
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--implementation", default="cuda")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--match", default="", help="cases that have one of these texts, by commas")
    parser.add_argument("--rounds", type=int, default=rounds.ROUNDS)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    devices = jax.devices()[: options.devices]
    if len(devices) < options.devices:
        raise SystemExit(f"{options.devices} devices are needed, and there are {len(devices)}")
    result = record.environment() | {"devices": len(devices), "rows": []}
    print(record.heading(result))
    for case in CASES:
        if not any(text in str(case) for text in options.match.split(",")):
            continue
        for row in rows(case, devices, options.rounds, options.implementation):
            row = {"case": str(case)} | row
            result["rows"].append(row)
            told = f"{row['efficiency']:.3f}" if "efficiency" in row else row["error"][:160]
            print(f"{row['case']:40} {row['way']:20} {row.get('pass', ''):9} {told}", flush=True)
        jax.clear_caches()
        if options.out:
            record.write(result, options.out)


if __name__ == "__main__":
    main()
