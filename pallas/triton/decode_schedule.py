"""Which split of which tile a program of the decoding kernels computes, from the lengths of all sequences.

Lengths are data, and a kernel before this one would cost more than its answer. So each program works the
schedule out for itself. Splits have about equally many blocks in all sequences, as many as give the number of
programs that occupies the GPU: a long sequence has many splits and a short one has one.

The programs of one key head are numbered by sequence, then tile, then split. The static number of programs is
an upper bound, and those beyond the last split have nothing to do.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton

from jax_flash._cache_spec import CacheSizes, CacheSpec

from . import decode_tiles
from .decode_tiles import Cut
from .tiles import padded


@dataclasses.dataclass(frozen=True)
class Share:
    """What one program computes; nothing unless `is_there`."""

    is_there: jax.Array | bool
    sequence: jax.Array
    tile: jax.Array  # of the sequence
    split: jax.Array  # of the tile
    splits: jax.Array | int  # that the tile has


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Refs: lengths (B,), and query_offsets (B + 1,) of packed queries."""

    spec: CacheSpec
    sizes: CacheSizes
    cut: Cut
    lengths: Any
    query_offsets: Any

    @property
    def is_static(self) -> bool:
        """Whether tiles have one split, and all sequences equally many tiles."""
        return self.query_offsets is None and self.cut.splits == 1

    def keys(self, sequence: jax.Array) -> jax.Array:
        """How many keys a sequence has after the append."""
        return self._after_append(triton.load(self.lengths.at[sequence]))

    def queries(self, sequence: jax.Array) -> tuple[jax.Array, jax.Array | int]:
        """The first token of a sequence, and how many it has."""
        if self.query_offsets is None:
            return sequence * self.sizes.T, self.sizes.T
        start = triton.load(self.query_offsets.at[sequence])
        return start, triton.load(self.query_offsets.at[sequence + 1]) - start

    def sequence_of(self, token: jax.Array) -> tuple[jax.Array, jax.Array | bool]:
        """The sequence of a token, and whether the token is of any."""
        if self.query_offsets is None:
            return divided(token, self.sizes.T), True
        ends, is_sequence = self._vector(self.query_offsets, first=1)
        sequence = _sum(is_sequence & (ends <= token))
        last = jnp.minimum(sequence, self.sizes.B - 1)
        return last, (sequence < self.sizes.B) & (token >= triton.load(self.query_offsets.at[last]))

    def share(self, program: jax.Array) -> Share:
        if self.is_static:
            tiles = self.cut.tiles // self.sizes.B
            return Share(True, divided(program, tiles), remainder(program, tiles), jnp.int32(0), 1)
        tiles, splits = self._of_sequences()
        ends = lax.cumsum(tiles * splits)
        sequence = _sum(ends <= program)
        before = ends - tiles * splits
        own_splits, first = (_pick(x, sequence) for x in (splits, before))
        within, own_splits = program - first, jnp.maximum(own_splits, 1)
        is_there = sequence < self.sizes.B
        tile = lax.div(within, own_splits)
        return Share(
            is_there, jnp.minimum(sequence, self.sizes.B - 1), tile, within - tile * own_splits, own_splits
        )

    def programs_of(self, sequence: jax.Array, tile: jax.Array) -> tuple[jax.Array, jax.Array | int]:
        """The first program of a tile, and how many splits it has: programs that follow each other."""
        if self.is_static:
            return sequence * (self.cut.tiles // self.sizes.B) + tile, 1
        tiles, splits = self._of_sequences()
        own_splits = _pick(splits, sequence)
        first = _sum_where(_indices(tiles) < sequence, tiles * splits)
        return first + tile * own_splits, own_splits

    def _of_sequences(self) -> tuple[jax.Array, jax.Array]:
        """How many tiles each sequence has, and how many splits a tile of it has; int32 vectors that are
        padded with sequences of no tile."""
        n, cut = self.sizes, self.cut
        lengths, is_sequence = self._vector(self.lengths)
        if self.query_offsets is None:
            tiles = jnp.where(is_sequence, cut.tiles // n.B, 0)
        else:
            starts, ends = (self._vector(self.query_offsets, first)[0] for first in (0, 1))
            tiles = ceil_divided((ends - starts) * n.group, cut.rows)
        span = decode_tiles.visible_span(self.spec, n, cut.rows)
        blocks = ceil_divided(jnp.minimum(self._after_append(lengths), span), cut.keys)
        if span < n.S:
            blocks = blocks + 1  # what a window shows begins amid a block
        total = _sum_where(is_sequence, tiles * blocks)
        of_split = jnp.maximum(ceil_divided(total, cut.splits_wanted), decode_tiles.BLOCKS_OF_SPLIT)
        splits = lax.div(blocks + (of_split - 1), jnp.broadcast_to(of_split, blocks.shape))
        return tiles, jnp.clip(splits, 1, cut.splits)

    def _after_append(self, lengths: jax.Array) -> jax.Array:
        return jnp.minimum(lengths + self.sizes.U, self.sizes.S)

    def _vector(self, ref: Any, first: int = 0) -> tuple[jax.Array, jax.Array]:
        """An element for each sequence, 0 for others, of `ref` from `first` on; and which are sequences."""
        index = lax.iota(jnp.int32, padded(self.sizes.B))
        is_sequence = index < self.sizes.B
        return triton.load(ref.at[index + first], mask=is_sequence, other=0), is_sequence


def divided(x: jax.Array, divisor: int) -> jax.Array:
    """`x // divisor` of integers that aren't negative, without the code for others."""
    return lax.div(x, lax.full_like(x, divisor))


def remainder(x: jax.Array, divisor: int) -> jax.Array:
    return x - divided(x, divisor) * divisor


def ceil_divided(x: jax.Array, divisor: int) -> jax.Array:
    return divided(x + (divisor - 1), divisor)


def _indices(x: jax.Array) -> jax.Array:
    return lax.iota(jnp.int32, x.shape[0])


def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x.astype(jnp.int32), dtype=jnp.int32)  # else int64 where 64-bit types are on


def _sum_where(where: jax.Array, x: jax.Array) -> jax.Array:
    return _sum(jnp.where(where, x, 0))


def _pick(x: jax.Array, index: jax.Array) -> jax.Array:
    """`x[index]`, 0 beyond the last: Triton has no indexing of what is in registers."""
    return _sum_where(_indices(x) == index, x)
