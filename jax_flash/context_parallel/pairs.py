"""The pairs of queries and keys that a step of a ring has, and which of them it visits.

A device has its queries in one chunk or two, and gets the keys of another device in as many
(`load_balance.py`). Each chunk of queries with one of keys is a pair, and an ordinary call. Zigzag under a
causal mask needs no more than one call, of the whole shards or of halves of them.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jax_flash._block_kinds import Kind
from jax_flash._mask import Index, PositionMask, Window, both
from jax_flash._spec import Operands, functions_of
from jax_flash.context_parallel import sharded
from jax_flash.context_parallel.load_balance import ZIGZAG, Chunk
from jax_flash.context_parallel.packed import Packed
from jax_flash.context_parallel.sharded import Sharded, Spans

State, Result = TypeVar("State"), TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A chunk of this device's queries and one of the keys that it has in a step."""

    operands: Operands  # of an ordinary call; without sinks, which are left to the last step
    mask: PositionMask
    own: Spans  # the pair's part of this device's operands
    of_keys: Spans  # and of those that go with the keys


def _pair(
    of: Sharded, operands: Operands, keys: Packed, source: jax.Array, q: Index = 0, k: Index = 0
) -> Pair:
    """Chunk `q` of this device's queries, and chunk `k` of the keys of shard `source`."""
    t, s = of.queries_per_chunk, of.keys_per_chunk
    chunks = of.order.chunk(of.own_shard(), q, t), of.order.chunk(source, k, s)
    return _placed(of, operands, keys, source, (q * t, k * s), chunks)


def _placed(
    of: Sharded,
    operands: Operands,
    keys: Packed,
    source: jax.Array,
    starts: tuple[Index, Index],
    chunks: tuple[Chunk, Chunk],
) -> Pair:
    """Queries and keys from these places on in what devices have, which are these chunks of the sequences."""
    (q, k), (t, s) = starts, (chunk.length for chunk in chunks)
    own: Spans = {"T": (q, t), "S": (source * (of.keys // of.order.shards) + k, s)}
    of_keys: Spans = {"S": (k, s)}
    parts = keys.take(of_keys)
    for name, x in operands.present().items():
        if name not in parts and name != "sinks":
            parts[name] = sharded.take(name, x, own)
    placed, mask = of.placed(Operands.of(parts), *chunks)
    return Pair(placed, mask, own, of_keys)


def over_pairs(
    of: Sharded,
    operands: Operands,
    keys: Packed,
    step: Index,
    visit: Callable[[Pair, State], Result],
    state: State,
    skip: Callable[[State], Result] = lambda state: state,
) -> Result:
    """`state` after `visit(pair, state)` for the pairs of a step of which a query may see a key.

    A state of None is that before the first pair, which is visited.

    Args:
      skip: what takes the place of `visit` if no query may see a key. Both make something other than a state
        only where a step has one pair.
    """
    if _is_folded(of, operands):
        return _over_folded(of, operands, keys, step, visit, state)
    source = (of.own_shard() - step) % of.order.shards

    def one(index: Index, state: State) -> State:
        pair = _pair(of, operands, keys, source, index // of.chunks, index % of.chunks)
        may_see = None if state is None else _may_see(of, pair)
        if may_see is None:
            return visit(pair, state)
        return jax.lax.cond(jnp.any(may_see), lambda state: visit(pair, state), skip, state)

    return one(0, state) if of.chunks == 1 else jax.lax.fori_loop(0, of.chunks**2, one, state)


def _is_folded(of: Sharded, operands: Operands) -> bool:
    """Whether the pairs of a zigzag step are one: under a causal mask, with nothing else that has positions.

    Segment ids can hide some of the pairs, so these stay apart.
    """
    is_causal = of.window == Window(None, 0) and of.queries == of.keys and not of.has_lengths
    is_plain = not of.has_alibi and functions_of(of.spec) is None and operands.query_segment_ids is None
    return of.order.kind == ZIGZAG and is_causal and is_plain


def has_one_pair(of: Sharded, operands: Operands) -> bool:
    """Whether the first step has one pair, of all that the device has."""
    return of.chunks == 1 or _is_folded(of, operands)


def _over_folded(
    of: Sharded,
    operands: Operands,
    keys: Packed,
    step: Index,
    visit: Callable[[Pair, State], Result],
    state: State,
) -> Result:
    """A step of zigzag as one pair, of whole shards or halves of them. All devices have the same work.

    keys of          this shard           a lower one    a higher one
    early queries          ◣ ·                ■ ·             · ·
    late queries           ■ ◣                ■ ·             ■ ■
    """
    t, s = of.queries // of.order.shards, of.keys // of.order.shards
    shard = of.own_shard()
    source = (shard - step) % of.order.shards

    def pair(rows: slice, columns: slice, first: int) -> Pair:
        chunks = Chunk(first, 1, rows.stop - rows.start), Chunk(0, 1, columns.stop - columns.start)
        return _placed(of, operands, keys, source, (rows.start, columns.start), chunks)

    if isinstance(step, int) and step == 0:
        return visit(pair(slice(0, t), slice(0, s), 0), state)
    # Queries behind all keys of the sequence see each of them.
    return jax.lax.cond(
        source < shard,
        lambda state: visit(pair(slice(0, t), slice(0, s // 2), of.keys), state),
        lambda state: visit(pair(slice(t // 2, t), slice(0, s), of.keys), state),
        state,
    )


def _may_see(of: Sharded, pair: Pair) -> jax.Array | None:
    """Whether any query of the pair may see a key, for each batch row or all; None if all may.

    Segments are compared by their least and greatest ids, and blocks of a block mask are looked at. A mask is
    not.
    """
    may_see = None
    if of.may_be_skipped():
        visited = pair.mask.block_range(0, pair.mask.rows, of.keys_per_chunk)
        may_see = visited.first < visited.last
    queries, keys = pair.operands.query_segment_ids, pair.operands.key_value_segment_ids
    if queries is not None and keys is not None:
        share = (queries.min(-1) <= keys.max(-1)) & (keys.min(-1) <= queries.max(-1))
        may_see = both(may_see, share)
    if pair.operands.block_kinds is not None:
        may_see = both(may_see, jnp.any(pair.operands.block_kinds != Kind.HIDDEN))
    return may_see


def first_pair(of: Sharded, operands: Operands) -> Operands:
    """The operands of the first call of a ring, as implementations are asked about them."""
    keys = Packed.of(sharded.key_side(operands))
    if has_one_pair(of, operands):
        return over_pairs(of, operands, keys, 0, lambda pair, _: pair.operands, None)
    return _pair(of, operands, keys, of.own_shard()).operands
