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
    packed: bool = True  # queries of sequences follow each other; else all sequences have as many

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
    """A CTA's part of a tile, in blocks from the tile's first; a tile without blocks counts one.

    If the number of parts is limited, some CTAs that share a tile have none, and an empty one here.
    """

    batch: int
    head: int
    tile: int
    begin: int
    end: int
    counted_blocks: int  # of the whole tile
    sharers: int  # that the tile has: CTAs, or pairs of them
    index: int  # of this one among them
    partial: int  # of this one, if several share the tile


def boundary(offset: int, counted_blocks: int, max_parts: int) -> int:
    """Where in a tile parts meet, if a boundary between shares lies `offset` behind the tile's start."""
    offset = min(max(offset, 0), counted_blocks)
    step = math.ceil(counted_blocks / min(max_parts, counted_blocks))
    return min(math.ceil(offset / step) * step, counted_blocks)


def aligned(share: int, tile_blocks: int) -> int:
    """The share that has whole tiles, or half a tile or a quarter, if it isn't much larger."""
    unit = tile_blocks
    for _ in range(2):
        if unit % 2 == 0 and 2 * share <= unit:
            unit //= 2
    found = math.ceil(share / unit) * unit
    return found if found - share <= min(share // 32, 2) else share


def parts(
    work: Work, ctas: int, max_parts: int | None, least_share: int = 1, team: int = 1, paired: bool = False
) -> Iterator[tuple[int, Part]]:
    """Every CTA's parts, in order. A team of CTAs has as many heads, each CTA one of them.

    If CTAs are paired, those of teams 2j and 2j + 1 with one head are one sharer of a tile.
    """
    tiles, start = [], 0
    for batch in range(len(work.lengths)):
        for group in range(work.key_heads // team):
            for tile in range(work.tiles(batch)):
                first, last = work.blocks(batch, tile)
                counted_blocks = max(last - first, 1)
                tiles.append((batch, group, tile, start, counted_blocks))
                start += counted_blocks
    share = max(math.ceil(start / (ctas // team)), least_share)
    tile_blocks = {counted_blocks for *_, counted_blocks in tiles}
    may_align = (work.left, work.right) == (None, None) or work.tiles(0) == 1
    if not work.packed and may_align and len(tile_blocks) == 1:
        share = aligned(share, *tile_blocks)
    teams, sharer_teams = ctas // team, 1 + paired
    for cta in range(ctas):  # by member, then by team, as sharers are in scratch memory
        member, own_team = divmod(cta, teams)
        place = member * math.ceil(teams / sharer_teams) + own_team // sharer_teams
        for batch, group, tile, start, counted_blocks in tiles:
            first_team, last_team = start // share, (start + counted_blocks - 1) // share
            if first_team <= own_team <= last_team:
                begin, end = (
                    boundary(edge * share - start, counted_blocks, max_parts or counted_blocks)
                    for edge in (own_team, own_team + 1)
                )
                head = group * team + member
                first, last, own = (x // sharer_teams for x in (first_team, last_team, own_team))
                # Slot 1 of a sharer is for the tile that begins in its share.
                of_tile = (counted_blocks, last - first + 1, own - first, 2 * place + (own == first))
                yield cta, Part(batch, head, tile, begin, end, *of_tile)
