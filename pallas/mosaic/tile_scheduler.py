"""The order in which blocks of a Mosaic GPU kernel's grid take the tiles of all heads.

A persistent block takes every n-th tile. Where tiles differ in length, they come in one of several orders
that give all blocks about equal work: the one whose busiest block has the least. How long tiles are, the mask
may say by positions, or as data: then XLA has sorted them.
"""

import dataclasses
import functools
import heapq
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jax_flash._mask import PositionMask

Carry = TypeVar("Carry")

_L2_BYTES = 32 << 20  # that the columns of heads that are scheduled together may have
_TILE_ENDS = 1.2  # the time that beginning and ending a tile takes, in blocks of columns
_TILES_OF_BLOCK = 3  # of a group of heads, at least, for blocks to have about equal work in it


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
    by_data: bool = False  # whether data says how long tiles are, and in which order they come

    @property
    def uneven(self) -> bool:
        return (self.lengths is not None or self.by_data) and self.tiles > 1

    @property
    def l2_head_group(self) -> int | None:
        """How many heads form a group, whose tiles are handed out together. Groups alternate: tiles go from
        the longest to the shortest in one, from the shortest to the longest in the next. None where heads
        form no groups: a block takes a long tile of a head, then a short one of the same head."""
        if not self.uneven or self.blocks is None:
            return 1
        if self.by_data:
            return self._smallest_even_group()
        most = max(1, _L2_BYTES // self.bytes_of_head)
        return _l2_head_group(self._longest_first, self._passes_of_heads, self.blocks, most)

    def _smallest_even_group(self) -> int:
        """So many heads that a group has several tiles for each block, and that half of the groups go either
        way: what a block has more in one it has less in the next."""
        heads = self.heads * self.batch
        found = [n for n in range(1, heads) if heads % (2 * n) == 0] or [heads]
        enough = [n for n in found if n * self.tiles >= _TILES_OF_BLOCK * (self.blocks or 1)]
        return enough[0] if enough else found[-1]

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
        heads = self.l2_head_group or 1
        return min(pl.cdiv(self.grid, self.items_of_head * heads) * heads, self.heads * self.batch)

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

    def over(self, body: Callable[..., Carry], carry: Carry, order: Any = None) -> Carry:
        """`body(tile, head, batch, carry)` over the tiles of this block of the grid.

        Args:
          order: a ref, the tiles of each batch row, the longest first, (B, tiles); or None, for any order of
            tiles whose lengths are data.
        """
        if order is not None:
            of_tile, body = (
                body,
                lambda place, head, batch, carry: of_tile(order[batch, place], head, batch, carry),
            )
        block = lax.axis_index("block")
        if self.blocks is None:
            return self._item(block, body, carry)
        count = div(self.items - 1 - block, self.grid) + 1
        step = lambda i, carry: self._item(block + i * np.int32(self.grid), body, carry)  # noqa: E731
        return lax.fori_loop(np.int32(0), count, step, carry)

    def _item(self, item: jax.Array, body: Callable[..., Carry], carry: Carry) -> Carry:
        l2_head_group = self.l2_head_group
        if l2_head_group is None:
            return self._pair(item, body, carry)
        place, groups = div(item, l2_head_group), self.heads * self.batch // l2_head_group
        group, place = div(place, self.tiles), rem(place, self.tiles)
        head_number = group * l2_head_group + rem(item, l2_head_group)
        tile = self._by_length(place)
        if self.uneven and self.blocks is not None:  # the last group ends with the shortest
            tile = lax.select(rem(groups - group, 2) == 1, tile, self._by_length(self.tiles - 1 - place))
        return body(tile, rem(head_number, self.heads), div(head_number, self.heads), carry)

    def _pair(self, item: jax.Array, body: Callable[..., Carry], carry: Carry) -> Carry:
        place, head_number = rem(item, self.items_of_head), div(item, self.items_of_head)
        head, batch = rem(head_number, self.heads), div(head_number, self.heads)
        long, short = self._by_length(place), self._by_length(self.tiles - 1 - place)
        tiles = jnp.where(place * 2 == self.tiles - 1, np.int32(1), np.int32(2))  # the middle one is alone
        step = lambda i, carry: body(lax.select(i == 0, long, short), head, batch, carry)  # noqa: E731
        return lax.fori_loop(np.int32(0), tiles, step, carry)

    def _by_length(self, place: jax.Array) -> jax.Array:
        """The tile at a place of those of a head, the longest first; the place in an order by data."""
        if self.by_data:
            return place
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
    lengths: tuple[float, ...], passes: tuple[int, ...], l2_head_group: int | None, alternates: bool = True
) -> np.ndarray:
    """What each item takes, in the order of `TileScheduler._item`; arguments as `_l2_head_group` has them.

    Args:
      l2_head_group: as `TileScheduler` has it.
      alternates: whether every other group of heads goes from its shortest tiles to its longest.
    """
    times = np.outer(passes, lengths) + _TILE_ENDS  # of each head, each tile
    if l2_head_group is None:
        pairs = (times + times[:, ::-1])[:, : pl.cdiv(len(lengths), 2)]
        if len(lengths) % 2:
            pairs[:, -1] /= 2
        return pairs.ravel()
    groups = times.reshape(-1, l2_head_group, len(lengths)).swapaxes(1, 2)
    if alternates:  # the last group ends with the shortest
        groups = groups.copy()
        groups[-2::-2] = groups[-2::-2, ::-1]
    return groups.ravel()


def _busiest(items: np.ndarray, blocks: int) -> float:
    """What the busiest block has to do, if each takes every n-th item."""
    return float(np.bincount(np.arange(len(items)) % min(len(items), blocks), weights=items).max())
