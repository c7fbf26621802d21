"""How long a jitted call takes: on a GPU its kernels, without or with the gaps between them."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

ITERATIONS = 7
WARM_UP = 2
WARM_UP_SECONDS = 0.1  # on a GPU, so that clocks settle
CALLS_IN_FLIGHT = 50


def method() -> str:
    """How `milliseconds` measures on this machine, in words."""
    if jax.default_backend() != "gpu":
        return f"wall clock, median of {ITERATIONS}"
    if _profiler() is not None:
        return f"kernel time by CUPTI, median of {ITERATIONS} after {WARM_UP_SECONDS} s of the same"
    return f"wall clock of {ITERATIONS} calls in flight at once, divided by {ITERATIONS}; least of 3"


def milliseconds(function: Callable, *args: jax.Array) -> float:
    """Time of one call of `function`, which is jitted unless it is already jitted or compiled.

    A GPU runs the function for `WARM_UP_SECONDS` first, so that its clock doesn't depend on what ran before.
    """
    function = _jitted(function)
    _warm_up(function, args)
    if jax.default_backend() != "gpu":
        return statistics.median(_wall_clock(function, args, 1) for _ in range(ITERATIONS))
    profiler = _profiler()
    if profiler is None:
        # The queue never runs empty, so what launching costs on the host is hidden.
        return min(_wall_clock(function, args, ITERATIONS) for _ in range(3))
    _, times = profiler.measure(function, iterations=ITERATIONS)(*args)
    if times is None:
        raise RuntimeError("it launched no kernel")
    return statistics.median(times)


def span_milliseconds(function: Callable, *args: jax.Array, calls: int = CALLS_IN_FLIGHT) -> float:
    """Time of one call of `function`, jitted and warm, with the gaps between its kernels.

    So many calls are in flight at once. The result is the device's time where the host launches kernels
    faster than they run, and the host's time elsewhere.
    """
    function = _jitted(function)
    for _ in range(WARM_UP):
        jax.block_until_ready(function(*args))
    return min(_wall_clock(function, args, calls) for _ in range(ITERATIONS))


Events = list[tuple[float, float]]
"""Start and end of what ran on a GPU, in milliseconds."""


def profile(function: Callable, *args: jax.Array) -> list[Events]:
    """The kernels and copies of each of `ITERATIONS` calls of `function`, all of which are in flight at once.

    A process uses this or `milliseconds`: two profilers in one don't go together.
    """
    function = _jitted(function)
    _warm_up(function, args)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([function(*args) for _ in range(ITERATIONS)])
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        return by_call(device_events(planes), ITERATIONS)


def device_events(planes: Iterable[Any]) -> Iterator[tuple[float, float]]:
    """What ran in the streams of a profile's GPUs, whose times are in nanoseconds."""
    lines = (line for plane in planes if "/device:GPU" in plane.name for line in plane.lines)
    for line in lines:
        if line.name.startswith("Stream"):
            for event in line.events:
                yield 1e-6 * event.start_ns, 1e-6 * (event.start_ns + event.duration_ns)


def by_call(events: Iterable[tuple[float, float]], calls: int) -> list[Events]:
    """The events of each of so many calls, which ran one after the other."""
    ordered = sorted(events)
    of_call, rest = divmod(len(ordered), calls)
    if rest or not of_call:
        raise RuntimeError(f"{len(ordered)} kernels and copies of {calls} calls in the profile")
    return [ordered[i : i + of_call] for i in range(0, len(ordered), of_call)]


def sum_and_period(short: list[Events], long: list[Events], more: int, steps: int) -> tuple[float, float]:
    """Of a step, from calls of two programs: the second has `more` steps than the first, `steps` in all.

    Returns the sum over the step's kernels, and the time from a step's start to the next one's. That has what
    kernels wait for each other and for being launched. What a program does ahead of its steps doesn't count.
    """
    of_step, rest = divmod(len(long[0]) - len(short[0]), more)
    if rest or of_step < 1:
        raise RuntimeError(f"{len(long[0])} and {len(short[0])} kernels and copies differ by no whole steps")
    sums = [
        statistics.median(sum(end - start for start, end in call) for call in calls)
        for calls in (short, long)
    ]
    periods = [(call[-of_step][0] - call[-of_step * steps][0]) / (steps - 1) for call in long]
    return (sums[1] - sums[0]) / more, statistics.median(periods)


def _warm_up(function: Callable, args: tuple[jax.Array, ...]) -> None:
    """Compiles the function, and on a GPU runs it for `WARM_UP_SECONDS`."""
    for _ in range(WARM_UP):
        jax.block_until_ready(function(*args))
    if jax.default_backend() == "gpu":
        end = time.perf_counter() + WARM_UP_SECONDS
        while time.perf_counter() < end:
            jax.block_until_ready([function(*args) for _ in range(ITERATIONS)])


def _jitted(function: Callable) -> Callable:
    return function if isinstance(function, (jax.stages.Wrapped, jax.stages.Compiled)) else jax.jit(function)


def _wall_clock(function, args, calls: int) -> float:
    start = time.perf_counter()
    jax.block_until_ready([function(*args) for _ in range(calls)])
    return (time.perf_counter() - start) / calls * 1e3


def _profiler():
    """JAX's access to CUPTI; None where this JAX has none."""
    try:
        from jax.experimental.mosaic.gpu import profiler
    except ImportError:
        return None
    return profiler if hasattr(profiler, "measure") else None
