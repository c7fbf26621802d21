"""Continuous batching: sequences join and leave between steps, and share the pages of one cache."""

import collections
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import paged_step
from loading import Model
from paged_step import FROM_LAST_STEP, RowWork
from pages import PagePool, PrefixCache
from workload import Clock, Completion, Request


@dataclasses.dataclass(frozen=True)
class Capacity:
    """What an engine has room for."""

    rows: int  # sequences that run at once
    step_tokens: int  # of a step that has a part of a prompt
    pages: int
    page_size: int  # in tokens
    pages_per_sequence: int

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.step_tokens < self.rows:
            raise ValueError(
                f"a step needs a token for each of {self.rows} rows, got step_tokens={self.step_tokens}"
            )

    def pages_of(self, request: Request) -> int:
        """Pages for all of its tokens but the last, whose key nothing attends to."""
        return -(-(len(request.prompt) + request.tokens - 1) // self.page_size)


@dataclasses.dataclass
class _Running:
    """A sequence in a row of the engine."""

    completion: Completion
    row: int
    pages: list[int]
    written: int  # tokens whose keys are in the pages once the steps so far have run
    sampled: int = 0  # tokens that these steps give

    @property
    def request(self) -> Request:
        return self.completion.request

    def work(self, tokens: int) -> RowWork:
        """Its part of a step: of its prompt at most so many tokens, or else the newest token."""
        part = list(self.request.prompt[self.written : self.written + tokens]) or [FROM_LAST_STEP]
        samples = self.written + len(part) >= len(self.request.prompt)
        return RowWork(self.row, part, self.written, self.pages, samples)


class Engine:
    """Greedy decoding of requests, as many at once as `capacity` has room for.

    A step takes one token of each sequence that decodes, and fills up with parts of prompts. It has one of
    two static sizes: `rows` tokens if no prompt has a part in it, else `step_tokens`. A request gets all
    pages that it can need when it starts, so none has to stop halfway. Until then it waits, first come, first
    served. It also waits for pages of its prompt that a running sequence is about to fill.

    The number of tokens of each request is known, so the host prepares a step without the results of the one
    before. `collect` fetches them while the device is busy with the next step.
    """

    def __init__(self, model: Model, capacity: Capacity):
        self._model, self._capacity = model, capacity
        self.pool = PagePool(capacity.pages)
        self.prefixes = PrefixCache(self.pool, capacity.page_size)
        self.shared_tokens = 0  # of prompts, that were not computed again
        # On a device by name, as a step's results are: a step would be compiled again for others.
        self._pages, self._last = jax.device_put(
            (
                paged_step.empty_pages(model.config, capacity.pages, capacity.page_size),
                jnp.zeros(capacity.rows, jnp.int32),
            ),
            jax.local_devices()[0],
        )
        self._waiting: collections.deque[Completion] = collections.deque()
        self._running: list[_Running] = []  # in the order of their start
        self._free_rows = list(range(capacity.rows))
        self._results: collections.deque[tuple[jax.Array, list[tuple[int, Completion]]]] = collections.deque()
        for size in {capacity.rows, capacity.step_tokens}:  # compile both
            self._dispatch([], size)
        jax.block_until_ready(self._pages)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(self, request: Request) -> Completion:
        """Queue a request. Its completion fills up as its tokens are collected.

        Raises:
          ValueError: it would never fit.
        """
        capacity = self._capacity
        if not request.prompt or request.tokens < 1:
            raise ValueError("a request needs a prompt and at least 1 token to generate")
        needed, limit = capacity.pages_of(request), min(capacity.pages, capacity.pages_per_sequence)
        if needed > limit:
            raise ValueError(
                f"a request of {len(request.prompt)} tokens that asks for {request.tokens} more needs "
                f"{needed} pages of {capacity.page_size} tokens; one may have {limit}"
            )
        completion = Completion(request)
        self._waiting.append(completion)
        return completion

    def step(self) -> None:
        """Start what there is room for, and dispatch one step of what runs."""
        while self._waiting and self._free_rows and self._start(self._waiting[0]):
            self._waiting.popleft()
        if not self._running:  # submit() refuses what doesn't fit an empty engine
            raise RuntimeError(f"no request can start, though none runs: {self.pool.free} pages are free")
        work, size = self._plan()
        self._dispatch([of_row for _, of_row in work], size)
        samplers = []
        for running, of_row in work:
            running.written += len(of_row.tokens)
            if running.written <= len(running.request.prompt):
                self.prefixes.add(running.request.prompt[: running.written], running.pages)
            if of_row.samples:
                running.sampled += 1
                samplers.append((running.row, running.completion))
            if running.sampled == running.request.tokens:
                self._finish(running)
        self._results.append((self._last, samplers))

    def collect(self, clock: Clock, keep: int = 0) -> None:
        """Fetch the tokens of all steps but the newest `keep`."""
        while len(self._results) > keep:
            tokens, samplers = self._results.popleft()
            values = jax.device_get(tokens).tolist()
            now = clock.now()
            for row, completion in samplers:
                if not completion.tokens:
                    completion.first_at = now
                completion.tokens.append(values[row])
                completion.finished_at = now

    def _start(self, completion: Completion) -> bool:
        """Give the request a row and pages, if there are enough and no page it can share is under way."""
        request = completion.request
        pages = self.prefixes.share(request.prompt)
        shared = len(pages) * self._capacity.page_size
        missing = self._capacity.pages_of(request) - len(pages)
        is_under_way = self._is_under_way(request.prompt, shared)
        if not is_under_way:
            self.prefixes.evict(missing)
        if is_under_way or missing > self.pool.free:
            self.pool.release(pages)
            return False
        self.shared_tokens += shared
        pages += self.pool.allocate(missing)
        self._running.append(_Running(completion, self._free_rows.pop(0), pages, shared))
        return True

    def _is_under_way(self, prompt: bytes, shared: int) -> bool:
        """Whether a running sequence is about to fill the page behind the `shared` tokens of `prompt`."""
        end = shared + self._capacity.page_size
        return end < len(prompt) and any(
            running.written < end and running.request.prompt.startswith(prompt[:end])
            for running in self._running
        )

    def _plan(self) -> tuple[list[tuple[_Running, RowWork]], int]:
        """What each sequence does in the next step, and the step's size."""
        capacity = self._capacity
        prefilling = [r for r in self._running if r.written < len(r.request.prompt)]
        work = [(r, r.work(1)) for r in self._running if r.written >= len(r.request.prompt)]
        left = capacity.step_tokens - len(work)
        for running in prefilling:
            if left:
                of_row = running.work(left)
                work.append((running, of_row))
                left -= len(of_row.tokens)
        return work, capacity.step_tokens if prefilling else capacity.rows

    def _dispatch(self, work: list[RowWork], size: int) -> None:
        c = self._capacity
        batch = paged_step.pack(work, size, c.rows, c.pages, c.page_size, c.pages_per_sequence)
        self._pages, self._last = paged_step.run(
            self._model.graph, self._model.parameters, self._pages, self._last, batch
        )

    def _finish(self, running: _Running) -> None:
        """Free its row and pages. Steps run one after another, so the next one may write to the pages."""
        self._running.remove(running)
        self._free_rows.append(running.row)
        self.pool.release(running.pages)


def serve(engine: Engine, requests: Sequence[Request], clock: Clock) -> list[Completion]:
    """Serve requests as they arrive. Those that can't fit are refused; the others are not held up by it."""
    arriving = collections.deque(sorted(range(len(requests)), key=lambda i: requests[i].arrival))
    completions: dict[int, Completion] = {}
    while arriving or engine.has_work:
        while arriving and requests[arriving[0]].arrival <= clock.now():
            i = arriving.popleft()
            try:
                completions[i] = engine.submit(requests[i])
            except ValueError as error:
                completions[i] = Completion(requests[i], refusal=str(error))
        if engine.has_work:
            engine.step()
            engine.collect(clock, keep=1)
        else:
            engine.collect(clock)
            if arriving:
                clock.wait_until(requests[arriving[0]].arrival)
    engine.collect(clock)
    return [completions[i] for i in range(len(requests))]
