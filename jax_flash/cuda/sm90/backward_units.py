"""Units of work of the backward pass: how many CTAs, or clusters, share a key tile.

By default a CTA has a key tile of a key head, and visits the blocks of all of its query heads. With few key
heads there are few such tiles, of unequal length under a causal mask: some multiprocessors have none, or are
done long before the others. Then a tile's visits are divided into units: by its query heads, into equal head
shares; and each share by its blocks of queries, into parts (`Units` in cuda/kernels/sm90/backward/shape.cuh).
Tiles are also divided if L2 can't hold all query heads that CTAs work on at a time.
Units of a tile add what they contribute to dK and dV to float32 sums. These take as much scratch memory as
dK and dV in float32, however many units there are.
"""

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterator

from jax_flash.cuda.parameters import struct

ENDS = 2
"""The beginning and the end of a unit take about as long as this many blocks."""

MAX_PARTS = 8
"""The most parts of a tile's blocks."""

KEY_SUMS = struct(
    "KeySums",
    d_key="float*",  # (B, K, groups of 64 keys, 64 · head_dim); null, as all, if no tile is shared
    d_value="float*",  # (B, K, groups of 64 keys, 64 · value_dim)
    d_key_semaphores="int*",  # (B, K, groups of 64 keys): head shares that have added; null if unordered
    d_value_semaphores="int*",
)
"""The float32 sums of dK and dV, as kernels get them; see cuda/kernels/sm90/backward/key_sums.cuh."""

# Rates of Hopper, from which times are estimated (benchmarks/tune_schedule.py). They decide on speed alone.
_FLOPS_PER_US = 4.7e6  # of a multiprocessor at work
_ADDED_BYTES_PER_US = 40e3  # of float32 additions to L2, by a multiprocessor
_BYTES_PER_US = 3.5e6  # of memory
_LAUNCH_US = 6.0  # of one more kernel, and the gap before it
# Multiprocessors are not equally fast, so that units of unequal length don't end as evenly as the model has
# them: the last one ends later by this share of what the longest takes beyond the mean.
_UNEVENNESS = 0.12

# The pass takes this share of its time more for each doubling of what CTAs at work read beyond what L2
# holds. Measured on an H100.
_MISSES = 0.06

# Shares have to gain this much to be worth the scratch memory.
_LEAST_GAIN = 0.02
# Up to this many units schedules are simulated. Longer ones end evenly enough.
_SIMULATED = 1 << 12


@dataclasses.dataclass(frozen=True)
class Units:
    """How the work of a key tile is divided."""

    shares: int = 1  # head shares of a key head; each has as many query heads
    parts: int = 1  # of the blocks that a head share visits

    @property
    def count(self) -> int:
        return self.shares * self.parts


@dataclasses.dataclass(frozen=True)
class Costs:
    """What sharing key tiles costs, in blocks' times."""

    adding: float  # to the sums of dK and dV, for each unit
    converting: float  # the sums, and setting them to zero, for the call


