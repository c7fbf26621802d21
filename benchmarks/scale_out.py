"""Attention to sequences that are sharded over several GPUs against the same work on one.

    python benchmarks/scale_out.py --out benchmarks/results/scale_out_2xh100.json

Causal calls of 32K to 1M tokens, a window, and for comparison a sharded batch: by each strategy and order of
tokens, and under a sharded `jit`. A program makes calls as a model's layers do: each has keys and values of
its own, and its queries are the output of the one before. Times are wall clock, transfers among them, in
shuffled rounds. Each row has a case, how it is sharded, a pass, a call's time on one device and on all, and
the efficiency: the first over the second times the number of devices. 1.00 is linear. The time on one device
is the mean of the devices' own, as some are slower than others; `alone` has each device's. One runs at most
`ON_ONE` tokens; its time for a longer call is computed from its rate there, and the row has `one_tokens`.
`links` has the collectives alone.
"""

import argparse
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import links
import record
import rounds
from calls import Case
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

AXIS = "devices"
TWO_AXES = ("groups", "members")
CASES = [
    Case(1, 32768, 32768, 32, 8, 128, causal=True, calls=4),
    Case(1, 131072, 131072, 32, 8, 128, causal=True),
    Case(1, 524288, 524288, 32, 8, 128, causal=True),
    Case(1, 1048576, 1048576, 32, 8, 128, causal=True),
    Case(1, 262144, 262144, 48, 12, 128, causal=True, window=512, calls=4),
    Case(1, 262144, 262144, 48, 12, 128, causal=True),
    Case(8, 8192, 8192, 32, 8, 128, causal=True, calls=4),
]
ON_ONE = 262144
ONE = "one device"
BATCH, JIT, PAIRS = "batch", "jit", "ring × Ulysses, zigzag"
WAYS = {
    BATCH: None,
    JIT: None,
    "ring": ("ring", None),
    "ring, zigzag": ("ring", "zigzag"),
    "ring, striped": ("ring", "striped"),
    "all-gather": ("all_gather", None),
    "all-gather, zigzag": ("all_gather", "zigzag"),
    "Ulysses": ("ulysses", None),
    PAIRS: ("ring", "zigzag"),
}
"""How a call is sharded: along its batch; along its sequence under `jit`; or by a strategy and an order.

The last one has two mesh axes: a ring of pairs of devices, which exchange heads.
"""


def runs(way: str, case: Case, devices: int) -> bool:
    """Whether so many devices can run a call so."""
    if way == BATCH:
        return case.batch % devices == 0
    return way != PAIRS or (devices >= 4 and devices % 2 == 0)


def attend(case: Case, implementation: str) -> Callable[..., jax.Array]:
    """One call on a device."""
    window = None if case.window is None else (case.window - 1, 0)
    return functools.partial(
        jax_flash.flash_attention,
        is_causal=case.causal,
        local_window_size=window,
        implementation=implementation,
    )


