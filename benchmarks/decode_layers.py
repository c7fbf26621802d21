"""A step of decoding in a model of many layers, whose caches are one array: what a layer's attention takes.

    python benchmarks/decode_layers.py --out benchmarks/results/decode_layers_h100.json
    PYTHONPATH=FOLDER python benchmarks/decode_layers.py --peers jax_flash,jax_flash_before     see before.py
    python benchmarks/decode_layers.py --settings "as it is,no clusters" --sizes 8x2048     see tune_decode.py

Each step appends a key and a value to each layer's cache and attends to it, the output being the next layer's
query; nothing else is computed. Steps run in a jitted loop that owns the cache. Layers are written one after
another ("unrolled"), or scanned. Microseconds of a layer are the loop's time, gaps between kernels included,
divided by steps and layers: the median of rounds in which the peers take turns.
"""

import argparse
import functools
import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import record
import rounds
import tune_decode

HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128
STEPS = 16


def unrolled(attend: Callable, layers: int, query: jax.Array, new: jax.Array, cache: Any) -> tuple:
    for layer in range(layers):
        query, cache = attend(query, cache, new, new, layer=layer)
    return query, cache


def scanned(attend: Callable, layers: int, query: jax.Array, new: jax.Array, cache: Any) -> tuple:
    def step(carry, layer):
        return attend(*carry, new, new, layer=layer), None

    return jax.lax.scan(step, (query, cache), jnp.arange(layers))[0]


WAYS = {"unrolled": unrolled, "scanned": scanned}


def loop(package: ModuleType, way: str, layers: int, implementation: str, rotary: Any) -> Callable:
    """A jitted function of query, new keys and cache, which is donated: `STEPS` steps."""
    cos, sin = rotary or (None, None)
    attend = functools.partial(
        package.flash_attention_with_cache, rotary_cos=cos, rotary_sin=sin, implementation=implementation
    )

    @functools.partial(jax.jit, donate_argnums=2)
    def run(query, new, cache):
        def step(_, carry):
            return WAYS[way](attend, layers, carry[0], new, carry[1])

        return jax.lax.fori_loop(0, STEPS, step, (query, cache))

    return run


def lengths_of(batch: int, most: int, kind: str) -> np.ndarray:
    """Keys of each sequence before a step: all have `most`, or a number drawn from 1 to `most`, or one has it
    and the others have 64 at most."""
    if kind == "full":
        return np.full(batch, most)
    if kind == "uniform":
        return np.random.default_rng(0).integers(1, most + 1, batch)
    return np.where(np.arange(batch) == batch // 2, most, min(64, most))


def stopwatch(
    package: ModuleType, way: str, size: tuple[int, int], options: argparse.Namespace
) -> Callable[[], float]:
    """Compiles the loop. Returns a function that runs it once, and returns the microseconds of a layer."""
    (batch, capacity), layers = size, options.layers
    angles = jnp.outer(jnp.arange(capacity), 1e4 ** -jnp.linspace(0, 1, HEAD_DIM // 2, endpoint=False))
    rotary = (jnp.cos(angles), jnp.sin(angles)) if options.rotary else None
    query = jnp.ones((batch, 1, HEADS, HEAD_DIM), jnp.bfloat16)
    new = jnp.ones((batch, 1, KEY_HEADS, HEAD_DIM), jnp.bfloat16)
    dtype = jnp.dtype(options.cache_dtype)
    empty = package.KVCache.create(batch, capacity, KEY_HEADS, HEAD_DIM, dtype, layers=layers)
    of_sequences = jnp.asarray(lengths_of(batch, capacity - STEPS, options.lengths), jnp.int32)
    lengths = jnp.broadcast_to(of_sequences, empty.lengths.shape)
    caches = [package.KVCache(empty.key, empty.value, lengths)]
    jitted = loop(package, way, layers, options.implementation, rotary)
    run = jitted.lower(query, new, caches[0]).compile()

    def once() -> float:
        cache = caches.pop()
        cache = package.KVCache(cache.key, cache.value, lengths + 0)  # the loop takes what it is given
        jax.block_until_ready(cache)
        start = time.perf_counter()
        _, after = jax.block_until_ready(run(query, new, cache))
        caches.append(after)
        return 1e6 * (time.perf_counter() - start) / STEPS / layers

    once()
    return once


def stopwatches(
    peers: Sequence[str],
    settings: Sequence[str],
    way: str,
    size: tuple[int, int],
    options: argparse.Namespace,
) -> dict[str, Callable[[], float]]:
    """A stopwatch for each package, or, if there are settings, for each of them with our package."""
    if not settings:
        return {name: stopwatch(importlib.import_module(name), way, size, options) for name in peers}
    found = {}
    for setting in settings:
        jax.clear_caches()  # of what was traced under another setting
        with tune_decode.set_to(tune_decode.SETTINGS[setting]):
            found[setting] = stopwatch(importlib.import_module("jax_flash"), way, size, options)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", default="jax_flash", help="packages, with commas between them")
    parser.add_argument("--settings", help="of tune_decode.py, with commas between them")
    parser.add_argument("--implementation", default="cuda")
    parser.add_argument("--cache-dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rotary", action="store_true", help="rotate queries and new keys")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--sizes",
        default="1x1024,8x2048,16x4096",
        help="sequences, and tokens that the cache of each has room for; by default %(default)s",
    )
    parser.add_argument("--lengths", choices=("full", "uniform", "one long"), default="full")
    parser.add_argument("--ways", default=",".join(WAYS), help="by default all: %(default)s")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    result = record.environment() | {"timing": "wall clock", "rows": []}
    peers = options.peers.split(",")
    settings = options.settings.split(",") if options.settings else []
    if settings and options.peers != parser.get_default("peers"):
        parser.error("--settings compares plans of jax_flash, so there can be no other --peers")
    if unknown := set(settings) - set(tune_decode.SETTINGS):
        parser.error(f"--settings: {', '.join(sorted(unknown))}; may be {', '.join(tune_decode.SETTINGS)}")
    for size in options.sizes.split(","):
        batch, capacity = map(int, size.split("x"))
        for way in options.ways.split(","):
            case = f"b{batch} s{capacity} h{HEADS}/{KEY_HEADS} d{HEAD_DIM}, {options.layers} layers {way}"
            case += ", rotary" * options.rotary
            case += f", {options.cache_dtype}" * (options.cache_dtype != "bfloat16")
            case += f", {options.lengths} lengths" * (options.lengths != "full")
            once = stopwatches(peers, settings, way, (batch, capacity), options)
            times = {name: [] for name in once}
            for order in rounds.orders(list(once), options.rounds):
                for name in order:
                    times[name].append(once[name]())
            for name in once:
                row = {"case": case, "peer": name, "microseconds_of_a_layer": statistics.median(times[name])}
                result["rows"].append(row)
                print(f"{case} {name}: {row['microseconds_of_a_layer']:.2f} µs a layer", flush=True)
    if options.out:
        record.write(result, options.out)


if __name__ == "__main__":
    main()
