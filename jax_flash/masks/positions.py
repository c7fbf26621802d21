"""Masks of the positions of a query and a key alone."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_flash.masks.arguments import FARTHEST, Array, of_rows, position, positive, quotient, row_of, window
from jax_flash.masks.mask import Mask


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FullMask(Mask):
    """Every query attends to every key."""

    def _sees(self, batch, head, query, key) -> jax.Array:
        return jnp.asarray(True)


_WITHOUT_SHAPE = "; masks have no argument shape, unlike those of splash attention"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CausalMask(Mask):
    """A query attends to the key at its position and to those before: `key <= query + offset`.

    Bounds decide all blocks but those on the diagonal.

    Attributes:
      offset: an int or an int32 array, `()` or `(B,)`; see the head of `jax_flash.masks`. Queries at negative
        positions see nothing.

    Raises:
      TypeError: offset isn't an integer, or an array of integers.
      ValueError: offset is an array of more than one axis.
    """

    offset: int | Array = 0
    _of_rows = ("offset",)

    def __post_init__(self):
        self._set(offset=of_rows("offset", self.offset, advice=_WITHOUT_SHAPE))

    def _sees(self, batch, head, query, key) -> jax.Array:
        return key <= position(query, self.offset, batch)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LocalMask(Mask):
    """A window around the query's position p: `p - left <= key <= p + right`.

    Bounds decide all blocks but those on the two edges.

    Attributes:
      window_size: `(left, right)` in keys, or one int for both. A side that is None or -1 is unbounded.
      offset: as in `CausalMask`: p is `query + offset`.

    Raises:
      TypeError: window_size isn't made of integers; offset as in `CausalMask`.
      ValueError: window_size isn't one int or two, or is less than -1.
    """

    window_size: int | tuple[int | None, int | None] | None
    offset: int | Array = 0
    _of_rows = ("offset",)

    def __post_init__(self):
        self._set(
            window_size=window("window_size", self.window_size),
            offset=of_rows("offset", self.offset, advice=_WITHOUT_SHAPE),
        )

    def _sees(self, batch, head, query, key) -> jax.Array:
        return in_window(self.window_size, position(query, self.offset, batch), key)


def in_window(window_size, place: jax.Array, key: jax.Array, step: int = 1) -> jax.Array:
    """Whether a key is in the window around a place, with sides that count `step` keys each."""
    left, right = window_size
    sees = jnp.asarray(True)
    if left is not None:
        sees &= place - left * step <= key
    if right is not None:
        sees &= key <= place + right * step
    return sees


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ChunkedCausalMask(Mask):
    """Causal attention within chunks of `chunk_size` keys: 0 to chunk_size - 1, and so on.

    A query attends to the key at its position and to those before it in the same chunk (the local layers of
    Llama 4). Bounds decide all blocks but those on the diagonal and on the edges of chunks.

    Attributes:
      chunk_size: in keys.
      offset: as in `CausalMask`. A query's chunk is that of its position.

    Raises:
      TypeError: chunk_size isn't an integer; offset as in `CausalMask`.
      ValueError: chunk_size is less than 1; offset as in `CausalMask`.
    """

    chunk_size: int
    offset: int | Array = 0
    _of_rows = ("offset",)

    def __post_init__(self):
        self._set(
            chunk_size=min(positive("chunk_size", self.chunk_size), FARTHEST),
            offset=of_rows("offset", self.offset, advice=_WITHOUT_SHAPE),
        )

    def _sees(self, batch, head, query, key) -> jax.Array:
        place = position(query, self.offset, batch)
        # A negative place, whose quotient is rounded up, is ahead of all keys.
        return (key <= place) & (quotient(place, self.chunk_size) == quotient(key, self.chunk_size))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PrefixLMMask(Mask):
    """Every query attends to all keys of the prefix, and causally to the others.

    The prefix LM of Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer" (T5), 2020, section 3.2.1. `key < prefix_length or key <= query + offset`. Bounds decide all
    blocks but those on the diagonal and on the prefix's end.

    Attributes:
      prefix_length: in keys: an int, or an int32 array, `()` or `(B,)`, one of each batch row.
      offset: as in `CausalMask`.

    Raises:
      TypeError: prefix_length or offset isn't an integer, or an array of integers.
      ValueError: prefix_length is a negative int; either is an array of more than one axis.
    """

    prefix_length: int | Array
    offset: int | Array = 0
    _of_rows = ("prefix_length", "offset")

    def __post_init__(self):
        self._set(
            prefix_length=of_rows("prefix_length", self.prefix_length, least=0),
            offset=of_rows("offset", self.offset, advice=_WITHOUT_SHAPE),
        )

    def _sees(self, batch, head, query, key) -> jax.Array:
        return (key < row_of(self.prefix_length, batch)) | (key <= position(query, self.offset, batch))
