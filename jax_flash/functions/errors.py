"""The error for a primitive that no graph of scalars can have, and the line of the user's code with it."""

from pathlib import Path

from jax.extend import source_info_util

_PACKAGE = f"{Path(__file__).parents[1]}/"


class UnsupportedPrimitiveError(NotImplementedError):
    """A user's function has a primitive that can't become a node of a graph of scalars.

    Attributes:
      primitive: its name.
      line: where the user's code has it, as "file:line:column (function)".
      reason: why it can't.
    """

    def __init__(self, primitive: str, line: str, reason: str):
        super().__init__(f"{primitive}, at {line}: {reason}")
        self.primitive, self.line, self.reason = primitive, line, reason


class GraphTooLargeError(UnsupportedPrimitiveError):
    """The graph had more nodes than code is written out for when it came to this primitive."""


def user_line(equations) -> str:
    """The line of the user's code that an equation comes from.

    Args:
      equations: the equation, and those whose functions it lies in, outermost first. The line is that of the
        outermost equation that the user's code made. Inner ones may lie in functions of JAX that were traced
        for another caller, whose line they have.
    """
    lines = [source_info_util.summarize(equation.source_info) for equation in equations]
    return next((line for line in lines if line and not line.startswith((_PACKAGE, "unknown"))), lines[-1])
