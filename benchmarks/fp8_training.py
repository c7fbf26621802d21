"""Trains the GPT example with attention's forward pass in 16 bits and in 8, from several seeds.

    python benchmarks/fp8_training.py --out benchmarks/results/fp8_training_h100.json

Each row has a seed, a dtype of the products, the training loss as means over `--mean-of` steps, and the
losses on held-out text. What matters is whether the two dtypes' curves differ by more than those of seeds do:
`differences` prints both. benchmarks/train.py has the time of a step.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import record

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import train_gpt

QUANTIZATIONS = {"bfloat16": None, "float8_e4m3fn": "fp8"}


def measure(settings: train_gpt.Settings, dtype: str, mean_of: int) -> dict:
    history = train_gpt.train(settings)
    losses = history.training
    return {
        "case": f"{settings.layers} layers, width {settings.width}, {settings.heads} heads, "
        f"{settings.batch_size} × {settings.sequence_length} bytes, seed {settings.seed}",
        "peer": dtype,
        "seed": settings.seed,
        "steps_of_a_mean": mean_of,
        "losses": [statistics.fmean(losses[i : i + mean_of]) for i in range(0, len(losses), mean_of)],
        "validation": {str(step): loss for step, loss in history.validation.items()},
    }


def differences(rows: Sequence[dict]) -> str:
    """By how much curves differ: dtypes' means over seeds, and seeds, in their standard deviation."""
    curves = {peer: [row["losses"] for row in rows if row["peer"] == peer] for peer in QUANTIZATIONS}
    means = {peer: [statistics.fmean(x) for x in zip(*of, strict=True)] for peer, of in curves.items()}
    of_dtypes = [eight - sixteen for sixteen, eight in zip(*means.values(), strict=True)]
    (sixteen, _) = curves.values()
    of_seeds = (
        [statistics.stdev(x) for x in zip(*sixteen, strict=True)] if len(sixteen) > 1 else [float("nan")]
    )
    half = len(of_dtypes) // 2
    return (
        f"second half: 8 bits less 16 bits {statistics.fmean(of_dtypes[half:]):+.4f}, at most "
        f"{max(map(abs, of_dtypes[half:])):.4f}; standard deviation of seeds "
        f"{statistics.fmean(of_seeds[half:] or of_seeds):.4f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--mean-of", type=int, default=50, help="steps to a loss that is kept")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    result = record.environment() | {"rows": []}
    del result["timing"]
    for seed in options.seeds:
        for dtype, quantization in QUANTIZATIONS.items():
            with tempfile.TemporaryDirectory() as folder:
                settings = train_gpt.Settings(
                    output_dir=folder,
                    quantization=quantization,
                    dtype="bfloat16",
                    layers=options.layers,
                    heads=options.heads,
                    width=options.width,
                    sequence_length=options.sequence_length,
                    batch_size=options.batch_size,
                    steps=options.steps,
                    learning_rate=1e-3,
                    seed=seed,
                    sample_length=8,
                )
                result["rows"].append(measure(settings, dtype, options.mean_of))
            record.write(result, options.out)
    print(differences(result["rows"]))


if __name__ == "__main__":
    main()
