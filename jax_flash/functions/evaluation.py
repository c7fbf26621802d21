"""A graph of scalars, computed for many at once: each node is an array that broadcasts.

A node that depends on the head alone has one number for each head, whatever the number of scores.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jax_flash.functions.graph import CONSTANT, INPUT, LOAD, Node, reachable
from jax_flash.transforms.varying import vary_alike, vary_over, varying_axes

Load = Callable[[Hashable, jax.Array], jax.Array]
"""The elements of an operand at flat indices."""

Apply = Callable[[Node, Sequence[jax.Array]], jax.Array]
"""A node's primitive, of arguments of one shape."""


def by_jax(node: Node, arguments: Sequence[jax.Array]) -> jax.Array:
    """The primitive as JAX has it."""
    assert node.bind is not None
    return node.bind(*arguments)


def evaluate(
    outputs: Sequence[Node], inputs: Mapping[str, jax.Array], load: Load, apply: Apply = by_jax
) -> list[jax.Array]:
    """What `outputs` are for these inputs, whose shapes broadcast. A result's shape may have 1 for an axis
    that it doesn't depend on."""
    rank = max(x.ndim for x in inputs.values())
    inputs = vary_alike(dict(inputs))
    axes = varying_axes(inputs)
    values: dict[Node, jax.Array] = {}
    for node in reachable(outputs):
        if node.operation == INPUT:
            values[node] = inputs[str(node.detail)]
        elif node.operation == CONSTANT:
            values[node] = vary_over(jnp.full((1,) * rank, node.value, node.dtype), axes)
        elif node.operation == LOAD:
            values[node] = load(node.detail, values[node.arguments[0]])
        else:
            values[node] = apply(node, jnp.broadcast_arrays(*(values[x] for x in node.arguments)))
    return [values[node] for node in outputs]


def text(outputs: Sequence[Node]) -> str:
    """All that `outputs` are computed by: equal for graphs that compute the same."""
    nodes = reachable(outputs)
    numbers = {node: number for number, node in enumerate(nodes)}
    lines = [
        f"{node.operation} {node.dtype} {[numbers[x] for x in node.arguments]} {node.detail!r}"
        for node in nodes
    ]
    return "\n".join([*lines, repr([numbers[node] for node in outputs])])
