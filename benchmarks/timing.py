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


def device_milliseconds(function: Callable, *args: jax.Array) -> tuple[float, float]:
    """Of one call on the GPU: the sum over its kernels and copies, and the time from the start of the first one to
    the end of the last.

    That has what kernels wait for each other and for being launched, once; the host counts only if it launches them
    too slowly. A process uses this or `milliseconds`: two profilers in one don't go together.
    """
    function = _jitted(function)
    _warm_up(function, args)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(ITERATIONS):
                jax.block_until_ready(function(*args))
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        sums, spans = zip(*sums_and_spans(device_events(planes), ITERATIONS), strict=True)
        return 1e-6 * statistics.median(sums), 1e-6 * statistics.median(spans)


def device_events(planes: Iterable[Any]) -> Iterator[tuple[float, float]]:
    """Start and end, in nanoseconds, of what ran in the streams of a profile's GPUs."""
    lines = (line for plane in planes if "/device:GPU" in plane.name for line in plane.lines)
    for line in lines:
        if line.name.startswith("Stream"):
            yield from ((event.start_ns, event.start_ns + event.duration_ns) for event in line.events)


def sums_and_spans(events: Iterable[tuple[float, float]], calls: int) -> Iterator[tuple[float, float]]:
    """Of each of so many calls, which ran one after the other: the sum, and from the first start to the last end."""
    ordered = sorted(events)
    of_call, rest = divmod(len(ordered), calls)
    if rest or not of_call:
        raise RuntimeError(f"{len(ordered)} kernels and copies of {calls} calls in the profile")
    for i in range(0, len(ordered), of_call):
        call = ordered[i : i + of_call]
        yield sum(end - start for start, end in call), max(end for _, end in call) - call[0][0]


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
