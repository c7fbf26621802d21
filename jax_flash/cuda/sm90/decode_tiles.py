"""The decode kernel's blocks and stages, and how it loads a cache."""

import dataclasses
import itertools
import math

import jax

from jax_flash._cache_spec import CacheOperands, cache_sizes
from jax_flash._float8 import is_float8
from jax_flash.cuda.sm90.tensor_maps import (
    MAX_SHARED_BYTES,
    PANEL_BYTES,
    padded_head_dim,
    tile_row_bytes,
)

ROWS = 64
"""Rows of a tile, at most: queries times the query heads of one key head."""

_ELEMENT_BYTES = 2
_MAX_STAGES = 6
_SM_BYTES = 228 << 10  # shared memory of a multiprocessor, of which each CTA takes 1 KiB more than its own
_TILE_STAGES = 2
_CHUNK_BYTES = 32 * 16  # `Traits::chunk_bytes`, of what CTAs store in each other
_BYTES_IN_FLIGHT = 64 << 10  # of each of two CTAs on a multiprocessor: with more, calls took longer
TILE_BYTES = 80  # of `Tile` in cuda/kernels/sm90/decode/tile.cuh


@dataclasses.dataclass(frozen=True)
class DecodeTile:
    """The pipeline of one kernel variant."""

    head_dim: int  # padded, of queries and keys
    value_dim: int  # padded
    query_rows: int  # of a tile, at most: 8, 16, 32 or 64
    keys: int  # in a block
    box: int  # keys that one TMA copy loads; 0: threads gather the rows
    paged: bool
    rotary: bool  # Q is rotated
    float8: bool  # the cache is in e4m3
    pairs: bool = False  # CTAs form pairs (cuda/kernels/sm90/decode/pair.cuh)
    cluster: int = 1  # CTAs of a cluster that has a tile for itself (cluster_parts.cuh there)
    partials_apart: bool = False  # what these store in each other doesn't lie where blocks were
    ctas_of_sm: int = 1
    stages: int = 1  # blocks of K and V in flight

    @property
    def threads(self) -> int:
        """The consumers, and a producer warp, or a thread for each key if they gather."""
        return 128 + (32 if self.box else self.keys)

    @property
    def by_warps(self) -> bool:
        """Whether each warp attends to keys of its own (cuda/kernels/sm90/decode/warp_tile.cuh)."""
        return self.float8 and self.query_rows <= 16

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, laid out by `SharedMemory` in cuda/kernels/sm90/decode/traits.cuh."""
        key_row, value_row = (tile_row_bytes(x, _ELEMENT_BYTES) for x in (self.head_dim, self.value_dim))
        stage = self.block_bytes
        stage += 8 * self.keys * (self.box == 0)  # rows of the cache
        stage += (16 + self.keys) * self.paged  # which keys are missing
        stage += 3 * 8  # barriers
        query = self.query_rows * key_row
        if self.rotary:
            query += _TILE_STAGES * self.query_rows * self.head_dim * _ELEMENT_BYTES  # as it is, before
        else:
            query *= _TILE_STAGES
        widened = self.keys * (key_row + value_row) * (self.float8 and not self.by_warps)
        warp_parts = 4 * self.query_rows * (8 + 4 * (self.value_dim + 8)) * self.by_warps
        pair = (self.query_rows // 8 * (self.value_dim // 16 + 1) * _CHUNK_BYTES + 8) * self.pairs
        cluster = self.cluster_bytes * self.partials_apart + 8 * (self.cluster > 1)
        tiles = _TILE_STAGES * (TILE_BYTES + 2 * 8)
        return query + widened + warp_parts + pair + cluster + self.stages * stage + tiles

    @property
    def fits(self) -> bool:
        """Whether shared memory has room for all CTAs of a multiprocessor."""
        return self.shared_bytes <= min(MAX_SHARED_BYTES, _SM_BYTES // self.ctas_of_sm - (1 << 10))

    @property
    def cluster_bytes(self) -> int:
        """What the CTAs of a cluster store in one of them (`ClusterPartials` in cluster_parts.cuh)."""
        row_units = self.value_dim // 16
        least = math.ceil(self.query_rows // 8 * row_units / self.cluster)
        own = next(x for x in itertools.count(least) if row_units % x == 0 or x % row_units == 0)
        return self.cluster * (own + math.ceil(own / row_units)) * _CHUNK_BYTES

    def in_clusters(self, size: int) -> "DecodeTile | None":
        """The tile if clusters of `size` CTAs share it; None if there is no room for their partials."""
        apart = dataclasses.replace(self, cluster=size, partials_apart=True)
        if apart.fits:
            return apart
        within = dataclasses.replace(apart, partials_apart=False)
        return within if within.fits and within.cluster_bytes <= self.stages * self.block_bytes else None

    @property
    def block_bytes(self) -> int:
        """Of a block of keys and values, as it is loaded."""
        dims = (self.head_dim, self.value_dim)
        return self.keys * sum(tile_row_bytes(x, self._element_bytes) for x in dims)

    @property
    def _element_bytes(self) -> int:
        return 1 if self.float8 else _ELEMENT_BYTES

    def fitted(self) -> "DecodeTile | None":
        """With as many stages as there is room for, up to 6; None if there is no room for one."""
        options = (dataclasses.replace(self, stages=stages) for stages in range(_MAX_STAGES, 0, -1))
        return next((tile for tile in options if tile.fits), None)

    def with_fewer_stages(self) -> "DecodeTile":
        """With as many stages as keep memory busy, and two at least. More would only queue up there."""
        block_bytes = self.keys * (self.head_dim + self.value_dim) * self._element_bytes
        enough = max(_BYTES_IN_FLIGHT // block_bytes, 2)
        return dataclasses.replace(self, stages=min(self.stages, enough))


LEAST_SHARE = 2
"""Blocks of a CTA, at least, unless there are fewer. With fewer, more partials would be combined."""


def choose_tile(shapes: CacheOperands[jax.ShapeDtypeStruct]) -> DecodeTile:
    """The tile of a call.

    Two CTAs on a multiprocessor hide each other's waits, if shared memory has room for three stages of each.
    A block has 128 keys where these have few columns, unless only blocks of 64 consist of pages, or each warp
    attends to 16 keys of a block, or threads gather the rows: with as many threads as a block has keys, 128
    would leave each too few registers.
    """
    n = cache_sizes(shapes)
    dims = padded_head_dim(n.H), padded_head_dim(n.V)
    rows = next((rows for rows in (8, 16, 32) if n.T * n.group <= rows), ROWS)  # few kernels to compile
    rotary, float8 = shapes.rotary_cos is not None, is_float8(shapes.key.dtype)
    tile = DecodeTile(*dims, rows, 64, _box(n.page, 64), n.page is not None, rotary, float8)
    if sum(dims) <= 128 and _box(n.page, 128) and not tile.by_warps:
        tile = dataclasses.replace(tile, keys=128, box=_box(n.page, 128))
    options = (dataclasses.replace(tile, ctas_of_sm=ctas).fitted() for ctas in (2, 1))
    tile = max((tile for tile in options if tile is not None), key=lambda tile: min(tile.stages, 3))
    return tile.with_fewer_stages() if tile.ctas_of_sm == 2 else tile


def _box(page: int | None, keys: int) -> int:
    """Keys that one TMA copy loads: a block, or a page if blocks consist of pages; 0 where it loads none."""
    if page is None or page % keys == 0:
        return keys
    # A box starts where the swizzle's period does, which is 8 rows.
    swizzle_rows = 1024 // PANEL_BYTES
    return page if keys % page == 0 and page % swizzle_rows == 0 else 0
