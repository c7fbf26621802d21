"""Times the CUDA forward kernel under changed fields of its tiles, in 8 bits or in 16, on one GPU.

    python benchmarks/tune_fp8.py --out benchmarks/results/tune_fp8_h100.json
    python benchmarks/tune_fp8.py --dtype bfloat16 --match d128 --changes query_stages

Each row has a call, what is changed of the tile that it gets (`ForwardTile`), and the kernel's milliseconds,
in shuffled rounds beside the tile as it is. Kernels that spill are left out.
"""

import argparse
import dataclasses
import functools
import re
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import fp8
import jax
import record
import rounds
import timing
from calls import Case

import jax_flash
from jax_flash import _device
from jax_flash import cuda as by_cuda
from jax_flash._call import Arguments, prepare
from jax_flash._float8_arguments import Float8
from jax_flash._mask import Window
from jax_flash._spec import shapes_of
from jax_flash.cuda.compile import CompileError, compile_kernel
from jax_flash.cuda.launch_plan import LaunchPlan
from jax_flash.cuda.sm90 import forward_plan, tensor_maps

AS_IT_IS = "as it is"
CHANGES: tuple[dict[str, int], ...] = (
    {},
    *({"early_pv_steps": count} for count in (1, 2, 4)),
    {"pingpong": 0},
    {"stages": 3},
    {"query_stages": 1},
    {"consumers": 2},
    {"consumers": 3},
)
"""Of a tile's fields, as a row names them."""


def changed_tiles(changes: dict[str, int]):
    """Plans made meanwhile have tiles with these changes, where they are possible."""
    choose = forward_plan.choose_tile

    def changed(requirements, n):
        fields = {"pingpong": bool(changes["pingpong"])} if "pingpong" in changes else {}
        return dataclasses.replace(choose(requirements, n), **changes | fields)

    return mock.patch.object(forward_plan, "choose_tile", changed)


def call_of(case: Case, inputs: Sequence, dtype: str):
    """The call, as the kernel takes it."""
    window = Window(None, 0 if case.causal else None)
    if dtype == "bfloat16":
        return prepare(Arguments(*inputs, window=window))
    *arrays, query_descale, key_descale, value_descale = jax.jit(jax_flash.quantize)(*inputs)
    return prepare(
        Arguments(*arrays, window=window, float8=Float8(query_descale, key_descale, value_descale))
    )


def plans(call, device, pattern: str) -> dict[str, LaunchPlan]:
    """By the changes that `pattern` finds, without those that don't fit, or make the tile of another."""
    found: dict[str, LaunchPlan] = {}
    for changes in CHANGES:
        with changed_tiles(changes):
            try:
                plan = by_cuda.family(device).plan_forward(call.spec, shapes_of(call.operands), device)
            except (ValueError, AssertionError):
                continue
        name = ", ".join(f"{field} {value}" for field, value in changes.items()) or AS_IT_IS
        if changes and not re.search(pattern, name):
            continue
        shared_bytes = [launch.shared_bytes for launch in plan.launches]
        if plan not in found.values() and max(shared_bytes) <= tensor_maps.MAX_SHARED_BYTES:
            found[name] = plan
    return found


def spills(plan: LaunchPlan) -> bool:
    """Whether a kernel of the plan spills registers, or isn't compiled at all."""
    try:
        logs = [compile_kernel(launch.kernel).log for launch in plan.launches]
    except CompileError:
        return True
    return any(int(count) for log in logs for count in re.findall(r"(\d+) bytes spill", log))


def measure(case: Case, dtype: str, pattern: str, of_rounds: int) -> dict[str, float]:
    """Median milliseconds of each variant."""
    device = _device.current()
    call = call_of(case, case.inputs(), dtype)
    variants = plans(call, device, pattern)
    with ThreadPoolExecutor(16) as pool:
        spilling = dict(zip(variants, pool.map(spills, variants.values()), strict=True))
    given = jax.jit(by_cuda.forward_arrays)(call.operands)
    programs = {}
    for name, plan in variants.items():
        if not spilling[name]:
            run = functools.partial(by_cuda.call.call, "jax_flash_forward", plan)
            programs[name] = jax.jit(
                lambda given, run=run, plan=plan: run(*(given[b.name] for b in plan.operands))
            )
    times: dict[str, list[float]] = {name: [] for name in programs}
    for order in rounds.orders(list(times), of_rounds):
        for name in order:
            times[name].append(timing.milliseconds(programs[name], given))
    return {name: statistics.median(x) for name, x in times.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--dtype", default="float8_e4m3fn", choices=("float8_e4m3fn", "bfloat16"))
    parser.add_argument("--match", default="", help="cases that have this text")
    parser.add_argument("--changes", default="", help="changes that this regular expression finds, and none")
    parser.add_argument("--rounds", type=int, default=rounds.ROUNDS)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    result = record.environment() | {"rows": []}
    print(record.heading(result))
    for case in [case for case in fp8.CASES if options.match in str(case)]:
        times = measure(case, options.dtype, options.changes, options.rounds)
        rows = [
            {
                "case": str(case),
                "dtype": options.dtype,
                "tile": name,
                "milliseconds": x,
                "TFLOP/s": case.flops / x / 1e9,
            }
            for name, x in times.items()
        ]
        result["rows"] += rows
        usual = times[AS_IT_IS]
        print(
            case,
            f"{usual:.3f} ms;",
            "; ".join(f"{name} {usual / x:.3f}" for name, x in times.items()),
            flush=True,
        )
        if options.out:
            record.write(result, options.out)


if __name__ == "__main__":
    main()
