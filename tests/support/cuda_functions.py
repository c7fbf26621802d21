"""Functions of users as C++, alone: with structs of their own, beside no kernel."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_flash import functions
from jax_flash.cuda.functions import cpp, derivative_text, operand_fields, value_text
from jax_flash.cuda.parameters import Struct, struct
from jax_flash.functions import Derivative, ScalarFunction

__all__ = [
    "derivative_text",
    "function_text",
    "gradient_struct",
    "operand_struct",
    "shapes_of_gradients",
    "trace_mask_mod",
    "trace_score_mod",
]


def trace_score_mod(function: Callable[..., Any]) -> ScalarFunction:
    """As `jax_flash.functions.trace_score_mod`, of what can be written."""
    return functions.trace_score_mod(function, cpp.unsupported)


def trace_mask_mod(function: Callable[..., Any]) -> ScalarFunction:
    """As `jax_flash.functions.trace_mask_mod`, of what can be written."""
    return functions.trace_mask_mod(function, cpp.unsupported)


def function_text(function: ScalarFunction, namespace: str, operands: str) -> str:
    """The C++ of a function.

    Args:
      operands: the name of `operand_struct`.
    """
    return value_text(function.output, "score" in function.arguments, namespace, operands)


def operand_struct(function: ScalarFunction, name: str) -> Struct:
    """What points to the captured arrays."""
    return _struct(name, operand_fields(function))


def gradient_struct(derivative: Derivative, name: str) -> Struct:
    """What points to the sums that `add_gradients` adds to."""
    return _struct(name, {f"d_operand{number}": "float*" for number in derivative.operands})


def shapes_of_gradients(function: ScalarFunction, derivative: Derivative) -> dict[str, jax.ShapeDtypeStruct]:
    """What fields of `gradient_struct` point to: float32 sums, zero ahead of the kernel."""
    return {
        f"d_operand{number}": jax.ShapeDtypeStruct(function.shapes[number].shape, np.float32)
        for number in derivative.operands
    }


def _struct(name: str, fields: dict[str, str]) -> Struct:
    return struct(name, **(fields or {"none": "int32_t"}))  # a struct has a field
