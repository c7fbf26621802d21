"""Functions of scalars that users write in JAX, as CUDA C++: headers that kernels include.

`jax_flash.functions` traces a function to a graph of scalars, refusing what `cpp.unsupported` says can't be
written. `value_text` and `derivative_text` write the graph, and that of its derivative.
"""

from jax_flash.cuda.functions.source import derivative_text, operand_fields, unit, value_text

__all__ = ["derivative_text", "operand_fields", "unit", "value_text"]
