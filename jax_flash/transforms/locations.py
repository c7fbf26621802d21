"""Programs that don't say which lines of Python they come from.

The compiler asks for the computation of one device as a program of its own, and puts its operations into the
whole program as they are. Each has a number that stands for its place in Python. XLA doesn't renumber them,
so a number may lie beyond the whole program's table. Inlining a loop's body looks it up, and in jaxlib 0.12.0
this search may never end.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun


def without_locations(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function, but what it calls has no places in Python when it is lowered."""

    def run(inputs: Any) -> Any:
        program, shapes = jax.make_jaxpr(function, return_shape=True)(inputs)
        results = jaxpr_as_fun(_closed(program))(*jax.tree.leaves(inputs))
        return jax.tree.structure(shapes).unflatten(results)

    return run


def _closed(program: ClosedJaxpr) -> ClosedJaxpr:
    return program.replace(jaxpr=_jaxpr(program.jaxpr))


def _jaxpr(program: Jaxpr) -> Jaxpr:
    return program.replace(eqns=[_equation(equation) for equation in program.eqns])


def _equation(equation: Any) -> Any:
    place = equation.source_info
    place = type(place)(traceback=None, name_stack=place.name_stack)
    parameters = {name: _parameter(x) for name, x in equation.params.items()}
    return equation.replace(source_info=place, params=parameters)


def _parameter(x: Any) -> Any:
    if isinstance(x, ClosedJaxpr):
        return _closed(x)
    if isinstance(x, Jaxpr):
        return _jaxpr(x)
    if type(x) in (tuple, list):
        return type(x)(map(_parameter, x))
    return x
