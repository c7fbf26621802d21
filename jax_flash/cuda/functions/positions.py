"""Sums of positions that kernels compute once a block, where a function computes them for each score.

A thread's scores lie at distances from its first one that are constants once loops are unrolled. So a kernel
gives an index as a `Position` (cuda/kernels/common/position.cuh): its base, the same for many scores, and its
offset. An integer that is a sum of multiples of `query` and `key`, and of what depends on neither, has a base
and an offset too. Two uses of such a sum are replaced here:

    float(query - key)     float(base) + offset, one addition of a constant, in place of a subtraction and a
                           conversion; the conversion of an integer takes as long as an exponential
    query - key >= 3       base >= 3 - offset, one comparison with a constant

Conversions move ahead of absolute values, extrema and choices, which floats have for less. All are exact for
positions below 2^24; beyond, a float may differ in its last bit from that of the integer.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jax import lax

from jax_flash.functions.graph import BOOL, CONSTANT, FLOAT32, INPUT, INT32, Graph, Node, reachable

FLOAT_OF_POSITION, COMPARED_POSITION = "float_of_position", "compared_position"
"""Operations of the nodes that replace those uses. `detail` is `(sum of positions, comparison or None)`."""

_LARGEST_FACTOR, _LARGEST_CONSTANT = 1 << 6, 1 << 22
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_COMMUTING = {"abs": lax.abs, "neg": lax.neg, "max": lax.max, "min": lax.min, "clamp": lax.clamp}
"""Operations that may as well come behind a conversion to float."""


class PositionSum(NamedTuple):
    """query · `query` + key · `key` + `constant` + Σ factor · term, of int32.

    Terms depend on neither index. Here `factors` has their factors; the terms are the node's arguments.
    """

    query: int
    key: int
    constant: int
    factors: tuple[int, ...] = ()

    @property
    def is_small(self) -> bool:
        return max(abs(self.query), abs(self.key), *map(abs, self.factors), 0) <= _LARGEST_FACTOR and (
            abs(self.constant) <= _LARGEST_CONSTANT
        )


def with_positions(outputs: Sequence[Node]) -> list[Node]:
    """`outputs`, in a graph of their own, with these uses replaced."""
    graph = Graph()
    found: dict[Node, Node] = {}
    sums: dict[Node, tuple[PositionSum, tuple[Node, ...]] | None] = {}
    for node in reachable(outputs):  # arguments first
        sums[node] = _sum_of(node, sums)
        own = _float(graph, node, sums, found) if _is_conversion(node) else None
        if own is None and node.operation in _COMPARISONS:
            own = _comparison(graph, node, sums, found)
        found[node] = graph.copied(node, (found[x] for x in node.arguments)) if own is None else own
    return [found[node] for node in outputs]


def _is_conversion(node: Node) -> bool:
    return node.operation == "convert_element_type" and node.dtype == FLOAT32


def _depends_on_position(node: Node) -> bool:
    return not node.inputs.isdisjoint(("query", "key", "score"))


def _sum_of(node: Node, sums) -> tuple[PositionSum, tuple[Node, ...]] | None:
    """A node as a sum of positions and its terms, from those of its arguments; None if it is none."""
    if node.dtype != INT32:
        return None
    if node.operation == CONSTANT:
        return PositionSum(0, 0, int(node.value)), ()
    if node.operation == INPUT and node.detail in ("query", "key"):
        return PositionSum(int(node.detail == "query"), int(node.detail == "key"), 0), ()
    if not _depends_on_position(node):
        return PositionSum(0, 0, 0, (1,)), (node,)
    arguments = [sums[x] for x in node.arguments]
    if node.operation not in ("add", "sub", "mul", "neg") or None in arguments:
        return None
    (one, terms), *others = arguments
    if node.operation == "neg":
        result = _times(one, -1), terms
    elif node.operation == "mul":
        other, others_terms = others[0]
        if one == PositionSum(0, 0, one.constant):
            result = _times(other, one.constant), others_terms
        elif other == PositionSum(0, 0, other.constant):
            result = _times(one, other.constant), terms
        else:
            return None
    else:
        other, others_terms = others[0]
        result = _plus(one, _times(other, -1 if node.operation == "sub" else 1)), (*terms, *others_terms)
    return result if result[0].is_small else None


def _times(x: PositionSum, by: int) -> PositionSum:
    return PositionSum(x.query * by, x.key * by, x.constant * by, tuple(factor * by for factor in x.factors))


def _plus(x: PositionSum, y: PositionSum) -> PositionSum:
    return PositionSum(x.query + y.query, x.key + y.key, x.constant + y.constant, x.factors + y.factors)


def _float(graph: Graph, node: Node, sums, found) -> Node | None:
    """The conversion of an integer, or None where nothing is to be gained."""
    (x,) = node.arguments
    if x.dtype != INT32 or not _depends_on_position(x) or not _is_cheaper_as_float(x, sums):
        return None
    return _as_float(graph, x, sums, found)


def _is_cheaper_as_float(x: Node, sums) -> bool:
    if not _depends_on_position(x) or sums[x] is not None:
        return True
    if x.operation == "select_n":
        return x.dtype == INT32 and all(_is_cheaper_as_float(case, sums) for case in x.arguments[1:])
    return x.operation in _COMMUTING and all(_is_cheaper_as_float(y, sums) for y in x.arguments)


def _as_float(graph: Graph, x: Node, sums, found) -> Node:
    if not _depends_on_position(x):
        return graph.convert(found[x], FLOAT32)
    if sums[x] is not None:
        total, terms = sums[x]
        return graph.scalar(FLOAT_OF_POSITION, [found[y] for y in terms], FLOAT32, (total, None), x.inputs)
    if x.operation == "select_n":
        which, *cases = x.arguments
        arguments = [found[which], *(_as_float(graph, case, sums, found) for case in cases)]
        return graph.apply("select_n", arguments, FLOAT32, lax.select_n)
    arguments = [_as_float(graph, y, sums, found) for y in x.arguments]
    return graph.apply(x.operation, arguments, FLOAT32, _COMMUTING[x.operation])


def _comparison(graph: Graph, node: Node, sums, found) -> Node | None:
    """Of two sums of positions: that of their difference with 0, or None."""
    one, other = (sums[x] for x in node.arguments)
    if one is None or other is None:
        return None
    total, terms = _plus(one[0], _times(other[0], -1)), (*one[1], *other[1])
    # A difference of what is not known might wrap around.
    if terms or not total.is_small or total.query == total.key == 0:
        return None
    return graph.scalar(COMPARED_POSITION, [], BOOL, (total, node.operation), node.inputs)


# ------------------------------------------------------------------------------------------- as C++


_SIGNS = dict(zip(_COMPARISONS, ("<", "<=", ">", ">=", "==", "!="), strict=True))


def expression(node: Node, arguments: Sequence[str]) -> str:
    """The node in C++, where `query` and `key` are `Position`s."""
    assert isinstance(node.detail, tuple)
    total, comparison = node.detail
    base = _text(total, "base", arguments, total.constant)
    offset = _text(total, "offset", (), 0)
    if comparison is not None:
        return f"{base} {_SIGNS[comparison]} -({offset})"
    return f"static_cast<float>({base}) + static_cast<float>({offset})"


def _text(total: PositionSum, part: str, terms: Sequence[str], constant: int) -> str:
    factors = {f"query.{part}": total.query, f"key.{part}": total.key}
    factors |= dict(zip(terms, total.factors, strict=False))
    result = str(constant) if constant else ""
    for name, factor in factors.items():
        if factor:
            product = name if factor == 1 else f"scalar::multiply({name}, {factor})"
            result = f"scalar::add({result}, {product})" if result else product
    return result
