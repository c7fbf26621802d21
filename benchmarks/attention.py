"""Attention for JAX side by side on one machine, in TFLOP/s forward and backward.

    python benchmarks/attention.py --out benchmarks/results/attention_h200.json
    python benchmarks/attention.py --seq-len 8192 --head-dim 64 --causal --peers jax_flash_cuda,cudnn

Without flags that describe a case, this runs the default cases, full and causal. It measures our
implementations and every peer that is installed; a peer that refuses a case shows why. A forward pass counts
4·B·N·T·S·H operations, a backward pass 2.5 times as many, and causal attention half of both. The time of a
backward pass is that of both passes less that of the forward pass.

Every round measures all contenders, in an order of its own, each after a warm-up so that clocks settle; the
median of the rounds counts. Figures of different runs don't compare.
"""

import argparse
import dataclasses
import functools
import itertools
import logging
import math
import os
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import chart
import contenders
import jax
import jax.numpy as jnp
import record
import rounds
import timing
from cases import SHAPES


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    seq_len: int  # queries and keys
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False

    def __str__(self):
        label = f"b{self.batch} s{self.seq_len} h{self.heads}/{self.kv_heads} d{self.head_dim}"
        return f"{label} causal" if self.causal else label

    @property
    def forward_flops(self) -> float:
        full = 4 * self.batch * self.heads * self.seq_len**2 * self.head_dim
        return full / 2 if self.causal else full

    @property
    def backward_flops(self) -> float:
        """Five products where forward has two."""
        return 2.5 * self.forward_flops


DEFAULT_CASES = tuple(Case(*shape, causal) for shape in SHAPES for causal in (False, True))


# `with_residual` returns more than what the others return.
_VARIANTS = {name: f for name, f in contenders.VARIANTS.items() if name != "with_residual"}
_ALL = {**contenders.CONTENDERS, **_VARIANTS}

Program = Callable | Exception  # compiled, or why it isn't
Programs = Mapping[tuple[Case, str, str], Program]  # by case, contender and pass


def shapes(case: Case, dtype: str) -> list[jax.ShapeDtypeStruct]:
    """The arrays of a case: query, key, value and the output's gradient."""
    queries = (case.batch, case.seq_len, case.heads, case.head_dim)
    keys = (case.batch, case.seq_len, case.kv_heads, case.head_dim)
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in (queries, keys, keys, queries)]


