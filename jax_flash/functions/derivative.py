"""The derivative of a user's function of a score, by JAX's own differentiation.

JAX's `jvp` of the function gives a program that is linear in tangents of the score and of captured arrays,
in which custom derivative rules have been applied. Read as a graph, it looks up single elements of the
arrays' tangents. JAX's `vjp` of that graph of scalars gives a factor for each: the derivative by that
element.
"""

import dataclasses
import functools
from collections.abc import Callable, Container, Iterable

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_flash.functions import reading
from jax_flash.functions.errors import UnsupportedPrimitiveError, user_line
from jax_flash.functions.function import ScalarFunction, argument_shapes, inputs, operands
from jax_flash.functions.graph import CONSTANT, FLOAT32, FLOATS, INPUT, LOAD, Graph, Node, reachable
from jax_flash.functions.lazy import constant, operand, scalar
from jax_flash.functions.scopes import Scope, scope

_TANGENT = "tangent"


@dataclasses.dataclass(frozen=True)
class Gather:
    """An element of a captured array that the function's value depends on.

    Attributes:
      operand: the array's number among those captured.
      index: the element's place in the dense array.
      d_value: d value / d element, float32.
    """

    operand: int
    index: Node
    d_value: Node

    @property
    def scope(self) -> Scope:
        """That of the index. In a row, one of scope `TILE` or `ROW` is the same for all keys."""
        return scope(self.index)


@dataclasses.dataclass(frozen=True)
class Derivative:
    """A function's value, its derivative by the score, and those by what it looks up in captured float
    arrays.

    Attributes:
      program: the tangent as JAX has it, in which rules of custom derivatives show.
    """

    graph: Graph
    value: Node
    d_score: Node
    gathers: tuple[Gather, ...]
    program: str = ""

    @property
    def outputs(self) -> list[Node]:
        """d_score, and of each gather its index and d_value."""
        return [self.d_score, *(node for gather in self.gathers for node in (gather.index, gather.d_value))]

    @property
    def operands(self) -> list[int]:
        """The numbers of the captured arrays that have a gradient."""
        return sorted({gather.operand for gather in self.gathers})


def differentiate(function: ScalarFunction) -> Derivative:
    """The derivative of a function that `trace_score_mod` returned.

    Raises UnsupportedPrimitiveError, also for what has a `jax.custom_vjp`, as JAX gives no tangents there.
    """
    _refuse_custom_vjp(function.jaxpr.jaxpr, ())
    graph = Graph(function.graph.unsupported)
    value, tangent, program = _value_and_tangent(graph, function)
    nodes = reachable([tangent])
    leaves = [node for node in nodes if _is_tangent(node)]
    factors = _factors(graph, tangent, nodes, leaves)
    d_score, gathers = graph.constant(0, FLOAT32), []
    for leaf, factor in zip(leaves, factors, strict=True):
        if leaf.operation != LOAD:
            d_score = factor
        elif not (factor.operation == CONSTANT and factor.value == 0):
            assert isinstance(leaf.detail, tuple)
            gathers.append(Gather(leaf.detail[1], leaf.arguments[0], factor))
    return Derivative(graph, value, d_score, tuple(gathers), program)


def _is_tangent(node: Node) -> bool:
    """Whether a node is a tangent that the program is given."""
    if node.operation == LOAD:
        return isinstance(node.detail, tuple)
    return node.operation == INPUT and node.detail == _TANGENT


def _value_and_tangent(graph: Graph, function: ScalarFunction) -> tuple[Node, Node, str]:
    """The function's value, its tangent by those of the score and of captured arrays of floats, and the
    program of both."""
    shapes = function.shapes
    of_floats = [number for number, x in enumerate(shapes) if np.dtype(x.dtype) in FLOATS]

    def program(arguments, captured, d_score, d_captured):
        score, *indices = arguments

        def value(score, floats):
            own = [*captured]
            for number, x in zip(of_floats, floats, strict=True):
                own[number] = x
            (result,) = jaxpr_as_fun(ClosedJaxpr(function.jaxpr.jaxpr, own))(score, *indices)
            return jax.numpy.asarray(result).astype(FLOAT32)

        primals = score, [captured[number] for number in of_floats]
        return jax.jvp(value, primals, (d_score, d_captured))

    # Types of tracers within `shard_map` also say along which axes of the mesh they vary.
    types = [jax.typeof(x) for x in function.captured]
    d_score = jax.ShapeDtypeStruct((), FLOAT32)
    tangent_types = [types[number] for number in of_floats]
    closed = jax.make_jaxpr(program)(argument_shapes(function.arguments), types, d_score, tangent_types)
    values = [
        *inputs(graph, function.arguments),
        *operands(graph, shapes),
        scalar(graph.input(_TANGENT, FLOAT32)),
        *(operand(graph, (_TANGENT, n), shapes[n].shape, np.dtype(shapes[n].dtype)) for n in of_floats),
    ]
    constants = [constant(graph, x) for x in closed.consts]
    value, tangent = reading.read(graph, closed, constants, values)
    return value.at(()), tangent.at(()), str(closed.jaxpr)


