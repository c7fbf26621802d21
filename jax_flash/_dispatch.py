"""Which implementation runs a call.

An implementation is a module with `supports`, `describe`, `forward` and `backward`. Its submodules, with the
first three, run other calls: `decoding` those on key-value caches, `quantizing` those of `quantize`.
`supports` returns the limit that keeps it from running a call, as the support table in the README documents
it, or None. It raises ImportError where the installation lacks something that the call needs. Here are the
order in which implementations are asked, and the warnings where a slower one runs than the device allows for.
"""

import dataclasses
import functools
import importlib
import traceback
from collections.abc import Mapping, Sequence
from types import ModuleType

import jax

from jax_flash import _slower
from jax_flash._cache_spec import CacheOperands, CacheSpec
from jax_flash._device import Device
from jax_flash._quantize_spec import QuantizeOperands, QuantizeSpec
from jax_flash._slower import SlowerImplementationWarning
from jax_flash._spec import AttentionSpec, Operands

__all__ = [
    "IMPLEMENTATIONS",
    "SlowerImplementationWarning",
    "get",
    "reason",
    "reasons",
    "select",
]

IMPLEMENTATIONS = ("cuda", "pallas", "xla")
"""In order of preference: the automatic choice is the first that supports the call."""

PORTABLE = "xla"
"""The one that runs on every platform."""

PLANNED_OFF_GPU = (PORTABLE, PORTABLE)
"""What `select` gives for a call that was planned for no GPU, where implementations before "xla" refused it.

A program that is lowered for a GPU nevertheless warns."""

Spec = AttentionSpec | CacheSpec | QuantizeSpec
Shapes = (
    Operands[jax.ShapeDtypeStruct]
    | CacheOperands[jax.ShapeDtypeStruct]
    | QuantizeOperands[jax.ShapeDtypeStruct]
)

_WITHOUT_KERNELS = {CacheSpec.operation: "key-value caches", QuantizeSpec.operation: "rounding to e4m3"}
"""What an implementation lacks that has no module of that operation."""


@functools.cache
def get(name: str, operation: str = AttentionSpec.operation) -> ModuleType:
    """The module that runs `operation` for an implementation, imported when first asked for."""
    return importlib.import_module(_path(name, operation))


def _path(name: str, operation: str) -> str:
    return f"jax_flash.{name}" + ("" if operation == AttentionSpec.operation else f".{operation}")


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why an implementation can't run a call."""

    reason: str
    fault: ImportError | None = None
    """What the installation lacks; None where the reason is a documented limit."""


def reason(name: str, spec: Spec, shapes: Shapes, device: Device) -> str | None:
    """Why that implementation can't run the call on `device`; None where it can."""
    refusal = _refusal(name, spec, shapes, device)
    return None if refusal is None else refusal.reason


def reasons(spec: Spec, shapes: Shapes, device: Device) -> dict[str, str | None]:
    """`reason` of every implementation, in order of preference."""
    return {name: reason(name, spec, shapes, device) for name in IMPLEMENTATIONS}


def select(spec: Spec, shapes: Shapes, names: Sequence[str] | None, device: Device) -> tuple[str, ...]:
    """The implementation to run, and what to run in its place on other platforms.

    Warns with `SlowerImplementationWarning`, once for each reason, where a GPU runs a slower implementation
    because of a fault of the installation, or the automatic choice is "xla" because of a limit.

    Args:
      names: the implementations to try in order; None for the automatic choice.

    Returns:
      `(name,)`: this implementation runs the call on every platform.
      `(name, "xla")`: "xla" runs it where the program is lowered for another platform than the default
      device's, as a `jit` over CPU arrays is on a machine with a GPU.
      `PLANNED_OFF_GPU`: "xla" runs it everywhere. The default device is no GPU, and implementations before
      "xla" refused; lowered for a GPU, the program warns.

    Raises:
      NotImplementedError: none of them supports the call; with the reason of each.
    """
    candidates = IMPLEMENTATIONS if names is None else tuple(names)
    refused: dict[str, Refusal] = {}
    for position, name in enumerate(candidates):
        refusal = _refusal(name, spec, shapes, device)
        if refusal is None:
            if refused and device.is_gpu:
                _warn_of_slower(name, refused, device, is_automatic=names is None)
            if name == PORTABLE and refused and not device.is_gpu:
                return PLANNED_OFF_GPU
            portable_behind = PORTABLE in candidates[position + 1 :]
            return (name, PORTABLE) if portable_behind and name != PORTABLE else (name,)
        refused[name] = refusal
    where = f"on {device.kind} ({device.platform})"
    fault = next((refusal.fault for refusal in refused.values() if refusal.fault is not None), None)
    if len(refused) == 1:
        ((name, only),) = refused.items()
        message = f'implementation "{name}" can\'t run this call {where}: {only.reason}'
        raise NotImplementedError(message) from fault
    message = f"no implementation of {candidates} can run this call {where}: {_listed(refused)}"
    raise NotImplementedError(message) from fault


def _refusal(name: str, spec: Spec, shapes: Shapes, device: Device) -> Refusal | None:
    try:
        implementation = get(name, spec.operation)
    except ImportError as error:
        if name != PORTABLE and error.name == _path(name, spec.operation):
            return Refusal(f"it has no kernels for {_WITHOUT_KERNELS[spec.operation]}")
        return Refusal(_import_failure(error), error)
    if name != PORTABLE and (symbolic := _symbolic(shapes)):
        return Refusal(f"kernels are planned for shapes that are known, and {symbolic} is symbolic")
    try:
        limit = implementation.supports(spec, shapes, device)
    except ImportError as error:
        return Refusal(str(error), error)
    return None if limit is None else Refusal(limit)


def _symbolic(shapes: Shapes) -> str:
    """The symbolic sizes of an export, as text; empty if all sizes are known."""
    sizes = (size for x in shapes.present().values() for size in x.shape if not isinstance(size, int))
    return ", ".join(dict.fromkeys(map(str, sizes)))


def _import_failure(error: ImportError) -> str:
    """What failed where, and the cure, for an implementation that can't be imported."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f", {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return (
        f"it can't be imported ({type(error).__name__}: {error}{where}); jax_flash or JAX is damaged or half "
        "installed: pip install --force-reinstall jax_flash"
    )


def _warn_of_slower(
    picked: str, refused: Mapping[str, Refusal], device: Device, *, is_automatic: bool
) -> None:
    """Warns where `picked` runs because those before it were `refused`, and the user may not expect it.

    A limit is worth a warning where it leaves nothing but "xla", unless the user named "xla".
    """
    faults = {name: refusal for name, refusal in refused.items() if refusal.fault is not None}
    told = refused if is_automatic and picked == PORTABLE else faults
    if told:
        _slower.warn(
            f'On {device.kind} this call of jax_flash runs by implementation="{picked}", which is slower, '
            f'because of: {_listed(told)}. To choose it without this warning, pass implementation="{picked}".'
        )


def _listed(refused: Mapping[str, Refusal]) -> str:
    return "; ".join(f"{name}: {refusal.reason}" for name, refusal in refused.items())
