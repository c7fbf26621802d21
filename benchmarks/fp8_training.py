"""Trains the GPT example with attention's forward pass in 16 bits and in 8, from several seeds.

    python benchmarks/fp8_training.py --out benchmarks/results/fp8_training_h100.json

Each row has a seed, a peer, the training loss as means over `--mean-of` steps, and the
losses on held-out text. What matters is whether the curves of peers differ by more than those of seeds do:
`differences` prints both. benchmarks/train.py has the time of a step.

`--peers` adds calls whose forward pass is in 8 bits and whose gradients are others. They tell which part of
the difference comes from where: "exact backward" has the gradients of attention in 16 bits, with its own
output and log-sum-exp; "rounded backward" those of attention in 16 bits to the rounded numbers.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import record

import jax_flash
from jax_flash import _float8

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import train_gpt

Attention = Callable[..., jax.Array]
Arrays = tuple[jax.Array, jax.Array, jax.Array]


def with_gradients_to(changed: Callable[..., Arrays]) -> Attention:
    """Attention with a forward pass in 8 bits, and the gradients of attention in 16 bits to what `changed`
    makes of query, key and value."""

    def attention(query: jax.Array, key: jax.Array, value: jax.Array, **options) -> jax.Array:
        def in_16_bits(*arrays: jax.Array) -> jax.Array:
            return jax_flash.flash_attention(*changed(*arrays), **options)

        @jax.custom_vjp
        def attend(*arrays: jax.Array) -> jax.Array:
            return jax_flash.flash_attention(*arrays, quantization="fp8", **options)

        attend.defvjp(
            lambda *arrays: (attend(*arrays), arrays),
            lambda arrays, d_out: jax.vjp(in_16_bits, *arrays)[1](d_out),
        )
        return attend(query, key, value)

    return attention


def rounded(query: jax.Array, key: jax.Array, value: jax.Array) -> Arrays:
    """What the kernel in 8 bits computes from, in query's dtype, as if rounding had the derivative 1.

    Query and key are rotated, which changes no score.
    """
    quantized = jax_flash.quantize(*map(jax.lax.stop_gradient, (query, key, value)), incoherent=True)
    signs = _float8.fixed_signs(query.shape[-1])
    found = []
    for x, name in ((query, "query"), (key, "key"), (value, "value")):
        eight = getattr(quantized, name).astype(jnp.float32)
        descales = getattr(quantized, f"{name}_descale")
        eight = eight * _float8.of_rows(descales, eight.shape[1], eight.shape[2])
        exact = x if name == "value" else _float8.rotated(x, signs)
        exact = exact.astype(jnp.float32)
        found.append((exact + jax.lax.stop_gradient(eight - exact)).astype(x.dtype))
    return tuple(found)


ATTENTIONS: dict[str, Attention] = {
    "bfloat16": jax_flash.flash_attention,
    "float8_e4m3fn": functools.partial(jax_flash.flash_attention, quantization="fp8"),
    "float8_e4m3fn, exact backward": with_gradients_to(lambda *arrays: arrays),
    "float8_e4m3fn, rounded backward": with_gradients_to(rounded),
}
"""By peer."""


def train(settings: train_gpt.Settings, attention: Attention) -> train_gpt.report.History:
    config = train_gpt.model_config

    def with_attention(*arguments):
        return dataclasses.replace(config(*arguments), attention=attention)

    with mock.patch.object(train_gpt, "model_config", with_attention):
        return train_gpt.train(settings)


def measure(settings: train_gpt.Settings, peer: str, mean_of: int) -> dict:
    history = train(settings, ATTENTIONS[peer])
    losses = history.training
    return {
        "case": f"{settings.layers} layers, width {settings.width}, {settings.heads} heads, "
        f"{settings.batch_size} × {settings.sequence_length} bytes, seed {settings.seed}",
        "peer": peer,
        "seed": settings.seed,
        "steps_of_a_mean": mean_of,
        "losses": [statistics.fmean(losses[i : i + mean_of]) for i in range(0, len(losses), mean_of)],
        "validation": {str(step): loss for step, loss in history.validation.items()},
    }


def differences(rows: Sequence[dict]) -> str:
    """By how much curves differ: of each peer and of 16 bits, as means over seeds, and of seeds, in their
    standard deviation. A line for each peer, over the second half of training."""
    curves: dict[str, list[list[float]]] = {}
    for row in rows:
        curves.setdefault(row["peer"], []).append(row["losses"])
    means = {peer: [statistics.fmean(x) for x in zip(*of, strict=True)] for peer, of in curves.items()}
    sixteen, sixteen_mean = curves.pop("bfloat16"), means.pop("bfloat16")
    half = len(sixteen_mean) // 2
    of_seeds = [float("nan")]
    if len(sixteen) > 1:
        of_seeds = [statistics.stdev(x) for x in zip(*sixteen, strict=True)][half:]
    lines = []
    for peer, mean in means.items():
        apart = [eight - of_16 for of_16, eight in zip(sixteen_mean, mean, strict=True)][half:]
        lines.append(
            f"{peer} less bfloat16 {statistics.fmean(apart):+.4f}, at most {max(map(abs, apart)):.4f}; "
            f"standard deviation of seeds {statistics.fmean(of_seeds):.4f}"
        )
    return "\n".join(lines)


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
    parser.add_argument("--peers", nargs="+", default=["bfloat16", "float8_e4m3fn"], choices=ATTENTIONS)
    parser.add_argument("--mean-of", type=int, default=50, help="steps to a loss that is kept")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    result = record.environment() | {"rows": []}
    del result["timing"]
    for seed in options.seeds:
        for peer in options.peers:
            with tempfile.TemporaryDirectory() as folder:
                settings = train_gpt.Settings(
                    output_dir=folder,
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
                result["rows"].append(measure(settings, peer, options.mean_of))
            record.write(result, options.out)
    if "bfloat16" in options.peers:
        print(differences(result["rows"]))


if __name__ == "__main__":
    main()
