"""The decode kernel's blocks and stages, and how it loads a cache."""

import dataclasses

from jax_flash._cache_spec import CacheSizes
from jax_flash.cuda.sm90.tensor_maps import (
    MAX_SHARED_BYTES,
    PANEL_BYTES,
    padded_head_dim,
    tile_row_bytes,
)

ROWS = 64
"""Rows of a tile: queries times the query heads of one key head."""

_ELEMENT_BYTES = 2
_MAX_STAGES = 6
_TILE_STAGES, _TILE_BYTES = 2, 88  # `Tile` in cuda/kernels/sm90/decode/traits.cuh


@dataclasses.dataclass(frozen=True)
class DecodeTile:
    """The pipeline of one kernel variant."""

    head_dim: int  # padded, of queries and keys
    value_dim: int  # padded
    keys: int  # in a block
    consumers: int  # warpgroups that take blocks in turn
    box: int  # keys that one TMA copy loads; 0: threads gather the rows
    paged: bool
    stages: int = 1  # blocks of K and V in flight

    @property
    def threads(self) -> int:
        """The consumers, and a producer warp, or a warpgroup that gathers."""
        return 128 * self.consumers + (32 if self.box else 128)

    @property
    def least_share(self) -> int:
        """Blocks of a CTA, at least: one for each consumer. With fewer, more partials would be combined."""
        return self.consumers

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, laid out by `SharedMemory` in cuda/kernels/sm90/decode/traits.cuh."""
        key_row, value_row = (tile_row_bytes(x, _ELEMENT_BYTES) for x in (self.head_dim, self.value_dim))
        stage = self.keys * (key_row + value_row)
        stage += 8 * self.keys * (self.box == 0)  # rows of the cache
        stage += (16 + self.keys) * self.paged  # which keys are missing
        stage += 3 * 8  # barriers
        statistics = 4 * 4 * 128 * (self.consumers > 1)
        tiles = _TILE_STAGES * (_TILE_BYTES + 2 * 8)
        return ROWS * key_row + self.stages * stage + statistics + tiles + 8

    def fitted(self) -> "DecodeTile":
        """With as many stages as there is room for. Each is always the same consumer's."""
        counts = range(_MAX_STAGES, 0, -self.consumers)
        options = (dataclasses.replace(self, stages=stages) for stages in counts)
        return next((tile for tile in options if tile.shared_bytes <= MAX_SHARED_BYTES), self)


def choose_tile(n: CacheSizes) -> DecodeTile:
    """The tile of a call.

    TMA loads blocks if pages allow it, and two consumers compute if registers allow it and each has two
    stages at least. Blocks have 128 keys, or 64 where that would leave too few stages. None of this was
    measured: it follows from how much time a block's steps take, and from how long its loads do.
    """
    dims = padded_head_dim(n.H), padded_head_dim(n.V)
    # Registers hold the output of 64 rows, and the scores of a block beside it.
    largest = {(1, 128): 192, (1, 64): 256, (2, 128): 128, (2, 64): 128}  # head dims of values
    options = []
    for (consumers, keys), value_dim in largest.items():
        tile = DecodeTile(*dims, keys, consumers, _box(n.page, keys), n.page is not None).fitted()
        fits = tile.stages >= 2 * consumers and tile.shared_bytes <= MAX_SHARED_BYTES
        if fits and dims[1] <= value_dim:
            options.append(tile)
    return max(options, key=lambda tile: (tile.box > 0, tile.consumers, tile.keys))


def _box(page: int | None, keys: int) -> int:
    """Keys that one TMA copy loads: a block, or a page if blocks consist of pages; 0 where it loads none."""
    if page is None or page % keys == 0:
        return keys
    # A box starts where the swizzle's period does, which is 8 rows.
    swizzle_rows = 1024 // PANEL_BYTES
    return page if keys % page == 0 and page % swizzle_rows == 0 else 0
