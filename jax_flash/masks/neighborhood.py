"""Neighborhood attention: windows in several dimensions that stay inside."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_flash._validate import INT32_MAX, short
from jax_flash.masks.arguments import positive, quotient, remainder, several
from jax_flash.masks.mask import Mask


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NeighborhoodMask(Mask):
    """Neighborhood attention: each token of a grid attends to the window of tokens nearest to it.

    Hassani et al., "Neighborhood Attention Transformer", 2023, section 3.1, and with a dilation Hassani and
    Shi, "Dilated Neighborhood Attention Transformer", 2022. Tokens lie in a grid, an image's
    `(height, width)` say, the last axis fastest: T and S are both its product. Along each axis, token i
    attends to `kernel_size` tokens from `i - kernel_size // 2` on, moved inward at the borders, so that each
    sees exactly as many. With a dilation, the tokens i, i ± dilation, … form a grid of their own, and i
    attends to `kernel_size` of these.

    Bounds decide the blocks of rows too far apart, and of tokens too far apart within rows that are longer
    than a block. All pairs of the others are looked at: the cost is linear in the tokens times those of a
    window's rows.

    Attributes:
      shape: of the grid: height and width, or any number of axes.
      kernel_size: of the window along each axis, or one int for all.
      dilation: along each axis, or one int for all.

    Raises:
      TypeError: shape isn't a sequence of integers; kernel_size or dilation isn't an integer, or several.
      ValueError: one is less than 1, or has another number of axes; kernel_size times dilation is more than
        the grid has along an axis.
    """

    shape: Sequence[int]
    kernel_size: int | Sequence[int]
    dilation: int | Sequence[int] = 1

    def __post_init__(self):
        if not isinstance(self.shape, tuple | list) or not self.shape:
            raise TypeError(f"shape must be a tuple of ints, as (height, width); got {short(self.shape)}")
        shape = tuple(positive("shape", size) for size in self.shape)
        if math.prod(shape) > INT32_MAX:
            raise ValueError(f"shape must have fewer than 2**31 tokens; got {short(self.shape)}")
        kernel_size = several("kernel_size", self.kernel_size, len(shape))
        dilation = several("dilation", self.dilation, len(shape))
        if any(k * d > size for size, k, d in zip(shape, kernel_size, dilation, strict=True)):
            raise ValueError(
                f"kernel_size times dilation must be at most shape = {shape} along each axis; "
                f"got kernel_size {kernel_size} and dilation {dilation}"
            )
        self._set(shape=shape, kernel_size=kernel_size, dilation=dilation)

    def _sees(self, batch, head, query, key) -> jax.Array:
        sees = jnp.asarray(True)
        axes = zip(self.shape, self.kernel_size, self.dilation, strict=True)  # pyright: ignore
        for axis, (size, kernel_size, dilation) in enumerate(axes):
            own, other = (self._coordinate(axis, x) for x in (query, key))
            sees &= _is_near(size, kernel_size, dilation, own, other)
        return sees

    def _coordinate(self, axis: int, index: jax.Array) -> jax.Array:
        index = quotient(index, math.prod(self.shape[axis + 1 :]))
        return remainder(index, self.shape[axis]) if axis > 0 else index

    def check_sizes(self, B: int | None, N: int | None, T: int, S: int) -> None:
        tokens = math.prod(self.shape)
        if (T, S) != (tokens, tokens):
            raise ValueError(f"shape is {self.shape}; T and S must be {tokens}, and are {T} and {S}")


def _is_near(size: int, kernel_size: int, dilation: int, query: jax.Array, key: jax.Array) -> jax.Array:
    """Along one axis. Of coordinates with the same remainder by the dilation, quotients are neighbours."""
    last, is_same = size - 1, None
    if dilation > 1:
        group = remainder(query, dilation)
        last, is_same = quotient(last - group, dilation), group == remainder(key, dilation)
        query, key = quotient(query, dilation), quotient(key, dilation)
    first_key = jnp.minimum(jnp.maximum(query - kernel_size // 2, 0), last - (kernel_size - 1))
    is_near = (first_key <= key) & (key < first_key + kernel_size)
    return is_near if is_same is None else is_same & is_near
