"""The order in which blocks of `mosaic_forward`'s grid take tiles of queries, and the keys that these meet.

Blocks of keys go from the last to the first, so that the masked one of causal attention comes first, where
nothing runs beside its softmax anyway.

A persistent block takes every n-th tile. Where tiles are unevenly long, they come in one of the orders that
give all blocks about equally much, the one that does so best by count.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jax_flash._spec import Sizes

from .band import Band, Blocks
from .mosaic_tiles import ROWS, ForwardConfig

_L2_BYTES = 32 << 20  # that keys and values of heads that are walked together may have
_TILE_ENDS = 1.2  # what beginning and ending a tile takes, in blocks of keys


def div(index: jax.Array, by: int) -> jax.Array:
    return lax.div(index, np.int32(by))


def rem(index: jax.Array, by: int) -> jax.Array:
    return lax.rem(index, np.int32(by))


def int32(x) -> jax.Array | np.int32:
    """An index of 32 bits, also where 64-bit types are on."""
    return np.int32(x) if isinstance(x, int) else x


@dataclasses.dataclass(frozen=True)
class Walk:
    """The order in which blocks of the grid take tiles, and the keys that each tile meets."""

    size: Sizes
    band: Band
    config: ForwardConfig
    multiprocessors: int

    @property
    def tiles_of_head(self) -> int:
        return pl.cdiv(self.size.T, self.config.queries)

    @property
    def uneven(self) -> bool:
        """Whether late tiles see more keys than early ones."""
        return self.band.high is not None and self.band.low is None and self.tiles_of_head > 1

    @functools.cached_property
    def heads_together(self) -> int | None:
        """How many heads at a time are walked from their longest tiles to their shortest, the next ones from
        the shortest to the longest, and so on; None where each long tile is followed by a short one of its
        head, by the same block."""
        heads = self.size.N * self.size.B
        lengths = self._lengths()
        orders: dict[int | None, np.ndarray] = {}
        for together in range(1, heads + 1):
            if heads % together == 0 and (together == 1 or self._bytes_of(together) <= _L2_BYTES):
                there = np.repeat(lengths[::-1], together)  # the last heads, so that short ones end it
                both = [there, there[::-1]] * (heads // together)
                orders[together] = np.concatenate(both[: heads // together][::-1])
        in_pairs = (lengths + lengths[::-1])[: pl.cdiv(len(lengths), 2)]
        orders[None] = np.tile(in_pairs, heads)
        return min(orders, key=lambda together: self._longest(orders[together]))

    def _lengths(self) -> np.ndarray:
        """What each tile of a head takes, in blocks of keys, where late ones see more."""
        assert isinstance(self.band.high, int)
        ends = np.arange(1, self.tiles_of_head + 1) * self.config.queries + self.band.high
        blocks = -(-np.clip(ends, 1, self.size.S) // self.config.keys)
        return blocks + _TILE_ENDS

    def _bytes_of(self, heads: int) -> int:
        """Of their keys and values."""
        return 2 * pl.cdiv(heads, self.size.group) * self.size.S * (self.size.H + self.size.V)

    def _longest(self, items: np.ndarray) -> float:
        """How long the block with the most to do takes."""
        blocks = min(len(items), self.multiprocessors)
        return np.bincount(np.arange(len(items)) % blocks, weights=items).max()

    @property
    def paired(self) -> bool:
        """Whether long tiles are taken together with short ones, so that all pairs weigh the same."""
        return self.config.persistent and self.uneven and self.heads_together is None

    @property
    def items_of_head(self) -> int:
        return pl.cdiv(self.tiles_of_head, 2) if self.paired else self.tiles_of_head

    @property
    def items(self) -> int:
        return self.items_of_head * self.size.N * self.size.B

    @property
    def blocks(self) -> int:
        return min(self.items, self.multiprocessors) if self.config.persistent else self.items

    def over_tiles(self, body, carry):
        """`body(first_query, head, batch, keys, carry)` over the tiles of this block of the grid."""
        block = lax.axis_index("block")
        if not self.config.persistent:
            return self._tile(block, 0, body, carry)
        turns = div(self.items - 1 - block, self.blocks) + 1
        tiles = 2 if self.paired else 1

        def step(i, carry):
            item = block + div(i, tiles) * self.blocks
            return self._tile(item, rem(i, tiles), body, carry)

        return lax.fori_loop(np.int32(0), turns * tiles, step, carry)

    def _tile(self, item, of_pair, body, carry):
        last = self.tiles_of_head - 1
        together = self.heads_together if self.config.persistent and self.uneven else None
        if together is None:
            tile, others = rem(item, self.items_of_head), div(item, self.items_of_head)
            if self.uneven:
                tile = last - tile
            if self.paired:
                tile = lax.select(of_pair == 0, tile, last - tile)
        else:
            turn, sections = div(item, together), self.size.N * self.size.B // together
            section, turn = div(turn, self.tiles_of_head), rem(turn, self.tiles_of_head)
            others = section * together + rem(item, together)
            tile = lax.select(rem(sections - section, 2) == 1, last - turn, turn)
        head, batch = rem(others, self.size.N), div(others, self.size.N)
        first = tile * self.config.queries
        return body(first, head, batch, self._keys(first, self.config.queries), carry)

    def _keys(self, first, rows: int) -> Blocks:
        """The blocks of keys that a tile loads: at least one, also where its queries see none."""
        blocks = self.band.blocks(first, rows, self.config.keys)
        if self.band.low is None and self.band.high is None:
            return blocks
        start = jnp.minimum(blocks.start, pl.cdiv(self.size.S, self.config.keys) - 1)
        return dataclasses.replace(blocks, start=start, stop=jnp.maximum(blocks.stop, start + 1))

    def keys_of_warpgroup(self, first, tile: Blocks) -> Blocks:
        """A tile's blocks, those that all queries of a warpgroup meet told from the others; backwards."""
        own = self.band.blocks(first, ROWS, self.config.keys)
        full_start = _clip(own.full_start, tile.start, tile.stop)
        full_stop = _clip(own.full_stop, full_start, tile.stop)
        return dataclasses.replace(tile, full_start=full_start, full_stop=full_stop).backwards()


def _clip(x, low, high):
    if all(isinstance(value, int) for value in (x, low, high)):
        return min(max(x, low), high)
    return jnp.clip(x, low, high)
