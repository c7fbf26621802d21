"""Loops over the blocks that a tile visits."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from jax import lax

from jax_flash._mask import BlockRange, Index

Carry = TypeVar("Carry")


@dataclasses.dataclass(frozen=True)
class BlockList:
    """A tile's list of all blocks: full ones first, then partial ones, then those that it skips.

    Attributes:
      at: the block at a place of the list.
      full: how many are full.
      visited: how many are full or partial.
    """

    at: Callable[[Index], Index]
    full: Index
    visited: Index


def over_block_range(blocks: BlockRange, body: Callable[[bool, Index, Carry], Carry], carry: Carry) -> Carry:
    """Runs `body(partial, block, carry)` over the blocks in order.

    `partial` is static: whether blocks need masking. Full blocks have a loop of their own without it.
    """
    ranges = (
        (True, blocks.first, blocks.full_begin),
        (False, blocks.full_begin, blocks.full_end),
        (True, blocks.full_end, blocks.last),
    )
    for partial, begin, end in ranges:
        carry = over_blocks(begin, end, lambda j, carry, partial=partial: body(partial, j, carry), carry)
    return carry


def over_visited_blocks(
    blocks: BlockRange | BlockList, body: Callable[[bool, Index, Carry], Carry], carry: Carry
) -> Carry:
    """`over_block_range`, or the same over the blocks of a list that are full or partial."""
    if isinstance(blocks, BlockRange):
        return over_block_range(blocks, body, carry)
    carry = over_blocks(0, blocks.full, lambda place, carry: body(False, blocks.at(place), carry), carry)
    return over_blocks(
        blocks.full, blocks.visited, lambda place, carry: body(True, blocks.at(place), carry), carry
    )


def over_skipped_blocks(blocks: BlockRange | BlockList, count: int, body: Callable[[Index], None]) -> None:
    """Runs `body(block)` over those of `count` blocks that a tile skips."""

    def step(j: Index, carry: np.int32) -> np.int32:
        body(blocks.at(j) if isinstance(blocks, BlockList) else j)
        return carry

    if isinstance(blocks, BlockList):
        ranges = [(blocks.visited, count)]
    else:
        ranges = [(0, blocks.first), (blocks.last, count)]
    for begin, end in ranges:
        over_blocks(begin, end, step, np.int32(0))


def over_blocks(begin: Index, end: Index, body: Callable[[Index, Carry], Carry], carry: Carry) -> Carry:
    """Runs `body(block, carry)` over the blocks `[begin, end)`."""
    if isinstance(begin, int) and isinstance(end, int):
        if begin == end:
            return carry
        # int32 even where 64-bit types are on
        return lax.fori_loop(np.int32(begin), np.int32(end), body, carry)
    return lax.fori_loop(begin, end, body, carry)
