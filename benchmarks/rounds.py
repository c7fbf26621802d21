"""Measures contenders on a case in shuffled rounds, for attention.py, forward.py and backward.py."""

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import contenders
import jax
import jax.numpy as jnp
import record

Name = TypeVar("Name")  # of a contender

ROUNDS = 3
# ‖result − first contender's‖ / ‖first contender's‖: rounding gives under 0.01, another mask over 0.1.
AGREEMENT = 0.03


def method(timing: str, rounds: int = ROUNDS) -> str:
    """How `measure` measures what `timing` says of a single figure, in words."""
    return f"{timing} in each of {rounds} shuffled rounds, whose median counts"


def measure(
    names: Sequence[Name],
    prepare: Callable[[Name], tuple[Any, Any]],
    figures: Callable[[Any], dict[str, float]],
    rounds: int = ROUNDS,
) -> dict[Name, dict]:
    """The figures of each contender, or the error that it raised.

    `prepare` returns what `figures` measures, and its results, which must agree with the first contender's.
    Each round has an order of its own, since the chip's clock depends on what ran before; the median of the
    rounds counts.
    """
    found: dict[Name, dict] = {name: {} for name in names}
    runs, measured = {}, {}
    expected = None
    for name in names:
        try:
            runs[name], results = prepare(name)
            if name not in contenders.UNSCALED:
                expected = results if expected is None else expected
                jax.tree.map(check_agreement, results, expected)
            measured[name] = []
        except Exception as error:  # whatever a contender refuses with is its answer
            found[name]["error"] = record.error(error)
    for order in orders(list(measured), rounds):
        for name in order:
            measured[name].append(figures(runs[name]))
    for name, of_rounds in measured.items():
        found[name] |= {key: statistics.median(figure[key] for figure in of_rounds) for key in of_rounds[0]}
    return found


def orders(names: Sequence[Name], rounds: int) -> list[list[Name]]:
    """The order of each round: shuffled, and every second one the reverse of the one before.

    So of two contenders each comes first equally often.
    """
    shuffled = [random.Random(pair).sample(names, len(names)) for pair in range((rounds + 1) // 2)]
    return [order for first in shuffled for order in (first, first[::-1])][:rounds]


def check_agreement(result: jax.Array, expected: jax.Array) -> None:
    """Raises ValueError where `result` is not `expected` but for rounding."""
    refuse_difference(float(relative_difference(result, expected)))


def refuse_difference(relative: float) -> None:
    """Raises ValueError where `relative`, a part of a result's norm, is more than rounding."""
    if not relative <= AGREEMENT:  # NaN too
        raise ValueError(f"its result differs from the first one's by {relative:.3g} of its norm")


@jax.jit
def relative_difference(result: jax.Array, expected: jax.Array) -> jax.Array:
    """‖result − expected‖ / ‖expected‖."""
    result, expected = (x.astype(jnp.float32).ravel() for x in (result, expected))
    return jnp.linalg.norm(result - expected) / jnp.linalg.norm(expected)
