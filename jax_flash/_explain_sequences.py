"""What `explain` says of sharded sequences: which strategies run, at what cost, and which is picked."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_flash._call import Call
from jax_flash._device import Device
from jax_flash._spec import Operands
from jax_flash.transforms import lowering, sequence_layout
from jax_flash.transforms.layout import Layout, MeshAxes, letters_of
from jax_flash.transforms.sequence_layout import RefusedStrategyError, StrategyChoice


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Of a call whose arrays are sharded along the sequence."""

    choices: tuple[StrategyChoice, ...]
    picked: str | None  # what context_parallel as it was given picks; None where sequences are gathered
    refusal: str | None  # why the strategy that was named can't run the call, if one was


def of_call(
    call: Call, given: Mapping[str, Any], implementation: str | None, device: Device
) -> Sequences | None:
    """None where no sequence is sharded, or that isn't known.

    Args:
      given: what the caller passed, by name: arrays, or shapes with a sharding.
      implementation: that runs the call.
    """
    of_query = getattr(given.get("query"), "sharding", None)
    if implementation is None or not isinstance(of_query, NamedSharding):
        return None
    mesh = dict(of_query.mesh.shape)
    shapes = {name: _shape(x) for name, x in call.operands.present().items()}
    specs = {name: _spec(given.get(name), len(x.shape)) for name, x in shapes.items()}
    letters = letters_of({name: x.shape for name, x in shapes.items()})

    def layout(queries: MeshAxes, keys: MeshAxes) -> Layout:
        return Layout.of(mesh, letters, shapes, specs, queries, keys)

    arguments = Operands.of(shapes), specs, layout
    on_its_way = lowering.PlannedCall(call.spec, (implementation,), device, call.context_parallel)
    choices = sequence_layout.explained(on_its_way, *arguments)
    if not choices:
        return None
    try:
        found = sequence_layout.choose(on_its_way, *arguments)
    except RefusedStrategyError as error:
        return Sequences(choices, None, str(error))
    return Sequences(choices, found.strategy if found.shards is not None else None, None)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, np.dtype(x.dtype))


def _spec(argument: Any, axes: int) -> PartitionSpec:
    """Of an operand of so many axes: those of its argument are its last."""
    sharding = getattr(argument, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return PartitionSpec()
    return PartitionSpec(*(None,) * (axes - len(argument.shape)), *sharding.spec)
