"""The forward kernel's tiles: their shapes, which one a call gets, and how they are shared out."""

import dataclasses
import math

from jax_flash._mask import Window, position_mask
from jax_flash._spec import Sizes
from jax_flash.cuda.sm90.tensor_maps import MAX_SHARED_BYTES, tile_row_bytes


@dataclasses.dataclass(frozen=True)
class Needs:
    """What of a call decides on its tile, besides lengths and heads; `needs_of` in forward_plan.py makes it.

    Head dims are padded: `head_dim` of queries and keys, `value_dim` of values.
    """

    head_dim: int
    value_dim: int
    window: Window
    changes: int = 0  # of scores, beside the scale and the window: how many of soft cap, bias, ALiBi and mask
    read: str | None = None  # the one of bias and mask that is among them; "bias" where both are
    bounded: bool = False  # what rows see is data
    segments: bool = False  # that is of segments, too
    dropout: bool = False

    @property
    def tiles_alike(self) -> bool:
        """Whether all tiles take equally long."""
        return self.window.unbounded and not self.bounded


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """Tile shape and schedule of one kernel variant."""

    consumers: int  # warpgroups, 64 rows each
    keys: int  # keys in a block
    stages: int  # blocks in flight
    pingpong: bool  # warpgroups take turns at the tensor cores
    query_stages: int  # query tiles in shared memory
    split: int  # 16-key steps of PV that are issued before the row maxima are taken; at most keys / 16

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    def shared_bytes(self, needs: Needs) -> int:
        """Dynamic shared memory: Q, the rings of K and V, rows of the output, dropout's words of keys,
        what rows see where that is data, barriers, tiles, -inf."""
        key_row, value_row = (tile_row_bytes(x, 2) for x in (needs.head_dim, needs.value_dim))
        inputs = (self.query_stages * self.rows + self.stages * self.keys) * key_row
        inputs += self.stages * self.keys * value_row
        staging = 4 * self.consumers * 16 * 128
        words = (self.stages + 1) * self.keys * 4 if needs.dropout else 0
        barriers = 8 * (2 * self.query_stages + 4 * self.stages)
        of_rows = self.rows * (8 * needs.bounded + 4 * needs.segments) + 8 * self.consumers * needs.bounded
        return inputs + staging + words + barriers + (of_rows + 24) * self.query_stages + 8

    def fitted(self, needs: Needs) -> "ForwardTile":
        """The same where shared memory has room for it; or else with one stage for Q, and with fewer keys."""
        tile = self
        while tile.shared_bytes(needs) > MAX_SHARED_BYTES:
            keys = tile.keys if tile.query_stages > 1 else tile.keys - 16
            split = math.ceil(self.split * keys / self.keys)
            tile = dataclasses.replace(self, query_stages=1, keys=keys, split=split)
        return tile


@dataclasses.dataclass(frozen=True)
class Choice:
    """A tile, and what a query and key that it passes over cost, relative to the first choice of the row."""

    tile: ForwardTile
    cost: float = 1.0


# Head dim of V, rounded up to a multiple of 16, at most → choices for full attention, and for windowed
# (causal is one). Found on an H200 by varying the fields (benchmarks/results/schedule_forward_h200.json), as
# `benchmarks/tune.py` does anew; docs/tuning.md says what each gave. 160 was timed with the row of 192, and
# 80 with that of 96; keys of another head dim than V's not yet. Larger tiles cost less a query and key, where
# they divide queries and keys well.
TILES: dict[int, tuple[tuple[Choice, ...], tuple[Choice, ...]]] = {
    64: (
        (Choice(ForwardTile(3, 128, 2, True, 2, 6)), Choice(ForwardTile(2, 128, 2, True, 2, 6), 1.24)),
        (Choice(ForwardTile(3, 128, 2, True, 2, 6)), Choice(ForwardTile(2, 128, 2, True, 2, 6), 1.19)),
    ),
    96: (
        (Choice(ForwardTile(3, 96, 2, True, 2, 5)), Choice(ForwardTile(2, 128, 2, True, 2, 6), 1.12)),
        (Choice(ForwardTile(3, 96, 2, True, 2, 6)), Choice(ForwardTile(2, 128, 2, True, 2, 6), 1.1)),
    ),
    128: (
        (
            Choice(ForwardTile(2, 128, 2, True, 2, 6)),
            Choice(ForwardTile(2, 144, 2, True, 2, 7), 0.985),
            Choice(ForwardTile(2, 176, 2, True, 1, 8), 0.97),
        ),
        (Choice(ForwardTile(2, 128, 2, True, 2, 6)),),
    ),
    192: (
        (Choice(ForwardTile(2, 96, 2, True, 1, 5)),),
        (Choice(ForwardTile(2, 96, 2, True, 1, 6)),),
    ),
    256: (
        (Choice(ForwardTile(2, 64, 2, True, 1, 4)),),
        (Choice(ForwardTile(2, 64, 2, True, 1, 4)),),
    ),
}