def costs(queries: int, cta_keys: int, dims: int, gradient_elements: int) -> Costs:
    """Estimates the costs for a device of Hopper's.

    Args:
      queries, cta_keys: of a block and of a CTA's tile.
      dims: head dim of keys and of values, added up.
      gradient_elements: of dK and dV.
    """
    block_us = 5 * queries * cta_keys * dims / _FLOPS_PER_US
    adding_us = cta_keys * dims * 4 / _ADDED_BYTES_PER_US
    # Zeroed, added to, read and written in 16 bits.
    converting_us = _LAUNCH_US + gradient_elements * (4 + 4 + 4 + 2) / _BYTES_PER_US
    return Costs(adding_us / block_us, converting_us / block_us)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The key tiles of a call, and who takes them."""

    blocks: tuple[int, ...]  # query blocks that see each key tile of a head
    heads: int  # key heads, of all batch rows
    group: int  # query heads of each
    workers: int  # CTAs, or clusters, that take units at a time
    heads_in_l2: float = math.inf
    """How many query heads fit in L2: of each, the Q, dO and sum of dQ that a tile visits."""

    def share(self, units: Units) -> "Tiles":
        """The same with each head share for a head of its own."""
        heads = self.heads * units.shares
        return dataclasses.replace(self, heads=heads, group=self.group // units.shares)


def slowdown(tiles: Tiles, width: int) -> float:
    """The time of the pass over its time if L2 held all heads at work.

    Tiles of different lengths don't stay in step. So the tiles of a key head work on different query heads of
    it at a time, up to all of them.

    Args:
      width: heads in an L2 head group.
    """
    fills = width * tiles.group / tiles.heads_in_l2
    return 1 + _MISSES * math.log2(max(1.0, fills))


def part_lengths(count: int, parts: int, span: int) -> list[int]:
    """Blocks in each part of `count` blocks, which are whole spans (`part_of` in tile_scheduler.cuh)."""
    spans = math.ceil(count / span)
    ends = [min(count, spans * part // parts * span) for part in range(parts + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def widths(most: int) -> list[int]:
    """The numbers of heads that an L2 head group may have, up to `most`."""
    return [width for width in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96) if width < most] + [most]


def makespan(tiles: Tiles, width: int, parts: int = 1, span: int = 1, adding: float = 0) -> float:
    """When the last worker ends, in blocks' times, if each takes the next unit as soon as it is free.

    Args:
      tiles: with a head for each head share.
      width: heads in an L2 head group.
      adding: what a unit takes beside its blocks and `ENDS`.
    """
    ends = [0.0] * tiles.workers
    for first in range(0, tiles.heads, width):
        for count in tiles.blocks:
            times = [length * tiles.group + ENDS + adding for length in part_lengths(count, parts, span)]
            for _ in range(min(width, tiles.heads - first)):
                for time in times:
                    heapq.heapreplace(ends, ends[0] + time)
    return max(ends)


@functools.lru_cache(256)
def choose(tiles: Tiles, width: int, costs: Costs, span: int, most_parts: int = MAX_PARTS) -> Units:
    """The units with which the pass is estimated to end first.

    Args:
      width: the most heads in an L2 head group.
      span: blocks that a part has a multiple of.
      most_parts: the most parts of a tile's blocks.
    """
    best, best_time = Units(), estimate(tiles, width, Units(), costs, span)
    threshold = best_time * (1 - _LEAST_GAIN)
    # From those that can gain most, until none can gain anything.
    candidates = [
        (_bound(tiles, units, costs, span), units.count, units) for units in _candidates(tiles, most_parts)
    ]
    for bound, _, units in sorted(candidates, key=lambda x: x[:2]):
        if bound >= min(threshold, best_time):
            break
        time = estimate(tiles, width, units, costs, span)
        if time < min(threshold, 0.995 * best_time):
            best, best_time = units, time
    return best


def _candidates(tiles: Tiles, most_parts: int) -> Iterator[Units]:
    for shares in range(1, tiles.group + 1):
        if tiles.group % shares:
            continue
        # Whole query heads are as good units as any, so only single ones are divided further.
        for parts in range(1, most_parts + 1 if shares == tiles.group else 2):
            if shares * parts > 1:
                yield Units(shares, parts)


def _work(tiles: Tiles, units: Units, costs: Costs, span: int) -> tuple[float, float, float]:
    """The time of all units together, that of the longest, and how much longer than the mean that is."""
    adding = costs.adding if units.count > 1 else 0
    group = tiles.group // units.shares
    longest = max(part_lengths(max(tiles.blocks), units.parts, span)) * group + ENDS + adding
    count = len(tiles.blocks) * tiles.heads * units.count
    total = sum(tiles.blocks) * tiles.heads * tiles.group + count * (ENDS + adding)
    return total, longest, longest - total / count


def _bound(tiles: Tiles, units: Units, costs: Costs, span: int) -> float:
    """No estimate is less."""
    total, longest, beyond_mean = _work(tiles, units, costs, span)
    return max(total / tiles.workers, longest) + _extra(units, costs, beyond_mean)


def _extra(units: Units, costs: Costs, beyond_mean: float) -> float:
    return _UNEVENNESS * beyond_mean + (costs.converting if units.count > 1 else 0)


def estimate(tiles: Tiles, width: int, units: Units, costs: Costs, span: int) -> float:
    """The time of the pass, in blocks' times; arguments as `choose` takes them."""
    total, longest, beyond_mean = _work(tiles, units, costs, span)
    extra = _extra(units, costs, beyond_mean)
    shared = tiles.share(units)
    if len(tiles.blocks) * shared.heads * units.parts > _SIMULATED:
        time = max(total / tiles.workers + beyond_mean / 2, longest)
        return time * slowdown(shared, 1) + extra
    adding = costs.adding if units.count > 1 else 0
    if len(set(tiles.blocks)) == 1:
        return makespan(shared, 1, units.parts, span, adding) + extra
    known = widths(min(width, shared.heads))
    return min(makespan(shared, w, units.parts, span, adding) * slowdown(shared, w) for w in known) + extra
