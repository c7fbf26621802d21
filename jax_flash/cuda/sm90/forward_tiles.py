"""The forward kernel's tile shapes, which of them a call gets, and how tiles are shared among CTAs."""

import dataclasses
import math

from jax_flash import _isolation
from jax_flash._mask import Window, position_mask
from jax_flash._spec import Sizes
from jax_flash.cuda.sm90.tensor_maps import MAX_SHARED_BYTES, PANEL_BYTES, tile_row_bytes


@dataclasses.dataclass(frozen=True)
class TileRequirements:
    """What a tile must have room for: the facts of a call, besides its lengths and heads, that decide on it.

    Head dims are padded: `head_dim` is that of queries and keys, `value_dim` that of values.
    """

    head_dim: int
    value_dim: int
    window: Window
    score_mods: int = 0  # how many of soft cap, score_mod, bias, ALiBi and mask the call has
    loaded_operand: str | None = None  # "bias" or "mask", where scores are looked up in it, see score_mod.py
    mask_metadata: bool = False  # which keys rows see is known only at run time
    segments: bool = False  # and depends on segments
    block_mask: bool = False  # visited blocks are in lists
    mask: bool = False  # a boolean mask is one of the score modifications
    dropout: bool = False
    element_bytes: int = 2  # of query, key, value and out

    @property
    def tiles_alike(self) -> bool:
        """Whether all tiles take equally long."""
        return self.window.unbounded and not self.mask_metadata and not self.block_mask

    @property
    def isolates(self) -> bool:
        """Whether rows that see some keys of a block and not others are kept apart from what isn't finite."""
        hides_pairs = not self.window.unbounded or self.mask_metadata or self.mask or self.block_mask
        return _isolation.KERNELS and hides_pairs and not self.fp8

    @property
    def fp8(self) -> bool:
        return self.element_bytes == 1


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """Tile shape and pipeline of one kernel variant."""

    consumers: int  # warpgroups, 64 rows each
    keys: int  # in a block
    stages: int  # blocks of K, and of V, in flight
    pingpong: bool  # consumer warpgroups alternate on the tensor cores
    query_stages: int  # query tiles in shared memory
    early_pv_steps: int  # steps of PV, of 32 bytes of keys each, issued before the row maxima are computed
    sum_blocks: int = 0  # blocks whose PV tensor cores sum by themselves (out_sums.cuh); 0: all

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    def shared_bytes(self, requirements: TileRequirements) -> int:
        """Dynamic shared memory, in the order of `SharedMemory` in cuda/kernels/sm90/forward/traits.cuh."""
        needs = requirements
        key_row, value_row = (
            tile_row_bytes(x, needs.element_bytes) for x in (needs.head_dim, needs.value_dim)
        )
        query = self.query_stages * self.rows * key_row
        key, value = (self.stages * self.keys * row for row in (key_row, value_row))
        if needs.fp8:  # a panel holds a block of V^T
            value = self.stages * needs.value_dim * self.keys
        sums = 4 * self.rows * needs.value_dim * (self.sum_blocks > 0)
        staging = 4 * self.consumers * 16 * PANEL_BYTES  # 16 rows of a panel for each consumer warp
        hashes = (self.stages + 1) * self.keys * _INT_BYTES if needs.dropout else 0
        row_mask = self.rows * (_INTERVAL_BYTES * needs.mask_metadata + _INT_BYTES * needs.segments)
        full_blocks = self.consumers * _INTERVAL_BYTES * needs.mask_metadata
        barriers = _BARRIER_BYTES * (2 * self.query_stages + 4 * self.stages)
        of_query_stages = self.query_stages * (row_mask + full_blocks + _TILE_BYTES)
        least_score = 8
        repeats = (2 * _BARRIER_BYTES + _REPEATS_BYTES + _RINGS_BYTES) * needs.isolates
        tiles = query + key + value + sums + staging
        return tiles + hashes + of_query_stages + barriers + least_score + repeats

    def fitted(self, requirements: TileRequirements) -> "ForwardTile":
        """This tile if shared memory has room for it; else with one stage for Q, then with fewer keys."""
        tile = self
        while tile.shared_bytes(requirements) > MAX_SHARED_BYTES:
            keys = tile.keys if tile.query_stages > 1 else tile.keys - 16
            early_pv_steps = math.ceil(self.early_pv_steps * keys / self.keys)
            tile = dataclasses.replace(self, query_stages=1, keys=keys, early_pv_steps=early_pv_steps)
        return tile


