"""The two passes of a call as compiled programs, and their times in shuffled rounds."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import rounds
import timing

Programs = dict[str, tuple]
"""By pass, "forward" and "backward" alone: a compiled function, and its arguments."""


def compiled(attend: Callable[..., jax.Array], given: Sequence[Any], inputs: Sequence[Any]) -> Programs:
    """Of `attend(*given, *inputs)`, with gradients of all inputs."""
    forward = jax.jit(attend).lower(*given, *inputs).compile()
    out, vjp = jax.vjp(lambda *inputs: attend(*given, *inputs), *inputs)
    d_out = jax.random.normal(jax.random.key(3), out.shape, out.dtype)
    backward = jax.jit(lambda vjp, d_out: vjp(d_out)).lower(vjp, d_out).compile()
    return {"forward": (forward, *given, *inputs), "backward": (backward, vjp, d_out)}


def milliseconds(calls: Mapping[str, Programs], of_rounds: int) -> dict[str, dict[str, float]]:
    """By pass and call the median kernel time. All calls take part in each round."""
    found = {}
    for direction in ("forward", "backward"):
        times: dict[str, list[float]] = {name: [] for name in calls}
        for order in rounds.orders(list(times), of_rounds):
            for name in order:
                times[name].append(timing.milliseconds(*calls[name][direction]))
        found[direction] = {name: statistics.median(x) for name, x in times.items()}
    return found
