"""Which implementation runs a call.

An implementation is a module with `supports`, `describe`, `forward` and `backward`. It says itself
what it can't do; here is only the order in which they are asked.
"""

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType

import jax

from jax_flash._device import Device
from jax_flash._spec import AttentionSpec, Operands

IMPLEMENTATIONS = ("cuda", "pallas", "xla")
"""In order of preference: the automatic choice is the first that supports the call."""

PORTABLE = "xla"
"""The one that runs on every platform."""

Shapes = Operands[jax.ShapeDtypeStruct]


@functools.cache
def get(name: str) -> ModuleType:
    """The implementation of that name. Imported on demand, so that none is loaded in vain."""
    return importlib.import_module(f"jax_flash.{name}")


def reason(name: str, spec: AttentionSpec, shapes: Shapes, device: Device) -> str | None:
    """Why that implementation can't run the call on `device`; None where it can."""
    try:
        implementation = get(name)
    except ImportError as error:
        return f"it can't be imported ({error})"
    return implementation.supports(spec, shapes, device)


def reasons(spec: AttentionSpec, shapes: Shapes, device: Device) -> dict[str, str | None]:
    """`reason` of every implementation, in order of preference."""
    return {name: reason(name, spec, shapes, device) for name in IMPLEMENTATIONS}


def select(
    spec: AttentionSpec, shapes: Shapes, names: Sequence[str] | None, device: Device
) -> tuple[str, ...]:
    """The implementation to run, and what to run in its place on other platforms.

    Args:
      names: the implementations to try in order; None for the automatic choice among all.

    Returns:
      the first of them that supports the call; and behind it "xla" where that stands after it among
      those to try. A program traced for the default device may be lowered for another platform (a
      `jit` over arrays on the CPU of a machine with a GPU), and runs "xla" there.

    Raises:
      NotImplementedError: none of them supports the call; with the reason of each.
    """
    candidates = IMPLEMENTATIONS if names is None else tuple(names)
    refused: dict[str, str] = {}
    for position, name in enumerate(candidates):
        why_not = reason(name, spec, shapes, device)
        if why_not is None:
            portable_behind = PORTABLE in candidates[position + 1 :]
            return (name, PORTABLE) if portable_behind and name != PORTABLE else (name,)
        refused[name] = why_not
    where = f"on {device.kind} ({device.platform})"
    if len(refused) == 1:
        ((name, why_not),) = refused.items()
        raise NotImplementedError(f'implementation "{name}" can\'t run this call {where}: {why_not}')
    listed = "; ".join(f"{name}: {why_not}" for name, why_not in refused.items())
    raise NotImplementedError(f"no implementation of {candidates} can run this call {where}: {listed}")
