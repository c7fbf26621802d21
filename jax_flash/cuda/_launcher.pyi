"""Runs launch plans on XLA's stream through the CUDA driver (cuda/launcher/module.cc)."""

from collections.abc import Sequence
from typing import Any

class Kernel:
    def __init__(self, cubin: bytes, entry: str, description: str) -> None: ...

class Pointer:
    def __init__(self, offset: int, buffer: int) -> None: ...

class TensorMap:
    def __init__(
        self,
        offset: int,
        buffer: int,
        dtype: str,
        sizes: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: int,
    ) -> None: ...

class Launch:
    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: int,
        shared_bytes: int,
        cluster: int,
        overlap_previous: bool,
        parameters: bytes,
        pointers: Sequence[Pointer],
        tensor_maps: Sequence[TensorMap],
    ) -> None: ...

class Zero:
    def __init__(self, buffer: int) -> None: ...

class Plan:
    def __init__(
        self,
        compute_capability: tuple[int, int],
        operand_bytes: Sequence[int],
        result_bytes: Sequence[int],
        steps: Sequence[Launch | Zero],
    ) -> None: ...
    @staticmethod
    def alive() -> int:
        """How many plans this process holds: those of executables, and Python's."""

def state_type() -> dict[str, Any]:
    """The type of what a custom call keeps from stage to stage, for `jax.ffi.register_ffi_type`."""

def handlers() -> dict[str, Any]:
    """The stages of every custom call, for `jax.ffi.register_ffi_target`."""

def driver_version() -> tuple[int, int]:
    """The newest CUDA (major, minor) that the driver supports; RuntimeError where there is none."""