def _factors(graph: Graph, tangent: Node, nodes: list[Node], leaves: list[Node]) -> list[Node]:
    """What the leaves are multiplied by in `tangent`, which is linear in them and computed by `nodes`."""
    if not leaves:
        return []
    linear = set(leaves)
    for node in nodes:
        if not linear.isdisjoint(node.arguments):
            linear.add(node)
    steps = [node for node in nodes if node in linear and not _is_tangent(node)]
    others = list(dict.fromkeys(x for node in steps for x in node.arguments if x not in linear))

    def program(tangents, others_):
        def evaluate(*tangents):
            return _evaluate(tangent, dict(zip((*leaves, *others), (*tangents, *others_), strict=True)))

        return jax.vjp(evaluate, *tangents)[1](jax.numpy.ones((), tangent.dtype))

    def shapes_of(some):
        return [jax.ShapeDtypeStruct((), node.dtype) for node in some]

    closed = jax.make_jaxpr(program)(shapes_of(leaves), shapes_of(others))
    values = [scalar(node) for node in (*leaves, *others)]
    constants = [constant(graph, x) for x in closed.consts]
    found = [factor.at(()) for factor in reading.read(graph, closed, constants, values)]
    return [_with_one_constant(graph, _float32(graph, factor)) for factor in found]


def _evaluate(node: Node, known: dict[Node, jax.Array]) -> jax.Array:
    """The value of a node, given those of nodes that it is computed from.

    A branch is computed in a `cond`, as its derivative may not be finite where the other one is taken, and 0
    times that is NaN.
    """
    known = dict(known)
    for step in _needed(node, known):
        if step.selects_branch:
            predicate, *branches = step.arguments
            if_false, if_true = (functools.partial(_evaluate, branch, known) for branch in branches)
            known[step] = jax.lax.cond(known[predicate], if_true, if_false)
        else:
            assert step.bind is not None
            known[step] = step.bind(*(known[argument] for argument in step.arguments))
    return known[node]


def _needed(node: Node, known: Container[Node]) -> list[Node]:
    """What is to be computed for a node, arguments first: of branches only what both need."""

    def arguments(step: Node) -> Iterable[Node]:
        if not step.selects_branch:
            return step.arguments
        predicate, *branches = step.arguments
        if_false, if_true = (_unknown(branch, known, lambda step: step.arguments) for branch in branches)
        return predicate, *(if_false & if_true)

    return sorted(_unknown(node, known, arguments), key=lambda step: step.number)


def _unknown(node: Node, known: Container[Node], arguments: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """The node, and those that it depends on by `arguments`, but for what is known."""
    found, pending = set(), [node]
    while pending:
        step = pending.pop()
        if step not in known and step not in found:
            found.add(step)
            pending += arguments(step)
    return found


def _float32(graph: Graph, factor: Node) -> Node:
    """A factor in float32. That of a 16-bit element is rounded at its end, which is left out here."""
    if factor.operation == "convert_element_type" and factor.arguments[0].dtype == FLOAT32:
        return factor.arguments[0]
    return graph.convert(factor, FLOAT32)


def _with_one_constant(graph: Graph, factor: Node) -> Node:
    """A factor whose constant factors are one: those of a soft cap c tanh(x / c) cancel."""
    rest, product, constants = factor, 1.0, 0
    while rest.operation in ("mul", "div"):
        first, second = rest.arguments
        if second.operation == CONSTANT:
            of_product = float(second.value) if rest.operation == "mul" else 1 / float(second.value or np.nan)
            kept = first
        elif first.operation == CONSTANT and rest.operation == "mul":
            of_product, kept = float(first.value), second
        else:
            break
        rest, product, constants = kept, product * of_product, constants + 1
    if constants < 2 or not 2.0**-100 < abs(product) < 2.0**100:
        return factor
    return graph.product(rest, graph.constant(product, FLOAT32))


def _refuse_custom_vjp(jaxpr, callers) -> None:
    for equation in jaxpr.eqns:
        chain = (*callers, equation)
        if equation.primitive.name == "custom_vjp_call":
            reason = "a function with a custom_vjp has no tangents; a custom_jvp has"
            raise UnsupportedPrimitiveError(equation.primitive.name, user_line(chain), reason)
        inner = reading.called(equation)
        if inner is not None:
            _refuse_custom_vjp(inner[0], chain)
