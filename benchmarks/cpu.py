"""The portable implementation beside `jax.nn.dot_product_attention`, on this machine's CPU.

    python benchmarks/cpu.py [--seq-len 512,1024,2048] [--batch-size 1] [--num-heads 8] [--head-dim 64,128]
                             [--dtype float32,bfloat16] [--pairs 9] [--out benchmarks/results/cpu.json]

Each case runs both in turn, in pairs, in one process: what else the machine does weighs on both. A
ratio is the median over pairs of their time over ours, so above 1 ours is faster.
"""

import argparse
import datetime
import functools
import itertools
import json
import os
import platform
import statistics
import time

import jax
import jaxlib
from measured_commit import measured_commit

import jax_flash


def attention_functions(is_causal):
    """Ours and JAX's, both `(query, key, value) -> out`."""
    return {
        "jax_flash_xla": functools.partial(
            jax_flash.flash_attention, is_causal=is_causal, implementation="xla"
        ),
        "jax_nn": functools.partial(jax.nn.dot_product_attention, is_causal=is_causal),
    }


def compile_for(attend, backward, inputs):
    """`attend` compiled, forward or forward and backward, for `inputs` (query, key, value, d_out)."""

    def forward_and_backward(query, key, value, d_out):
        out, vjp = jax.vjp(attend, query, key, value)
        return out, vjp(d_out)

    def forward(query, key, value, d_out):
        return attend(query, key, value)

    return jax.jit(forward_and_backward if backward else forward).lower(*inputs).compile()


def time_in_pairs(programs, inputs, pairs):
    """Seconds of each run, by name: lists of `pairs` numbers, taken in turn."""
    seconds = {name: [] for name in programs}
    for program in programs.values():
        jax.block_until_ready(program(*inputs))
    for _ in range(pairs):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*inputs))
            seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(shape, dtype, is_causal, backward, pairs):
    """One case: median milliseconds, temporary bytes and the ratio of times."""
    keys = jax.random.split(jax.random.key(0), 4)
    inputs = [jax.random.normal(key, shape, dtype) for key in keys]
    programs = {
        name: compile_for(attend, backward, inputs) for name, attend in attention_functions(is_causal).items()
    }
    seconds = time_in_pairs(programs, inputs, pairs)
    ratios = [theirs / ours for theirs, ours in zip(seconds["jax_nn"], seconds["jax_flash_xla"], strict=True)]
    return {
        "milliseconds": {name: round(1e3 * statistics.median(x), 2) for name, x in seconds.items()},
        "temporary_bytes": {
            name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()
        },
        "ratio": round(statistics.median(ratios), 2),
        "ratio_lowest": round(min(ratios), 2),
    }


def processor():
    """The processor's name, as Linux tells it."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def main():
    def several(of):
        return lambda text: [of(item) for item in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=several(int), default=[512, 1024, 2048])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--num-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=several(int), default=[64, 128])
    parser.add_argument("--dtype", type=several(str), default=["float32", "bfloat16"])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out", help="a JSON file to write the results to")
    flags = parser.parse_args()

    jax.config.update("jax_platforms", "cpu")
    rows = []
    title = f"{'case':<42} {'direction':<20} {'ours ms':>9} {'jax.nn ms':>10} {'ratio':>6} {'memory':>7}"
    print(title)
    for dtype, head_dim, seq_len, is_causal, backward in itertools.product(
        flags.dtype, flags.head_dim, flags.seq_len, (False, True), (False, True)
    ):
        shape = (flags.batch_size, seq_len, flags.num_heads, head_dim)
        row = {
            "case": f"b{shape[0]} n{seq_len} h{shape[2]} d{head_dim} {dtype} "
            + ("causal" if is_causal else "full"),
            "direction": "forward+backward" if backward else "forward",
            **measure(shape, dtype, is_causal, backward, flags.pairs),
        }
        rows.append(row)
        ours, theirs = (row["milliseconds"][name] for name in ("jax_flash_xla", "jax_nn"))
        memory = row["temporary_bytes"]["jax_nn"] / row["temporary_bytes"]["jax_flash_xla"]
        print(
            f"{row['case']:<42} {row['direction']:<20} {ours:>9.1f} {theirs:>10.1f} "
            f"{row['ratio']:>6.2f} {memory:>6.1f}x",
            flush=True,
        )

    if flags.out:
        report = {
            "commit": measured_commit(),
            "device": f"{processor()}, {os.cpu_count()} cores",
            "date": datetime.date.today().isoformat(),
            "versions": {
                "python": platform.python_version(),
                "jax": jax.__version__,
                "jaxlib": jaxlib.__version__,
                "jax_flash": jax_flash.__version__,
            },
            "pairs": flags.pairs,
            "rows": rows,
        }
        with open(flags.out, "w") as out:
            json.dump(report, out, indent=1)
            out.write("\n")


if __name__ == "__main__":
    main()
