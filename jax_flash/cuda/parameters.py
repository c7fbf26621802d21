"""The parameter struct of a kernel, described once.

Every kernel takes one parameter, a struct. A `Struct` lists its fields in order. From it come the layout by
which the launcher fills the struct, and the C++ definition that the kernel includes as "parameters.cuh", so
that both sides agree by construction.
"""

import dataclasses
import functools
import re
import struct as _struct
from collections.abc import Sequence

HEADER_NAME = "parameters.cuh"

_NUMBERS = {"int32_t": "i", "uint32_t": "I", "int64_t": "q", "float": "f"}
"""Types passed by value, and their formats of the module `struct`."""
_TENSOR_MAP = "TensorMap"
_TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 128  # of CUtensorMap in CUDA 13; in CUDA 12 it is 64
_POINTER_BYTES = 8
_HEADERS = {
    "Interval": "common/block_range.cuh",
    "BlockRange": "common/block_range.cuh",
    "KeyPlace": "common/key_place.cuh",
    "QuerySlot": "common/query_slot.cuh",
    "ExactSum": "common/exact_sum.cuh",
    "SegmentRange": "common/segment_ranges.cuh",
}
"""Structs of the kernels that pointers may point to, and the headers that define them."""

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_POINTER = re.compile(r"(const )?[A-Za-z_][A-Za-z0-9_]*( char)?\*")


@dataclasses.dataclass(frozen=True)
class Struct:
    """A C++ struct: its name, and its fields in order, each with a C++ type or a struct of its own.

    A type is `int32_t`, `uint32_t`, `int64_t`, `float`, `TensorMap` or a pointer, as `const float*`.
    """

    name: str
    fields: tuple[tuple[str, "str | Struct"], ...]

    def replace(self, **types: "str | Struct") -> "Struct":
        """The same struct with other types of some fields, and with further fields behind them."""
        return Struct(self.name, tuple((dict(self.fields) | types).items()))

    def __post_init__(self):
        for name in (self.name, *(name for name, _ in self.fields)):
            if not _IDENTIFIER.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a struct or a field")
        names = [name for name, _ in self.fields]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"struct {self.name} has fields {names}; it needs some, each of its own name")
        for name, type in self.fields:
            if isinstance(type, str) and not (
                type in _NUMBERS or type == _TENSOR_MAP or _POINTER.fullmatch(type)
            ):
                raise ValueError(
                    f"field {name} of struct {self.name} has type {type!r}; "
                    f"it may be {', '.join(_NUMBERS)}, {_TENSOR_MAP} or a pointer"
                )


def struct(name: str, **fields: str | Struct) -> Struct:
    """A `Struct` with these fields, in this order."""
    return Struct(name, tuple(fields.items()))


@dataclasses.dataclass(frozen=True)
class Slot:
    """A field that holds a value: not a struct in turn."""

    path: str  # names from the outermost struct inward, as "score.bias_strides.key"
    type: str
    offset: int  # bytes from the start of the outermost struct
    bytes: int

    @property
    def is_pointer(self) -> bool:
        return self.type.endswith("*")

    @property
    def is_tensor_map(self) -> bool:
        return self.type == _TENSOR_MAP


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a C++ compiler puts the fields of a struct."""

    bytes: int
    alignment: int
    slots: tuple[Slot, ...]


@functools.cache
def layout(described: Struct) -> Layout:
    end, alignment, slots = 0, 1, []
    for name, type in described.fields:
        inner = layout(type) if isinstance(type, Struct) else _layout_of_type(type)
        offset = -(-end // inner.alignment) * inner.alignment
        for slot in inner.slots:
            path = f"{name}.{slot.path}" if slot.path else name
            slots.append(dataclasses.replace(slot, path=path, offset=offset + slot.offset))
        end, alignment = offset + inner.bytes, max(alignment, inner.alignment)
    return Layout(-(-end // alignment) * alignment, alignment, tuple(slots))


def _layout_of_type(type: str) -> Layout:
    if type == _TENSOR_MAP:
        size, alignment = _TENSOR_MAP_BYTES, _TENSOR_MAP_ALIGNMENT
    else:
        size = alignment = _struct.calcsize(_NUMBERS[type]) if type in _NUMBERS else _POINTER_BYTES
    return Layout(size, alignment, (Slot("", type, 0, size),))


def pack(described: Struct, numbers: Sequence[int | float | None]) -> bytes:
    """The struct's bytes from a number for each slot; None leaves a pointer or a tensor map zero."""
    found = layout(described)
    packed = bytearray(found.bytes)
    for slot, number in zip(found.slots, numbers, strict=True):
        if number is not None:
            _struct.pack_into(f"<{_NUMBERS[slot.type]}", packed, slot.offset, number)
    return bytes(packed)


@functools.cache
def header(described: Struct) -> str:
    """The C++ definition of the struct and of those in it, which states the layout that `layout` finds."""
    definitions = "\n".join(_definition(each) for each in _inner_first(described))
    types = {slot.type.removeprefix("const ").removesuffix("*") for slot in layout(described).slots}
    headers = ("ptx/types.cuh", *sorted({_HEADERS[type] for type in types & _HEADERS.keys()}))
    includes = "\n".join(f'#include "{path}"' for path in headers)
    return f"#pragma once\n{includes}\n\n{definitions}"


def _inner_first(described: Struct) -> list[Struct]:
    """The struct and all in it, each once, those that others hold ahead of them."""
    inner = [type for _, type in described.fields if isinstance(type, Struct)]
    return list(dict.fromkeys([s for each in inner for s in _inner_first(each)] + [described]))


def _definition(described: Struct) -> str:
    name = described.name
    lines = [f"struct {name} {{"]
    for field, type in described.fields:
        lines.append(f"    {type.name if isinstance(type, Struct) else type} {field};")
    lines.append("};")
    starts: dict[str, int] = {}
    for slot in layout(described).slots:
        starts.setdefault(slot.path.split(".")[0], slot.offset)
    offsets = [f"__builtin_offsetof({name}, {field}) == {offset}" for field, offset in starts.items()]
    lines += _assertions(f"sizeof({name}) == {layout(described).bytes}")
    # NVRTC 13.0 has no offsetof; a host compiler, which lays structs out alike, checks these in the tests.
    lines += ["#ifndef __CUDACC_RTC__", *_assertions(*offsets), "#endif"]
    return "\n".join(lines) + "\n"


def _assertions(*checks: str) -> list[str]:
    return [f'static_assert({check}, "the launcher has this layout");' for check in checks]
