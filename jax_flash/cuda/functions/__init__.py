"""Functions of scalars that users write in JAX, as CUDA C++.

    traced = trace_score_mod(score_mod)            jax_flash/functions: a graph of scalars
    function_text(traced, ...), derivative_text(derivative, ...)      source.py: headers that kernels include

A primitive that can't be written raises `UnsupportedPrimitiveError`, with its name and the line of the
user's code.
"""

from collections.abc import Callable
from typing import Any

from jax_flash import functions
from jax_flash.cuda.functions import cpp
from jax_flash.cuda.functions.source import (
    derivative_text,
    function_text,
    gradient_struct,
    operand_fields,
    operand_struct,
    shapes_of_gradients,
    unit,
    value_text,
)

__all__ = [
    "derivative_text",
    "function_text",
    "gradient_struct",
    "operand_fields",
    "operand_struct",
    "shapes_of_gradients",
    "trace_mask_mod",
    "trace_score_mod",
    "unit",
    "value_text",
]


def trace_score_mod(function: Callable[..., Any]) -> functions.ScalarFunction:
    """As `jax_flash.functions.trace_score_mod`, of what can be written."""
    return functions.trace_score_mod(function, cpp.unsupported)


def trace_mask_mod(function: Callable[..., Any]) -> functions.ScalarFunction:
    """As `jax_flash.functions.trace_mask_mod`, of what can be written."""
    return functions.trace_mask_mod(function, cpp.unsupported)
