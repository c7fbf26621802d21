"""How a call on a key-value cache is cut: tiles of rows, blocks of keys, and at most how many splits.

A row is a pair of a query and a query head of the tile's key head (PackGQA): row `t * group + g` of a
sequence is query t of head g of the group.

The tables keep K and V of all stages within half of an SM's shared memory, so that two programs of few rows
share an SM. No kernel spills registers by Triton 3.9's compiler. They were chosen without a GPU: no timing
has gone into them yet. Where a function looks arrays up for each score, Triton loads these ahead as well, a
number for each pair of a row and a key: then blocks and stages are as many as fit (`_bytes_of`).
"""

import dataclasses
import functools

from jax_flash._cache_spec import CacheOperands, CacheSizes, CacheSpec, cache_sizes
from jax_flash._device import Device
from jax_flash._mask import Window

from .tiles import has_much_shared_memory, padded, shared_bytes

MOST_ROWS = 64
MOST_SPLITS = 128
BLOCKS_OF_SPLIT = 2  # at least, unless a tile has fewer: a shorter split is mostly overhead
PROGRAMS_OF_SM = 2
MOST_SEQUENCES = 4096  # of packed queries: each program reads the lengths of all sequences
MOST_SEQUENCES_TO_SPLIT = 1024

_UNKNOWN_SM_COUNT = 108

_OTHER_BYTES = 4096  # of shared memory, beside what `_bytes_of` counts: page numbers, sums of rows

# By the padded head dim: keys of a block, and stages.
_HOPPER = {64: (128, 3), 128: (64, 3), 256: (32, 3)}  # 227 KiB of shared memory
_AMPERE = {64: (64, 3), 128: (32, 3), 256: (32, 2)}  # 99 KiB, which is what the smaller GPUs have


@dataclasses.dataclass(frozen=True)
class Cut:
    rows: int  # of a tile
    keys: int  # of a block
    num_warps: int
    num_stages: int
    tiles: int  # of one key head, at most
    splits: int  # of a tile, at most
    splits_wanted: int  # of one key head: what occupies the GPU
    programs: int  # of one key head, at most

    def __str__(self) -> str:
        return (
            f"{self.rows} rows x {self.keys} keys, {self.num_warps} warps, {self.num_stages} stages, "
            f"at most {self.splits} {'split' if self.splits == 1 else 'splits'}"
        )


def choose(spec: CacheSpec, operands: CacheOperands, device: Device) -> Cut:
    n = cache_sizes(operands)
    is_varlen = operands.query_offsets is not None
    rows = min(MOST_ROWS, padded(n.T * n.group))
    table = _HOPPER if has_much_shared_memory(device) else _AMPERE
    keys, depth = next(of_block for limit, of_block in table.items() if max(n.H, n.V) <= limit)
    keys = min(keys, padded(n.S))
    lookups = 0 if spec.attention.score_mod is None else spec.attention.score_mod.lookups_of_a_score
    if lookups:
        taken = functools.partial(_bytes_of, operands, rows, lookups=lookups)
        while keys > 16 and taken(keys, _stages(n, keys, depth)) > shared_bytes(device):
            keys //= 2
        while depth > 1 and taken(keys, _stages(n, keys, depth)) > shared_bytes(device):
            depth -= 1
    stages = _stages(n, keys, depth)

    of_all_tokens = _ceil_div(n.T * n.group, rows)
    tiles = of_all_tokens + n.B if is_varlen else of_all_tokens * n.B
    # One wave of programs. Where tiles are more than that already, splits only even out the tail: half
    # as long then.
    wave = PROGRAMS_OF_SM * (device.sm_count or _UNKNOWN_SM_COUNT)
    wanted = _ceil_div(wave if tiles * n.K <= wave else 2 * wave, n.K)
    # A sequence that is far longer than the others needs no more splits than occupy the GPU by itself.
    alone = max(1, wave // (n.K * (1 if is_varlen else of_all_tokens)))
    blocks = _ceil_div(min(n.S, visible_span(spec, n, rows)), keys) + 1
    splits = min(spec.num_splits or MOST_SPLITS, MOST_SPLITS, alone, _ceil_div(blocks, BLOCKS_OF_SPLIT))
    # Sums over all blocks are int32.
    if tiles * blocks >= 1 << 31 or (not is_varlen and n.B > MOST_SEQUENCES_TO_SPLIT):
        splits = 1
    programs = min(tiles + wanted, tiles * splits)
    num_warps = 8 if rows * padded(n.V) > 32 * 128 else 4
    return Cut(rows, keys, num_warps, stages, tiles, splits, wanted, programs)


def _stages(n: CacheSizes, keys: int, depth: int) -> int:
    """Triton's stages, of which `depth` have blocks of keys.

    Triton puts the load of page numbers in stages before that of keys: as deep a pipeline of keys takes twice
    as many.
    """
    return 2 * depth - 1 if in_several_pages(n, keys) else depth


def _bytes_of(operands: CacheOperands, rows: int, keys: int, stages: int, *, lookups: int) -> int:
    """Shared memory of a program: blocks of all stages, what is looked up in all but one, and its queries."""
    n = cache_sizes(operands)
    of_block = keys * (padded(n.H) + padded(n.V)) * operands.key.dtype.itemsize
    looked_up = lookups * rows * keys * 4
    queries = rows * padded(n.H) * operands.query.dtype.itemsize
    return stages * of_block + (stages - 1) * looked_up + queries + _OTHER_BYTES


def in_several_pages(n: CacheSizes, keys: int) -> bool:
    """Whether blocks of that many keys may lie in several pages each."""
    return n.page is not None and n.page % keys != 0


def visible_span(spec: CacheSpec, n: CacheSizes, rows: int) -> int:
    """How many keys, one after another, hold all that the window shows to a tile."""
    window = Window(spec.attention.left, spec.attention.right)
    if window.left is None:
        return n.S
    # A query has at most T - 1 keys to the right of its diagonal.
    right = n.T if window.right is None else min(window.right, n.T)
    queries = min(n.T, _ceil_div(rows, n.group) + 1)
    return max(0, window.left + right + queries)


def _ceil_div(x: int, divisor: int) -> int:
    return -(-x // divisor)
