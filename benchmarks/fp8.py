"""Forward in 8 bits on one GPU: kernel times beside 16 bits, and what quantization takes.

    python benchmarks/fp8.py --out benchmarks/results/fp8_h100.json

Each row has a call and the milliseconds of what `programs` lists, in shuffled rounds: the kernel alone, on
arrays as it takes them, and of long calls with other numbers of blocks whose PV tensor cores sum by
themselves, where shared memory has room for sums (cuda/kernels/sm90/forward/out_sums.cuh); `flash_attention`
of e4m3 arrays, which transposes values first; with `quantization="fp8"`, which also quantizes; `quantize`
alone, and a copy of as many bytes as it reads and writes; and `flash_attention` in bfloat16. Then the rates
of the first and the last, and their ratio. With `--pallas` also e4m3 arrays by `pallas`, on Hopper.

Peers run on e4m3 arrays too: cuDNN, which has a scale for each array and writes e4m3, by JAX; and with
`--merge FILE` what torch_fa3.py measured of FlashAttention-3 on the same GPU just before. `to_best_peer` is
the time of the faster one over that of the kernel.
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

KERNEL, OF_16_BITS, PALLAS = "kernel", "bfloat16", "pallas, e4m3 arrays"
CUDNN, FA3 = "cudnn_fp8", "fa3_fp8"
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
    given = jax.jit(by_cuda.forward_arrays)(call.operands)
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


def cudnn(case: Case) -> Callable[..., jax.Array]:
    """cuDNN's attention of e4m3 arrays, which JAX has without a public name."""
    from jax._src.cudnn import fused_attention_stablehlo as stablehlo

    scales = dict.fromkeys(stablehlo.fp8_params_keys, jnp.ones((1, 1, 1, 1), jnp.float32))
    mask_type = stablehlo.MaskType.CAUSAL if case.causal else stablehlo.MaskType.NO_MASK

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        arrays, scale = (query, key, value), case.head_dim**-0.5
        return stablehlo.dot_product_attention(
            *arrays, fp8_params=scales, scale=scale, mask_type=mask_type, use_fp8=True
        )[0]

    return attend


def programs(case: Case) -> Programs:
    inputs = case.inputs()
    attend = functools.partial(jax_flash.flash_attention, is_causal=case.causal, implementation="cuda")
    quantized = jax.jit(jax_flash.quantize)(*inputs)
    kernel, given = kernel_alone(case, quantized)
    moved = sum(x.size for x in inputs) * 3  # bytes: 2 are read and 1 is written
    copied = jnp.zeros(moved // 8, jnp.uint32)  # words: XLA copies bytes more slowly
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
    return {name: _compiled(*call) for name, call in calls.items()}


def by_pallas(case: Case) -> Programs:
    quantized = jax.jit(jax_flash.quantize)(*case.inputs())
    attend = functools.partial(jax_flash.flash_attention, is_causal=case.causal, implementation="pallas")
    return {PALLAS: _compiled(lambda x: attend(**x._asdict()), quantized)}  # by Mosaic GPU, or refused


def _compiled(function: Callable, *arguments: Any) -> tuple:
    return jax.jit(function).lower(*arguments).compile(), *arguments


def measure(runs: Programs, of_rounds: int) -> dict[str, float]:
    """Median kernel times, milliseconds. All programs take part in each round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for order in rounds.orders(list(times), of_rounds):
        for name in order:
            times[name].append(timing.milliseconds(*runs[name]))
    return {name: statistics.median(x) for name, x in times.items()}


def peer_program(case: Case) -> tuple[Programs, dict[str, str]]:
    """cuDNN's program; or none, and the error with which it refuses the case."""
    try:
        inputs = (x.astype(jnp.float8_e4m3fn) for x in case.inputs())
        return {CUDNN: _compiled(cudnn(case), *inputs)}, {}
    except Exception as exception:  # whatever a peer refuses with is its answer
        return {}, {f"{CUDNN} error": record.error(exception)}


def row(case: Case, of_rounds: int, fa3: float | None = None, pallas: bool = False) -> dict:
    """`fa3`: milliseconds of FlashAttention-3, where these were measured."""
    try:
        ours = programs(case) | (by_pallas(case) if pallas else {})
        theirs, refused = peer_program(case)
        times = measure(ours | theirs, of_rounds)
    except Exception as exception:  # the other calls are measured nevertheless
        return {"case": str(case), "error": record.error(exception)}
    times |= {} if fa3 is None else {FA3: fa3}
    peers = [name for name in (CUDNN, FA3) if name in times]
    rates = {f"{name} TFLOP/s": case.flops / times[name] / 1e9 for name in (KERNEL, OF_16_BITS, *peers)}
    if peers:
        rates["to_best_peer"] = min(times[name] for name in peers) / times[KERNEL]
    return {
        "case": str(case),
        "milliseconds": times,
        **rates,
        "ratio": times[OF_16_BITS] / times[KERNEL],
        "ratio with quantization": times[OF_16_BITS] / times['quantization="fp8"'],
        **refused,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--match", default="", help="cases that have this text")
    parser.add_argument("--rounds", type=int, default=rounds.ROUNDS)
    parser.add_argument("--pallas", action="store_true", help="e4m3 arrays by pallas too")
    parser.add_argument("--merge", type=Path, help="JSON of torch_fa3.py")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    result = record.environment() | {"ceiling": record.product_ceiling("bfloat16"), "rows": []}
    print(record.heading(result))
    theirs = {
        other["case"]: other["milliseconds"]
        for other in record.other_rows(options.merge, result["device"])
        if other["peer"] == FA3 and "milliseconds" in other
    }
    for case in [case for case in CASES if options.match in str(case)]:
        found = row(case, options.rounds, theirs.get(str(case)), options.pallas)
        result["rows"].append(found)
        told = {name: round(x, 3) for name, x in found.get("milliseconds", {}).items()} or found.get("error")
        print(
            found["case"],
            told,
            *(f"{found[x]:.2f}" for x in ("ratio", "to_best_peer") if x in found),
            flush=True,
        )
        if options.out:
            record.write(result, options.out)


if __name__ == "__main__":
    main()