def compile_all(cases: Sequence[Case], names: Sequence[str], dtype: str, backward: bool) -> Programs:
    """Compile all that will be measured, on all cores: it takes longer than measuring."""

    def compiled(work: tuple[Case, str, str]) -> Program:
        case, name, one_pass = work
        attend = functools.partial(_ALL[name], causal=case.causal)

        def both(query, key, value, d_out):
            return jax.vjp(attend, query, key, value)[1](d_out)

        *inputs, d_out = shapes(case, dtype)
        try:
            lowered = (
                jax.jit(attend).lower(*inputs)
                if one_pass == "forward"
                else jax.jit(both).lower(*inputs, d_out)
            )
            return lowered.compile()
        except Exception as error:  # whatever a contender refuses with is its answer
            return error

    work = list(itertools.product(cases, names, chart.PASSES if backward else ("forward",)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(work, pool.map(compiled, work), strict=True))


def measure(
    case: Case, names: Sequence[str], dtype: str, programs: Programs, count: int = rounds.ROUNDS
) -> list[dict]:
    """A row for each contender: TFLOP/s of each pass, or the error that it raised."""
    # Random data: on zeros the chip draws less power and runs faster.
    inputs = [
        jax.random.normal(jax.random.key(i), x.shape, x.dtype) for i, x in enumerate(shapes(case, dtype))
    ]
    refused: dict[str, str] = {}

    def prepare(name: str) -> tuple[list[tuple[Callable, Sequence[jax.Array]]], jax.Array]:
        forward, both = (programs.get((case, name, one_pass)) for one_pass in chart.PASSES)
        if isinstance(forward, Exception):
            raise forward
        passes: list[tuple[Callable, Sequence[jax.Array]]] = [(forward, inputs[:3])]
        out = forward(*inputs[:3])
        try:
            if isinstance(both, Exception):
                raise both
            if both is not None:
                jax.block_until_ready(both(*inputs))
                passes.append((both, inputs))
        except Exception as error:  # as in rounds.py, and the forward pass counts nevertheless
            refused[name] = record.error(error)
        return passes, out

    def figures(passes: list[tuple[Callable, Sequence[jax.Array]]]) -> dict[str, float]:
        forward, *both = (timing.milliseconds(function, *arrays) for function, arrays in passes)
        return {"forward": forward, **({"backward": both[0] - forward} if both else {})}

    rows = []
    for name, found in rounds.measure(names, prepare, figures, count).items():
        row: dict = {"case": str(case), "peer": name} | ({"error": refused[name]} if name in refused else {})
        if "error" in found:
            row["error"] = found.pop("error")
        flops = {"forward": case.forward_flops, "backward": case.backward_flops}
        for key, milliseconds in found.items():
            if milliseconds > 0:
                row[key] = flops[key] / milliseconds / 1e9
            else:
                row["error"] = "both passes took less time than the forward one alone: noise"
        rows.append(row)
    return rows


def geometric_means(rows: Sequence[dict], baseline: str) -> list[dict]:
    """For each contender and pass: the mean over its cases, and of its ratios to `baseline`."""
    rates = {(row["peer"], row["case"], key): row[key] for row in rows for key in chart.PASSES if key in row}
    means = []
    for name in dict.fromkeys(row["peer"] for row in rows):
        for key in chart.PASSES:
            own = {case: rate for (peer, case, k), rate in rates.items() if peer == name and k == key}
            shared = [
                rate / rates[baseline, case, key]
                for case, rate in own.items()
                if (baseline, case, key) in rates
            ]
            if own:
                mean = statistics.geometric_mean(own.values())
                ratio = statistics.geometric_mean(shared) if shared else math.nan
                means.append({"peer": name, "pass": key, "mean": mean, "ratio": ratio, "cases": len(own)})
    return means


def print_case(rows: Sequence[dict], case: Case) -> None:
    def cell(row):
        return "/".join(record.rate(row.get(key)) for key in chart.PASSES)

    print(f"{case!s:28}" + "".join(f"{cell(row):>18}" for row in rows))
    for row in rows:
        if "error" in row:
            print(f"    {row['peer']}: {' '.join(row['error'].split())[:160]}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    default = DEFAULT_CASES[0]
    shape = parser.add_argument_group(
        "the case", "the first default case where one of them is given, but for it"
    )
    shape.add_argument("--batch-size", type=int)
    shape.add_argument("--seq-len", type=int, nargs="+", help="one or several, of queries and keys alike")
    shape.add_argument("--num-heads", type=int)
    shape.add_argument("--num-kv-heads", type=int, help="as many as --num-heads by default")
    shape.add_argument("--head-dim", type=int)
    parser.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, help="only (not) causal; default both"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--backward", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--peers",
        default=",".join(contenders.CONTENDERS),
        help=f"which to measure: {','.join(contenders.CONTENDERS)} (the default), {','.join(_VARIANTS)}",
    )
    parser.add_argument("--rounds", type=int, default=rounds.ROUNDS, help="whose median counts")
    parser.add_argument("--out", type=Path, help="JSON file to write; the chart goes beside it as PNG")
    options = parser.parse_args(arguments)
    options.peers = options.peers.split(",")
    if unknown := set(options.peers) - set(_ALL):
        parser.error(f"--peers: {', '.join(sorted(unknown))}; may be {', '.join(_ALL)}")

    heads = options.num_heads or default.heads
    described = (
        options.batch_size,
        options.seq_len,
        options.num_heads,
        options.num_kv_heads,
        options.head_dim,
    )
    causals = (False, True) if options.causal is None else (options.causal,)
    if any(value is not None for value in described):
        options.cases = [
            Case(
                batch=options.batch_size or default.batch,
                seq_len=seq_len,
                heads=heads,
                kv_heads=options.num_kv_heads or heads,
                head_dim=options.head_dim or default.head_dim,
                causal=causal,
            )
            for seq_len in options.seq_len or (default.seq_len,)
            for causal in causals
        ]
        if heads % options.cases[0].kv_heads:
            parser.error(f"--num-heads {heads} must be a multiple of --num-kv-heads {options.num_kv_heads}")
    else:
        options.cases = [case for case in DEFAULT_CASES if case.causal in causals]
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    # Peers warn of their own affairs.
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

    ceiling = record.product_ceiling(options.dtype)
    result = record.environment() | {"dtype": options.dtype, "ceiling": ceiling, "rows": []}
    print(record.heading(result))
    print(f"TFLOP/s forward/backward, {options.dtype}, {rounds.method(result['timing'], options.rounds)}")
    print(f"{'case':28}" + "".join(f"{name:>18}" for name in options.peers), flush=True)
    programs = compile_all(options.cases, options.peers, options.dtype, options.backward)
    for case in options.cases:
        rows = measure(case, options.peers, options.dtype, programs, options.rounds)
        print_case(rows, case)
        result["rows"] += rows
        if options.out:  # each time, so that a run cut short leaves what it had
            record.write(result, options.out)

    print(
        "\ngeometric means over the cases that ran"
        + ("; behind them, ratios to cudnn" if _has_cudnn(result) else "")
    )
    for mean in geometric_means(result["rows"], baseline="cudnn"):
        name, rate, ratio = f"{mean['peer']:18}{mean['pass']:10}", record.rate(mean["mean"]), mean["ratio"]
        print(
            f"  {name}{rate:>6} TFLOP/s over {mean['cases']:2}"
            + ("" if math.isnan(ratio) else f"  {ratio:.2f}")
        )
    if options.out and any("forward" in row for row in result["rows"]):
        print(f"{options.out}, {chart.draw(options.out)}")


def _has_cudnn(result: dict) -> bool:
    return any(row["peer"] == "cudnn" and "forward" in row for row in result["rows"])


if __name__ == "__main__":
    main()