_INT_BYTES, _INTERVAL_BYTES, _TILE_BYTES, _BARRIER_BYTES = 4, 8, 24, 8
"""Sizes of the kernel's `int`, `Interval`, `Tile` and mbarriers."""
_REPEATS_BYTES, _RINGS_BYTES = 16, 32
"""Sizes of the kernel's `Repeats` and `Rings`."""


@dataclasses.dataclass(frozen=True)
class TileOption:
    """A tile that a call may run with, and its cost.

    The cost is the time for a pair of query and key, relative to the first option of the same row of `TILES`.
    """

    tile: ForwardTile
    cost: float = 1.0


# The largest padded head dim of V → options for full attention, and options for windowed attention, which
# includes causal. Found on an H200 by varying the fields (benchmarks/results/schedule_forward_h200.json);
# `benchmarks/tune.py` does so again, and docs/tuning/forward.md says what each gave. Head dim 160 was timed
# with the row of 192, and 80 with the row of 96. Keys with another head dim than V's are not timed yet. A
# larger tile costs less for each pair of query and key, provided that it divides queries and keys well.
TILES: dict[int, tuple[tuple[TileOption, ...], tuple[TileOption, ...]]] = {
    64: (
        (
            TileOption(ForwardTile(3, 128, 2, True, 2, 6)),
            TileOption(ForwardTile(2, 128, 2, True, 2, 6), 1.24),
        ),
        (
            TileOption(ForwardTile(3, 128, 2, True, 2, 6)),
            TileOption(ForwardTile(2, 128, 2, True, 2, 6), 1.19),
        ),
    ),
    96: (
        (TileOption(ForwardTile(3, 96, 2, True, 2, 5)), TileOption(ForwardTile(2, 128, 2, True, 2, 6), 1.12)),
        (TileOption(ForwardTile(3, 96, 2, True, 2, 6)), TileOption(ForwardTile(2, 128, 2, True, 2, 6), 1.1)),
    ),
    128: (
        (
            TileOption(ForwardTile(2, 128, 2, True, 2, 6)),
            TileOption(ForwardTile(2, 144, 2, True, 2, 7), 0.985),
            TileOption(ForwardTile(2, 176, 2, True, 1, 8), 0.97),
        ),
        (TileOption(ForwardTile(2, 128, 2, True, 2, 6)),),
    ),
    192: (
        (TileOption(ForwardTile(2, 96, 2, True, 1, 5)),),
        (TileOption(ForwardTile(2, 96, 2, True, 1, 6)),),
    ),
    256: (
        (TileOption(ForwardTile(2, 64, 2, True, 1, 4)),),
        (TileOption(ForwardTile(2, 64, 2, True, 1, 4)),),
    ),
}

# Tiles for calls with score modifications, by the operand that scores are looked up in. Soft cap and ALiBi
# look up nothing, and have room in registers beside the tiles above. So has a mask up to head dim 128.
# A bias, and three score modifications or more, take smaller blocks and no ping-pong: their arithmetic takes
# so long that the tensor cores are idle in any order. Timed at head dims 64, 128 and 256
# (benchmarks/results/tune_options_forward_h200.json). Where a tile is not the fastest there, it spills less.
_SMALLER_TILES = {
    128: ForwardTile(2, 96, 2, False, 1, 6),
    192: ForwardTile(2, 64, 2, False, 1, 4),
    256: ForwardTile(2, 32, 2, False, 1, 2),
}
SCORE_MOD_TILES: dict[str | None, dict[int, ForwardTile]] = {
    None: {
        128: ForwardTile(2, 128, 2, True, 2, 6),
        192: ForwardTile(2, 96, 2, True, 1, 6),
        256: ForwardTile(2, 64, 2, True, 1, 4),
    },
    "mask": _SMALLER_TILES | {128: ForwardTile(2, 128, 2, True, 2, 6)},
    "bias": _SMALLER_TILES,
}
MANY_SCORE_MODS_TILES = _SMALLER_TILES | {128: ForwardTile(2, 80, 2, False, 1, 5)}

# Tiles for arrays of 8 bits, with the keys that float8.py says. No other choice of a field that was tried
# gains 2% both full and causal (benchmarks/results/tune_fp8_h100.json). Sums are in shared memory, which has
# no room for those of values with more than 128 columns.
FP8_TILES: dict[int, ForwardTile] = {
    64: ForwardTile(3, 128, 2, True, 2, 3, sum_blocks=8),
    128: ForwardTile(2, 128, 2, True, 2, 3, sum_blocks=8),
    192: ForwardTile(2, 128, 2, True, 1, 4),
    256: ForwardTile(2, 64, 2, True, 2, 1),
}
FP8_SCORE_MOD_TILES = {64: ForwardTile(2, 128, 2, True, 2, 3, sum_blocks=8)}  # in place of those above

