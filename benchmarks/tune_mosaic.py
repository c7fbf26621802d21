"""Times configurations of the Mosaic GPU kernels on the Hopper GPU at hand, beside other kernels.

    python benchmarks/tune_mosaic.py --out benchmarks/results/tune_mosaic_h200.json
    python benchmarks/tune_mosaic.py --head-dim 128 --mask causal --beside jax_flash_cuda jax_mgpu
    python benchmarks/tune_mosaic.py --passes backward --head-dim 128 --shapes 1
    python benchmarks/tune_mosaic.py --passes together --head-dim 128

Forward, for each head dim and mask, the table's configuration and those that differ from it in a field or
two. Backward, each kernel by itself, the table's configuration first, and the rate at which the best of each
would run together. `together`: whole backward passes by one kernel for all gradients and by one for each
side, over lengths, to see from how many keys on one is faster. Results that differ from the first contender's
are refused, as is what does not compile. A kernel that hangs ends the run after `--patience` seconds, with
what it had.
"""

import argparse
import functools
import itertools
import logging
import os
import statistics
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import contenders
import jax
import mosaic_candidates as candidates
import record
import timing
from calls import GROUPS, Case
from rounds import check_agreement

from jax_flash import _device
from jax_flash._mask import keys_of_queries
from jax_flash._spec import Operands, Sizes, sizes
from jax_flash.pallas import lowering
from jax_flash.pallas.mosaic import backward as mosaic_backward
from jax_flash.pallas.mosaic import forward as mosaic_forward
from jax_flash.pallas.mosaic import tiles as mosaic_tiles
from jax_flash.pallas.mosaic.tiles import ForwardConfig

MASKS = ("full", "causal")
TOKENS = 16384  # of a call, in as many sequences of one of the lengths
LENGTHS = (256, 512, 768, 1024, 1536, 2048, 4096)
PRODUCTS = {"all": 5, "queries": 3, "keys": 3, "values": 2, "keys_and_values": 4}  # that a kernel computes


def cases(head_dim: int, mask: str, count: int | None = None) -> list[Case]:
    """The first `count` of the shapes that attention is compared on."""
    causal = mask == "causal"
    return [case for case in GROUPS["default"] if (case.head_dim, case.causal) == (head_dim, causal)][:count]


def cases_of_lengths(head_dim: int, mask: str, count: int | None = None) -> list[Case]:
    """One of each of the first `count` lengths, all of about as many tokens."""
    causal = mask == "causal"
    return [Case(round(TOKENS / n), n, n, 16, 16, head_dim, causal) for n in LENGTHS[:count]]


def call_sizes(case: Case) -> Sizes:
    return sizes(Operands(*case.shapes()))


def attention(config: ForwardConfig, case: Case):
    """The kernel alone, as a function of query, key and value."""

    def run(*arrays):
        return mosaic_forward.forward(case.spec(), Operands(*arrays), config, _device.current().sm_count)[0]

    return run


def measure_forward(case: Case, beside: Sequence[str], patience: float) -> list[dict]:
    others = {
        name: functools.partial(contenders.CONTENDERS[name], causal=case.causal, window=case.window)
        for name in beside
    }
    ours = {str(config): attention(config, case) for config in candidates.forward(call_sizes(case))}
    return measure({"case": str(case)}, others | ours, case.inputs(), case.flops, patience)


def saved_and_cotangent(case: Case) -> tuple[Operands[jax.Array], jax.Array, jax.Array, jax.Array]:
    """What a backward pass takes: the operands, the output, lse, and the output's cotangent."""
    config = mosaic_tiles.forward(call_sizes(case))
    operands = Operands(*case.inputs())
    forward = functools.partial(
        mosaic_forward.forward,
        case.spec(),
        config=config,
        multiprocessors=_device.current().sm_count,
    )
    out, lse = jax.jit(forward)(operands)
    return operands, out, lse, jax.random.normal(jax.random.key(3), out.shape, out.dtype)


def measure_backward(case: Case, patience: float) -> list[dict]:
    """Of one kernel after the other; what the preparation for them takes is in no figure."""
    spec, size, multiprocessors = case.spec(), call_sizes(case), _device.current().sm_count
    inputs = jax.jit(mosaic_backward.prepare)(*saved_and_cotangent(case), None)
    rows = []
    for kernel in candidates.backward_kernels(size):

        def run(inputs, config, kernel=kernel):
            return mosaic_backward.gradients(kernel, spec, size, inputs, config, multiprocessors)

        timed = {
            str(config): functools.partial(run, config=config) for config in candidates.backward(size, kernel)
        }
        flops = PRODUCTS[kernel] * case.flops / 2
        rows += measure({"case": str(case), "kernel": kernel}, timed, [inputs], flops, patience)
    return rows


def measure_together(case: Case, patience: float) -> list[dict]:
    """Of the whole pass by either of the table's ways; none where it has one alone."""
    spec, size, multiprocessors = case.spec(), call_sizes(case), _device.current().sm_count
    ways = {together: mosaic_tiles.backward(size, together) for together in (False, True)}
    if ways[False] == ways[True]:
        return []

    def run(*inputs, configs):
        return mosaic_backward.backward(spec, *inputs, None, configs, multiprocessors)

    timed = {str(configs): functools.partial(run, configs=configs) for configs in ways.values()}
    rows = measure({"case": str(case)}, timed, saved_and_cotangent(case), 2.5 * case.flops, patience)
    keys = keys_of_queries(spec, size).mean_visible_columns()
    return [row | {"keys_of_a_query": keys} for row in rows]


def compiled(function, inputs):
    """The function compiled; or why it can't be."""
    try:
        return jax.jit(function).lower(*inputs).compile()
    except Exception as error:  # whatever a compiler refuses with is its answer
        return record.error(error)


def measure(
    labels: dict, timed: dict[str, Callable], inputs: Sequence, flops: float, patience: float
) -> list[dict]:
    """A row for each function, by name: TFLOP/s and milliseconds, or why it has none."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = dict(zip(timed, pool.map(lambda f: compiled(f, inputs), timed.values()), strict=True))
    rows, expected = [], None
    for name, program in programs.items():
        row = labels | {"name": name}
        rows.append(row)
        if isinstance(program, str):
            row["error"] = program
            continue
        hung = threading.Timer(patience, _give_up, (name, labels))
        hung.start()
        try:
            result = jax.block_until_ready(program(*inputs))
            if name not in contenders.UNSCALED:
                expected = result if expected is None else expected
                jax.tree.map(check_agreement, result, expected)
            row["milliseconds"] = timing.milliseconds(program, *inputs)
            row["rate"] = flops / row["milliseconds"] / 1e9
        except Exception as error:
            row["error"] = record.error(error)
        finally:
            hung.cancel()
    return rows


def _give_up(name: str, labels: dict) -> None:
    print(f"  {name} hangs on {', '.join(labels.values())}", flush=True)
    os._exit(1)


def print_best(title: str, rows: Sequence[dict]) -> None:
    """The geometric mean of each name over the cases, fastest first."""
    print(f"{title}:")
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


def print_backward(title: str, timed: Sequence[Case], rows: Sequence[dict]) -> None:
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        print_best(f"{title}, {kernel}", [row for row in rows if row["kernel"] == kernel])
    for case in timed:
        best: dict[str, float] = {}
        for row in rows:
            if row["case"] == str(case):
                milliseconds = row.get("milliseconds", float("inf"))
                best[row["kernel"]] = min(milliseconds, best.get(row["kernel"], float("inf")))
        together = best.pop("all", float("inf"))
        milliseconds = min(together, sum(best.values()))
        rate = 2.5 * case.flops / milliseconds / 1e9  # five products where forward has two
        print(f"  {record.rate(rate):>6}  the best of each, or of the one for all, on {case}")
    sys.stdout.flush()


def print_together(title: str, rows: Sequence[dict]) -> None:
    print(f"{title}: keys that a query sees in the mean, TFLOP/s with kernels apart and with one, ratio")
    for apart, one in zip(rows[::2], rows[1::2], strict=True):
        rates = [row.get("rate", float("nan")) for row in (apart, one)]
        print(
            f"  {apart['keys_of_a_query']:>6.0f}  {rates[0]:.0f}  {rates[1]:.0f}  {rates[1] / rates[0]:.3f}"
        )
        for row in (apart, one):
            if "error" in row:
                print(f"    {row['name']}: {row['error']}")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--passes", choices=("forward", "backward", "together"), default="forward")
    parser.add_argument("--head-dim", type=int, nargs="+", default=(128, 64, 256))
    parser.add_argument("--mask", choices=MASKS, nargs="+", default=MASKS)
    parser.add_argument("--shapes", type=int, help="or lengths: only so many of each head dim and mask")
    peers = ("jax_flash_cuda", "jax_mgpu", "tokamax")
    parser.add_argument("--beside", nargs="*", default=peers, help="forward alone (default %(default)s)")
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
    print(f"TFLOP/s {options.passes}, bfloat16, {result['timing']}: geometric mean over the cases, then each")
    for head_dim, mask in itertools.product(options.head_dim, options.mask):
        found = []
        pick = cases_of_lengths if options.passes == "together" else cases
        timed = pick(head_dim, mask, options.shapes)
        for case in timed:
            if options.passes == "forward":
                found += measure_forward(case, options.beside, options.patience)
            elif options.passes == "backward":
                found += measure_backward(case, options.patience)
            else:
                found += measure_together(case, options.patience)
            if options.out:  # each time, so that a run cut short leaves what it had
                record.write(result | {"rows": result["rows"] + found}, options.out)
        result["rows"] += found
        title = f"head dim {head_dim}, {mask}"
        if options.passes == "forward":
            print_best(title, found)
        elif options.passes == "backward":
            print_backward(title, timed, found)
        else:
            print_together(title, found)


if __name__ == "__main__":
    main()
