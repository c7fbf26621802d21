"""Forward attention over many kinds of calls: our CUDA kernels beside every peer, in one run.

    python benchmarks/forward.py --out benchmarks/results/forward_h200.json
    python benchmarks/forward.py --groups short,odd --peers jax_flash_cuda,cudnn,fa3_cu13

Operations are 4·H for each query and key that see each other. A contender's output has to agree with that
of the first one; one that refuses a case, or answers another question, shows why. Of windows, and of full
attention beside them, our rate is given per visited block too: over all that the tensor cores compute,
masked or not. The group `launch` is a chain of calls, each on the output of the one before, with the gaps
between kernels; all others are kernel time. Only figures of one run compare.
"""

import argparse
import dataclasses
import functools
import logging
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import contenders
import jax
import jax.numpy as jnp
import numpy as np
import record
import timing
from cases import SHAPES

from jax_flash._device import Device, current
from jax_flash._spec import AttentionSpec, Operands, sizes
from jax_flash.cuda import forward_plan
from jax_flash.cuda.forward_tiles import block_counts
from jax_flash.cuda.window import binding_window

OURS = "jax_flash_cuda"
FA3 = "fa3_cu13"
# ‖output − first contender's‖ / ‖first contender's‖: rounding gives under 0.01, another mask over 0.1.
AGREEMENT = 0.03
ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False  # aligned to the last key
    window: int | None = None  # keys that a causal query sees at most, its own included
    dtype: str = "bfloat16"
    calls: int = 1  # each on the output of the one before

    def __str__(self):
        lengths = f"s{self.keys}" if self.queries == self.keys else f"t{self.queries} s{self.keys}"
        label = f"b{self.batch} {lengths} h{self.heads}/{self.kv_heads} d{self.head_dim}"
        if self.window is not None:
            label += f" window {self.window}"
        elif self.causal:
            label += " causal"
        if self.dtype != "bfloat16":
            label += f" {self.dtype}"
        return f"{label} ×{self.calls}" if self.calls > 1 else label

    def seen(self, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The keys `[begin, end)` that queries see; none where `end <= begin`."""
        diagonal = row + self.keys - self.queries
        begin = np.zeros_like(row) if self.window is None else np.maximum(diagonal - self.window + 1, 0)
        end = np.minimum(diagonal + 1, self.keys) if self.causal else np.full_like(row, self.keys)
        return begin, end

    @property
    def flops(self) -> int:
        """Of what is attended to, in all calls."""
        begin, end = self.seen(np.arange(self.queries))
        pairs = int(np.maximum(end - begin, 0).sum())
        return 4 * self.calls * self.batch * self.heads * self.head_dim * pairs

    def inputs(self) -> list[jax.Array]:
        """Query, key and value. Random: on zeros the chip draws less power and runs faster."""
        return [
            jax.random.normal(jax.random.key(i), shape.shape, shape.dtype)
            for i, shape in enumerate(self.shapes())
        ]

    def spec(self) -> AttentionSpec:
        left = None if self.window is None else self.window - 1
        return AttentionSpec(scale=self.head_dim**-0.5, left=left, right=0 if self.causal else None)

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        query = (self.batch, self.queries, self.heads, self.head_dim)
        key = (self.batch, self.keys, self.kv_heads, self.head_dim)
        return [jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)) for shape in (query, key, key)]


def full_and_causal(*shape: int, **others) -> list[Case]:
    return [Case(*shape, causal=causal, **others) for causal in (False, True)]


def square(batch: int, length: int, heads: int, kv_heads: int, head_dim: int, **others) -> list[Case]:
    return full_and_causal(batch, length, length, heads, kv_heads, head_dim, **others)


GROUPS: dict[str, list[Case]] = {
    "default": [case for shape in SHAPES for case in square(*shape)],  # attention.py's
    "fp16": [case for shape in SHAPES for case in square(*shape, dtype="float16")],
    "head_dims": [
        case
        for head_dim in (80, 96, 160, 192)
        for case in square(4, 4096, round(2048 / head_dim), round(2048 / head_dim), head_dim)
    ],
    "windows": [
        case
        for shape in ((1, 16384, 16384, 16, 16, 128), (1, 16384, 16384, 32, 32, 64))
        for case in (Case(*shape), Case(*shape, causal=True, window=1024))
    ],
    "short": [
        case
        for head_dim in (64, 128)
        for length in (128, 257, 512, 1000)
        for case in square(round(16384 / length), length, 16, 16, head_dim)
    ],
    "odd": [
        *full_and_causal(4, 1000, 4096, 16, 16, 128),
        *full_and_causal(4, 4096, 1000, 16, 16, 128),
        *square(1, 4096, 8, 8, 64),
        *square(1, 4096, 8, 8, 128),
        *full_and_causal(16, 64, 4096, 32, 4, 128),
    ],
    "launch": [Case(4, 256, 256, 16, 16, 64, calls=32)],
}


def chain(attend: Callable, calls: int) -> Callable:
    """`calls` of `attend` in a row, each with the output of the one before as its query."""
    if calls == 1:
        return attend
    attend = jax.jit(attend)  # traced and lowered once

    def run(query, key, value):
        for _ in range(calls):
            query = attend(query, key, value)
        return query

    return run


def visited_flops(case: Case, device: Device) -> int:
    """Of the blocks that our kernel visits on `device`, masked parts of them and padding included.

    Rows and keys of a block are those of the plan, and so is how many heads share a tile: row r of their
    rows holds query r / pack.
    """
    shapes = Operands(*case.shapes())
    n, window = sizes(shapes), binding_window(case.spec(), sizes(shapes))
    defines = dict(forward_plan.plan_forward(case.spec(), shapes, device).launches[0].kernel.defines)
    heads, head_dim = int(defines["PACK"]), int(defines["HEAD_DIM"])
    tile = forward_plan.tile(head_dim, window, n)
    blocks = sum(block_counts(tile, heads, window, n))
    return 4 * case.calls * case.batch * (case.heads // heads) * head_dim * tile.rows * tile.keys * blocks


def measure(group: str, case: Case, names: Sequence[str]) -> list[dict]:
    """A row for each contender: TFLOP/s and milliseconds, or the error it raised in place of them.

    Medians of rounds in each of which the contenders come in another order: what comes first, or after a
    heavy one, finds the chip at another clock.
    """
    inputs = case.inputs()
    expected: jax.Array | None = None
    rows: dict[str, dict] = {name: {"case": str(case), "group": group, "peer": name} for name in names}
    runs, rounds = {}, {}
    for name in names:
        attend = functools.partial(contenders.CONTENDERS[name], causal=case.causal, window=case.window)
        run = chain(attend, case.calls)
        try:
            out = jax.jit(run)(*inputs)
            if name not in contenders.UNSCALED:
                expected = out if expected is None else expected
                check_agreement(out, expected)
            runs[name], rounds[name] = run, []
        except Exception as error:  # whatever a contender refuses with is its answer
            rows[name]["error"] = record.error(error)
    for order in range(ROUNDS):
        for name in random.Random(order).sample(list(runs), len(runs)):
            rounds[name].append(figures(case, runs[name], inputs))
    for name, of_rounds in rounds.items():
        rows[name] |= {key: statistics.median(figure[key] for figure in of_rounds) for key in of_rounds[0]}
        if name == OURS and group == "windows":
            rows[name]["visited"] = visited_flops(case, current()) / rows[name]["milliseconds"] / 1e9
    return list(rows.values())


def figures(case: Case, run: Callable, inputs: Sequence[jax.Array]) -> dict[str, float]:
    """Of all calls, but for the microseconds, which are one call's with the gap behind it."""
    kernels = timing.milliseconds(run, *inputs)
    if case.calls == 1:
        return {"forward": case.flops / kernels / 1e9, "milliseconds": kernels}
    span = timing.span_milliseconds(run, *inputs)
    return {
        "forward": case.flops / span / 1e9,
        "milliseconds": span,
        "call_microseconds": 1e3 * span / case.calls,
        "kernel_microseconds": 1e3 * kernels / case.calls,
    }


def check_agreement(out: jax.Array, expected: jax.Array) -> None:
    """Raises ValueError where `out` is not `expected` but for rounding."""
    relative = float(_relative_difference(out, expected))
    if not relative <= AGREEMENT:  # NaN too
        raise ValueError(f"its output differs from the first one's by {relative:.3g} of its norm")


@jax.jit
def _relative_difference(out, expected):
    out, expected = (x.astype(jnp.float32).ravel() for x in (out, expected))
    return jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected)


