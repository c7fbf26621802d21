"""Tokens that attend to all, and that all attend to."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import _validate
from jax_flash.masks.arguments import (
    LONGEST,
    Array,
    check_axis,
    check_length,
    element,
    of_rows,
    position,
    ranked,
)
from jax_flash.masks.mask import Mask
from jax_flash.masks.strided import DilatedMask


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class GlobalMask(Mask):
    """Global tokens: they attend to every key, and every query attends to them.

    True if the key is a global token, or the token at the query's position is one (Beltagy et al.,
    "Longformer", 2020, section 3.1). To be combined with a window. Bounds decide all blocks but those that
    have both global tokens and others, among the queries and among the keys.

    Attributes:
      tokens: how many tokens at the beginning are global; or a bool array, `(S,)` or `(B, S)`, that says of
        each key whether it is.
      offset: as in `CausalMask`. A query at a position that no key has isn't global.

    Raises:
      TypeError: tokens isn't an integer, or an array of bools; offset as in `CausalMask`.
      ValueError: tokens is negative, or an array of other axes; offset as in `CausalMask`.
    """

    tokens: int | Array
    offset: int | Array = 0
    _of_rows = ("offset",)

    def __post_init__(self):
        self._set(tokens=_tokens(self.tokens), offset=of_rows("offset", self.offset))

    def _sees(self, batch, head, query, key) -> jax.Array:
        place = position(query, self.offset, batch)
        if isinstance(self.tokens, int):
            is_global, is_key = place < self.tokens, key < self.tokens
        else:
            table = jnp.asarray(self.tokens)
            is_global, is_key = element(table, batch, place), element(table, batch, key)
            is_global &= place < self.tokens.shape[-1]
        return is_key | is_global & (place >= 0)

    def check_sizes(self, B: int | None, N: int | None, T: int, S: int) -> None:
        super().check_sizes(B, N, T, S)
        if not isinstance(self.tokens, int):
            check_axis("tokens", self.tokens, -2, "B", B)
            check_length("tokens", self.tokens, -1, "S", S)


def _tokens(value: Any) -> int | Array:
    if isinstance(value, jax.Array | np.ndarray):
        return ranked("tokens", value, {"(S,)": 1, "(B, S)": 2}, "mask")
    return min(_validate.size("tokens", value), LONGEST)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LongformerMask(Mask):
    """A sliding window, dilated or not, and global tokens.

    Beltagy et al., "Longformer: The Long-Document Transformer", 2020, section 3.1, figure 2d. Equal to
    `DilatedMask(window_size, dilation, offset) | GlobalMask(tokens, offset)`, and costs what these do. For a
    window of w in all, as in the paper, window_size is w // 2.

    Attributes:
      window_size: as in `DilatedMask`: `(left, right)` or one int for both.
      tokens: as in `GlobalMask`: how many at the beginning, or a bool array `(S,)` or `(B, S)`.
      dilation: in keys.
      offset: as in `CausalMask`.

    Raises: as these do.
    """

    window_size: int | tuple[int | None, int | None]
    tokens: int | Array
    dilation: int = 1
    offset: int | Array = 0

    def __post_init__(self):
        window = DilatedMask(self.window_size, self.dilation, self.offset)
        tokens = GlobalMask(self.tokens, window.offset)
        self._set(
            window_size=window.window_size,
            tokens=tokens.tokens,
            dilation=window.dilation,
            offset=window.offset,
        )

    @property
    def _mask(self) -> Mask:
        window = DilatedMask(self.window_size, self.dilation, self.offset)
        return window | GlobalMask(self.tokens, self.offset)

    def _sees(self, *indices: jax.Array) -> jax.Array:
        return self._mask(*indices)

    def check_sizes(self, B: int | None, N: int | None, T: int, S: int) -> None:
        self._mask.check_sizes(B, N, T, S)
