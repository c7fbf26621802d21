"""Which values of a function are finite, whatever the score and captured arrays are."""

from jax_flash.functions.graph import BOOL, CONSTANT, FLOATS, Node

_LARGEST_INTEGER, _LARGEST = 2.0**32, 2.0**120
_OF_ONE = ("tanh", "sin", "cos", "erf", "logistic", "sign")
"""At most 1 of finite numbers."""
_OF_ARGUMENT = ("neg", "abs", "max", "min", "select_n", "clamp", "convert_element_type", "stop_gradient")
"""No larger than the largest argument."""


def is_finite(node: Node) -> bool:
    return _bound(node, {}) < _LARGEST


def _bound(node: Node, known: dict[Node, float]) -> float:
    """How large a number is at most; infinite where nothing is known of it."""
    if node not in known:
        known[node] = _bound_of(node, known)
    return known[node]


def _bound_of(node: Node, known: dict[Node, float]) -> float:
    if node.operation == CONSTANT:
        size = abs(float(node.value))
        return size if size < _LARGEST else float("inf")
    if node.dtype not in FLOATS:
        return 1.0 if node.dtype == BOOL else _LARGEST_INTEGER
    sizes = [_bound(x, known) for x in node.arguments]
    largest = max(sizes, default=float("inf"))
    if largest >= _LARGEST:
        return float("inf")
    if node.operation in _OF_ONE:
        return 1.0
    if node.operation in _OF_ARGUMENT:
        return largest
    if node.operation in ("add", "add_any", "sub"):
        return sizes[0] + sizes[1]
    if node.operation == "mul":
        return sizes[0] * sizes[1]
    return float("inf")
