"""Bytes that the backward kernel moves between memory and L2, by a model, for L2 head groups of any width.

    python benchmarks/l2_traffic.py --lengths 512 300 61 --heads 16 --queries 512 --head-dim 64

L2 keeps what was used last, and holds whole blocks. CTAs take key tiles in their order, and each tile visits
the query blocks of its sequence at one pace. Widths are heads of an L2 head group (tile_scheduler.cuh). There
is no mask but lengths, there are as many keys as queries and as many key heads as heads, no tile waits for a
slot to sum dQ in, and what is in L2 at the end counts as not written. It needs no GPU, and tells no times.
"""

import argparse
import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

BLOCK = 128  # queries of a block, and keys of a tile
ELEMENT_BYTES, SUM_BYTES = 2, 4
SETUP = 1.0  # of a tile, in blocks' times


class Traffic(NamedTuple):
    read: int
    written: int


class L2:
    """Least recently used goes first; what was changed is written then."""

    def __init__(self, capacity: int):
        self.capacity, self.used = capacity, 0
        self.blocks: OrderedDict[Hashable, tuple[int, bool]] = OrderedDict()
        self.read = self.written = 0

    def touch(self, block: Hashable, size: int, changes: bool = False, is_new: bool = False) -> None:
        """Use a block; one that `is_new` is overwritten whole."""
        if block in self.blocks:
            size, changed = self.blocks.pop(block)
            self.blocks[block] = size, changed or changes
            return
        self.read += 0 if is_new else size
        self.blocks[block] = size, changes
        self.used += size
        while self.used > self.capacity:
            _, (size, changed) = self.blocks.popitem(last=False)
            self.used -= size
            self.written += size if changed else 0


def backward(
    lengths: Sequence[int],
    heads: int,
    queries: int,
    head_dim: int,
    width: int,
    capacity: int,
    ctas: int = 132,
) -> Traffic:
    """Of the main kernel, for sequences of these lengths in rows of `queries` tokens.

    L2 has what the preprocess leaves there.
    """
    l2, tiles = L2(capacity), math.ceil(queries / BLOCK)
    row, total = BLOCK * head_dim * ELEMENT_BYTES, BLOCK * head_dim * SUM_BYTES
    blocks_of = {(b, n): math.ceil(x / BLOCK) for b, x in enumerate(lengths) for n in range(heads)}
    for head in blocks_of:
        for block in range(tiles):
            for name in ("out", "d_out"):
                l2.touch((name, head, block), row)
            l2.touch(("sum", head, block), total, changes=True, is_new=True)
    before = l2.read, l2.written
    steps = _steps(blocks_of, tiles, width, ctas)
    left = Counter(head for head, _, _ in steps)
    for head, tile, block in steps:
        if block is None:
            for name in ("key", "value") if tile < blocks_of[head] else ():
                l2.touch((name, head, tile), row)
            for name in ("d_key", "d_value"):
                l2.touch((name, head, tile), row, changes=True, is_new=True)
        else:
            for name in ("query", "d_out"):
                l2.touch((name, head, block), row)
            l2.touch(("sum", head, block), total, changes=True)
        left[head] -= 1
        if not left[head]:  # the sum becomes dQ
            for block in range(tiles):
                l2.touch(("sum", head, block), total)
                l2.touch(("d_query", head, block), row, changes=True, is_new=True)
    return Traffic(l2.read - before[0], l2.written - before[1])


def _steps(
    blocks_of: dict[tuple[int, int], int], tiles: int, width: int, ctas: int
) -> list[tuple[tuple[int, int], int, int | None]]:
    """What CTAs do, in order of time: the start of a tile, of no block, or a block of it."""
    free = [0.0] * ctas
    found = []
    for head, tile in _in_order(list(blocks_of), tiles, width):
        start, count = heapq.heappop(free), blocks_of[head] if tile < blocks_of[head] else 0
        found.append((start, head, tile, None))
        found += [(start + SETUP + i, head, tile, i) for i in range(count)]
        heapq.heappush(free, start + SETUP + count)
    return [step for _, *step in sorted(found, key=lambda x: x[0])]


def _in_order(
    heads: Sequence[tuple[int, int]], tiles: int, width: int
) -> Iterator[tuple[tuple[int, int], int]]:
    for first in range(0, len(heads), width):
        for tile in range(tiles):
            for head in heads[first : first + width]:
                yield head, tile


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", required=True, help="of each batch row")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--queries", type=int, default=512)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--widths", type=int, nargs="+", default=(1, 16, 64, 128, 256))
    parser.add_argument("--mib", type=int, nargs="+", default=(24, 30, 36, 44), help="that L2 holds")
    options = parser.parse_args(arguments)
    print("read + written MB, by MiB of L2 (rows) and width (columns)", *options.widths)
    for mib in options.mib:
        sizes = options.lengths, options.heads, options.queries, options.head_dim
        found = [backward(*sizes, width, mib << 20) for width in options.widths]
        print(f"{mib:3}", *(f"{x.read / 1e6:6.0f} + {x.written / 1e6:.0f}" for x in found))


if __name__ == "__main__":
    main()
