"""How long what PyTorch runs on a GPU takes, and what its results record of the run."""

import datetime
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from measured_commit import measured_commit

ITERATIONS = 7
WARM_UP_SECONDS = 0.1  # so that clocks settle, as in timing.py
CALLS = 5  # between two events


def environment() -> dict:
    return {
        "commit": measured_commit(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "timing": f"CUDA events around {CALLS} calls, median of {ITERATIONS}"
        f" after {WARM_UP_SECONDS} s of the same",
    }


def milliseconds(function: Callable[[], Any]) -> float:
    """Of one call, with others in flight: that of its kernels, if it takes less to launch than to run."""
    end = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < end:
        for _ in range(CALLS):
            function()
        torch.cuda.synchronize()
    return statistics.median(_of_events(function, CALLS) for _ in range(ITERATIONS))


def graph_milliseconds(function: Callable[[], Any]) -> float:
    """Of one call within a CUDA graph of several, which costs no launch on the host."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            function()
    return milliseconds(graph.replay) / CALLS


def _of_events(function: Callable[[], Any], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    function()  # the host is ahead of the GPU from here on
    start.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls
