"""Loops over the blocks that a tile visits."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from jax import lax

from jax_flash._mask import BlockRange, Index

Carry = TypeVar("Carry")


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


def over_skipped_blocks(blocks: BlockRange, count: int, body: Callable[[Index], None]) -> None:
    """Runs `body(block)` over those of `count` blocks that the range leaves out."""

    def step(j: Index, carry: np.int32) -> np.int32:
        body(j)
        return carry

    for begin, end in ((0, blocks.first), (blocks.last, count)):
        over_blocks(begin, end, step, np.int32(0))


def over_blocks(begin: Index, end: Index, body: Callable[[Index, Carry], Carry], carry: Carry) -> Carry:
    """Runs `body(block, carry)` over the blocks `[begin, end)`."""
    if isinstance(begin, int) and isinstance(end, int):
        if begin == end:
            return carry
        # int32 even where 64-bit types are on
        return lax.fori_loop(np.int32(begin), np.int32(end), body, carry)
    return lax.fori_loop(begin, end, body, carry)
