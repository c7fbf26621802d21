"""How a call is cut into blocks, and which key blocks a block of queries needs."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jax_flash._device import Device
from jax_flash._spec import AttentionSpec, Operands, sizes

QUERIES_PER_BLOCK = 256
QUERIES_AT_LEAST = 64
KEYS_PER_BLOCK = 256
LOGITS_PER_BLOCK = {"cpu": 16 * 256 * 256}
"""Logits held at once, over batch rows and heads, by platform. On CPUs what a step touches should stay
in the cache: this and the sizes above were tuned with `benchmarks/cpu.py`, on two cores."""
LOGITS_PER_BLOCK_ELSEWHERE = 256 * 256 * 256
"""An accelerator needs enough work in each step to fill it: 64 MiB of float32."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of `length` cut into `count` blocks of `size`.

    Where the size does not divide the length, the last block is moved back to end with the axis and
    so overlaps the one before: no operand is ever padded. `fresh` tells its own positions.
    """

    length: int
    size: int

    @property
    def count(self) -> int:
        return -(-self.length // self.size)

    @property
    def even(self) -> bool:
        return self.length % self.size == 0

    def start(self, index) -> jax.Array:
        """First position of block `index`, a traced integer."""
        return jnp.minimum(index * self.size, self.length - self.size)

    def positions(self, index) -> jax.Array:
        """Positions of block `index`: int32 `(size,)`."""
        return self.start(index) + jnp.arange(self.size, dtype=jnp.int32)

    def fresh(self, index) -> jax.Array | None:
        """Which positions no earlier block holds: bool `(size,)`, or None for all of them."""
        return None if self.even else self.positions(index) >= index * self.size

    def take(self, x: jax.Array, index, axis: int) -> jax.Array:
        """Block `index` of `x`; all of it where that axis is 1 and stands for every position."""
        if x.shape[axis] == 1:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self.start(index), self.size, axis)

    def put(self, x: jax.Array, block: jax.Array, index, axis: int) -> jax.Array:
        """`x` with block `index` set."""
        return jax.lax.dynamic_update_slice_in_dim(x, block.astype(x.dtype), self.start(index), axis)

    def add(self, x: jax.Array, block: jax.Array, index, axis: int) -> jax.Array:
        """`x` with `block` added to block `index`."""
        return self.put(x, self.take(x, index, axis) + block, index, axis)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The three axes that are cut: batch rows outermost, then queries, then keys."""

    batch: Axis
    queries: Axis
    keys: Axis


def plan(spec: AttentionSpec, operands: Operands, device: Device) -> Plan:
    """The blocks of a call on a device, from its shapes and spec alone."""
    size = sizes(operands)
    logits = LOGITS_PER_BLOCK.get(device.platform, LOGITS_PER_BLOCK_ELSEWHERE)
    most_queries, most_keys = QUERIES_PER_BLOCK, KEYS_PER_BLOCK
    if not _may_skip(spec, operands):
        # Fine blocks are for skipping many of them. Where there is none to skip coarser ones are a
        # tenth faster, and 512 keys are best in one piece.
        most_queries, logits = 2 * most_queries, 2 * logits
        if size.S <= 2 * most_keys:
            most_keys *= 2
    # Where one sequence is short, as when decoding, a block of the other may be as much longer.
    tile = most_queries * most_keys
    keys = _even_blocks(size.S, max(most_keys, tile // size.T))
    room = logits // (size.N * keys.size)
    queries = _even_blocks(size.T, max(min(room, tile // keys.size), QUERIES_AT_LEAST))
    rows = max(1, room // queries.size)
    rows = max(divisor for divisor in range(1, min(rows, size.B) + 1) if size.B % divisor == 0)
    return Plan(Axis(size.B, rows), queries, keys)


def _may_skip(spec: AttentionSpec, operands: Operands) -> bool:
    """Whether anything that `key_blocks` looks at may rule a block out."""
    lengths = operands.query_seq_lengths, operands.key_value_seq_lengths
    limits = spec.left, spec.right, *lengths, operands.query_segment_ids
    return any(limit is not None for limit in limits)


def _even_blocks(length: int, most: int) -> Axis:
    """As few blocks as hold `length` at no more than `most` each, all of about the same size."""
    count = -(-length // most)
    size = -(-length // count)
    return Axis(length, size if count == 1 else min(length, 16 * math.ceil(size / 16)))


def diagonal(operands: Operands) -> int | jax.Array:
    """Key position on the diagonal of query 0: `S - T`, or int32 `(B,)` where lengths are given."""
    size = sizes(operands)
    queries, keys = operands.query_seq_lengths, operands.key_value_seq_lengths
    return (size.S if keys is None else keys) - (size.T if queries is None else queries)


def key_blocks(spec: AttentionSpec, operands: Operands, cut: Plan, query_block) -> tuple:
    """First key block that `query_block` needs, and the one after its last.

    Python integers where nothing rules a block out, traced ones otherwise. Masks are not looked at.
    """
    if not _may_skip(spec, operands):
        return 0, cut.keys.count
    top = cut.queries.start(query_block)
    bottom = top + cut.queries.size - 1
    offset = jnp.asarray(diagonal(operands), jnp.int32)
    first = jnp.int32(0)
    end = jnp.int32(cut.keys.length)
    if spec.left is not None:
        first = jnp.maximum(first, top + offset.min() - spec.left)
    if spec.right is not None:
        end = jnp.minimum(end, bottom + offset.max() + spec.right + 1)
    if operands.key_value_seq_lengths is not None:
        end = jnp.minimum(end, operands.key_value_seq_lengths.max())
    if operands.query_seq_lengths is not None:
        end = jnp.where(top < operands.query_seq_lengths.max(), end, 0)
    first, end = first // cut.keys.size, -(-end // cut.keys.size)
    if operands.query_segment_ids is not None:
        first_of_segments, end_of_segments = _key_blocks_of_segments(operands, cut, query_block)
        first, end = jnp.maximum(first, first_of_segments), jnp.minimum(end, end_of_segments)
    return first, end


def _key_blocks_of_segments(operands: Operands, cut: Plan, query_block) -> tuple:
    """The key blocks whose ids, from their least to their greatest, have one in common with the queries'.

    Where ids are sorted, as those of packed documents, these are the blocks with a segment in common.
    """
    ids = cut.queries.take(operands.query_segment_ids, query_block, 1)
    in_blocks = [(0, 0), (0, cut.keys.count * cut.keys.size - cut.keys.length)]
    bounds = jnp.iinfo(ids.dtype)

    def of_blocks(outside: int) -> jax.Array:
        padded = jnp.pad(operands.key_value_segment_ids, in_blocks, constant_values=outside)
        return padded.reshape(-1, cut.keys.count, cut.keys.size)

    least, greatest = of_blocks(bounds.max).min(2), of_blocks(bounds.min).max(2)
    meet = (least <= ids.max(1, keepdims=True)) & (ids.min(1, keepdims=True) <= greatest)
    meet = meet.any(0)  # in some batch row
    index = jnp.arange(cut.keys.count, dtype=jnp.int32)
    return jnp.min(index, where=meet, initial=cut.keys.count), jnp.max(index + 1, where=meet, initial=0)
