"""Parallelism over all local devices: batches are split, and sequences may be; the rest is copied."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "batch"
SEQUENCE_AXIS = "sequence"


class Parallel(Protocol):
    """How a step runs on several devices.

    `axis` is the name of the axis over which a step averages its gradients. It is None if the compiler adds
    the sums.
    """

    axis: str | None

    def compile(self, step: Callable[..., Any], donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        """`step(state, tokens)` for the devices. Results may reuse the memory of the arguments `donate`."""
        ...

    def copy_to_all(self, state: Any) -> Any: ...

    def copy_of_first(self, state: Any) -> Any: ...

    def split(self, tokens: np.ndarray) -> jax.Array:
        """`tokens (batch, length)`, with each device's part of the batch on that device."""
        ...

    def split_sequences(self, tokens: jax.Array) -> jax.Array:
        """The same tokens within a step, with each device's part of the sequences on that device."""
        ...


class ShardedJit:
    """One program over a mesh of the devices. The compiler adds the sums over them.

    A sequence may be sharded over several devices, and stays so from the tokens to the loss: attention passes
    keys and values round, and all else is computed for each token alone.
    """

    axis = None

    def __init__(self, devices: list[jax.Device], sequence_shards: int = 1):
        mesh = Mesh(np.array(devices).reshape(-1, sequence_shards), (AXIS, SEQUENCE_AXIS))
        self._split = NamedSharding(mesh, PartitionSpec(AXIS))
        self._split_sequences = NamedSharding(mesh, PartitionSpec(AXIS, SEQUENCE_AXIS))
        self._replicated = NamedSharding(mesh, PartitionSpec())

    def compile(self, step: Callable[..., Any], donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        shardings = self._replicated, self._split
        return jax.jit(step, in_shardings=shardings, out_shardings=self._replicated, donate_argnums=donate)

    def copy_to_all(self, state: Any) -> Any:
        return jax.device_put(state, self._replicated)

    def copy_of_first(self, state: Any) -> Any:
        return jax.tree.map(lambda x: x.addressable_data(0), state)

    def split(self, tokens: np.ndarray) -> jax.Array:
        return jax.device_put(tokens, self._split)

    def split_sequences(self, tokens: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(tokens, self._split_sequences)


class Pmap:
    """One program for each device. The programs average gradients by `jax.lax.pmean` over `AXIS`."""

    axis = AXIS

    def __init__(self, devices: list[jax.Device]):
        self._devices = devices

    def compile(self, step: Callable[..., Any], donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        return jax.pmap(step, AXIS, devices=self._devices, donate_argnums=donate)

    def copy_to_all(self, state: Any) -> Any:
        copy = jax.pmap(lambda _, state: state, in_axes=(0, None), devices=self._devices)
        return copy(np.arange(len(self._devices)), state)

    def copy_of_first(self, state: Any) -> Any:
        return jax.tree.map(lambda x: x[0], state)

    def split(self, tokens: np.ndarray) -> Any:
        return tokens.reshape(len(self._devices), -1, tokens.shape[-1])

    def split_sequences(self, tokens: jax.Array) -> jax.Array:
        return tokens
