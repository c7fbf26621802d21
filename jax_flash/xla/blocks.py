"""How a call is cut into blocks, and which key blocks a block of queries needs."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jax_flash._block_kinds import Kind
from jax_flash._device import Device
from jax_flash._mask import (
    PositionMask,
    blocks_sharing_segments,
    keys_of_queries,
    segment_id_ranges,
    window_of,
)
from jax_flash._spec import AttentionSpec, BlockMaskSpec, Operands, sizes
from jax_flash.xla import symbolic

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
        """First position of block `index`, a traced integer: int32."""
        return jnp.minimum(jnp.asarray(index, jnp.int32) * self.size, self.length - self.size)

    def positions(self, index) -> jax.Array:
        """Positions of block `index`: int32 `(size,)`."""
        return self.start(index) + jnp.arange(self.size, dtype=jnp.int32)

    def fresh(self, index) -> jax.Array | None:
        """Which positions no earlier block holds: bool `(size,)`, or None for all of them."""
        return None if self.even else self.positions(index) >= jnp.asarray(index, jnp.int32) * self.size

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
    T = size.T if isinstance(size.T, int) else most_queries
    keys = _even_blocks(size.S, max(most_keys, tile // T))
    room = logits // (size.N * keys.size)
    queries = _even_blocks(size.T, max(min(room, tile // keys.size), QUERIES_AT_LEAST))
    rows = max(1, room // queries.size)
    if isinstance(size.B, int):
        rows = max(divisor for divisor in range(1, min(rows, size.B) + 1) if size.B % divisor == 0)
    else:
        rows = 1  # which divides every batch
    return Plan(Axis(size.B, rows), queries, keys)


def _may_skip(spec: AttentionSpec, operands: Operands) -> bool:
    """Whether anything that `key_blocks` looks at may rule a block out."""
    lengths = operands.query_seq_lengths, operands.key_value_seq_lengths
    data = *lengths, operands.query_segment_ids
    window = window_of(spec, sizes(operands), is_shifted=operands.diagonal is not None)
    hides = not window.unbounded or spec.block_mask is not None
    return hides or any(x is not None for x in data)


def hides_keys(spec: AttentionSpec, operands: Operands) -> bool:
    """Whether there may be keys that some queries see and others don't."""
    return _may_skip(spec, operands) or operands.mask is not None


def _even_blocks(length: int, most: int) -> Axis:
    """As few blocks as hold `length` at no more than `most` each, all of about the same size.

    Of a symbolic length, whose blocks are of one size that divides it.
    """
    if not isinstance(length, int):
        return Axis(length, symbolic.BLOCK)
    count = -(-length // most)
    size = -(-length // count)
    return Axis(length, size if count == 1 else min(length, 16 * math.ceil(size / 16)))


def position_mask(spec: AttentionSpec, operands: Operands) -> PositionMask:
    """What causality, the window and the lengths of each batch row leave visible, with queries as rows."""
    lengths = operands.query_seq_lengths, operands.key_value_seq_lengths
    shift = None if operands.diagonal is None else operands.diagonal[:, 0]
    return keys_of_queries(spec, sizes(operands), *lengths, shift=shift)


def key_blocks(spec: AttentionSpec, operands: Operands, cut: Plan, query_block) -> tuple:
    """The key blocks `[first, last)` that `query_block` visits in any batch row.

    Python integers where nothing rules a block out, traced ones otherwise. Masks are not looked at, but
    block masks are.
    """
    if not _may_skip(spec, operands):
        return 0, cut.keys.count
    mask = position_mask(spec, operands)
    visited = mask.block_range(cut.queries.start(query_block), cut.queries.size, cut.keys.size)
    if operands.query_segment_ids is not None:
        ids = cut.queries.take(operands.query_segment_ids, query_block, 1)
        key_ranges = segment_id_ranges(operands.key_value_segment_ids, cut.keys.size)
        visited = visited.within(*blocks_sharing_segments(ids.min(1), ids.max(1), *key_ranges))
    first, last = visited.union()
    if spec.block_mask is not None:
        seen = _seen_by(spec.block_mask, operands, cut, query_block)
        first = jnp.maximum(first, jnp.argmax(seen))
        last = jnp.where(jnp.any(seen), jnp.minimum(last, len(seen) - jnp.argmax(seen[::-1])), first)
    return jnp.asarray(first, jnp.int32), jnp.asarray(last, jnp.int32)  # alike where JAX counts in int64 too


def unless_hidden(spec: AttentionSpec, operands: Operands, cut: Plan, query_block, key_block, step, state):
    """`step(state)`, or `state` where a block mask hides the block from all batch rows and heads."""
    if spec.block_mask is None:
        return step(state)
    is_seen = _seen_by(spec.block_mask, operands, cut, query_block)[key_block]
    return jax.lax.cond(is_seen, step, lambda state: state, state)


def _seen_by(block_mask: BlockMaskSpec, operands: Operands, cut: Plan, query_block) -> jax.Array:
    """Which key blocks of ours the block mask lets any query of a block see, in any batch row or head."""
    kinds = operands.block_kinds
    assert kinds is not None
    query_size, key_size = block_mask.block_size
    start = cut.queries.start(query_block)
    rows = jnp.arange(kinds.shape[-2], dtype=jnp.int32) * query_size
    is_of_block = (rows < start + cut.queries.size) & (rows + query_size > start)
    is_seen = (kinds != Kind.HIDDEN) & is_of_block[:, None]
    columns = jnp.any(is_seen, axis=range(kinds.ndim - 1))
    # A block of ours has those of the mask that begin in it, and that in which it begins.
    edges = jnp.arange(cut.keys.count, dtype=jnp.int32) * cut.keys.size
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(columns, dtype=jnp.int32)])
    first = edges // key_size
    last = jnp.minimum(edges + cut.keys.size, cut.keys.length) - 1
    return before[last // key_size + 1] > before[first]
