"""The decode kernel's schedule (cuda/kernels/sm90/decode/schedule.cuh), in Python."""

import dataclasses
import math
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Work:
    """What the schedule depends on: B sequences, of which each has a length, queries and a first key."""

    lengths: list[int]
    queries: list[int]
    first_keys: list[int]
    key_heads: int
    group: int
    keys: int  # of a block
    left: int | None = None
    right: int | None = None

    def visible(self, batch: int, query: int) -> tuple[int, int]:
        diagonal = query + self.lengths[batch] - self.queries[batch]
        begin = 0 if self.left is None else diagonal - self.left
        end = self.lengths[batch] if self.right is None else diagonal + self.right + 1
        return max(self.first_keys[batch], begin), min(self.lengths[batch], end)

    def tiles(self, batch: int) -> int:
        return math.ceil(self.queries[batch] * self.group / 64)

    def blocks(self, batch: int, tile: int) -> tuple[int, int]:
        """The first block that a tile visits, and the one behind its last."""
        rows = self.queries[batch] * self.group
        last_row = min(64 * (tile + 1), rows) - 1
        begin, end = (
            self.visible(batch, 64 * tile // self.group)[0],
            self.visible(batch, last_row // self.group)[1],
        )
        return (begin // self.keys, math.ceil(end / self.keys)) if begin < end else (0, 0)


@dataclasses.dataclass(frozen=True)
class Part:
    """A share's part of a tile, in blocks from the tile's first; a tile without blocks has one unit."""

    batch: int
    head: int
    tile: int
    begin: int
    end: int
    units: int
    first_share: int  # that has some of the tile
    partial: int  # of this share

    @property
    def is_whole(self) -> bool:
        return (self.begin, self.end) == (0, self.units)


def boundary(offset: int, units: int, max_parts: int) -> int:
    """Where in a tile parts meet, if a boundary between shares lies `offset` behind the tile's start."""
    offset = min(max(offset, 0), units)
    step = math.ceil(units / min(max_parts, units))
    return min(math.ceil(offset / step) * step, units)


@dataclasses.dataclass(frozen=True)
class Shares:
    """How all units are shared out: so many large shares, and then small ones."""

    large: int
    small: int
    large_count: int

    def begin(self, share: int) -> int:
        smaller = max(share - self.large_count, 0)
        return (share - smaller) * self.large + smaller * self.small

    def of(self, unit: int) -> int:
        beyond = unit - self.large_count * self.large
        return unit // self.large if beyond < 0 else self.large_count + beyond // self.small


def shares_of(units: int, ctas: int, count: int, least: int, least_small: int) -> Shares:
    even = max(math.ceil(units / ctas), least)
    if count <= ctas or even < 4 * least_small:
        return Shares(even, even, count)
    large = even - even // 4
    return Shares(large, max(math.ceil((units - ctas * large) / (count - ctas)), least_small), ctas)


def parts(
    work: Work, ctas: int, count: int, max_parts: int | None, least: int = 1, least_small: int = 1
) -> Iterator[tuple[int, Part]]:
    """The parts of every share, in order; there are `count` shares at most."""
    tiles, start = [], 0
    for batch in range(len(work.lengths)):
        for head in range(work.key_heads):
            for tile in range(work.tiles(batch)):
                first, last = work.blocks(batch, tile)
                units = max(last - first, 1)
                tiles.append((batch, head, tile, start, units))
                start += units
    shares = shares_of(start, ctas, count, least, least_small)
    for share in range(count):
        edges = shares.begin(share), min(shares.begin(share + 1), max(start, shares.begin(share)))
        for batch, head, tile, start_of_tile, units in tiles:
            begin, end = (boundary(edge - start_of_tile, units, max_parts or units) for edge in edges)
            if begin < end:
                # Only a tile that begins in the share has its first partial.
                first = shares.of(start_of_tile)
                partial = 2 * share + (share == first)
                yield share, Part(batch, head, tile, begin, end, units, first, partial)
