"""The order in which blocks of a Mosaic GPU kernel's grid take the tiles of all heads.

A persistent block takes every n-th tile. Where tiles differ in length, they come in one of several orders
that give all blocks about equal work: the one whose busiest block has the least.
"""

import dataclasses
import functools
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
        return _l2_head_group(
            tuple(sorted(self.lengths, reverse=True)), self.heads * self.batch, self.blocks, most
        )

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
def _l2_head_group(lengths: tuple[int, ...], heads: int, blocks: int, most: int) -> int | None:
    """`TileScheduler.l2_head_group`: the one whose busiest block has the least to do.

    `lengths` has the longest tile first.
    """
    long = np.array(lengths) + _TILE_ENDS
    orders: dict[int | None, np.ndarray] = {}
    for group in range(1, min(heads, most) + 1):
        if heads % group == 0:
            there = np.repeat(long, group)
            sections = [there, there[::-1]] * (heads // group)
            orders[group] = np.concatenate(sections[: heads // group][::-1])
    pairs = (long + long[::-1])[: pl.cdiv(len(long), 2)]
    if len(long) % 2:
        pairs[-1] /= 2
    orders[None] = np.tile(pairs, heads)

    def longest(order: int | None) -> float:
        items = orders[order]
        return np.bincount(np.arange(len(items)) % min(len(items), blocks), weights=items).max()

    return min(orders, key=longest)
