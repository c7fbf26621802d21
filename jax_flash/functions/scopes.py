"""When a kernel computes each value of a function: once a tile, a row, a column, or for each element."""

import enum
from collections.abc import Iterable

from jax_flash.functions.graph import CONSTANT, INPUT, Node, reachable


class Scope(enum.IntEnum):
    """What a value depends on."""

    TILE = 0  # on the batch, which is one for all of a tile, or on captured arrays alone
    ROW = 1  # on the head or query
    COLUMN = 2  # on the key, and maybe the batch
    ELEMENT = 3  # on the score, or on the key and the head or query


def scope(node: Node) -> Scope:
    if node.inputs <= {"batch"}:
        return Scope.TILE
    if "score" not in node.inputs:
        if "key" not in node.inputs:
            return Scope.ROW
        if node.inputs <= {"batch", "key"}:
            return Scope.COLUMN
    return Scope.ELEMENT


def by_scope(outputs: Iterable[Node]) -> dict[Scope, list[Node]]:
    """What `outputs` are computed from, and these, by scope, arguments first. Arguments of the function and
    constants aren't computed."""
    found: dict[Scope, list[Node]] = {each: [] for each in Scope}
    for node in reachable(outputs):
        if node.operation not in (INPUT, CONSTANT):
            found[scope(node)].append(node)
    return found
