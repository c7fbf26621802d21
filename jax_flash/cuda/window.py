"""The window of a call as the kernels see it: only the sides that bind, in a range that can't overflow."""

import dataclasses

from jax_flash._spec import AttentionSpec, Sizes


@dataclasses.dataclass(frozen=True)
class Window:
    """Keys seen on each side of the bottom-right diagonal; None where the side hides no key."""

    left: int | None
    right: int | None

    @property
    def unbounded(self) -> bool:
        return self.left is None and self.right is None


UNBOUNDED = Window(None, None)


def binding_window(spec: AttentionSpec, n: Sizes) -> Window:
    """`spec`'s window for these sizes.

    The first query's diagonal is at key S - T and the last one's at S - 1, so a right side of T - 1 or
    more, and a left side of S - 1 or more, hides nothing. Sides that hide everything are clipped.
    """
    left = None if spec.left is None or spec.left >= n.S - 1 else max(spec.left, -n.T)
    right = None if spec.right is None or spec.right >= n.T - 1 else max(spec.right, -n.S)
    return Window(left, right)
