"""Functions of scalars that users write in JAX, as CUDA C++: score_mod and mask_mod, as FlexAttention has
them (Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels", 2024).

    traced = trace_score_mod(score_mod)            function.py: one trace by JAX, read into a graph of scalars
    derivative = differentiate(traced)             derivative.py: by JAX's jvp and vjp
    function_text(traced, ...), derivative_text(derivative, ...)      source.py: headers that kernels include

A primitive that can't be written raises `UnsupportedPrimitiveError`, with its name and the line of the
user's code.
"""

from jax_flash.cuda.functions.derivative import Derivative, Gather, differentiate
from jax_flash.cuda.functions.errors import UnsupportedPrimitiveError
from jax_flash.cuda.functions.function import ScalarFunction, trace_mask_mod, trace_score_mod
from jax_flash.cuda.functions.scopes import Scope, scope
from jax_flash.cuda.functions.source import (
    derivative_text,
    function_text,
    gradient_struct,
    operand_struct,
    shapes_of_gradients,
)

__all__ = [
    "Derivative",
    "Gather",
    "ScalarFunction",
    "Scope",
    "UnsupportedPrimitiveError",
    "derivative_text",
    "differentiate",
    "function_text",
    "gradient_struct",
    "operand_struct",
    "scope",
    "shapes_of_gradients",
    "trace_mask_mod",
    "trace_score_mod",
]
