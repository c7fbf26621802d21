"""Requests that arrive at random, and the figures of a run that served them."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue by `tokens` bytes. The model has no token that ends a text."""

    prompt: bytes
    tokens: int
    arrival: float  # seconds from the start of the run


@dataclasses.dataclass
class Completion:
    """What a server gave for a request, and when."""

    request: Request
    tokens: list[int] = dataclasses.field(default_factory=list)
    first_at: float = 0.0  # when the first token was there
    finished_at: float = 0.0  # when all were
    refusal: str | None = None


class Clock(Protocol):
    def now(self) -> float:
        """Seconds from the start of the run."""
        ...

    def wait_until(self, moment: float) -> None: ...


class WallClock:
    def __init__(self):
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def wait_until(self, moment: float) -> None:
        time.sleep(max(moment - self.now(), 0))


def random_requests(
    text: np.ndarray,
    *,
    count: int,
    rate: float,
    prefix_length: int,
    prompt_length: int,
    tokens: int,
    seed: int,
) -> list[Request]:
    """`count` requests in the order of their arrival.

    Args:
      text: uint8, from which prompts are cut.
      count: how many.
      rate: requests per second, on average, at independent moments; 0: all arrive at once.
      prefix_length: bytes that all prompts have in common, at their start.
      prompt_length: each has 1 to `prompt_length` bytes of its own after them.
      tokens: the most bytes to generate for one. Most requests ask for fewer: the number is exponentially
        distributed, with a quarter of `tokens` as its mean before it is cut off.
      seed: of all that is random.
    """
    if len(text) <= prefix_length + prompt_length:
        raise ValueError(
            f"the held-out text has {len(text)} bytes: too few for prompts of up to "
            f"{prefix_length + prompt_length}"
        )
    random = np.random.default_rng(seed)
    moments = np.cumsum(random.exponential(1 / rate, count)) if rate else np.zeros(count)
    prefix = text[:prefix_length].tobytes()
    requests = []
    for moment in moments.tolist():
        own = int(random.integers(1, prompt_length, endpoint=True))
        start = int(random.integers(len(text) - own))
        prompt = prefix + text[start : start + own].tobytes()
        asked = min(1 + int(random.exponential(tokens / 4)), tokens)
        requests.append(Request(prompt, asked, moment))
    return requests


def figures(completions: Sequence[Completion]) -> dict[str, float]:
    """Throughput and latencies of the requests that were served, in seconds."""
    served = [completion for completion in completions if completion.refusal is None]
    if not served:
        raise ValueError("no request was served")
    begin = min(completion.request.arrival for completion in served)
    end = max(completion.finished_at for completion in served)
    latency = [completion.finished_at - completion.request.arrival for completion in served]
    first = [completion.first_at - completion.request.arrival for completion in served]
    return {
        "tokens_per_second": sum(len(completion.tokens) for completion in served) / (end - begin),
        "latency_mean": float(np.mean(latency)),
        "latency_p95": float(np.percentile(latency, 95)),
        "first_token_mean": float(np.mean(first)),
        "first_token_p95": float(np.percentile(first, 95)),
    }