def compare(rows: Sequence[dict]) -> list[dict]:
    """For each group and case that we and a peer ran: our rate over the best peer's, and over FA3's."""
    compared = []
    for group, case in dict.fromkeys((row["group"], row["case"]) for row in rows):
        rates = {
            row["peer"]: row["forward"]
            for row in rows
            if (row["group"], row["case"]) == (group, case) and "forward" in row
        }
        peers = {name: rate for name, rate in rates.items() if name in contenders.PEERS}
        if OURS not in rates or not peers:
            continue
        best = max(peers, key=peers.__getitem__)
        ratio = {"group": group, "case": case, "best": best, "to_best": rates[OURS] / peers[best]}
        if FA3 in peers:
            ratio["to_fa3"] = rates[OURS] / peers[FA3]
        compared.append(ratio)
    return compared


def window_ratios(rows: Sequence[dict]) -> dict[str, float]:
    """For each window: our rate per visited block over that of full attention with the same shape."""
    visited = {row["case"]: row["visited"] for row in rows if "visited" in row}
    ratios = {}
    for case, rate in visited.items():
        full = case.partition(" window ")[0]
        if full != case and full in visited:
            ratios[case] = rate / visited[full]
    return ratios


def print_case(case: Case, rows: Sequence[dict], seconds: float) -> None:
    ratio = "".join(f"{r['to_best']:>7.2f} of {r['best']}" for r in compare(rows))
    cells = "".join(f"{record.rate(row.get('forward')):>15}" for row in rows)
    print(f"{case!s:38}{cells}{ratio}  ({seconds:.0f} s)", flush=True)
    for row in rows:
        if "error" in row:
            print(f"    {row['peer']}: {' '.join(row['error'].split())[:160]}")
        if "call_microseconds" in row:
            call, kernel = row["call_microseconds"], row["kernel_microseconds"]
            print(f"    {row['peer']}: {call:.2f} µs a call, of which kernels {kernel:.2f}")