def mesh_of(way: str, devices: Sequence[jax.Device]) -> Mesh:
    shape, names = ((len(devices) // 2, 2), TWO_AXES) if way == PAIRS else ((len(devices),), (AXIS,))
    return jax.make_mesh(shape, names, (jax.sharding.AxisType.Auto,) * len(shape), devices=devices)


def sharded(way: str, case: Case, mesh: Mesh, implementation: str) -> tuple[Callable[..., jax.Array], P]:
    """The call on all devices, and how its arrays are sharded."""
    call = attend(case, implementation)
    axis: str | tuple[str, ...] = TWO_AXES if way == PAIRS else AXIS
    along_sequence = P(None, axis)
    if way == BATCH:
        return call, P(AXIS)
    if way == JIT:
        return call, along_sequence
    strategy, order = WAYS[way]
    call = functools.partial(
        jax_flash.context_parallel_attention,
        axis_name=axis,
        strategy=strategy,
        load_balance=order,
        **call.keywords,
    )
    return jax.shard_map(call, mesh=mesh, in_specs=along_sequence, out_specs=along_sequence), along_sequence


Programs = dict[str, tuple]
"""By pass, forward and both together: a compiled function, and its arguments."""


def in_layers(call: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function of a query, and of a key and a value for each call."""

    def calls(query: jax.Array, *keys_and_values: jax.Array) -> jax.Array:
        for key, value in zip(keys_and_values[::2], keys_and_values[1::2], strict=True):
            # Whole in memory, as a layer's projection reads it.
            query = jax.lax.optimization_barrier(call(query, key, value))
        return query

    return calls


def compiled(call: Callable[..., jax.Array], inputs: Sequence[jax.Array]) -> Programs:
    """Results stay as they are sharded.

    Args:
      inputs: as `inputs_of` gives them.
    """
    calls = in_layers(call)
    query, d_out, *keys_and_values = inputs

    def both(d_out: jax.Array, *inputs: jax.Array) -> Any:
        out, vjp = jax.vjp(calls, *inputs)
        return out, *vjp(d_out)

    arguments = query, *keys_and_values
    forward = jax.jit(calls).lower(*arguments).compile()
    return {
        "forward": (forward, *arguments),
        "both": (jax.jit(both).lower(d_out, *arguments).compile(), d_out, *arguments),
    }


def inputs_of(case: Case, sharding: jax.sharding.Sharding) -> list[jax.Array]:
    """Query, the output's cotangent, and a key and a value for each call, made where they are."""
    query, *key_and_value = case.shapes()
    drawn = jax.jit(jax.random.normal, static_argnames=("shape", "dtype"), out_shardings=sharding)
    arrays = query, query, *key_and_value * case.calls
    return [drawn(jax.random.key(i), shape=x.shape, dtype=x.dtype) for i, x in enumerate(arrays)]


def programs(way: str, case: Case, devices: Sequence[jax.Device], implementation: str) -> Programs:
    if way == ONE:
        inputs = inputs_of(case, jax.sharding.SingleDeviceSharding(devices[0]))
        return compiled(attend(case, implementation), inputs)
    mesh = mesh_of(way, devices)
    call, spec = sharded(way, case, mesh, implementation)
    return compiled(call, inputs_of(case, NamedSharding(mesh, spec)))


def milliseconds(function: Callable[..., Any], *arguments: jax.Array) -> float:
    """Wall clock of a program that runs between others, as a step of training does.

    It is the difference between the times of 2n and of n runs, divided by n. The start of a row of runs and
    the wait for its end, which take milliseconds on several devices, are in both times.
    """

    def seconds(runs: int) -> float:
        start = time.perf_counter()
        for _ in range(runs):
            results = function(*arguments)  # those of the run before are freed
        jax.block_until_ready(results)
        return time.perf_counter() - start

    estimate = seconds(1)
    if estimate > 1:  # nothing is lost in such a time
        return estimate * 1e3
    runs = min(max(math.ceil(0.1 / estimate), 1), 16)
    return statistics.median((seconds(2 * runs) - seconds(runs)) / runs for _ in range(3)) * 1e3


def rows(
    case: Case, devices: Sequence[jax.Device], ways: Sequence[str], of_rounds: int, implementation: str
) -> Iterator[dict]:
    """A row of each way and pass, as soon as it is there; of a way that doesn't take the call, why."""
    on_one = case
    if case.queries > ON_ONE:
        on_one = dataclasses.replace(case, queries=ON_ONE, keys=ON_ONE)
    prepared: dict[str, Programs] = {}
    alone = {f"{ONE} {i}": (ONE, on_one, [device], implementation) for i, device in enumerate(devices)}
    for way, given in (alone | {way: (way, case, devices, implementation) for way in ways}).items():
        try:
            prepared[way] = programs(*given)
            for function, *arguments in prepared[way].values():
                jax.block_until_ready(function(*arguments))  # the first call is slow
                if case.queries > ON_ONE:
                    break  # forward alone, which sets up the links for both
        except Exception as error:  # the other ways are measured nevertheless
            prepared.pop(way, None)
            yield {"way": way, "error": record.error(error)}
    for direction in ("forward", "both"):
        times: dict[str, list[float]] = {name: [] for name in prepared}
        for order in rounds.orders(list(times), of_rounds if case.queries <= ON_ONE else 1):
            for name in order:
                times[name].append(milliseconds(*prepared[name][direction]))
        median = {name: statistics.median(times[name]) for name in times}
        each = [median.pop(way) * case.flops / on_one.flops for way in alone]
        one = statistics.mean(each)
        for way, of_all in median.items():
            row = {"way": way, "pass": direction, "one": one / case.calls, "all": of_all / case.calls}
            row |= {"efficiency": one / (of_all * len(devices)), "one_tokens": on_one.queries}
            yield row | {"alone": [x / case.calls for x in each]}


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--implementation", default="cuda")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--match", default="", help="cases that have one of these texts, by commas")
    parser.add_argument("--ways", default="", help="ways that have one of these texts, by semicolons")
    parser.add_argument("--rounds", type=int, default=rounds.ROUNDS)
    parser.add_argument("--links", type=int, default=0, help="MiB a device sends at most, collectives alone")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    devices = jax.devices()[: options.devices]
    if len(devices) < options.devices:
        raise SystemExit(f"{options.devices} devices are needed, and there are {len(devices)}")
    result = record.environment() | {
        "timing": "wall clock of a program between others",
        "devices": len(devices),
        "links": [],
        "rows": [],
    }
    print(record.heading(result))
    if options.links:
        result["links"] = links.rows(devices, options.links)
        for row in result["links"]:
            print(f"{row['collective']:20} {row['bytes']:12} bytes {row['milliseconds']:9.3f} ms", flush=True)
    for case in CASES:
        if not any(text in str(case) for text in options.match.split(",")):
            continue
        ways = [way for way in WAYS if any(text in way for text in options.ways.split(";"))]
        ways = [way for way in ways if runs(way, case, len(devices))]
        for row in rows(case, devices, ways, options.rounds, options.implementation):
            row = {"case": str(case)} | row
            result["rows"].append(row)
            told = f"{row['efficiency']:.3f}" if "efficiency" in row else row["error"][:160]
            print(f"{row['case']:40} {row['way']:24} {row.get('pass', ''):9} {told}", flush=True)
            if options.out:
                record.write(result, options.out)
        jax.clear_caches()


if __name__ == "__main__":
    main()
