"""What each device runs of a call on arrays, whether sequences are whole or sharded.

Whole sequences are one ordinary call on the device's arrays (`lowering.py`). Of sharded ones a device has
consecutive tokens, and a call on these is told where they lie in the whole sequence by the operand `diagonal`
(`context_parallel/sharded.py`):

- Keys are sharded as queries are: they go round in a ring (`context_parallel/ring.py`).
- Queries alone are sharded: one ordinary call of the device's queries on all keys. Each device then has a
  part of the gradients of keys and values, which `Layout.run` adds up.
"""

import math

import jax
import jax.numpy as jnp

from jax_flash import _dispatch
from jax_flash._spec import Gradients, Operands, batch_axis_may_be_one, functions_of
from jax_flash.context_parallel import ring
from jax_flash.context_parallel.load_balance import Chunk, Order
from jax_flash.context_parallel.sharded import Sharded
from jax_flash.transforms import lowering
from jax_flash.transforms.layout import Shards
from jax_flash.transforms.lowering import Call, axes_of

PASSES = ring.Passes(lowering.forward, lowering.backward)
"""Of a ring's step, whose arrays are local."""


def may_take_shards(call: Call, operands: Operands) -> bool:
    """Whether there may be shards that `takes_shards`; if not, the call has whole sequences."""
    # Offsets of packed sequences and functions of users speak of places in the whole sequence. A diagonal
    # says that the call is itself part of one on sharded sequences.
    return operands.query_offsets is None and functions_of(call.spec) is None and operands.diagonal is None


def takes_shards(call: Call, shapes: Operands[jax.ShapeDtypeStruct], shards: Shards) -> bool:
    """Whether the implementation runs the calls that shards of these operands become."""
    shapes = _step_shapes(call, shapes, shards)
    return all(_dispatch.reason(name, call.spec, shapes, call.device) is None for name in call.implementation)


def forward(call: Call, operands: Operands, shards: Shards | None) -> tuple[jax.Array, jax.Array]:
    """`out (*B, T, N, V)` and `lse (*B, N, T)` of the device's queries."""
    if shards is None:
        return lowering.forward(call, operands)
    of = _sharded(call, operands, shards)
    if not shards.keys:
        return lowering.forward(call, _on_all_keys(of, operands))
    batch = lowering.batch_shape(operands)
    query = jnp.broadcast_to(operands.query, (*batch, *operands.query.shape[-3:]))
    return ring.forward(ring.Ring(of, call, PASSES), operands.replace(query=query))


def backward(
    call: Call,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    shards: Shards | None,
) -> Gradients:
    """Gradients of the device's operands. Of an operand that devices share, each has its queries' part."""
    if shards is None:
        return lowering.backward(call, operands, out, lse, d_out, d_lse)
    of = _sharded(call, operands, shards)
    if not shards.keys:
        return lowering.backward(call, _on_all_keys(of, operands), out, lse, d_out, d_lse)
    return ring.backward(ring.Ring(of, call, PASSES), operands, out, lse, d_out, d_lse)


def _sharded(call: Call, operands: Operands, shards: Shards) -> Sharded:
    """From the operands of one device."""
    n = shards.count
    lengths = operands.query_seq_lengths, operands.key_value_seq_lengths
    return Sharded(
        call.spec,
        shards.axes,
        Order(None, n),
        queries=operands.query.shape[-3] * n,
        keys=operands.key.shape[-3] * (n if shards.keys else 1),
        has_alibi=operands.alibi_slopes is not None,
        has_lengths=any(x is not None for x in lengths),
        shard_of=shards.shard_of,
    )


def _on_all_keys(of: Sharded, operands: Operands) -> Operands:
    queries = of.order.chunk(of.device(), 0, of.queries_per_chunk)
    return of.placed(operands, queries, Chunk(0, 1, of.keys))[0]


def _step_shapes(
    call: Call, whole: Operands[jax.ShapeDtypeStruct], shards: Shards
) -> Operands[jax.ShapeDtypeStruct]:
    """What implementations are asked about: the operands of a device's call, of all batch rows and heads."""
    batch = math.prod(lowering.batch_shape(whole))
    parts = {"T": shards.count, "S": shards.count if shards.keys else 1}

    def of_step(name: str, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        letters = axes_of(name)
        leading, own = x.shape[: x.ndim - len(letters)], x.shape[x.ndim - len(letters) :]
        rows = 1 if batch_axis_may_be_one(name) and math.prod(leading) == 1 else batch
        own = (n if n == 1 else n // parts.get(letter, 1) for letter, n in zip(letters, own, strict=True))
        return jax.ShapeDtypeStruct((rows, *own), x.dtype)

    shapes = Operands.of({name: of_step(name, x) for name, x in whole.present().items()})
    of = _sharded(call, shapes, shards)
    if of.is_positional:
        rows = batch if of.has_lengths else 1
        shapes = shapes.replace(diagonal=jax.ShapeDtypeStruct((rows,), jnp.int32))
    return shapes.replace(sinks=None) if shards.keys else shapes
