"""What each device runs of a call on arrays, whether sequences are whole or sharded.

Whole sequences are one ordinary call on the device's arrays (`lowering.py`). Of sharded ones a device has
consecutive tokens, and `Shards.strategy` says how devices see each other's keys:

- "ring": keys go round, and a device runs one ordinary call in each step (`context_parallel/ring.py`).
- "all_gather": one ordinary call of the device's queries on all keys (`context_parallel/gather.py`); for a
  narrow window, one on its own keys, and small ones on neighbours' keys (`context_parallel/halo.py`). If each
  device has all keys already, nothing is gathered. A device then has a part of the gradients of keys and
  values, which `Layout.run` adds up.
- "ulysses": one ordinary call of the device's heads on whole sequences (`context_parallel/ulysses.py`).

A call on parts of sequences is told where they lie by the operand `diagonal` (`context_parallel/sharded.py`).
`sequence_layout.py` chooses the strategy.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jax_flash._axes import batch_shape
from jax_flash._spec import Gradients, Operands
from jax_flash.context_parallel import gather, ring, ulysses
from jax_flash.context_parallel.load_balance import Chunk, Order
from jax_flash.context_parallel.sharded import LENGTHS, Calls, Passes, Sharded
from jax_flash.transforms import lowering
from jax_flash.transforms.layout import Shards
from jax_flash.transforms.lowering import PlannedCall

PASSES = Passes(lowering.forward, lowering.backward)
"""What runs the calls of a ring or an all-gather, on a device's own arrays."""


def forward(call: PlannedCall, operands: Operands, shards: Shards | None) -> tuple[jax.Array, jax.Array]:
    """`out (*B, T, N, V)` and `lse (*B, N, T)` of the device's queries."""
    if shards is None:
        return lowering.forward(call, operands)
    of = sharded(call, operands, shards)
    call = _ordinary_call(of, call, shards)
    if shards.strategy == "ring":
        batch = batch_shape(operands)
        query = jnp.broadcast_to(operands.query, (*batch, *operands.query.shape[-3:]))
        return ring.forward(ring.Ring(of, call, PASSES), operands.replace(query=query))
    if shards.strategy == "all_gather" and shards.keys:
        return gather.forward(Calls(of, call, PASSES), operands)
    out, lse = lowering.forward(call, _ordinary_operands(of, operands, shards))
    if shards.strategy == "ulysses":
        out, lse = ulysses.by_tokens(of, "out", out), ulysses.by_tokens(of, "lse", lse)
    return out, lse


def backward(
    call: PlannedCall,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    shards: Shards | None,
) -> Gradients:
    """Gradients of the device's operands.

    Of an operand that devices share, each has the part of its queries, or of its heads. Where these are parts
    of the gradients of keys, they are float32.
    """
    if shards is None:
        return lowering.backward(call, operands, out, lse, d_out, d_lse)
    of = sharded(call, operands, shards)
    call = _ordinary_call(of, call, shards)
    if shards.strategy == "ring":
        return ring.backward(ring.Ring(of, call, PASSES), operands, out, lse, d_out, d_lse)
    if shards.strategy == "all_gather":
        calls = Calls(of, call, PASSES)
        if shards.keys:
            return gather.backward(calls, operands, out, lse, d_out, d_lse)
        with_place = _ordinary_operands(of, operands, shards)
        return lowering.backward(calls.wide_call("shared"), with_place, out, lse, d_out, d_lse)

    def by_heads(differentiable: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], Operands]:
        moved = ulysses.by_heads(of, operands.replace(**differentiable))
        return moved.differentiable(), moved

    _, pullback, moved = jax.vjp(by_heads, operands.differentiable(), has_aux=True)
    out, d_out = (ulysses.of_heads(of, "out", x) for x in (out, d_out))
    lse = ulysses.of_heads(of, "lse", lse)
    d_lse = None if d_lse is None else ulysses.of_heads(of, "lse", d_lse)
    gradients = lowering.backward(call, moved, out, lse, d_out, d_lse)
    return Gradients.of(pullback(gradients.present())[0])


def sharded(call: PlannedCall, operands: Operands, shards: Shards) -> Sharded:
    """From the operands of one device."""
    n = shards.count
    return Sharded(
        call.spec,
        shards.axes,
        Order(None, n),
        queries=operands.query.shape[-3] * n,
        keys=operands.key.shape[-3] * (n if shards.keys else 1),
        has_alibi=operands.alibi_slopes is not None,
        lengths=tuple(name for name in LENGTHS if getattr(operands, name) is not None),
        shard_of=shards.shard_of,
    )


def _ordinary_call(of: Sharded, call: PlannedCall, shards: Shards) -> PlannedCall:
    """The ordinary call that a device runs, in each step of a ring."""
    return call if shards.strategy == "ulysses" else dataclasses.replace(call, spec=of.local_spec)


def _ordinary_operands(of: Sharded, operands: Operands, shards: Shards) -> Operands:
    """The operands of a device's one ordinary call: by Ulysses, or on keys that each device has."""
    if shards.strategy == "ulysses":
        return ulysses.by_heads(of, operands)
    queries = of.order.chunk(of.own_shard(), 0, of.queries_per_chunk)
    return of.placed(operands, queries, Chunk(0, 1, of.keys))[0]
