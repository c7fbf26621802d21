"""Forward in 8 bits on one GPU: kernel times beside 16 bits, and what quantization takes.

    python benchmarks/fp8.py --out benchmarks/results/fp8_h100.json

Each row has a call and the milliseconds of what `programs` lists, in shuffled rounds: the kernel alone, on
arrays as it takes them, and of long calls with other numbers of blocks whose PV tensor cores sum by
themselves, where shared memory has room for sums (cuda/kernels/sm90/forward/out_sums.cuh); `flash_attention`
of e4m3 arrays, which transposes values first; with `quantization="fp8"`, which also quantizes; `quantize`
alone, and a copy of as many bytes as it reads and writes; and `flash_attention` in bfloat16. Then the rates
of the first and the last, and their ratio.
"""

import argparse
import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
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
from jax_flash.cuda.sm90 import forward_tiles

KERNEL, OF_16_BITS = "kernel", "bfloat16"
SUM_BLOCKS, LONG = (0, 4, 16), 16384  # of long calls alone, as each is a kernel to compile
CASES = [
    Case(batch, length, length, 16, 16, head_dim, causal=causal)
    for head_dim in (64, 128, 192, 256)
    for batch, length in ((4, 4096), (1, 16384))
    for causal in (False, True)
]

Programs = dict[str, tuple]
"""By name: a compiled function, and its arguments."""


def kernel_alone(case: Case, quantized: Any, sum_blocks: int | None = None) -> tuple[Callable[..., Any], Any]:
    """The custom call of a call on e4m3 arrays, and the arrays that it takes."""
    *arrays, query_descale, key_descale, value_descale = quantized
    window = Window(None, 0 if case.causal else None)
    float8 = Float8(query_descale, key_descale, value_descale)
    call = prepare(Arguments(*arrays, window=window, float8=float8))
    device = _device.current()
    family = by_cuda.family(device)
    with summing(sum_blocks):
        plan = family.plan_forward(call.spec, shapes_of(call.operands), device)
    given = jax.jit(family.forward_arrays)(call.operands)
    return lambda given: by_cuda.call.call(
        "jax_flash_forward", plan, *(given[b.name] for b in plan.operands)
    ), given


def summing(sum_blocks: int | None) -> contextlib.AbstractContextManager:
    """Plans made meanwhile have so many blocks whose PV tensor cores sum by themselves; None: as it is."""
    if sum_blocks is None:
        return contextlib.nullcontext()
    changed = {
        head_dim: dataclasses.replace(tile, sum_blocks=sum_blocks)
        for head_dim, tile in forward_tiles.FP8_TILES.items()
        if tile.sum_blocks > 0
    }
    return mock.patch.dict(forward_tiles.FP8_TILES, changed)


def programs(case: Case) -> Programs:
    inputs = case.inputs()
    attend = functools.partial(jax_flash.flash_attention, is_causal=case.causal, implementation="cuda")
    quantized = jax.jit(jax_flash.quantize)(*inputs)
    kernel, given = kernel_alone(case, quantized)
    moved = sum(x.size for x in inputs) * 3  # bytes: 2 are read and 1 is written
    copied = jnp.zeros(moved // 2, jnp.uint8)
    calls: dict[str, tuple] = {
        KERNEL: (kernel, given),
        **{
            f"kernel, sums of {blocks or 'all'} blocks": kernel_alone(case, quantized, blocks)
            for blocks in SUM_BLOCKS
            if case.head_dim <= 128 and case.keys >= LONG
        },
        "e4m3 arrays": (lambda x: attend(**x._asdict()), quantized),
        'quantization="fp8"': (functools.partial(attend, quantization="fp8"), *inputs),
        "quantize": (jax_flash.quantize, *inputs),
        "copy": (lambda x: x + 1, copied),
        OF_16_BITS: (attend, *inputs),
    }
    return {
        name: (jax.jit(function).lower(*arguments).compile(), *arguments)
        for name, (function, *arguments) in calls.items()
    }


def measure(runs: Programs, of_rounds: int) -> dict[str, float]:
    """Median kernel times, milliseconds. All programs take part in each round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for order in rounds.orders(list(times), of_rounds):
        for name in order:
            times[name].append(timing.milliseconds(*runs[name]))
    return {name: statistics.median(x) for name, x in times.items()}


def row(case: Case, of_rounds: int) -> dict:
    try:
        times = measure(programs(case), of_rounds)
    except Exception as exception:  # the other calls are measured nevertheless
        return {"case": str(case), "error": record.error(exception)}
    rates = {f"{name} TFLOP/s": case.flops / times[name] / 1e9 for name in (KERNEL, OF_16_BITS)}
    return {
        "case": str(case),
        "milliseconds": times,
        **rates,
        "ratio": times[OF_16_BITS] / times[KERNEL],
        "ratio with quantization": times[OF_16_BITS] / times['quantization="fp8"'],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--match", default="", help="cases that have this text")
    parser.add_argument("--rounds", type=int, default=rounds.ROUNDS)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    result = record.environment() | {"ceiling": record.product_ceiling("bfloat16"), "rows": []}
    print(record.heading(result))
    for case in [case for case in CASES if options.match in str(case)]:
        found = row(dataclasses.replace(case), options.rounds)
        result["rows"].append(found)
        told = {name: round(x, 3) for name, x in found.get("milliseconds", {}).items()} or found.get("error")
        print(found["case"], told, *(f"{found[x]:.2f}" for x in ("ratio",) if x in found), flush=True)
        if options.out:
            record.write(result, options.out)


if __name__ == "__main__":
    main()
