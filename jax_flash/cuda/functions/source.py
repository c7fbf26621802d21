"""CUDA C++ of a function, and of its derivative: the text of a header.

The text depends on what the function computes and on shapes and dtypes of what it captures. It depends
neither on names nor on what captured arrays hold, so functions that are alike share a kernel. In a namespace
it has:

    struct Tile, Row, Column, Element      values by scope (scopes.py)
    Tile make_tile(operands, batch)
    Row make_row(operands, tile, batch, head, query)
    Column make_column(operands, tile, batch, key)
    Element make_element<range>(operands, tile, row, column, score, batch, head, query, key)

`score` is a `ScaledScore` (cuda/kernels/common/scaled_score.cuh). Where `has_tanh`, the function takes
tanh of what is cheap to compute from its score, and `largest_in_tanh`, with the arguments of
`make_element`, tells what `range` may be, a TanhRange (cuda/kernels/common/tanh.cuh).

`query` and `key` are of type `Position` (cuda/kernels/common/position.cuh).

`Element` has `value`, what the function returns; a function without a score has no such argument. The header
of a derivative also has `add_gradients(gradients, element, d_value, add)`. A kernel may call these for rows
and keys beyond the last: all loads stay within arrays, but for those of a function on varlen tokens
(functions/varlen.py).
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Protocol

import jax
import numpy as np

from jax_flash.cuda.functions import cpp, positions
from jax_flash.cuda.functions.finite import is_finite
from jax_flash.functions.derivative import Derivative
from jax_flash.functions.graph import BOOL, CONSTANT, FLOAT32, INPUT, LOAD, Node
from jax_flash.functions.scopes import Scope, by_scope, scope

_QUALIFIERS = "__device__ __forceinline__"
_INDEX_ARGUMENTS = {
    Scope.TILE: ("batch",),
    Scope.ROW: ("batch", "head", "query"),
    Scope.COLUMN: ("batch", "key"),
    Scope.ELEMENT: ("batch", "head", "query", "key"),
}
_POSITIONS = ("query", "key")
_NAMES = {each: each.name.lower() for each in Scope}


class Function(Protocol):
    """A ScalarFunction, or a StaticFunction: here, the shapes of what it captures."""

    @property
    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]: ...


def operand_fields(function: Function) -> dict[str, str]:
    """The fields `operand0`, `operand1`, … of the struct that points to captured arrays, and their types."""
    elements = [cpp.ELEMENTS[np.dtype(x.dtype)] for x in function.shapes]
    return {f"operand{number}": f"const {element}*" for number, element in enumerate(elements)}


def value_text(output: Node, has_score: bool, namespace: str, operands: str) -> str:
    """The C++ of a function that has, or has not, an argument `score`."""
    result = [("bool" if output.dtype == BOOL else "float", "value", output)]
    return _text(namespace, operands, has_score, result, "")


def unit(output: Node) -> tuple[float, Node]:
    """A number c and a bounded x whose product is the function's value, as of a soft cap c tanh(…); or 1 and
    the value.

    The softmax multiplies logits by log2(e), and so by c at no cost. Logits that may be huge are not for
    this: their products would be rounded by whole numbers.
    """
    if output.operation == "mul" and output.dtype == FLOAT32:
        for factor, rest in (output.arguments, output.arguments[::-1]):
            if factor.operation == CONSTANT and rest.operation in _BOUNDED:
                number = float(factor.value)
                if 0 < number < _MOST_UNIT:
                    return number, rest
    return 1.0, output


_MOST_UNIT = 2.0**16
_BOUNDED = ("tanh", "logistic", "erf", "sin", "cos")


def derivative_text(derivative: Derivative, namespace: str, operands: str, gradients: str | None) -> str:
    """The C++ of a function and its derivative.

    `Element` has `value`, `d_score` and for each gather i `d_value<i>` and `index<i>`. `add_gradients` hands
    the terms of sums of gradients to a function that adds them. `is_of_head(i)` says that a gather's index is
    the same for all scores of a head, `is_finite(i)` that its terms are finite wherever `d_value` is.

    Args:
      operands: the name of the struct with `operand_fields`.
      gradients: the name of the struct that points to float32 sums, shaped as the captured arrays that have a
        gradient, `d_operand0`, …; None for no `add_gradients`.
    """
    results = [("float", "value", derivative.value), ("float", "d_score", derivative.d_score)]
    terms, arrays = [], []
    for number, gather in enumerate(derivative.gathers):
        results += [
            ("float", f"d_value{number}", gather.d_value),
            ("int", f"index{number}", gather.index),
        ]
        term = f"element.index{number}, d_value * element.d_value{number}"
        terms.append(f"    add({number}, gradients.d_operand{gather.operand}, {term});")
        condition = f"if (gather == {number}) " if number + 1 < len(derivative.gathers) else ""
        arrays.append(f"    {condition}return gradients.d_operand{gather.operand};")
    add = "\n".join(
        [
            f"constexpr int gathers = {len(derivative.gathers)};",
            _predicate(
                "is_of_head", [gather.index.inputs <= {"batch", "head"} for gather in derivative.gathers]
            ),
            _predicate("is_finite", [is_finite(gather.d_value) for gather in derivative.gathers]),
            "",
            "// The sums that the terms of a gather are added to.",
            f"{_QUALIFIERS} auto sums_of(const {gradients}& gradients, int gather) {{",
            *arrays,
            "}",
            "",
            "// Calls add(gather, sums, index, term) for each gather. `d_value` is that of the value.",
            "template <class Add>",
            f"{_QUALIFIERS} void add_gradients("
            f"const {gradients}& gradients, const Element& element, float d_value, Add add) {{",
            *terms,
            "}",
        ]
    )
    return _text(namespace, operands, True, results, "" if gradients is None else add)


def _predicate(name: str, of_gathers: Sequence[bool]) -> str:
    holds = [f"gather == {number}" for number, value in enumerate(of_gathers) if value]
    return f"{_QUALIFIERS} constexpr bool {name}(int gather) {{ return {' || '.join(holds) or 'false'}; }}"


def _text(
    namespace: str, operands: str, has_score: bool, results: Sequence[tuple[str, str, Node]], last: str
) -> str:
    writer = _Writer(operands, has_score, results)
    parts = [writer.function(each) for each in Scope]
    if has_score:
        parts.append(writer.largest_in_tanh())
    body = "\n\n".join([*parts, *([last] if last else [])])
    return (
        '#pragma once\n#include "parameters.cuh"\n#include "common/position.cuh"\n'
        '#include "common/scalar_functions.cuh"\n#include "common/scaled_score.cuh"\n\n'
        f"namespace {namespace} {{\n\n{body}\n\n}}  // namespace {namespace}\n"
    )


class _Writer:
    """Writes the functions of the scopes, in order, and keeps which name each value has."""

    def __init__(self, operands: str, has_score: bool, results: Sequence[tuple[str, str, Node]]):
        nodes = positions.with_positions([node for _, _, node in results])
        results = [(*result[:2], node) for result, node in zip(results, nodes, strict=True)]
        self.operands, self.has_score, self.results = operands, has_score, results
        self.scopes = by_scope(node for _, _, node in results)
        nodes = [node for each in Scope for node in self.scopes[each]]
        self.names = {node: f"v{number}" for number, node in enumerate(nodes)}
        used = {argument for node in nodes for argument in node.arguments if scope(argument) < scope(node)}
        used |= {node for _, _, node in results}
        self.kept = {each: [node for node in self.scopes[each] if node in used] for each in Scope}
        self.tanhs = _tanhs(self.scopes[Scope.ELEMENT]) if has_score else ()

    def function(self, own: Scope) -> str:
        """A scope's struct, and the function that makes it."""
        name, type = f"make_{_NAMES[own]}", own.name.capitalize()
        if own == Scope.ELEMENT:
            fields = [(type_of, field, self.name(node, own)) for type_of, field, node in self.results]
        else:
            fields = [(cpp.type_of(node), self.names[node], self.names[node]) for node in self.kept[own]]
        lines = [f"struct {type} {{", *(f"    {type_of} {field};" for type_of, field, _ in fields), "};"]
        if own == Scope.ELEMENT and self.has_score:
            lines.append("template <TanhRange range = TanhRange::unasked>")
        lines.append(f"{_QUALIFIERS} {type} {name}({', '.join(self.parameters(own))}) {{")
        lines += self.statements(self.scopes[own], own)
        lines += [f"    return {{{', '.join(value for _, _, value in fields)}}};", "}"]
        return "\n".join(lines)

    def largest_in_tanh(self) -> str:
        """The text of a function: the largest |argument| of every tanh of an element, but NaN."""
        arguments = [node.arguments[0] for node in self.tanhs]
        lines = [f"constexpr bool has_tanh = {'true' if arguments else 'false'};"]
        lines.append(f"{_QUALIFIERS} float largest_in_tanh({', '.join(self.parameters(Scope.ELEMENT))}) {{")
        lines += self.statements(by_scope(arguments)[Scope.ELEMENT], Scope.ELEMENT)
        sizes = [f"fabsf({self.name(argument, Scope.ELEMENT)})" for argument in arguments]
        largest = functools.reduce("fmaxf({}, {})".format, sizes) if sizes else "0"
        lines += [f"    return {largest};", "}"]
        return "\n".join(lines)

    def statements(self, nodes: Iterable[Node], own: Scope) -> list[str]:
        return [
            f"    const {cpp.type_of(node)} {self.names[node]} = {self.expression(node, own)};"
            for node in nodes
        ]

    def parameters(self, own: Scope) -> list[str]:
        earlier = [each for each in Scope if each == Scope.TILE or own == Scope.ELEMENT]
        parameters = [f"const {self.operands}& operands"]
        parameters += [f"const {each.name.capitalize()}& {_NAMES[each]}" for each in earlier if each < own]
        if own == Scope.ELEMENT and self.has_score:
            parameters.append("ScaledScore score")
        return parameters + [
            f"{'Position' if name in _POSITIONS else 'int'} {name}" for name in _INDEX_ARGUMENTS[own]
        ]

    def expression(self, node: Node, own: Scope) -> str:
        arguments = [self.name(argument, own) for argument in node.arguments]
        if node.operation in (positions.FLOAT_OF_POSITION, positions.COMPARED_POSITION):
            return positions.expression(node, arguments)
        if node in self.tanhs:
            return f"tanh_in<range>({arguments[0]})"
        if (factor := self.factor_of_score(node, own)) is not None:
            return f"score.times({factor})"
        if node.operation != LOAD:
            return cpp.expression(node, arguments)
        load = f"scalar::load(operands.operand{node.detail} + {arguments[0]})"
        return f"{load} != 0" if node.dtype == BOOL else load

    def factor_of_score(self, node: Node, own: Scope) -> str | None:
        """What a node multiplies the score by, if it is the same for all scores of a row; else None."""
        if node.dtype != FLOAT32 or node.operation not in ("mul", "div"):
            return None
        first, second = node.arguments
        if node.operation == "div":
            reciprocal = cpp.reciprocal(second)
            return reciprocal if _is_score(first) else None
        factors = [x for x, other in ((first, second), (second, first)) if _is_score(other)]
        return next((self.name(x, own) for x in factors if x.inputs <= {"batch", "head", "query"}), None)

    def name(self, node: Node, own: Scope) -> str:
        """How the function of a scope names a value, which may be of an earlier scope."""
        if node.operation == CONSTANT:
            return cpp.literal(node)
        if _is_score(node):
            return "score.scaled()"
        if node.operation == INPUT:
            return f"{node.detail}.index()" if node.detail in _POSITIONS else str(node.detail)
        of = scope(node)
        return self.names[node] if of == own else f"{_NAMES[of]}.{self.names[node]}"


def _is_score(node: Node) -> bool:
    return node.operation == INPUT and node.detail == "score"


_CHEAP = ("add", "sub", "mul", "div", "neg", "convert_element_type")


def _tanhs(elements: Sequence[Node]) -> tuple[Node, ...]:
    """Each tanh among an element's values, if computing their arguments twice costs little; else none."""
    tanhs = tuple(node for node in elements if node.operation == "tanh")
    computed = by_scope(node.arguments[0] for node in tanhs)[Scope.ELEMENT]
    is_cheap = all(node.operation in _CHEAP for node in computed)
    return tanhs if is_cheap and all(node.dtype == FLOAT32 for node in tanhs) else ()
