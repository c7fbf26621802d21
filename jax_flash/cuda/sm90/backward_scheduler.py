"""The tile scheduler of the backward pass: the order of key tiles, and which heads' dQ is summed at a time.

Tiles are handed out by L2 head groups (`unit_at` in cuda/kernels/sm90/backward/tile_scheduler.cuh). The key
heads of a group take turns, a tile each, before those of the next group start. Where units of work share a
tile (backward_units.py), each head share counts as a head here.
"""

import functools
import math

from jax_flash.cuda.sm90.backward_units import ENDS, Tiles, makespan, slowdown, widths

# A finished head of dQ is assumed to wait for this many blocks' time until it is written.
_WRITING = 30
# A tile that adds to dQ in a fixed order follows the one before it by this many blocks' time. With it the
# simulated runs are as measured on an H100: b1 s4096 d128 took 17% more time with 8 heads, 64% more with 2.
_LAG = 4 / 3
# Waiting for tiles before may take this share of the run.
_WAITING = 1 / 8
# Up to this many tiles the schedule is simulated. Longer ones end evenly enough.
_SIMULATED = 1 << 14

MAX_DQ_SUMS = 8
"""The most sums that a block of dQ has (`dq_sums`)."""

ASSUMED_CTAS = 132
"""CTAs at work at a time, for choices on which the bits of deterministic gradients depend.

That of an H100 or H200 as a whole. If it were the device's, a part of one would give other bits.
"""

_FREE_BYTES = 32 << 20