def print_summary(result: dict) -> None:
    print("\nours over the best peer, and over FlashAttention-3: geometric means; cases below 1")
    for group in dict.fromkeys(ratio["group"] for ratio in result["ratios"]):
        ratios = [ratio for ratio in result["ratios"] if ratio["group"] == group]
        best, fa3 = (_mean(ratio[key] for ratio in ratios if key in ratio) for key in ("to_best", "to_fa3"))
        print(f"  {group:12}{best:>6.3f}{fa3:>7.3f}  over {len(ratios)}")
        for ratio in ratios:
            if ratio["to_best"] < 1:
                print(f"      {ratio['case']:38}{ratio['to_best']:>6.3f} of {ratio['best']}")
    for case, ratio in result["window_ratios"].items():
        print(f"  {case}: {ratio:.3f} of full attention's rate per visited block")


def _mean(values) -> float:
    values = list(values)
    return statistics.geometric_mean(values) if values else math.nan


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--groups", default=",".join(GROUPS), help="by default all: %(default)s")
    parser.add_argument(
        "--peers",
        default=",".join((OURS, *contenders.PEERS)),
        help=f"which to measure, of {','.join(contenders.CONTENDERS)} (default %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    for flag, known in (("groups", GROUPS), ("peers", contenders.CONTENDERS)):
        names = getattr(options, flag).split(",")
        if unknown := set(names) - set(known):
            parser.error(f"--{flag}: {', '.join(sorted(unknown))}; may be {', '.join(known)}")
        setattr(options, flag, names)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    # Peers warn of their own affairs.
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

    result = record.environment() | {"ceiling": record.product_ceiling("bfloat16"), "rows": []}
    print(record.heading(result))
    print(f"TFLOP/s forward, {result['timing']} in each of {ROUNDS} shuffled rounds, whose median counts")
    print(f"{'case':38}" + "".join(f"{name:>15}" for name in options.peers), flush=True)
    for group in options.groups:
        print(group, flush=True)
        for case in GROUPS[group]:
            start = time.monotonic()
            rows = measure(group, case, options.peers)
            print_case(case, rows, time.monotonic() - start)
            result["rows"] += rows
            result |= {"ratios": compare(result["rows"]), "window_ratios": window_ratios(result["rows"])}
            if options.out:  # each time, so that a run cut short leaves what it had
                record.write(result, options.out)
    print_summary(result)


if __name__ == "__main__":
    main()
