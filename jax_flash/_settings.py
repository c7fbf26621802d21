"""JAX's settings while code of this package is traced: those that it is written for.

A user may have JAX refuse what NumPy allows, broadcasting to a higher rank or mixing dtypes, so as to find
faults in their own program. That is no statement about ours.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def as_written(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """`function` with NumPy's promotion of ranks and JAX's standard promotion of dtypes inside."""

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        config = jax.config
        if (config.jax_numpy_rank_promotion, config.jax_numpy_dtype_promotion) == ("allow", "standard"):  # type: ignore[attr-defined]
            return function(*args, **kwargs)  # a context costs as much as the checks of a call
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(jax.numpy_rank_promotion("allow"))
            contexts.enter_context(jax.numpy_dtype_promotion("standard"))
            return function(*args, **kwargs)

    return run