def most_heads_in_l2(heads: int, bytes_per_head: int, l2_bytes: int) -> int:
    """The most key heads in an L2 head group (`l2_head_group`)."""
    return max(1, min(heads, l2_bytes // bytes_per_head))


@functools.lru_cache(256)
def l2_head_group(tiles: Tiles, bytes_per_head: int, l2_bytes: int, parts: int = 1, span: int = 1) -> int:
    """Number of key heads in an L2 head group.

    Where all tiles take equally long, one head at a time keeps its queries in L2. Elsewhere the longest tiles
    of several heads go first: of as few heads as let the last wave end evenly.

    Args:
      bytes_per_head: of Q, dO and the sum of dQ, of one query head; the query heads of a key head follow
        one another.
      l2_bytes: that Q, dO and the sum of dQ of the heads may take (l2.py).
      parts, span: of a tile's blocks, see `backward_units.part_lengths`.
    """
    if len(set(tiles.blocks)) == 1:
        return 1
    most = most_heads_in_l2(tiles.heads, bytes_per_head, l2_bytes)
    times = _times(tiles, most, parts, span)
    return next(width for width, time in times.items() if time <= 1.005 * min(times.values()))


def l2_head_group_of_sequences(tiles: Tiles, parts: int = 1, span: int = 1) -> int:
    """`l2_head_group` of varlen sequences and of segments, whose lengths are known only at run time.

    Args:
      tiles: as sequences of assumed lengths have them (`tiles_of_assumed_sequences`).
    """
    times = _times(tiles, tiles.heads, parts, span)
    return min(times, key=lambda width: times[width])


def tiles_of_assumed_sequences(tiles: int) -> list[int]:
    """How many of a row's key tiles each sequence is assumed to have: half of them, half of the rest, ..."""
    found = []
    while tiles:
        found.append(math.ceil(tiles / 2))
        tiles -= found[-1]
    return found


def _times(tiles: Tiles, most: int, parts: int, span: int) -> dict[int, float]:
    """How long a pass takes by the number of heads in an L2 head group, up to `most`.

    Of very many tiles, whose last wave is a small part, it has the most heads that L2 holds alone.
    """
    if len(tiles.blocks) * tiles.heads * parts > _SIMULATED:
        held = [width for width in widths(most) if slowdown(tiles, width) == slowdown(tiles, 1)]
        return {max(held): 1.0}
    return {width: makespan(tiles, width, parts, span) * slowdown(tiles, width) for width in widths(most)}


def l2_head_group_of_unknown_lengths(heads: int, bytes_per_head: int, sequences: int, l2_bytes: int) -> int:
    """As many heads as L2 holds, in groups of equal size: `l2_head_group` of chunks of sequences.

    How long their tiles take is known only at run time. Tiles that are at work together read one of the
    head's `sequences`.
    """
    groups = math.ceil(heads * bytes_per_head / (sequences * l2_bytes))
    return math.ceil(heads / max(1, min(heads, groups)))


def l2_head_group_in_order(heads: int, bytes_per_head: int, tiles_alike: bool, l2_bytes: int) -> int:
    """`l2_head_group` where tiles add to dQ in a fixed order (cuda/kernels/sm90/backward/dq_order.cuh).

    A tile comes to a block behind the tiles of its head that were handed out before it. So each tile of a
    head that is at work delays the next one by about a block's time, and groups are as wide as L2 allows, so
    that few tiles of a head are at work. Where tiles are not alike, the longest tiles of a group come last.
    Only in the last group they come first. So there have to be two groups, and the last one should not be
    small: it fills in what the others leave. `bytes_per_head` is that of all query heads of a key head, as
    tiles of a key head get apart by whole query heads.
    """
    if tiles_alike:
        return math.ceil(heads / min(heads, math.ceil(heads * bytes_per_head / l2_bytes)))
    most = max(1, min(math.ceil(heads / 2), l2_bytes // bytes_per_head))

    def last_group(width: int) -> int:
        return (heads - 1) % width + 1

    return max(range(1, most + 1), key=lambda width: (last_group(width), -width))


def dq_accum_slots(tiles: Tiles, width: int) -> int:
    """Number of query heads whose dQ has a slot to be summed in at a time (`DqAccum` in call.cuh).

    Those are the heads that start before a head's longest tile ends and its dQ is written. It is a whole
    number of key heads' groups, and either all heads or at least two L2 head groups: a head waits for the one
    that had its slot before, and all tiles of that one have to be handed out first.

    `width` is the number of key heads in an L2 head group.
    """
    steps = max(tiles.blocks) * tiles.group + _WRITING
    groups = 1 + math.ceil(steps * tiles.workers / max(width * sum(tiles.blocks) * tiles.group, 1))
    return min(groups * width, tiles.heads) * tiles.group


def main_writes_dq(heads_at_work: int, heads: int, larger_dim: int, key_tiles: int) -> bool:
    """Whether warps of the main kernel should write dQ, and not a kernel after it.

    They do so beside the products of later heads, from sums in L2. That gains nothing for the heads that are
    at work at the end. Where those are all heads, the kernel after is faster, but for small head dims, beside
    whose products it takes longer (benchmarks/tune_schedule.py).

    Args:
      heads_at_work: query heads whose dQ is summed at a time (`dq_accum_slots`).
      heads: all query heads.
      larger_dim: the larger head dim, of keys or of values.
      key_tiles: of a head.
    """
    return heads_at_work < heads or (larger_dim <= 96 and key_tiles > 1)


def dq_sums(tiles: Tiles, aligned: int, width: int, most: int) -> int:
    """Number of sums that each block of dQ has, where tiles add to it in a fixed order (dq_order.cuh).

    A tile follows the one before it that adds to the same sum. So from the first tile of a head at work to
    the last one, it takes the time of that many blocks, divided by the number of sums. Returns the least
    power of two with which this is a small part of the run. That is 1 unless heads at work are few.

    Args:
      aligned: the most tiles of a head that start at the same block. Others start blocks apart, and don't
        wait.
      width: key heads in an L2 head group.
      most: how many fit (`dq_sums_that_fit`).
    """
    at_work = min(aligned, math.ceil(tiles.workers / min(width, tiles.heads)))  # of a head
    of_head = sum(tiles.blocks) * tiles.group + ENDS * len(tiles.blocks)
    run = max(max(tiles.blocks) * tiles.group + ENDS, tiles.heads * of_head / tiles.workers)
    sums = 1
    while 2 * sums <= min(most, MAX_DQ_SUMS) and (math.ceil(at_work / sums) - 1) * _LAG > _WAITING * run:
        sums *= 2
    return sums


def dq_sums_that_fit(dq_bytes: int, gradients_bytes: int) -> int:
    """The most sums of dQ that a call may have.

    Together they take no more than the larger of two sizes. One is that of the three gradients in float32: a
    caller who can't hold that can't sum gradients over steps either, so the scratch memory is no more than
    training takes elsewhere. The other is 32 MiB, which is little on any GPU, and which L2 holds.

    Args:
      dq_bytes: of one sum of all of dQ.
      gradients_bytes: of the gradients of query, key and value, in float32.
    """
    return max(1, max(gradients_bytes, _FREE_BYTES) // dq_bytes)
