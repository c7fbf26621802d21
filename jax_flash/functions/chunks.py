"""A user's function on chunks of sequences: it sees indices of the whole sequences.

A call on chunks counts its own queries and keys from 0. Where its chunks start differs between devices and
steps. So the function captures one more array, the starts of both chunks, and an index that it takes is

    start + stride * own index

Starts are operands, never constants, so one compiled function serves all chunks.
"""

import dataclasses
import hashlib
from typing import Any

import jax
import numpy as np

from jax_flash.functions.derivative import Derivative, Gather
from jax_flash.functions.graph import INT32, Graph, Node, substituted
from jax_flash.functions.static import StaticFunction, without_arrays

STARTS = ("query", "key")
"""The arguments whose starts the further array has, in this order: int32 `(2,)`."""


def on_chunks(function: StaticFunction, stride: int) -> StaticFunction:
    """The function of indices within chunks, behind whose captured arrays there is that of `STARTS`.

    Args:
      stride: from one token of a chunk to its next one, in the whole sequence.
    """
    # Derived, so that it is equal for equal functions; one without a graph is equal to itself.
    key = hashlib.sha256(f"{function.key} on chunks, stride {stride}".encode()).hexdigest()[:32]
    shapes = (*function.shapes, jax.ShapeDtypeStruct((len(STARTS),), np.int32))
    derivative = function.derivative
    return dataclasses.replace(
        function,
        key=key,
        jaxpr=_jaxpr(function, shapes, stride),
        shapes=shapes,
        value=None if function.value is None else _nodes([function.value], Graph(), function, stride)[0],
        derivative=None if derivative is None else _derivative(derivative, function, stride),
    )


def _nodes(outputs: list[Node], graph: Graph, function: StaticFunction, stride: int) -> list[Node]:
    """The same of indices within chunks, in `graph`."""

    def whole(axis: int, name: str) -> Node:
        start = graph.load(len(function.shapes), graph.integer(axis), INT32)
        return graph.add(start, graph.multiply(graph.input(name, INT32), stride))

    return substituted(graph, outputs, {name: whole(axis, name) for axis, name in enumerate(STARTS)})


def _derivative(of: Derivative, function: StaticFunction, stride: int) -> Derivative:
    graph = Graph(of.graph.unsupported)
    value, *outputs = _nodes([of.value, *of.outputs], graph, function, stride)
    d_score, *rest = outputs
    gathers = (
        Gather(gather.operand, index, d_value)
        for gather, index, d_value in zip(of.gathers, rest[::2], rest[1::2], strict=True)
    )
    return dataclasses.replace(of, graph=graph, value=value, d_score=d_score, gathers=tuple(gathers))


def _jaxpr(function: StaticFunction, shapes: Any, stride: int) -> Any:
    """With the starts as the last of the captured arrays, which are `constvars`.

    The user's equations stay as they are. Those of the indices stand ahead of them.
    """
    jaxpr = function.jaxpr
    positions = [function.arguments.index(name) for name in STARTS]

    def whole(starts, *indices):
        return [starts[axis] + stride * index for axis, index in enumerate(indices)]

    indices = [jax.ShapeDtypeStruct((), np.int32)] * len(STARTS)
    ahead = jax.make_jaxpr(whole)(shapes[-1], *indices).jaxpr
    # What is computed ahead takes the place of the arguments that the user's equations read.
    places = dict(zip(ahead.outvars, (jaxpr.invars[i] for i in positions), strict=True))
    equations = [x.replace(outvars=[places.get(out, out) for out in x.outvars]) for x in ahead.eqns]
    starts, *own = ahead.invars
    arguments = list(jaxpr.invars)
    for position, variable in zip(positions, own, strict=True):
        arguments[position] = variable
    found = jaxpr.replace(
        constvars=[*jaxpr.constvars, starts], invars=arguments, eqns=[*equations, *jaxpr.eqns]
    )
    return without_arrays(found, shapes)
