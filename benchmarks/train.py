"""Training steps of the GPT example, with our attention, with cuDNN's and with plain attention by XLA.

    python benchmarks/train.py --out benchmarks/results/train_h200.json
    python benchmarks/train.py --table benchmarks/results/train_h200.json      prints it in Markdown

The model, of the size of GPT-2 medium unless flags say otherwise, and its step are examples/gpt.py's and
examples/steps.py's; tokens are random. A step has the same number of tokens at every length, so only the cost
of attention changes. A case marked `remat` recomputes each layer in the backward pass, for all contenders:
without it, plain attention, which keeps the weights of every layer, doesn't fit the GPU at these lengths.

A step's time is wall-clock time from the end of the step before it, with the next step queued. Each round
measures all contenders on one state, in an order of its own, and the median of the rounds counts. Before
that, their gradients of the first layer's projections must agree. Memory is what XLA plans: the state, the
tokens, and all temporaries. A speed-up is the first contender's over another.
"""

import argparse
import dataclasses
import functools
import json
import logging
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
import train_chart
from flax import nnx

import jax_flash

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import gpt
from parallel import ShardedJit
from steps import State, make_optimizer, make_steps

ATTENTION = {
    "jax_flash_cuda": {"attention": jax_flash.flash_attention, "implementation": "cuda"},
    "jax_flash_cuda_fp8": {
        "attention": functools.partial(jax_flash.flash_attention, quantization="fp8"),
        "implementation": "cuda",
    },
    "jax_flash_xla": {"attention": jax_flash.flash_attention, "implementation": "xla"},
    "cudnn": {"attention": jax.nn.dot_product_attention, "implementation": "cudnn"},
    "plain": {"attention": jax.nn.dot_product_attention, "implementation": "xla"},
}
DEFAULT = ("jax_flash_cuda", "cudnn", "plain")

ROUNDS = 5
STEPS = 4  # timed in a round, behind one that isn't and ahead of another
# ‖gradient − first contender's‖ / ‖first contender's‖: bfloat16 gives some 0.02, another mask over 0.5.
AGREEMENT = 0.2


@dataclasses.dataclass(frozen=True)
class Case:
    sequence: int
    batch: int
    remat: bool

    def __str__(self):
        return f"s{self.sequence} b{self.batch}" + (" remat" if self.remat else "")

    def weights_bytes(self, config: gpt.GPTConfig) -> int:
        """What plain attention keeps of its weights for the backward pass.

        They are kept in float32 for the softmax's derivative, and in `dtype` for that of the product.
        """
        size = 4 + jnp.dtype(config.dtype).itemsize
        weights = self.batch * config.heads * self.sequence**2
        return weights * size * (1 if self.remat else config.layers)


class Trainer:
    """A model's parameters and optimizer, from which every contender starts."""

    def __init__(self, config: gpt.GPTConfig):
        self.config = config
        self.parallel = ShardedJit(jax.devices()[:1])
        self.optimizer = make_optimizer(learning_rate=3e-4, weight_decay=0.1, steps=1000)
        parameters = nnx.split(gpt.GPT(config, nnx.Rngs(0)))[1]
        self.count = sum(x.size for x in jax.tree.leaves(parameters))
        # On the host, so that the device holds one state only.
        self._initial = jax.device_get(State(parameters, self.optimizer.init(parameters)))

    def state(self) -> State:
        return self.parallel.copy_to_all(self._initial)

    def tokens(self, case: Case, vocabulary: int) -> jax.Array:
        shape = case.batch, case.sequence + 1
        return self.parallel.split(np.random.default_rng(0).integers(vocabulary, size=shape, dtype=np.int32))

    def compile(self, case: Case, name: str, tokens: jax.Array) -> jax.stages.Compiled:
        """`step(state, tokens) -> state, loss`, with the memory of `state` used again."""
        config = dataclasses.replace(self.config, remat=case.remat, **ATTENTION[name])
        graph = nnx.split(nnx.eval_shape(lambda: gpt.GPT(config, nnx.Rngs(0))))[0]
        train, _ = make_steps(graph, self.optimizer, self.parallel)
        return train.lower(self._initial, tokens).compile()


