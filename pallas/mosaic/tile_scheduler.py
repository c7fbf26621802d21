"""The order in which blocks of a Mosaic GPU kernel's grid take the tiles of all heads.

A persistent block takes every n-th tile. Where tiles differ in length, they come in one of several orders
that give all blocks about equal work: the one whose busiest block has the least.
"""

import dataclasses
import functools
import heapq
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jax_flash._mask import PositionMask

Carry = TypeVar("Carry")

_L2_BYTES = 32 << 20  # that the columns of heads that are scheduled together may have
_TILE_ENDS = 1.2  # the time that beginning and ending a tile takes, in blocks of columns


def div(index: jax.Array, by: int) -> jax.Array:
    return lax.div(index, np.int32(by))


def rem(index: jax.Array, by: int) -> jax.Array:
    return lax.rem(index, np.int32(by))


def int32(x) -> jax.Array | np.int32:
    """An index of 32 bits, also where 64-bit types are on."""
    return np.int32(x) if isinstance(x, int) else x


@dataclasses.dataclass(frozen=True)
class TileScheduler:
    """Tile by tile through a head, the longest first. With `blocks`, each of them takes several tiles."""

    tiles: int  # of a head
    heads: int
    batch: int
    lengths: tuple[int, ...] | None  # of a head's tiles, in blocks of columns, where they grow or shrink
    blocks: int | None  # None: as many as there are tiles
    bytes_of_head: int  # of the columns that a head's tiles pass over
    passes: tuple[int, ...] = (1,)  # over a tile's columns: head h makes passes[h % len(passes)]

    @property
    def uneven(self) -> bool:
        return self.lengths is not None and self.tiles > 1

    @property
    def l2_head_group(self) -> int | None:
        """How many heads at a time are walked from their longest tiles to their shortest, the next ones from
        the shortest to the longest, and so on; None where each long tile is followed by a short one of its
        head, by the same block."""
        if not self.uneven or self.blocks is None:
            return 1
        most = max(1, _L2_BYTES // self.bytes_of_head)
        return _l2_head_group(self._longest_first, self._passes_of_heads, self.blocks, most)

    @property
    def _longest_first(self) -> tuple[int, ...]:
        return tuple(sorted(self.lengths or (), reverse=True))

    @property
    def _passes_of_heads(self) -> tuple[int, ...]:
        """Of all batch rows."""
        return self.passes * (self.heads * self.batch // len(self.passes))

    @property
    def heads_at_work(self) -> int:
        """How many heads blocks of a persistent grid have tiles of at a time."""
        group = self.l2_head_group or 1
        return min(pl.cdiv(self.grid, self.items_of_head * group) * group, self.heads * self.batch)

    def makespan(self, length: float, workers: int) -> float:
        """When the last of `workers` ends, in the times that a pass over a block of columns takes.

        Args:
          length: of each tile, where `lengths` is None.
        """
        lengths = self._longest_first or (length,) * self.tiles
        alternates = self.uneven and self.blocks is not None
        items = _item_times(lengths, self._passes_of_heads, self.l2_head_group, alternates)
        if self.blocks is not None:
            return _busiest(items, self.grid)
        ends = [0.0] * workers
        for time in items:  # the next one that is free takes it
            heapq.heapreplace(ends, ends[0] + time)
        return max(ends)

    @property
    def items_of_head(self) -> int:
        return pl.cdiv(self.tiles, 2) if self.l2_head_group is None else self.tiles

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
        group = self.l2_head_group
        if group is None:
            return self._pair(item, body, carry)
        turn, sections = div(item, group), self.heads * self.batch // group
        section, turn = div(turn, self.tiles), rem(turn, self.tiles)
        others = section * group + rem(item, group)
        tile = self._by_length(turn)
        if self.uneven and self.blocks is not None:  # the last heads end with the shortest
            tile = lax.select(rem(sections - section, 2) == 1, tile, self._by_length(self.tiles - 1 - turn))
        return body(tile, rem(others, self.heads), div(others, self.heads), carry)

    def _pair(self, item: jax.Array, body: Callable[..., Carry], carry: Carry) -> Carry:
        in_head, others = rem(item, self.items_of_head), div(item, self.items_of_head)
        head, batch = rem(others, self.heads), div(others, self.heads)
        long, short = self._by_length(in_head), self._by_length(self.tiles - 1 - in_head)
        tiles = jnp.where(in_head * 2 == self.tiles - 1, np.int32(1), np.int32(2))  # the middle one is alone
        step = lambda i, carry: body(lax.select(i == 0, long, short), head, batch, carry)  # noqa: E731
        return lax.fori_loop(np.int32(0), tiles, step, carry)

    def _by_length(self, place: jax.Array) -> jax.Array:
        """The tile at a place of those of a head, the longest first."""
        grow = self.lengths is not None and self.lengths[0] < self.lengths[-1]
        return self.tiles - 1 - place if grow else place


def tile_lengths(mask: PositionMask, rows: int, columns: int) -> tuple[int, ...] | None:
    """How many blocks of `columns` each tile of `rows` visits, one at least, where that grows or shrinks from
    the first tile to the last; None where tiles are about alike."""
    if (mask.low is None) == (mask.high is None):
        return None
    return tuple(max(count, 1) for count in mask.block_counts(rows, columns))


@functools.lru_cache
def _l2_head_group(lengths: tuple[int, ...], passes: tuple[int, ...], blocks: int, most: int) -> int | None:
    """`TileScheduler.l2_head_group`: the one whose busiest block has the least to do.

    Args:
      lengths: of a head's tiles, the longest first.
      passes: of each head.
    """
    groups = [group for group in range(1, min(len(passes), most) + 1) if len(passes) % group == 0]
    return min([*groups, None], key=lambda group: _busiest(_item_times(lengths, passes, group), blocks))


def _item_times(
    lengths: tuple[float, ...], passes: tuple[int, ...], group: int | None, alternates: bool = True
) -> np.ndarray:
    """What each item takes, in the order of `TileScheduler._item`; arguments as `_l2_head_group` has them.

    Args:
      group: `TileScheduler.l2_head_group`.
      alternates: whether every other group of heads goes from its shortest tiles to its longest.
    """
    times = np.outer(passes, lengths) + _TILE_ENDS  # of each head, each tile
    if group is None:
        pairs = (times + times[:, ::-1])[:, : pl.cdiv(len(lengths), 2)]
        if len(lengths) % 2:
            pairs[:, -1] /= 2
        return pairs.ravel()
    sections = times.reshape(-1, group, len(lengths)).swapaxes(1, 2)
    if alternates:  # the last one ends with the shortest
        sections = sections.copy()
        sections[-2::-2] = sections[-2::-2, ::-1]
    return sections.ravel()


def _busiest(items: np.ndarray, blocks: int) -> float:
    """What the busiest block has to do, if each takes every n-th item."""
    return float(np.bincount(np.arange(len(items)) % min(len(items), blocks), weights=items).max())
