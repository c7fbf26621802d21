"""How the CTAs of the decode kernel divide the tiles of a call (cuda/kernels/sm90/decode/schedule.cuh)."""

import dataclasses
import math

import jax

from jax_flash._cache_spec import CacheOperands, CacheSpec, cache_sizes
from jax_flash._device import Device
from jax_flash.cuda.sm90.decode_tiles import LEAST_SHARE, ROWS, DecodeTile, choose_tile

Shapes = CacheOperands[jax.ShapeDtypeStruct]

COUNTED_BLOCKS_LIMIT = 2**30
"""Sums of `max_counted_blocks`, and of shares of them, must fit 32 bits."""

CLUSTER_SIZES = (16, 8, 4, 2)
MOST_CLUSTER_BLOCKS = 16
"""Blocks of one CTA in a cluster, at most; fewer if blocks are larger than `_USUAL_BLOCK_BYTES`. A CTA takes
half a microsecond for each, even if other CTAs read nothing (docs/tuning/decode-combining.md). So with more,
one long sequence among short ones would take long."""
MOST_WHOLE_BLOCKS = 8
"""Blocks of a tile that one CTA has for itself, at most, where there are no clusters; fewer if blocks are
larger than `_USUAL_BLOCK_BYTES`. If CTAs share such tiles, calls take up to 4% longer
(docs/tuning/decode-combining.md)."""
_USUAL_BLOCK_BYTES = 32 << 10

MOST_PAIR_ROWS = 32
"""Rows of a tile that CTAs in pairs have, at most (cuda/kernels/sm90/decode/pair.cuh)."""

LARGEST_TEAM = 8
"""CTAs of a team, at most. Teams of 4 and of 32 took as long (docs/tuning/decode.md)."""

MOST_IDLE = 0.02
"""The share of all CTAs that teams may leave over."""

_ANY_PARTS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Division:
    """How CTAs divide tiles: clusters have one each, or teams have equal shares of all blocks."""

    ctas: int
    cluster: int  # CTAs of a cluster that has a tile for itself; 1: no cluster has
    split: bool  # CTAs may share a tile through global memory, where the last one combines what they leave
    pairs: bool  # CTAs form clusters of two, which leave one partial together
    most_parts: int  # of a tile
    least_share: int  # blocks of a CTA
    team_size: int
    teams: int

    @property
    def sharers(self) -> int:
        """How many may leave partials: CTAs, or pairs of them."""
        return self.team_size * math.ceil(self.teams / 2) if self.pairs else self.ctas


def divide(spec: CacheSpec, shapes: Shapes, tile: DecodeTile, device: Device) -> Division:
    """How CTAs divide the tiles of a call."""
    shares = math.ceil(_tiles(shapes) * _blocks(shapes, tile) / LEAST_SHARE)
    ctas = min(tile.ctas_of_sm * device.sm_count, shares)
    members = team_size(cache_sizes(shapes).K, ctas)
    teams, ctas = ctas // members, ctas - ctas % members
    cluster = cluster_size(spec, shapes, tile, device)
    whole = teams == 1 or keeps_tiles_whole(spec, shapes, tile)
    if cluster > 1:
        ctas, whole = _tiles(shapes) * cluster, False
    most_parts = 1 if whole else spec.num_splits or _ANY_PARTS
    split = cluster == 1 and not whole
    pairs = split and forms_pairs(tile)
    ctas += ctas % 2 * pairs  # the partner of an odd one, in no team
    return Division(ctas, cluster, split, pairs, most_parts, LEAST_SHARE, members, teams)


def forms_pairs(tile: DecodeTile) -> bool:
    """Whether CTAs that may share a tile form pairs: with few rows, and room for what one gives."""
    return tile.query_rows <= MOST_PAIR_ROWS and dataclasses.replace(tile, pairs=True).fits


def max_counted_blocks(shapes: Shapes) -> int:
    """The blocks that all tiles count, at most: those that a tile visits, or one if it visits none."""
    return _tiles(shapes) * _blocks(shapes, choose_tile(shapes))


def _tiles(shapes: Shapes) -> int:
    """The tiles of all sequences and key heads; if queries are packed, the most that there may be."""
    n = cache_sizes(shapes)
    tiles = math.ceil(n.T * n.group / ROWS)
    return n.K * (tiles * n.B if shapes.query_offsets is None else tiles + n.B)


def _blocks(shapes: Shapes, tile: DecodeTile) -> int:
    """The blocks that a sequence has room for."""
    return math.ceil(cache_sizes(shapes).S / tile.keys)


def cluster_size(spec: CacheSpec, shapes: Shapes, tile: DecodeTile, device: Device) -> int:
    """How many CTAs of a cluster share each tile; 1 where there are no clusters.

    Clusters combine their parts in less time. But parts are equal, and a CTA that is done early doesn't
    help others. So clusters suit few and short tiles: up to one CTA on each multiprocessor (with two, those
    of four and eight took longer), and few blocks for each CTA. Pairs may have two CTAs on each
    multiprocessor, and twice the blocks.
    """
    tiles, blocks = _tiles(shapes), _blocks(shapes, tile)
    if shapes.query_offsets is not None:
        return 1
    most_blocks = _fewer_if_large(MOST_CLUSTER_BLOCKS, tile)

    def fits(size: int) -> bool:
        parts = min(size, spec.num_splits or size)
        if LEAST_SHARE * size > blocks or 2 * parts <= size or tile.in_clusters(size) is None:
            return False
        if (
            size == 2
            and blocks <= 2 * parts * most_blocks
            and tiles * size <= tile.ctas_of_sm * device.sm_count
        ):
            return True
        # A cluster needs multiprocessors that can form one: of 16 CTAs eight, if each holds two.
        has_room = size <= 8 or tile.ctas_of_sm == 2
        return has_room and tiles * size <= device.sm_count and blocks <= parts * most_blocks

    return next((size for size in CLUSTER_SIZES if fits(size)), 1)


def keeps_tiles_whole(spec: CacheSpec, shapes: Shapes, tile: DecodeTile) -> bool:
    """Whether CTAs share no tile through global memory, so that none has to combine partials."""
    most_blocks = 1 if spec.num_splits else _fewer_if_large(MOST_WHOLE_BLOCKS, tile)
    return spec.num_splits == 1 or _blocks(shapes, tile) <= most_blocks


def _fewer_if_large(blocks: int, tile: DecodeTile) -> int:
    """As many blocks as take as long as `blocks` of the usual size."""
    return max(blocks * _USUAL_BLOCK_BYTES // max(tile.block_bytes, _USUAL_BLOCK_BYTES), 1)


def team_size(key_heads: int, ctas: int) -> int:
    """The CTAs of a team, which go through the blocks side by side, each with a key head of its own.

    The more, the longer are the pieces that memory is read in. But CTAs that teams leave over are idle.
    """
    sizes = (size for size in range(min(LARGEST_TEAM, ctas), 0, -1) if key_heads % size == 0)
    return next(size for size in sizes if ctas % size <= ctas * MOST_IDLE)