def measure(trainer: Trainer, case: Case, names: Sequence[str], vocabulary: int) -> list[dict]:
    """A row for each contender: milliseconds of a step, or the error it raised in place of them."""
    tokens = trainer.tokens(case, vocabulary)
    described = {"case": str(case), **dataclasses.asdict(case)}
    rows: dict[str, dict] = {name: described | {"peer": name} for name in names}
    steps, rounds = {}, {}
    expected = None
    for name in names:
        row = rows[name]
        try:
            check_memory(case, name, trainer.config)
            start = time.monotonic()
            step = trainer.compile(case, name, tokens)
            row |= {"compile_seconds": time.monotonic() - start, "memory": planned_bytes(step)}
            state, loss = step(trainer.state(), tokens)
            row["loss"] = float(loss)
            gradient = first_layer_gradient(state)
            del state  # the device holds one at a time
            expected = gradient if expected is None else expected
            check_agreement(gradient, expected)
            steps[name], rounds[name] = step, []
        except Exception as error:  # whatever a contender refuses with is its answer
            row["error"] = record.error(error)
    state = trainer.state() if steps else None
    for order in range(ROUNDS):
        for name in random.Random(order).sample(list(steps), len(steps)):
            try:
                state, seconds = step_seconds(steps[name], state, tokens)
                rounds[name].append(seconds)
            except Exception as error:  # with several steps queued, memory may run out after all
                rows[name]["error"] = record.error(error)
                del steps[name], rounds[name]
                state = trainer.state()
    for name, of_rounds in rounds.items():
        seconds = statistics.median(of_rounds)
        rows[name] |= {
            "milliseconds": 1e3 * seconds,
            "spread": (max(of_rounds) - min(of_rounds)) / seconds,
            "tokens_per_second": case.batch * case.sequence / seconds,
        }
    return list(rows.values())


def first_layer_gradient(state: State) -> np.ndarray:
    """Of query's, key's and value's projections, which depends on all that attention does in every layer.

    Up to a factor: Adam's first moment after one step.
    """
    moment = optax.tree_utils.tree_get(state.optimizer, "mu")
    return np.asarray(moment["blocks"][0]["qkv"]["kernel"][...])


def check_agreement(gradient: np.ndarray, expected: np.ndarray) -> None:
    """Raises ValueError where `gradient` is not `expected` but for rounding."""
    relative = np.linalg.norm(gradient - expected) / np.linalg.norm(expected)
    if not relative <= AGREEMENT:  # NaN too
        raise ValueError(f"its gradient differs from the first one's by {relative:.3g} of its norm")


def step_seconds(step: Callable, state: State, tokens: jax.Array) -> tuple[State, float]:
    """A step's time from the end of the one before it.

    The next step is queued before that end is waited for, so that the host's part, which may take as
    long as a quarter of the device's, goes on beside the device's. Timing starts at an end as well: a clock
    started once all steps were queued would miss what the device did meanwhile.
    """
    ends = []
    state, running = step(state, tokens)
    for _ in range(1 + STEPS):
        state, queued = step(state, tokens)
        running.block_until_ready()
        ends.append(time.perf_counter())
        running = queued
    running.block_until_ready()
    return state, (ends[-1] - ends[0]) / STEPS


def planned_bytes(step: jax.stages.Compiled) -> int:
    """Arguments, results that take no argument's memory, and temporaries."""
    memory: Any = step.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


def check_memory(case: Case, name: str, config: gpt.GPTConfig) -> None:
    """Raises MemoryError where plain attention's weights alone exceed the device: compiling is slow there."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    needed = case.weights_bytes(config)
    if name == "plain" and needed > limit:
        raise MemoryError(f"not tried: its weights take {needed / 1e9:.0f} GB, of {limit / 1e9:.0f} GB")


def speed_ups(rows: Sequence[dict], ours: str) -> list[dict]:
    """For each case that `ours` ran: each other contender's time over its time."""
    found = []
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = {row["peer"]: row for row in rows if row["case"] == case and "milliseconds" in row}
        own = of_case.pop(ours, None)
        if own is not None:
            described = {key: own[key] for key in ("case", "sequence", "batch", "remat")}
            over = {name: row["milliseconds"] / own["milliseconds"] for name, row in of_case.items()}
            found.append(described | {"over": over})
    return found