# Where scores become logits by more than the scale, by what each of them reads for that. Arithmetic alone,
# soft cap or ALiBi, has room in registers beside a tile like the others, and a mask up to head dim 128; a
# bias, and three changes or more, take smaller blocks, and no turns: what runs beside the tensor cores is so
# long that it leaves them idle in any order. Timed at 64, 128 and 256
# (benchmarks/results/tune_options_forward_h200.json); what is not the fastest there spills less.
_SMALLER = {
    128: ForwardTile(2, 96, 2, False, 1, 6),
    192: ForwardTile(2, 64, 2, False, 1, 4),
    256: ForwardTile(2, 32, 2, False, 1, 2),
}
CHANGED_TILES: dict[str | None, dict[int, ForwardTile]] = {
    None: {
        128: ForwardTile(2, 128, 2, True, 2, 6),
        192: ForwardTile(2, 96, 2, True, 1, 6),
        256: ForwardTile(2, 64, 2, True, 1, 4),
    },
    "mask": _SMALLER | {128: ForwardTile(2, 128, 2, True, 2, 6)},
    "bias": _SMALLER,
}
MUCH_CHANGED_TILES = _SMALLER | {128: ForwardTile(2, 80, 2, False, 1, 5)}

# Pieces that a tile is cut into, at most: its last CTA reads them all.
_PIECES = 8


def choices(needs: Needs) -> tuple[Choice, ...]:
    """What a call may run with.

    Registers hold scores, P and the output, and go by the head dim of V; shared memory goes by both.
    """
    if needs.changes:
        tiles = CHANGED_TILES[needs.read] if needs.changes <= 2 else MUCH_CHANGED_TILES
        row = (Choice(next(tile for limit, tile in tiles.items() if needs.value_dim <= limit)),)
    else:
        full, windowed = next(choices for limit, choices in TILES.items() if needs.value_dim <= limit)
        row = full if needs.tiles_alike else windowed
    fitted: dict[ForwardTile, Choice] = {}
    for choice in row:
        shape = choice.tile.fitted(needs)
        fitted.setdefault(shape, Choice(shape, choice.cost))
    return tuple(fitted.values())


def tile(needs: Needs, n: Sizes) -> ForwardTile:
    """The tile of a call: of the choices that it has the one that costs least."""

    mask = position_mask(needs.window, n.T, n.S)

    def cost(choice: Choice) -> float:
        rows, keys = choice.tile.rows, choice.tile.keys
        heads = pack(n, rows, needs.bounded)
        counts = mask.block_counts(rows // heads, keys)
        # A block more: the first one's softmax and the last one's product with V have nothing to run beside.
        return sum(count + 1 for count in counts) * rows * keys * choice.cost / heads

    return min(choices(needs), key=cost).tile


def pack(n: Sizes, rows: int, whole: bool = False) -> int:
    """How many query heads of a key head share a tile of `rows`: as few as give few tiles. With `whole`, 64
    rows are those of whole queries."""

    def tiles(heads: int) -> int:
        return math.ceil(n.T * heads / rows) * (n.N // heads)

    best = 1
    for heads in packs(n.group, 64 if whole else rows):
        if tiles(heads) <= 0.95 * tiles(best):
            best = heads
    return best


def packs(group: int, rows: int) -> list[int]:
    """How many heads of a group can share a tile, each with equally many of its rows."""
    return [heads for heads in range(1, min(group, rows) + 1) if group % heads == 0 and rows % heads == 0]


def can_cut(needs: Needs) -> bool:
    """Whether tiles may be cut: all are of one length, and the kernel has registers left to join pieces."""
    return needs.tiles_alike and needs.value_dim <= 192


def cut_last_wave(tiles: int, ctas: int, blocks: int) -> tuple[int, int]:
    """How many of `tiles`, of `blocks` each, are handed out whole, and how many CTAs share the others.

    Tiles that don't fill a wave leave CTAs idle. Sharing them costs: a second tile's beginning and end, the
    zeroing of a counter, and reading the pieces of a tile. Times are counted in blocks.
    """
    rest = tiles % ctas
    if rest == 0:
        return tiles, 0
    sharers = min(ctas, rest * _PIECES, rest * blocks)  # each has a block at least, as the kernel counts on
    if rest * blocks * sharers >= 2**31:  # the kernel divides this product, in 32 bits
        return tiles, 0
    whole = math.ceil(tiles / ctas) * (blocks + 1)
    shared = tiles // ctas * (blocks + 1) + rest * blocks / sharers + 5 + sharers / rest / 2 + 0.5
    return (tiles - rest, sharers) if shared < 0.985 * whole else (tiles, 0)
