"""A launch plan: everything that the launcher needs to run a call, as plain values.

Planning is pure Python over static shapes, so a plan can be printed, compared and checked against
hardware limits with no GPU. `dump` and `load` carry it through an XLA attribute as JSON.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jax_flash.cuda.parameters import Slot, Struct, layout

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "uint32": 4, "uint8": 1, "bool": 1}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An operand or result of the custom call, row-major and dense."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of ELEMENT_BYTES

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One entry point compiled with one set of defines: what NVRTC gets, and what caches key on."""

    source: str  # a file under cuda/kernels/, as "sm90/forward/forward.cu"
    entry: str  # the extern "C" name
    arch: str  # "sm_90a"
    defines: tuple[tuple[str, int | float | str], ...]
    parameters: Struct  # what the entry point takes


@dataclasses.dataclass(frozen=True)
class Pointer:
    """An argument: the address of a buffer."""

    buffer: str


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """An argument: a 128-byte TMA descriptor (`CUtensorMap`) over a buffer, tiled mode.

    Axes are innermost first, as `cuTensorMapEncodeTiled` takes them; the innermost one is dense, so
    `strides` (bytes) has one entry fewer than `sizes`. Elements out of bounds read as zero.
    """

    buffer: str
    dtype: str  # element type, a key of ELEMENT_BYTES
    sizes: tuple[int, ...]  # elements
    strides: tuple[int, ...]  # bytes, of axes 1…
    box: tuple[int, ...]  # elements
    swizzle: int = 128  # bytes: 0, 32, 64 or 128


Argument = Pointer | TensorMap | int | float | None
"""The value of one field of a kernel's parameters; None is a null pointer."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch. `launch` makes one from arguments by name."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: int  # threads
    shared_bytes: int  # dynamic shared memory
    arguments: tuple[Argument, ...]  # one for each slot of `layout(kernel.parameters)`, in order
    cluster: int = 1  # CTAs along x
    # The kernel may start before the one ahead of it in the stream has ended, and waits for it itself
    # (programmatic dependent launch).
    overlap_previous: bool = False

    def __post_init__(self):
        slots = layout(self.kernel.parameters).slots
        if len(self.arguments) != len(slots):
            raise ValueError(
                f"{self.kernel.entry} takes {len(slots)} arguments, and this launch has {len(self.arguments)}"
            )
        for slot, argument in zip(slots, self.arguments, strict=True):
            _check_argument(self.kernel, slot, argument)

    @property
    def by_path(self) -> dict[str, Argument]:
        """Arguments by the path of their field, as "dropout.threshold"."""
        slots = layout(self.kernel.parameters).slots
        return {slot.path: argument for slot, argument in zip(slots, self.arguments, strict=True)}


Arguments = Mapping[str, "Argument | Arguments"]
"""Arguments by the names of a struct's fields; those of a struct within it are a mapping in turn."""


def launch(
    kernel: Kernel,
    grid: tuple[int, int, int],
    block: int,
    arguments: Arguments,
    shared_bytes: int = 0,
    cluster: int = 1,
    overlap_previous: bool = False,
) -> Launch:
    """A launch with `arguments` by name, each exactly once."""
    values = tuple(_in_order(kernel.parameters, arguments, kernel.entry))
    return Launch(kernel, grid, block, shared_bytes, values, cluster, overlap_previous)


def _in_order(struct: Struct, arguments: Arguments, path: str) -> Iterator[Argument]:
    names = [name for name, _ in struct.fields]
    missing, unknown = set(names) - set(arguments), set(arguments) - set(names)
    if missing or unknown:
        problems = [f"lacks {', '.join(sorted(missing))}"] * bool(missing)
        problems += [f"has no field {', '.join(sorted(unknown))}"] * bool(unknown)
        raise ValueError(f"arguments of {path} (struct {struct.name}): it {' and '.join(problems)}")
    for name, type in struct.fields:
        argument = arguments[name]
        if isinstance(type, Struct):
            if not isinstance(argument, Mapping):
                raise ValueError(f"{path}.{name} is {argument!r}; it takes the fields of struct {type.name}")
            yield from _in_order(type, argument, f"{path}.{name}")
        elif isinstance(argument, Mapping):
            raise ValueError(f"{path}.{name} is {argument!r}; it is of type {type}")
        else:
            yield argument


_RANGES = {"int32_t": (-(2**31), 2**31), "uint32_t": (0, 2**32), "int64_t": (-(2**63), 2**63)}


def _check_argument(kernel: Kernel, slot: Slot, argument: Any) -> None:
    if slot.is_tensor_map:
        fits = isinstance(argument, TensorMap)
    elif slot.is_pointer:
        fits = argument is None or isinstance(argument, Pointer)
    elif slot.type == "float":
        fits = isinstance(argument, int | float) and not isinstance(argument, bool)
    else:
        low, high = _RANGES[slot.type]
        fits = isinstance(argument, int) and not isinstance(argument, bool) and low <= argument < high
    if not fits:
        raise ValueError(f"argument {slot.path} of {kernel.entry} is {argument!r}; it is of type {slot.type}")


@dataclasses.dataclass(frozen=True)
class Zero:
    """A step that fills a buffer with zero bytes."""

    buffer: str


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """The steps of one custom call, run in order on XLA's stream."""

    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]  # scratch memory is a result too, so that XLA owns it
    steps: tuple[Launch | Zero, ...]

    @property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(step for step in self.steps if isinstance(step, Launch))


_TYPES = {c.__name__: c for c in (Buffer, Kernel, Struct, Pointer, TensorMap, Launch, Zero, LaunchPlan)}


def dump(plan: LaunchPlan) -> str:
    """`plan` as compact JSON; equal plans give equal text."""

    def encode(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            fields = [encode(getattr(value, f.name)) for f in dataclasses.fields(value)]
            return {type(value).__name__: fields}
        return list(map(encode, value)) if isinstance(value, tuple) else value

    return json.dumps(encode(plan), separators=(",", ":"))


def load(text: str) -> LaunchPlan:
    """The inverse of `dump`."""

    def decode(value: Any) -> Any:
        if isinstance(value, dict):
            ((name, fields),) = value.items()
            return _TYPES[name](*map(decode, fields))
        return tuple(map(decode, value)) if isinstance(value, list) else value

    return decode(json.loads(text))
