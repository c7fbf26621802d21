"""The order in which blocks of the grid of a kernel of `mosaic_backward` take the tiles of all heads."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from .mosaic_walk import div, rem

Carry = TypeVar("Carry")


@dataclasses.dataclass(frozen=True)
class Walk:
    """Tile by tile through a head, the longest first; with `blocks`, so many blocks take several tiles each.

    These take long tiles together with short ones, so that all pairs weigh the same.
    """

    tiles: int  # of a head
    heads: int
    batch: int
    longest: int | None  # the first or last tile of a head; None where all are alike
    blocks: int | None = None

    @property
    def paired(self) -> bool:
        return self.blocks is not None and self.longest is not None and self.tiles > 1

    @property
    def items_of_head(self) -> int:
        return pl.cdiv(self.tiles, 2) if self.paired else self.tiles

    @property
    def items(self) -> int:
        return self.items_of_head * self.heads * self.batch

    @property
    def grid(self) -> int:
        return self.items if self.blocks is None else min(self.items, self.blocks)

    def over(self, body: Callable[..., Carry], carry: Carry) -> Carry:
        """`body(tile, head, batch, carry)` over the tiles of this block of the grid."""
        block = lax.axis_index("block")
        if self.blocks is None:
            return self._item(block, body, carry)
        count = div(self.items - 1 - block, self.grid) + 1
        step = lambda i, carry: self._item(block + i * np.int32(self.grid), body, carry)  # noqa: E731
        return lax.fori_loop(np.int32(0), count, step, carry)

    def _item(self, item: jax.Array, body: Callable[..., Carry], carry: Carry) -> Carry:
        in_head, others = rem(item, self.items_of_head), div(item, self.items_of_head)
        head, batch = rem(others, self.heads), div(others, self.heads)
        first, last = in_head, self.tiles - 1 - in_head
        if self.longest:
            first, last = last, first
        if not self.paired:
            return body(first, head, batch, carry)
        tiles = jnp.where(in_head * 2 == self.tiles - 1, np.int32(1), np.int32(2))  # the middle one is alone
        step = lambda i, carry: body(lax.select(i == 0, first, last), head, batch, carry)  # noqa: E731
        return lax.fori_loop(np.int32(0), tiles, step, carry)
