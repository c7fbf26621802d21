"""Arrays that go from device to device together.

Those of one shape and dtype, as keys and values mostly are, travel as one array. By itself XLA runs the first
of two transfers before a step's computation, and only the second one beside it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jax_flash.context_parallel import sharded
from jax_flash.context_parallel.sharded import Spans

Arrays = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """Arrays by name, stacked in groups."""

    stacked: tuple[jax.Array, ...]  # one for each group; of a group of one, the array itself
    groups: tuple[tuple[str, ...], ...] = dataclasses.field(metadata={"static": True})

    @staticmethod
    def of(arrays: Arrays) -> "Packed":
        groups: dict[tuple, list[str]] = {}
        for name, x in arrays.items():
            groups.setdefault((x.shape, x.dtype), []).append(name)
        stacked = (
            arrays[names[0]] if len(names) == 1 else jnp.stack([arrays[name] for name in names])
            for names in groups.values()
        )
        return Packed(tuple(stacked), tuple(map(tuple, groups.values())))

    def take(self, spans: Spans) -> Arrays:
        """A part of each array. XLA hands a kernel what one slice takes, and doesn't copy it."""
        return {
            name: sharded.take(name, x, spans) if len(names) == 1 else sharded.take_of(i, name, x, spans)
            for x, names in zip(self.stacked, self.groups, strict=True)
            for i, name in enumerate(names)
        }

    def unpacked(self) -> Arrays:
        return {
            name: x if len(names) == 1 else x[i]
            for x, names in zip(self.stacked, self.groups, strict=True)
            for i, name in enumerate(names)
        }
