"""A launch plan: everything that the launcher needs to run a call, as plain values.

Planning is pure Python over static shapes, so a plan can be printed, compared and checked against
hardware limits with no GPU. `dump` and `load` carry it through an XLA attribute as JSON; plan_check.py
says whether a plan that came so may run.
"""

import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jax_flash.cuda.parameters import Slot, Struct, layout

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "uint32": 4}
ELEMENT_BYTES |= {"int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1}


def element_type(dtype: np.dtype | str) -> str:
    """The C++ type of floats of that dtype."""
    name = np.dtype(dtype).name
    return "float" if name == "float32" else name


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
    headers: tuple[tuple[str, str], ...] = ()  # generated ones that it includes: names and texts


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
class Alias:
    """A result that has its operand's memory. XLA copies the operand first if others still need it."""

    operand: str
    result: str


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """The steps of one custom call, run in order on XLA's stream."""

    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]  # scratch memory is a result too, so that XLA owns it
    steps: tuple[Launch | Zero, ...]
    aliases: tuple[Alias, ...] = ()

    @property
    def alias_indices(self) -> dict[int, int]:
        """The results that have an operand's memory: the operand's index to the result's."""
        operands, results = ([b.name for b in buffers] for buffers in (self.operands, self.results))
        return {operands.index(alias.operand): results.index(alias.result) for alias in self.aliases}

    @property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(step for step in self.steps if isinstance(step, Launch))

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Of the devices that may run the plan. ValueError unless all kernels are for one."""
        found = {kernel_capability(launch.kernel) for launch in self.launches}
        if len(found) != 1:
            raise ValueError(f"a plan is for one compute capability, and this is for {sorted(found)}")
        return found.pop()


def kernel_capability(kernel: Kernel) -> tuple[int, int]:
    """The compute capability that `kernel` is compiled for, (9, 0) from "sm_90a"."""
    match = re.fullmatch(r"sm_(\d{1,2})(\d)[af]?", kernel.arch)
    if match is None:
        raise ValueError(f"{kernel.entry} is for {kernel.arch!r}; an architecture is named as 'sm_90a'")
    return int(match[1]), int(match[2])


_TYPES = {
    c.__name__: c for c in (Buffer, Kernel, Struct, Pointer, TensorMap, Launch, Zero, Alias, LaunchPlan)
}


def dump(plan: LaunchPlan) -> str:
    """`plan` as compact JSON; equal plans give equal text."""

    def encode(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            fields = [encode(getattr(value, f.name)) for f in dataclasses.fields(value)]
            return {type(value).__name__: fields}
        return list(map(encode, value)) if isinstance(value, tuple) else value

    return json.dumps(encode(plan), separators=(",", ":"))


def load(text: str) -> LaunchPlan:
    """The inverse of `dump`.

    Raises ValueError where `text` isn't the JSON of a plan, with values of the right types.
    """
    try:
        plan = _decode(json.loads(text, parse_constant=_refuse_constant))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not a launch plan: {error}") from error
    if not isinstance(plan, LaunchPlan):
        raise ValueError(f"not a launch plan: a {type(plan).__name__}")
    return plan


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_decode, value))
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or (name := next(iter(value))) not in _TYPES:
        raise ValueError(f"not a launch plan: it has a part {', '.join(value) or 'without a name'}")
    fields = _decode(value[name])
    hints = _hints(_TYPES[name])
    if not isinstance(fields, tuple) or len(fields) != len(hints):
        raise ValueError(f"not a launch plan: a {name} has the fields {', '.join(hints)}")
    for (field, hint), given in zip(hints.items(), fields, strict=True):
        if not _is(given, hint):
            raise ValueError(f"not a launch plan: {name}.{field} is {given!r}")
    return _TYPES[name](*fields)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"not a launch plan: it has a number {name}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields, in order."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _is(value: Any, hint: Any) -> bool:
    """Whether `value` is of the type `hint`: one of tuples, unions and classes."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_is(value, argument) for argument in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if arguments[-1] is Ellipsis:
            return all(_is(element, arguments[0]) for element in value)
        return len(value) == len(arguments) and all(map(_is, value, arguments))
    if hint in (int, float):
        return isinstance(value, hint) and not isinstance(value, bool)
    return isinstance(value, hint)
