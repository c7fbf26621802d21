"""Functions of scalars that users write in JAX, as graphs: score_mod and mask_mod, as FlexAttention has them
(Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels", 2024).

    traced = trace_score_mod(score_mod)            function.py: one trace by JAX, read into a graph of scalars
    derivative = differentiate(traced)             derivative.py: by JAX's jvp and vjp
    on_chunks(function, stride)                    chunks.py: of indices in parts of sequences
    on_varlen_tokens(function, queries, keys)      varlen.py: of tokens of varlen sequences

A primitive that no graph can have raises `UnsupportedPrimitiveError`, with its name and the line of the
user's code.
"""

from jax_flash.functions.derivative import Derivative, Gather, differentiate
from jax_flash.functions.errors import UnsupportedPrimitiveError
from jax_flash.functions.function import ScalarFunction, trace_mask_mod, trace_score_mod
from jax_flash.functions.scopes import Scope, scope

__all__ = [
    "Derivative",
    "Gather",
    "ScalarFunction",
    "Scope",
    "UnsupportedPrimitiveError",
    "differentiate",
    "scope",
    "trace_mask_mod",
    "trace_score_mod",
]
