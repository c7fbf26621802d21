"""Attention for JAX side by side on one machine, in TFLOP/s forward and backward.

    python benchmarks/attention.py --out benchmarks/results/attention_h200.json
    python benchmarks/attention.py --seq-len 8192 --head-dim 64 --causal --peers jax_flash_cuda,cudnn

Without flags that describe a case, the default ones are run, full and causal. Ours and every peer that is
installed are measured; one that refuses a case shows why. Operations are counted as 4·B·N·T·S·H forward, 2.5
times that backward, and half of both when causal; backward time is that of both passes less the forward one.
Only figures of one run compare.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import logging
import math
import statistics
import subprocess
import warnings
from collections.abc import Sequence
from pathlib import Path

import chart
import contenders
import jax
import jax.numpy as jnp
import jaxlib
import timing


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


SHAPES = (
    (4, 4096, 16, 16, 128),
    (1, 16384, 16, 16, 128),
    (4, 4096, 32, 32, 64),
    (4, 4096, 8, 8, 256),
    (4, 4096, 32, 8, 128),
    (16, 1024, 16, 16, 128),
)
DEFAULT_CASES = tuple(Case(*shape, causal) for shape in SHAPES for causal in (False, True))


def measure(case: Case, name: str, dtype: str, backward: bool) -> dict:
    """One row: TFLOP/s of contender `name`, or the error it raised in place of them."""
    row: dict = {"case": str(case), "peer": name}
    queries = (case.batch, case.seq_len, case.heads, case.head_dim)
    keys = (case.batch, case.seq_len, case.kv_heads, case.head_dim)
    # Random data: on zeros the chip draws less power and runs faster.
    query, key, value, d_out = (
        jax.random.normal(jax.random.key(i), shape, jnp.dtype(dtype))
        for i, shape in enumerate((queries, keys, keys, queries))
    )
    attend = functools.partial(contenders.CONTENDERS[name], causal=case.causal)

    def both(query, key, value, d_out):
        return jax.vjp(attend, query, key, value)[1](d_out)

    try:
        forward_ms = timing.milliseconds(attend, query, key, value)
        row["forward"] = case.forward_flops / forward_ms / 1e9
        if backward:
            backward_ms = timing.milliseconds(both, query, key, value, d_out) - forward_ms
            if backward_ms <= 0:
                raise RuntimeError("both passes took less time than the forward one alone: noise")
            row["backward"] = case.backward_flops / backward_ms / 1e9
    except Exception as error:  # whatever a contender refuses with is its answer
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    return row


def environment() -> dict:
    """The device and the versions that figures belong to."""
    return {
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "driver": _driver(),
        "versions": {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "cuda": _version("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
            **contenders.versions(),
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "timing": timing.method(),
    }


def _version(*distributions: str) -> str | None:
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _driver() -> str | None:
    if jax.default_backend() != "gpu":
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return lines[0] if lines else None


def product_ceiling(dtype: str) -> float | None:
    """TFLOP/s of a large matrix product, in the same run: what the tensor cores give at most. GPU only."""
    if jax.default_backend() != "gpu":
        return None
    n = 8192
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.dtype(dtype)) for i in (0, 1))
    return 2 * n**3 / timing.milliseconds(jnp.matmul, a, b) / 1e9


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
        return "/".join(_rate(row.get(key)) for key in chart.PASSES)

    print(f"{case!s:28}" + "".join(f"{cell(row):>18}" for row in rows))
    for row in rows:
        if "error" in row:
            print(f"    {row['peer']}: {' '.join(row['error'].split())[:160]}")


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


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
        help=f"which to measure, of {','.join(contenders.CONTENDERS)} (the default)",
    )
    parser.add_argument("--out", type=Path, help="JSON file to write; the chart goes beside it as PNG")
    options = parser.parse_args(arguments)
    options.peers = options.peers.split(",")
    if unknown := set(options.peers) - set(contenders.CONTENDERS):
        parser.error(f"--peers: {', '.join(sorted(unknown))}; may be {', '.join(contenders.CONTENDERS)}")

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

    result = environment() | {"dtype": options.dtype, "ceiling": product_ceiling(options.dtype), "rows": []}
    ceiling = f", 8192³ product {result['ceiling']:.0f} TFLOP/s" if result["ceiling"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    print(f"{result['device']}{ceiling}; {versions}")
    print(f"TFLOP/s forward/backward, {options.dtype}, {result['timing']}")
    print(f"{'case':28}" + "".join(f"{name:>18}" for name in options.peers), flush=True)
    for case in options.cases:
        rows = [measure(case, name, options.dtype, options.backward) for name in options.peers]
        print_case(rows, case)
        result["rows"] += rows
        if options.out:  # each time, so that a run cut short leaves what it had
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")

    print(
        "\ngeometric means over the cases that ran"
        + ("; behind them, ratios to cudnn" if _has_cudnn(result) else "")
    )
    for mean in geometric_means(result["rows"], baseline="cudnn"):
        name, rate, ratio = f"{mean['peer']:18}{mean['pass']:10}", _rate(mean["mean"]), mean["ratio"]
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
