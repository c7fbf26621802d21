"""Masks of distances that leave keys out at regular steps."""

import dataclasses

import jax

from jax_flash._validate import short
from jax_flash.masks.arguments import (
    FARTHEST,
    Array,
    of_rows,
    position,
    positive,
    quotient,
    remainder,
    window,
)
from jax_flash.masks.mask import Mask
from jax_flash.masks.positions import in_window


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DilatedMask(Mask):
    """A window with gaps: every `dilation`-th key around the query's position p.

    The keys `p + m * dilation` for m from `-left` to `right` (Beltagy et al., "Longformer", 2020, section
    3.1, figure 2c). Bounds decide the blocks outside of the window. Those inside are partial if the dilation
    is more than 1, which is found by all of their pairs: the cost is linear in T times the window.

    Attributes:
      window_size: `(left, right)` in steps of `dilation` keys, or one int for both; None or -1 is unbounded.
      dilation: in keys. 1 is `LocalMask`.
      offset: as in `CausalMask`: p is `query + offset`.

    Raises:
      TypeError: window_size or dilation isn't made of integers; offset as in `CausalMask`.
      ValueError: window_size isn't one int or two, or is less than -1; dilation is less than 1.
    """

    window_size: int | tuple[int | None, int | None] | None
    dilation: int
    offset: int | Array = 0
    _of_rows = ("offset",)

    def __post_init__(self):
        dilation = min(positive("dilation", self.dilation), FARTHEST)
        left, right = (
            None if side is None else min(side, FARTHEST // dilation)
            for side in window("window_size", self.window_size)
        )
        self._set(window_size=(left, right), dilation=dilation, offset=of_rows("offset", self.offset))

    def _sees(self, batch, head, query, key) -> jax.Array:
        place = position(query, self.offset, batch)
        is_near = in_window(self.window_size, place, key, self.dilation)
        return is_near & is_multiple(place - key, self.dilation)


def is_multiple(x: jax.Array, of: int) -> jax.Array:
    """Of either sign."""
    return remainder(x, of) == 0


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class StridedMask(Mask):
    """A causal window, and beyond it every `stride`-th key.

    The query at position p attends to keys k <= p with `p - k <= stride` or `(p - k) % stride == 0`: both
    sets of strided attention, merged (Child et al., "Generating Long Sequences with Sparse Transformers",
    2019, section 4.3, whose l is the stride). Bounds decide the blocks that no step reaches if the stride is
    more than twice the block. All pairs of the others are looked at.

    Attributes:
      stride: in keys.
      offset: as in `CausalMask`: p is `query + offset`.

    Raises:
      TypeError: stride isn't an integer; offset as in `CausalMask`.
      ValueError: stride is less than 1; offset as in `CausalMask`.
    """

    stride: int
    offset: int | Array = 0
    _of_rows = ("offset",)

    def __post_init__(self):
        self._set(
            stride=min(positive("stride", self.stride), FARTHEST), offset=of_rows("offset", self.offset)
        )

    def _sees(self, batch, head, query, key) -> jax.Array:
        place = position(query, self.offset, batch)
        distance = place - key
        return (key <= place) & ((distance <= self.stride) | is_multiple(distance, self.stride))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FixedMask(Mask):
    """Causal attention to the query's own chunk and to the last keys of every chunk before.

    The query at position p attends to keys k <= p of the same chunk of `stride` keys, and to those with
    `k % stride >= stride - summary`: both sets of fixed attention, merged (Child et al., "Generating Long
    Sequences with Sparse Transformers", 2019, section 4.3, whose l is the stride and whose c the summary).
    Bounds decide all blocks but those on edges if the stride is a multiple of the block.

    Attributes:
      stride: in keys.
      summary: how many keys at the end of each chunk all later queries attend to, 1 to stride.
      offset: as in `CausalMask`: p is `query + offset`.

    Raises:
      TypeError: stride or summary isn't an integer; offset as in `CausalMask`.
      ValueError: stride is less than 1; summary isn't from 1 to stride; offset as in `CausalMask`.
    """

    stride: int
    summary: int = 1
    offset: int | Array = 0
    _of_rows = ("offset",)

    def __post_init__(self):
        stride, summary = positive("stride", self.stride), positive("summary", self.summary)
        if summary > stride:
            raise ValueError(f"summary must be at most stride = {stride}; got {short(self.summary)}")
        if stride > FARTHEST:
            raise ValueError(f"stride must be at most {FARTHEST}; got {short(self.stride)}")
        self._set(stride=stride, summary=summary, offset=of_rows("offset", self.offset))

    def _sees(self, batch, head, query, key) -> jax.Array:
        place = position(query, self.offset, batch)
        is_own = quotient(place, self.stride) == quotient(key, self.stride)
        return (key <= place) & (is_own | (remainder(key, self.stride) >= self.stride - self.summary))
