"""Times configurations of the Mosaic GPU forward kernel on the Hopper GPU at hand, beside other kernels.

    python benchmarks/tune_mosaic.py --out benchmarks/results/tune_mosaic_h200.json
    python benchmarks/tune_mosaic.py --head-dim 128 --mask causal --beside jax_flash_cuda jax_mgpu

For each head dim and mask, the table's configuration and those that differ from it in a field or two. Results
that differ from the first contender's are refused, as is what does not compile. A kernel that hangs
ends the run after `--patience` seconds, with what it had.
"""

import argparse
import dataclasses
import functools
import itertools
import logging
import os
import statistics
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import contenders
import jax
import record
import timing
from calls import GROUPS, Case
from rounds import check_agreement

from jax_flash import _device
from jax_flash._spec import Operands, sizes
from jax_flash.pallas import lowering, mosaic_forward, mosaic_tiles
from jax_flash.pallas.mosaic_tiles import ForwardConfig

KEYS = (64, 128, 192)
STAGES = (2, 3)
QUERY_STAGES = (1, 2)
SWITCHES = ("turns", "persistent")
MASKS = ("full", "causal")


def cases(head_dim: int, mask: str, count: int | None = None) -> list[Case]:
    """The first `count` of the shapes that attention is compared on."""
    causal = mask == "causal"
    return [case for case in GROUPS["default"] if (case.head_dim, case.causal) == (head_dim, causal)][:count]


def candidates(case: Case) -> Iterator[ForwardConfig]:
    """The table's, with its switches in every position; and the other tiles that fit, with the table's."""
    size = sizes(Operands(*case.shapes()))
    table = mosaic_tiles.forward(size)
    if table is None:
        return
    for values in itertools.product((True, False), repeat=len(SWITCHES)):
        yield dataclasses.replace(table, **dict(zip(SWITCHES, values, strict=True)))
    for warpgroups, keys, stages, query_stages in itertools.product((2, 3), KEYS, STAGES, QUERY_STAGES):
        other = dataclasses.replace(
            table, warpgroups=warpgroups, keys=keys, stages=stages, query_stages=query_stages
        )
        # Three warpgroups have 160 registers a thread: too few for a wider output.
        registers = (case.head_dim + keys) // 2 + keys // 4
        enough = registers <= (128 if warpgroups == 3 else 208)
        if other != table and enough and mosaic_tiles.forward_fits(size, other):
            yield other


def attention(config: ForwardConfig, case: Case):
    """The kernel alone, as a function of query, key and value."""

    def run(*arrays):
        return mosaic_forward.forward(case.spec(), Operands(*arrays), config, _device.current().sm_count)[0]

    return run


def functions(case: Case, beside: Sequence[str]) -> dict[str, Callable]:
    """What is timed, by name."""
    others = {
        name: functools.partial(contenders.CONTENDERS[name], causal=case.causal, window=case.window)
        for name in beside
    }
    return others | {str(config): attention(config, case) for config in candidates(case)}


def compiled(function, inputs):
    """The function compiled; or why it can't be."""
    try:
        return jax.jit(function).lower(*inputs).compile()
    except Exception as error:  # whatever a compiler refuses with is its answer
        return record.error(error)


def measure(case: Case, beside: Sequence[str], patience: float) -> list[dict]:
    """A row for each contender and configuration: TFLOP/s, or why it has none."""
    inputs = case.inputs()
    timed = functions(case, beside)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = dict(zip(timed, pool.map(lambda f: compiled(f, inputs), timed.values()), strict=True))
    rows, expected = [], None
    for name, program in programs.items():
        row = {"case": str(case), "name": name}
        rows.append(row)
        if isinstance(program, str):
            row["error"] = program
            continue
        hung = threading.Timer(patience, _give_up, (name, case))
        hung.start()
        try:
            result = jax.block_until_ready(program(*inputs))
            if name not in contenders.UNSCALED:
                expected = result if expected is None else expected
                check_agreement(result, expected)
            row["rate"] = case.flops / timing.milliseconds(program, *inputs) / 1e9
        except Exception as error:
            row["error"] = record.error(error)
        finally:
            hung.cancel()
    return rows


def _give_up(name: str, case: Case) -> None:
    print(f"  {name} hangs on {case}", flush=True)
    os._exit(1)


def print_best(head_dim: int, mask: str, rows: Sequence[dict]) -> None:
    """The geometric mean of each name over the cases, fastest first."""
    print(f"head dim {head_dim}, {mask}:")
    rates: dict[str, list[float]] = {}
    for row in rows:
        rates.setdefault(row["name"], [])
        if "rate" in row:
            rates[row["name"]].append(row["rate"])
        else:
            print(f"  {row['name']} on {row['case']}: {row['error']}")
    whole = max(map(len, rates.values()))
    means = {
        name: statistics.geometric_mean(found) for name, found in rates.items() if len(found) == whole > 0
    }
    for name in sorted(means, key=lambda name: -means[name]):
        each = " ".join(record.rate(rate) for rate in rates[name])
        print(f"  {record.rate(means[name]):>6}  {name}  ({each})")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--head-dim", type=int, nargs="+", default=(128, 64, 256))
    parser.add_argument("--mask", choices=MASKS, nargs="+", default=MASKS)
    parser.add_argument("--shapes", type=int, help="only so many of each head dim and mask")
    parser.add_argument("--beside", nargs="*", default=("jax_flash_cuda", "jax_mgpu", "tokamax"))
    parser.add_argument("--patience", type=float, default=30, help="seconds (default %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

    first = cases(options.head_dim[0], options.mask[0])[0]
    if reason := lowering.mosaic_reason(first.spec(), Operands(*first.shapes()), _device.current()):
        sys.exit(f"tune_mosaic.py: the Mosaic GPU kernels can't run here: {reason}")
    result = record.environment() | {"rows": []}
    print(record.heading(result | {"ceiling": record.product_ceiling("bfloat16")}))
    print(f"TFLOP/s forward, bfloat16, {result['timing']}: geometric mean over the cases, then each")
    for head_dim, mask in itertools.product(options.head_dim, options.mask):
        found = []
        for case in cases(head_dim, mask, options.shapes):
            found += measure(case, options.beside, options.patience)
            if options.out:  # each time, so that a run cut short leaves what it had
                record.write(result | {"rows": result["rows"] + found}, options.out)
        result["rows"] += found
        print_best(head_dim, mask, found)


if __name__ == "__main__":
    main()
