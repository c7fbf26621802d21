"""Batch-at-a-time decoding, which continuous batching is compared with."""

import collections
from collections.abc import Sequence

import inference
import jax
import jax.numpy as jnp
import numpy as np
from inference import GREEDY
from loading import Model
from workload import Clock, Completion, Request

STEPS_AT_ONCE = 8
"""Decoding steps in one compiled loop; a batch runs for a multiple of it."""


class BatchServer:
    """Takes up to `rows` requests that wait, and no others until the longest of them is done.

    Prompts are padded to `prompt_length`. Each sequence has room for that and for `tokens` new ones.
    """

    def __init__(self, model: Model, rows: int, prompt_length: int, tokens: int):
        self._model, self._rows, self._prompt_length = model, rows, prompt_length
        self._room = prompt_length + -(-tokens // STEPS_AT_ONCE) * STEPS_AT_ONCE
        self._key = jax.random.key(0)  # greedy decoding draws nothing
        # Compile both programs.
        jax.block_until_ready(self._decode(*self._prefill([b"\n"])))

    def serve(self, requests: Sequence[Request], clock: Clock) -> list[Completion]:
        """Serve requests as they arrive. The tokens of a batch are returned together, at its end."""
        arriving = collections.deque(sorted(range(len(requests)), key=lambda i: requests[i].arrival))
        completions: dict[int, Completion] = {}
        while arriving:
            clock.wait_until(requests[arriving[0]].arrival)
            taken = []
            while arriving and len(taken) < self._rows and requests[arriving[0]].arrival <= clock.now():
                taken.append(arriving.popleft())
            done = self._serve_batch([requests[i] for i in taken], clock)
            completions.update(zip(taken, done, strict=True))
        return [completions[i] for i in range(len(requests))]

    def _serve_batch(self, requests: list[Request], clock: Clock) -> list[Completion]:
        cache, last = self._prefill([request.prompt for request in requests])
        tokens = [np.asarray(last)[:, None]]
        first_at = clock.now()
        for _ in range(1, max(request.tokens for request in requests), STEPS_AT_ONCE):
            cache, last, new = self._decode(cache, last)
            tokens.append(new)
        rows = np.concatenate([np.asarray(x) for x in tokens], axis=1).tolist()
        now = clock.now()
        return [
            Completion(request, row[: request.tokens], first_at, now)
            for request, row in zip(requests, rows, strict=False)  # there may be more rows than requests
        ]

    def _prefill(self, prompts: Sequence[bytes]):
        tokens = np.zeros((self._rows, self._prompt_length), np.int32)
        lengths = np.ones(self._rows, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = np.frombuffer(prompt, np.uint8)
            lengths[row] = len(prompt)
        model = self._model
        cache = inference.empty_cache(model.config, self._rows, self._room)
        return inference.prefill(
            model.graph, model.parameters, cache, jnp.asarray(tokens), jnp.asarray(lengths), GREEDY, self._key
        )

    def _decode(self, cache, last):
        model = self._model
        return inference.decode(
            model.graph, model.parameters, cache, last, GREEDY, self._key, steps=STEPS_AT_ONCE
        )
