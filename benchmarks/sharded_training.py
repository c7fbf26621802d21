"""Trains the GPT example on meshes of data × sequence shards: losses, time of a step, memory.

    python benchmarks/sharded_training.py --shards 1 2 4 --out benchmarks/results/sharded_training_4xh100.json
    python benchmarks/sharded_training.py --shards 2 --steps 2 --layers 24 --heads 16 --width 1024 --remat \
        --sequence-length 1048576 --batch-size 1 --out benchmarks/results/million_tokens_2xh100.json

The devices are all there are, and sequences are sharded over so many of them. Each row has a mesh, the loss
of each step, the seconds of a step (median without the first one), and the most bytes that a device held.
Parameters and batches are the same in all rows, so losses must be the same but for rounding: at a rate of
learning for which training is smooth, as a spike magnifies any difference.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import record
from flax import nnx

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import data
import gpt
import train_gpt
from parallel import ShardedJit
from steps import State, make_optimizer, make_steps


def measure(settings: train_gpt.Settings) -> dict:
    devices = jax.local_devices()
    train_gpt.check_devices(settings, len(devices))
    config = train_gpt.model_config(settings, devices[0])
    corpus = data.load(settings.text).train
    graph, parameters = nnx.split(gpt.GPT(config, nnx.Rngs(settings.seed)))
    optimizer = make_optimizer(settings.learning_rate, settings.weight_decay, settings.steps)
    parallel = ShardedJit(devices, settings.sequence_shards)
    step, _ = make_steps(graph, optimizer, parallel)
    state = parallel.copy_to_all(State(parameters, optimizer.init(parameters)))
    losses, seconds = [], []
    for i in range(settings.steps):
        tokens = parallel.split(
            data.batch(corpus, settings.seed, i, settings.batch_size, settings.sequence_length)
        )
        start = time.perf_counter()
        state, loss = step(state, tokens)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
        if settings.steps < 10:
            print(f"step {i}: loss {losses[-1]:.4f}, {seconds[-1]:.1f} s", flush=True)
    stats = [device.memory_stats() or {} for device in devices]
    return {
        "case": f"{sum(x.size for x in jax.tree.leaves(parameters)):,} parameters, {config.dtype}, "
        f"{settings.batch_size} × {settings.sequence_length} tokens" + (", remat" if settings.remat else ""),
        "mesh": [len(devices) // settings.sequence_shards, settings.sequence_shards],
        "attention": train_gpt.explain(settings, config, len(devices)).splitlines()[0],
        "losses": losses,
        "first_step_seconds": seconds[0],
        "step_seconds": statistics.median(seconds[1:] or seconds),
        "peak_bytes": max(x.get("peak_bytes_in_use", 0) for x in stats),
    }


def difference(rows: Sequence[dict]) -> float:
    """The most by which a step's loss differs from that of the first mesh, as a part of it."""
    first = rows[0]["losses"]
    return max(abs(x / y - 1) for row in rows for x, y in zip(row["losses"], first, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--shards", type=int, nargs="+", required=True)
    parser.add_argument("--text", help="file or folder to train on")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--implementation")
    parser.add_argument("--out", type=Path, required=True)
    options = vars(parser.parse_args(arguments))
    shards, out = options.pop("shards"), options.pop("out")
    result = record.environment() | {"timing": "wall clock", "devices": len(jax.devices()), "rows": []}
    for of_sequence in shards:
        settings = train_gpt.Settings(**options, sequence_shards=of_sequence)
        row = measure(settings)
        result["rows"].append(row)
        print(row["mesh"], f"{row['step_seconds']:.4f} s a step", f"{row['peak_bytes'] / 2**30:.2f} GiB")
        record.write(result, out)
    result["difference"] = difference(result["rows"])
    print(f"losses differ by at most {result['difference']:.2e}")
    record.write(result, out)


if __name__ == "__main__":
    main()
