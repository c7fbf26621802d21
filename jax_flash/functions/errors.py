"""What a function can't be written for, said with the primitive's name and the line of the user's code."""

from pathlib import Path

from jax.extend import source_info_util

_PACKAGE = f"{Path(__file__).parents[1]}/"


class UnsupportedPrimitiveError(NotImplementedError):
    """A primitive of a user's function that CUDA code can't be written for.

    Attributes:
      primitive: its name.
      line: where the user's code has it, as "file:line:column (function)".
    """

    def __init__(self, primitive: str, line: str, reason: str):
        super().__init__(f"{primitive}, at {line}: {reason}")
        self.primitive, self.line, self.reason = primitive, line, reason


def user_line(equations) -> str:
    """The line of the user's code that an equation comes from.

    Args:
      equations: the equation, and those whose functions it lies in, outermost first. The line is that of the
        outermost equation that the user's code made. Inner ones may lie in functions of JAX that were traced
        for another caller, whose line they have.
    """
    lines = [source_info_util.summarize(equation.source_info) for equation in equations]
    return next((line for line in lines if not line.startswith((_PACKAGE, "unknown"))), lines[-1])