_MAX_SPLITS = 8
"""CTAs that share a split tile, at most: the last of them reads all partials."""


def tile_options(requirements: TileRequirements) -> tuple[TileOption, ...]:
    """The tiles that a call may run with, each fitted to shared memory.

    The head dim of V decides on the row of the table, because registers hold scores, P and the output.
    """
    value_dim = requirements.value_dim
    if requirements.fp8:
        tiles = FP8_TILES | (FP8_SCORE_MOD_TILES if requirements.score_mods else {})
        row = (TileOption(next(tile for limit, tile in tiles.items() if value_dim <= limit)),)
    elif requirements.score_mods:
        few = requirements.score_mods <= 2
        tiles = SCORE_MOD_TILES[requirements.loaded_operand] if few else MANY_SCORE_MODS_TILES
        row = (TileOption(next(tile for limit, tile in tiles.items() if value_dim <= limit)),)
    else:
        full, windowed = next(options for limit, options in TILES.items() if value_dim <= limit)
        row = full if requirements.tiles_alike else windowed
        if requirements.block_mask:  # whose blocks have 128 queries by default
            row = tuple(option for option in row if option.tile.rows == 128) or row
    fitted: dict[ForwardTile, TileOption] = {}
    for option in row:
        tile = option.tile.fitted(requirements)
        fitted.setdefault(tile, TileOption(tile, option.cost))
    return tuple(fitted.values())


def choose_tile(requirements: TileRequirements, n: Sizes) -> ForwardTile:
    """The tile that costs a call of these sizes least."""

    mask = position_mask(requirements.window, n.T, n.S)

    def cost(option: TileOption) -> float:
        tile = option.tile
        heads = choose_pack_gqa(n, tile.rows, requirements.mask_metadata)
        counts = mask.block_counts(tile.rows // heads, tile.keys)
        # One block more a tile: nothing runs beside the first block's softmax and the last block's PV.
        return sum(count + 1 for count in counts) * tile.rows * tile.keys * option.cost / heads

    return min(tile_options(requirements), key=cost).tile


def choose_pack_gqa(n: Sizes, rows: int, mask_metadata: bool = False, most: int | None = None) -> int:
    """How many query heads of a key head share a tile of `rows` rows (PackGQA).

    More heads a tile are chosen only if that makes fewer tiles. Mask metadata is kept for groups of 64 rows.
    With it, each such group must hold all heads of its queries. `most` heads may share one; by default, a
    group.
    """

    def tiles(heads: int) -> int:
        return math.ceil(n.T * heads / rows) * (n.N // heads)

    best = 1
    for heads in pack_gqa_options(n.group if most is None else most, 64 if mask_metadata else rows):
        if tiles(heads) <= 0.95 * tiles(best):
            best = heads
    return best


def pack_gqa_options(group: int, rows: int) -> list[int]:
    """How many heads of a group can share a tile, each with equally many of its rows."""
    return [heads for heads in range(1, min(group, rows) + 1) if group % heads == 0 and rows % heads == 0]


def can_split_kv(requirements: TileRequirements) -> bool:
    """Whether tiles may be split along their keys.

    All tiles must be of one length, and the kernel needs registers to combine partials.
    """
    return requirements.tiles_alike and requirements.value_dim <= 192


def split_last_wave(tiles: int, ctas: int, blocks: int) -> tuple[int, int]:
    """How many of `tiles`, of `blocks` each, are not split, and how many CTAs share the others.

    Tiles that don't fill a wave leave CTAs idle. Sharing them costs the beginning and end of a second tile,
    the zeroing of a counter, and reading a tile's partials. Times are counted in blocks.
    """
    rest = tiles % ctas
    if rest == 0:
        return tiles, 0
    sharers = min(ctas, rest * _MAX_SPLITS, rest * blocks)  # the kernel relies on a block for each
    if rest * blocks * sharers >= 2**31:  # the kernel divides this product, in 32 bits
        return tiles, 0
    unsplit_time = math.ceil(tiles / ctas) * (blocks + 1)
    split_time = tiles // ctas * (blocks + 1) + rest * blocks / sharers + 5 + sharers / rest / 2 + 0.5
    return (tiles - rest, sharers) if split_time < 0.985 * unsplit_time else (tiles, 0)