def table(result: dict) -> str:
    """`result` in Markdown: milliseconds and memory of a step, and speed-ups."""
    _, *others = peers = list(dict.fromkeys(row["peer"] for row in result["rows"]))
    over = {ratio["case"]: ratio["over"] for ratio in result["speed_ups"]}
    titles = [train_chart.label(name) for name in peers]
    titles += [f"over {train_chart.label(name)}" for name in others]
    lines = ["| case | " + " | ".join(titles) + " |", "| --- " * (1 + len(titles)) + "|"]
    for case in dict.fromkeys(row["case"] for row in result["rows"]):
        of_case = {row["peer"]: row for row in result["rows"] if row["case"] == case}
        cells = [_cell(of_case.get(name, {})) for name in peers]
        ratios = (over.get(case, {}).get(name) for name in others)
        cells += ["–" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: dict) -> str:
    if "milliseconds" in row:
        return f"{row['milliseconds']:.1f} ms, {row['memory'] / 1e9:.0f} GB"
    return "out of memory" if train_chart.out_of_memory(row) else "–"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--cases",
        default="1024,4096+remat,16384+remat,4096,16384",
        help="lengths, with +remat behind one whose layers are recomputed (default %(default)s)",
    )
    parser.add_argument(
        "--peers",
        default=",".join(DEFAULT),
        help=f"which to measure, of {','.join(ATTENTION)} (default %(default)s)",
    )
    parser.add_argument("--tokens", type=int, default=16384, help="in a step (default %(default)s)")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument(
        "--vocabulary", type=int, default=50304, help="GPT-2's 50257, to a multiple of 128 (the default)"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--out", type=Path, help="JSON file to write; the chart goes beside it as PNG")
    parser.add_argument("--table", type=Path, help="print this JSON file's table, and measure nothing")
    parser.add_argument(
        "--add", action="store_true", help="keep what --out has of other cases, if it is of this machine"
    )
    options = parser.parse_args(arguments)
    if options.add and not options.out:
        parser.error("--add needs --out")
    options.peers = options.peers.split(",")
    if unknown := set(options.peers) - set(ATTENTION):
        parser.error(f"--peers: {', '.join(sorted(unknown))}; may be {', '.join(ATTENTION)}")
    try:
        options.cases = [_parse_case(text, options.tokens) for text in options.cases.split(",")]
    except ValueError as error:
        parser.error(f"--cases: {error}")
    return options


def _parse_case(text: str, tokens: int) -> Case:
    length, plus, suffix = text.partition("+")
    if plus and suffix != "remat":
        raise ValueError(f"{text}: only +remat may follow a length")
    sequence = int(length)
    if sequence <= 0 or tokens % sequence:
        raise ValueError(f"--tokens {tokens} must be a multiple of the length {sequence}")
    return Case(sequence, tokens // sequence, bool(plus))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    # Peers warn of their own affairs.
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

    config = gpt.GPTConfig(
        layers=options.layers,
        heads=options.heads,
        key_heads=options.heads,
        width=options.width,
        dtype=options.dtype,
        vocabulary=options.vocabulary,
    )
    trainer = Trainer(config)
    described = ("layers", "heads", "width", "dtype", "vocabulary")
    result = record.environment() | {
        "timing": f"wall clock of {STEPS} steps, each behind another, median of {ROUNDS} shuffled rounds",
        "model": {key: getattr(config, key) for key in described} | {"parameters": trainer.count},
        "tokens": options.tokens,
        "rows": [],
    }
    if options.add:
        earlier = record.earlier_rows(options.out, result)
        result["rows"] = [row for row in earlier if row["case"] not in map(str, options.cases)]
    print(record.heading(result))
    print(f"{trainer.count / 1e6:.0f} M parameters, {options.tokens} tokens a step; {result['timing']}")
    for case in options.cases:
        rows = measure(trainer, case, options.peers, options.vocabulary)
        print_case(case, rows)
        result["rows"] += rows
        result["speed_ups"] = speed_ups(result["rows"], options.peers[0])
        if options.out:  # each time, so that a run cut short leaves what it had
            record.write(result, options.out)
    print("\n" + table(result))
    if options.out and result["speed_ups"]:
        print(f"{options.out}, {train_chart.draw(options.out)}")


def print_case(case: Case, rows: Sequence[dict]) -> None:
    print(case)
    for row in rows:
        if "error" in row:
            print(f"    {row['peer']:16}{' '.join(row['error'].split())[:160]}", flush=True)
            continue
        print(
            f"    {row['peer']:16}{row['milliseconds']:9.2f} ms (spread {row['spread']:.1%}), "
            f"{row['tokens_per_second']:,.0f} tokens/s, {row['memory'] / 1e9:.1f} GB, "
            f"loss {row['loss']:.4f}, compiled in {row['compile_seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
