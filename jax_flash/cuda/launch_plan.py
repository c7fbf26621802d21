"""A launch plan: everything that the launcher needs to run a call, as plain values.

Planning is pure Python over static shapes, so a plan can be printed, compared and checked against
hardware limits with no GPU. `dump` and `load` carry it through an XLA attribute as JSON.
"""

import dataclasses
import json
import math
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A kernel parameter: the address of a buffer."""

    buffer: str


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A kernel parameter passed by value."""

    type: str  # "int32", "uint32", "int64", "float32"
    value: int | float


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A kernel parameter: a 128-byte TMA descriptor (`CUtensorMap`) over a buffer, tiled mode.

    Axes are innermost first, as `cuTensorMapEncodeTiled` takes them; the innermost one is dense, so
    `strides` (bytes) has one entry fewer than `sizes`. Elements out of bounds read as zero.
    """

    buffer: str
    dtype: str  # element type, a key of ELEMENT_BYTES
    sizes: tuple[int, ...]  # elements
    strides: tuple[int, ...]  # bytes, of axes 1…
    box: tuple[int, ...]  # elements
    swizzle: int = 128  # bytes: 0, 32, 64 or 128


Parameter = Pointer | Scalar | TensorMap


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: int  # threads
    shared_bytes: int  # dynamic shared memory
    parameters: tuple[Parameter, ...]
    cluster: int = 1  # CTAs along x
    # The kernel may start before the one ahead of it in the stream has ended, and waits for it itself
    # (programmatic dependent launch).
    overlap_previous: bool = False


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


_TYPES = {c.__name__: c for c in (Buffer, Kernel, Pointer, Scalar, TensorMap, Launch, Zero, LaunchPlan)}


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
