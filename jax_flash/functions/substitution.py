"""A user's function whose index arguments are computed from other indices and from further captured arrays.

The user's function keeps its graph: what it took as an index is a node now. chunks.py and varlen.py say
which.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jax_flash.functions.derivative import Derivative, Gather
from jax_flash.functions.graph import INT32, Graph, Node, substituted
from jax_flash.functions.static import StaticFunction, without_arrays


class IndexSubstitution(Protocol):
    """Computes a function's index arguments from a call's own indices: as nodes of a graph, and in JAX."""

    names: tuple[str, ...]
    """The arguments that are computed. They are computed from those of these names alone."""

    shapes: tuple[jax.ShapeDtypeStruct, ...]
    """Of the further captured arrays, int32 of one axis each."""

    def nodes(self, graph: Graph, first: int, own: Mapping[str, Node]) -> dict[str, Node]:
        """Each of `names`, from the own indices; the further arrays have numbers from `first` on."""
        ...

    def values(self, arrays: Sequence[Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """The same in JAX, from the further arrays."""
        ...


def with_indices(function: StaticFunction, indices: IndexSubstitution, key_suffix: str) -> StaticFunction:
    """The function of a call's own indices. Behind its captured arrays there are those of `indices`.

    Args:
      key_suffix: tells this substitution from others, in the key that says which functions are equal.
    """
    # Derived, so that it is equal for equal functions; one without a graph is equal to itself.
    key = hashlib.sha256(f"{function.key} {key_suffix}".encode()).hexdigest()[:32]
    shapes = (*function.shapes, *indices.shapes)
    derivative = function.derivative
    return dataclasses.replace(
        function,
        key=key,
        jaxpr=_jaxpr(function, indices, shapes),
        shapes=shapes,
        value=None if function.value is None else _nodes([function.value], Graph(), function, indices)[0],
        derivative=None if derivative is None else _derivative(derivative, function, indices),
    )


def _nodes(
    outputs: list[Node], graph: Graph, function: StaticFunction, indices: IndexSubstitution
) -> list[Node]:
    """The same of the call's own indices, in `graph`."""
    own = {name: graph.input(name, INT32) for name in indices.names}
    return substituted(graph, outputs, indices.nodes(graph, len(function.shapes), own))


def _derivative(of: Derivative, function: StaticFunction, indices: IndexSubstitution) -> Derivative:
    graph = Graph(of.graph.unsupported)
    value, *outputs = _nodes([of.value, *of.outputs], graph, function, indices)
    d_score, *rest = outputs
    gathers = (
        Gather(gather.operand, index, d_value)
        for gather, index, d_value in zip(of.gathers, rest[::2], rest[1::2], strict=True)
    )
    return dataclasses.replace(of, graph=graph, value=value, d_score=d_score, gathers=tuple(gathers))


def _jaxpr(function: StaticFunction, indices: IndexSubstitution, shapes: Any) -> Any:
    """With the further arrays as the last of the captured ones, which are `constvars`.

    The user's equations stay as they are. Those of the indices stand ahead of them.
    """
    jaxpr, count = function.jaxpr, len(indices.shapes)
    positions = [function.arguments.index(name) for name in indices.names]

    def computed(*given):
        arrays, own = given[:count], dict(zip(indices.names, given[count:], strict=True))
        found = indices.values(arrays, own)
        return [found[name] for name in indices.names]

    scalars = [jax.ShapeDtypeStruct((), np.int32)] * len(indices.names)
    ahead = jax.make_jaxpr(computed)(*indices.shapes, *scalars).jaxpr
    # What is computed ahead takes the place of the arguments that the user's equations read.
    read_as = dict(zip(ahead.outvars, (jaxpr.invars[i] for i in positions), strict=True))
    equations = [x.replace(outvars=[read_as.get(out, out) for out in x.outvars]) for x in ahead.eqns]
    arguments = list(jaxpr.invars)
    for position, variable in zip(positions, ahead.invars[count:], strict=True):
        arguments[position] = variable
    found = jaxpr.replace(
        constvars=[*jaxpr.constvars, *ahead.invars[:count]],
        invars=arguments,
        eqns=[*equations, *jaxpr.eqns],
    )
    return without_arrays(found, shapes)
