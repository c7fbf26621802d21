"""Loops over the blocks of a band."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from jax import lax

from .band import Blocks, Index

Carry = TypeVar("Carry")


def over_blocks(blocks: Blocks, body: Callable[[bool, Index, Carry], Carry], carry: Carry) -> Carry:
    """Runs `body(edge, block, carry)` over the blocks in order, `edge` (static) where one is not met whole.

    Whole blocks get a loop of their own, free of masks.
    """
    ranges = (
        (True, blocks.start, blocks.full_start),
        (False, blocks.full_start, blocks.full_stop),
        (True, blocks.full_stop, blocks.stop),
    )
    for edge, start, stop in ranges:
        carry = over(start, stop, lambda j, carry, edge=edge: body(edge, j, carry), carry)
    return carry


def over_others(blocks: Blocks, count: int, body: Callable[[Index], None]) -> None:
    """Runs `body(block)` over those of `count` blocks that are not in `blocks`."""

    def step(j: Index, carry: np.int32) -> np.int32:
        body(j)
        return carry

    for start, stop in ((0, blocks.start), (blocks.stop, count)):
        over(start, stop, step, np.int32(0))


def over(start: Index, stop: Index, body: Callable[[Index, Carry], Carry], carry: Carry) -> Carry:
    """Runs `body(block, carry)` over the blocks `[start, stop)`."""
    if isinstance(start, int) and isinstance(stop, int):
        if start == stop:
            return carry
        # int32 even where 64-bit types are on
        return lax.fori_loop(np.int32(start), np.int32(stop), body, carry)
    return lax.fori_loop(start, stop, body, carry)
