"""What a call does to scores beyond scale and window, as the kernels take it (cuda/kernels/sm90/scores.cuh)."""

import math

import jax

from jax_flash._spec import AttentionSpec, Operands
from jax_flash.cuda.launch_plan import Buffer, Parameter, Pointer, Scalar

OPERANDS = ("bias", "mask", "alibi_slopes")
_C_TYPES = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float"}

Shapes = Operands[jax.ShapeDtypeStruct]


def unsupported(shapes: Shapes) -> str | None:
    """Why the kernels can't take these operands, or None."""
    if shapes.bias is not None and shapes.bias.dtype.name not in _C_TYPES:
        return f"bias's dtype is {shapes.bias.dtype.name}; it may be {', '.join(_C_TYPES)}"
    return None


def changed(spec: AttentionSpec, shapes: Shapes) -> bool:
    """Whether scores become logits by more than the scale."""
    return spec.logits_soft_cap is not None or any(getattr(shapes, name) is not None for name in OPERANDS)


def defines(spec: AttentionSpec, shapes: Shapes) -> tuple[tuple[str, int | str], ...]:
    return (
        ("SOFT_CAP", int(spec.logits_soft_cap is not None)),
        ("BIAS", "void" if shapes.bias is None else _C_TYPES[shapes.bias.dtype.name]),
        ("ALIBI", int(shapes.alibi_slopes is not None)),
        ("MASK", int(shapes.mask is not None)),
    )


def buffers(shapes: Shapes, names: tuple[str, ...] = OPERANDS) -> tuple[Buffer, ...]:
    """Those of the operands `names` that are there."""
    found = ((name, getattr(shapes, name)) for name in names)
    return tuple(Buffer(name, x.shape, x.dtype.name) for name, x in found if x is not None)


def parameters(spec: AttentionSpec, shapes: Shapes) -> tuple[Parameter, ...]:
    """`SCORE_PARAMETERS` of the kernels."""
    cap = spec.logits_soft_cap
    return (
        Scalar("float32", spec.scale if cap is None else spec.scale / cap),
        Scalar("float32", cap or 0.0),
        *_pointer_and_strides("bias", shapes.bias),
        *_pointer_and_strides("mask", shapes.mask),
        *_pointer_and_strides("alibi_slopes", shapes.alibi_slopes),
    )


def sinks_parameters(shapes: Shapes) -> tuple[Parameter, ...]:
    return _pointer_and_strides("sinks", shapes.sinks)


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """From element to element along each axis, 0 along those that stand for all: of length 1."""
    return tuple(0 if size == 1 else math.prod(shape[axis + 1 :]) for axis, size in enumerate(shape))


def _pointer_and_strides(name: str, x: jax.ShapeDtypeStruct | None) -> tuple[Parameter, ...]:
    """Of a `(B|1, N|1, T|1, S|1)` array all strides, the last in 32 bits; of a `(B|1, N)` one the first."""
    axes = 4 if name in ("bias", "mask") else 1
    steps = (0,) * axes if x is None else strides(x.shape)[:axes]
    types = ("int64", "int64", "int64", "int32")
    pointer = Scalar("int64", 0) if x is None else Pointer(name)
    return pointer, *(Scalar(type, step) for type, step in zip(types, steps, strict=False))
