"""What kernels need of a user's function: the arrays that it captures, and the indices of rows and heads.

Both kinds of functions have it: score_mod (user_score_mod.py) and mask_mod (block_mask.py). The text of a
function is a header that is written for it (functions/source.py).
"""

import math
from collections.abc import Mapping, Sequence

import jax

from jax_flash._spec import AttentionSpec, Operands, captured_name, functions_of
from jax_flash.cuda.functions import cpp, operand_fields
from jax_flash.cuda.functions.source import Function
from jax_flash.cuda.launch_plan import ELEMENT_BYTES, Arguments, Buffer, Pointer
from jax_flash.cuda.parameters import Struct, struct
from jax_flash.functions.static import StaticFunction

Shapes = Operands[jax.ShapeDtypeStruct]

INDICES = ("batch_indices", "head_indices")
"""Operands that say which row and head of the whole call a device's own ones are."""

_LOADABLE = tuple(dtype for dtype in cpp.ELEMENTS if dtype.name in ELEMENT_BYTES)
"""Dtypes of arrays that functions in a kernel read."""


def unsupported(function: StaticFunction) -> str | None:
    """Why the function, or an array that it captures, can't be in a kernel; or None."""
    return function.limit(cpp.unsupported, _LOADABLE)


def parameters(struct_name: str, function: Function) -> Struct:
    """The part of a kernel's parameters that the function reads."""
    return struct(
        struct_name,
        **operand_fields(function),
        **{f"stride{n}": "int64_t" for n in range(len(function.shapes))},  # from batch row to batch row
        batch_indices="const int*",  # (B,)
        head_indices="const int*",  # (B | 1, N)
        head_stride="int64_t",
    )


def arguments(operands: Sequence[str], shapes: Shapes) -> Arguments:
    """Arguments of that part; `operands` are the names of those that the function reads, in order."""
    present, heads = shapes.present(), shapes.head_indices
    assert heads is not None
    return {
        **{f"operand{n}": Pointer(name) for n, name in enumerate(operands)},
        **{f"stride{n}": stride(present[name]) for n, name in enumerate(operands)},
        **{name: Pointer(name) for name in INDICES},
        "head_stride": stride(heads),
    }


def buffers(operands: Sequence[str], shapes: Shapes) -> tuple[Buffer, ...]:
    """The operands of those names."""
    present = shapes.present()
    return tuple(Buffer(name, present[name].shape, present[name].dtype.name) for name in operands)


def index_buffers(spec: AttentionSpec, shapes: Shapes) -> tuple[Buffer, ...]:
    """`INDICES`, of a call that has a function."""
    return buffers(INDICES, shapes) if functions_of(spec) else ()


def captured(name: str, function: Function) -> list[str]:
    """The operands that a function captures; its name is "score_mod" or "mask_mod"."""
    return [captured_name(name, number) for number in range(len(function.shapes))]


def of_batch_row(struct_name: str, strides: Mapping[str, str]) -> str:
    """The C++ of a function that gives the part for a batch row; pointers by the names of their strides."""
    lines = [f"    operands.{pointer} += batch * operands.{stride};" for pointer, stride in strides.items()]
    head = f"__device__ __forceinline__ {struct_name} of_batch_row({struct_name} operands, int batch) {{"
    return "\n".join([head, *lines, "    return operands;", "}\n"])


def in_namespace(namespace: str, *functions: str) -> str:
    return "\n".join([f"namespace {namespace} {{\n", *functions, f"}}  // namespace {namespace}\n"])


def operand_strides(function: Function) -> dict[str, str]:
    return {f"operand{n}": f"stride{n}" for n in range(len(function.shapes))}


def stride(x: jax.ShapeDtypeStruct) -> int:
    """From batch row to batch row of a (B | 1, …) operand."""
    return 0 if x.shape[0] == 1 else math.prod(x.shape[1:])
