"""In what order CTAs of the backward kernel take key tiles, and which heads' dQ is summed up at a time."""

import functools
import heapq
import math

# A tile's beginning and end take about as long as so many blocks.
_ENDS = 2
# For how many blocks' time dQ of a head is taken to wait to be written.
_WRITING = 30
# Walks are simulated up to so many tiles; longer ones end evenly enough.
_SIMULATED = 1 << 14


@functools.lru_cache(256)
def section_heads(
    blocks: tuple[int, ...], heads: int, group: int, bytes_per_head: int, workers: int, l2_bytes: int
) -> int:
    """Key heads whose tiles are walked together (`key_tile_at` in sm90/backward/tile_scheduler.cuh).

    Where all tiles take equally long, one head at a time keeps its queries in L2. Elsewhere the longest tiles
    of several heads go first, of as few as let the last wave end evenly.

    Args:
      blocks: query blocks that see each key tile of a head.
      heads: key heads, of all batch rows.
      group: query heads of each.
      bytes_per_head: of Q, dO and the sum of dQ, of one query head: those of a key head take turns.
      workers: CTAs, or clusters, that take tiles at a time.
      l2_bytes: that Q, dO and the sum of dQ of the heads may take (l2.py).
    """
    if len(set(blocks)) == 1:
        return 1
    most = max(1, min(heads, l2_bytes // bytes_per_head))
    if len(blocks) * heads > _SIMULATED:
        return most
    widths = [w for w in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96) if w <= most]
    times = {w: _makespan(blocks, heads, group, w, workers) for w in widths}
    return next(w for w in widths if times[w] <= 1.005 * min(times.values()))


def section_heads_by_data(heads: int, bytes_per_head: int, parts: int, l2_bytes: int) -> int:
    """The same where it is data how long tiles take: as many heads as there is room for, so that CTAs end
    together wherever the long ones are, in sections all alike. Tiles of a turn read one of a head's `parts`
    alone."""
    sections = math.ceil(heads * bytes_per_head / (parts * l2_bytes))
    return math.ceil(heads / max(1, min(heads, sections)))


def section_heads_in_turns(heads: int, bytes_per_head: int, tiles_alike: bool, l2_bytes: int) -> int:
    """The same where tiles add to dQ in turns (cuda/kernels/sm90/backward/dq_order.cuh).

    A tile comes to a block behind those of its head that were handed out before it, so each tile of a head
    that is at work delays the next one by about a block's time: sections are as wide as L2 allows, so that
    few are. Where tiles are not alike, the longest ones of a section come last, but for the last section:
    there have to be two, and a small last one would have little beside what the others leave. Tiles of a key
    head get apart by whole query heads, so that `bytes_per_head` counts the group's.
    """
    if tiles_alike:
        return math.ceil(heads / min(heads, math.ceil(heads * bytes_per_head / l2_bytes)))
    most = max(1, min(math.ceil(heads / 2), l2_bytes // bytes_per_head))
    return max(
        range(1, most + 1), key=lambda width: ((heads - 1) % width + 1, -width)
    )  # by that of the last one


def _makespan(blocks: tuple[int, ...], heads: int, group: int, section: int, workers: int) -> float:
    """When the last worker ends, in blocks' times, if each takes the next tile as soon as it is free."""
    ends = [0] * workers
    for first in range(0, heads, section):
        for count in blocks:
            for _ in range(min(section, heads - first)):
                heapq.heapreplace(ends, ends[0] + count * group + _ENDS)
    return max(ends)


def sum_places(blocks: tuple[int, ...], heads: int, group: int, section: int, workers: int) -> int:
    """Query heads whose dQ has a place to be summed up in at a time (`QueryGradient` in
    cuda/kernels/sm90/backward/call.cuh): those that are begun before a head's longest tile ends, and before
    it is written then.

    A whole number of groups. And either all heads, or at least two sections: a head's tiles wait for the one
    that had its place, whose tiles must all be handed out before them.

    Args:
      blocks, heads, group, workers: as `section_heads` takes them.
      section: what it gave.
    """
    steps = max(blocks) * group + _WRITING
    sections = 1 + math.ceil(steps * workers / max(section * sum(blocks) * group, 1))
    return min(sections * section, heads) * group
