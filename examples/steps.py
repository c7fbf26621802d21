"""A training step of the GPT: its loss, its optimizer and its state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import gpt
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from parallel import Parallel


class State(NamedTuple):
    """What a step changes."""

    parameters: nnx.State
    optimizer: optax.OptState


def make_optimizer(learning_rate: float, weight_decay: float, steps: int) -> optax.GradientTransformation:
    """AdamW on gradients whose norm is clipped, with warm-up and cosine decay over `steps`."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=learning_rate,
        warmup_steps=max(steps // 20, 1),
        decay_steps=max(steps, 2),
        end_value=learning_rate / 10,
    )

    def matrices(parameters: Any) -> Any:
        return jax.tree.map(lambda x: x.ndim > 1, parameters)

    adamw = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def make_steps(
    graph: nnx.GraphDef, optimizer: optax.GradientTransformation, parallel: Parallel
) -> tuple[Callable[..., tuple[State, jax.Array]], Callable[..., jax.Array]]:
    """Compile `train(state, tokens) -> state, loss` and `validate(parameters, tokens) -> loss`.

    `tokens` are integers `(batch, sequence_length + 1)`, as `parallel.split` returns them.
    """

    def mean_over_devices(values: Any) -> Any:
        return values if parallel.axis is None else jax.lax.pmean(values, parallel.axis)

    def loss(parameters: nnx.State, tokens: jax.Array) -> jax.Array:
        tokens = tokens.astype(jnp.int32)
        inputs, targets = map(parallel.split_sequences, (tokens[:, :-1], tokens[:, 1:]))
        return gpt.mean_loss(nnx.merge(graph, parameters)(inputs), targets)

    def train(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        value, gradients = mean_over_devices(jax.value_and_grad(loss)(state.parameters, tokens))
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.parameters)
        return State(optax.apply_updates(state.parameters, updates), optimizer_state), value

    def validate(parameters: nnx.State, tokens: jax.Array) -> jax.Array:
        return mean_over_devices(loss(parameters, tokens))

    return parallel.compile(train, donate=(0,)), parallel.compile(validate)
