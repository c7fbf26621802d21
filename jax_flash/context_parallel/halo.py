"""Attention with a window so narrow that a device needs few keys of its neighbours, and of no other device.

A device's queries attend to its own keys, where they lie, in one call. The few at an edge also attend to the
keys of the neighbour that they reach, in a small call (+):

    keys of               device 0   device 1   device 2
    queries of device 1          +   ◥■■■■■◣   +

Results of the two are combined by lse, in these rows alone. The backward pass computes both parts of the
gradients from lse of the whole rows, and sends those of a neighbour's keys home.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jax_flash._rounding import round_to
from jax_flash._spec import Gradients, Operands, functions_of
from jax_flash.context_parallel import sharded
from jax_flash.context_parallel.load_balance import Chunk
from jax_flash.context_parallel.packed import Arrays, Packed
from jax_flash.context_parallel.partial import Partial
from jax_flash.context_parallel.sharded import Calls, Sharded, Spans
from jax_flash.transforms.lowering import Call


@dataclasses.dataclass(frozen=True)
class Edge:
    """Queries at one end of a device's shard, and the keys of the neighbour there that they see."""

    neighbour: int  # -1: the device before; 1: the next one
    rows: int  # queries, and as many keys
    own: int  # queries of a device, and keys

    @property
    def first_query(self) -> int:
        """Of those that the device has."""
        return 0 if self.neighbour < 0 else self.own - self.rows

    @property
    def first_key(self) -> int:
        """Of those that the neighbour has."""
        return self.own - self.rows if self.neighbour < 0 else 0


Edges = tuple[Edge, ...]


def edges_of(of: Sharded) -> Edges | None:
    """The edges of a call that a halo can run, or None.

    It takes consecutive tokens, as many keys as queries, no lengths and no functions, and a window whose
    sides reach the next shards at most.
    """
    window, own = of.window, of.keys // of.order.shards
    if of.order.kind is not None or of.queries != of.keys or functions_of(of.spec) is not None:
        return None
    # With lengths, how queries and keys are aligned is data.
    if of.has_lengths or window.left is None or window.right is None:
        return None
    before, after = max(window.left, 0), max(window.right, 0)
    reaches_all = before + own + after >= of.keys  # an all-gather sends no more
    if max(before, after) > own or reaches_all:
        return None
    return tuple(Edge(side, rows, own) for side, rows in ((-1, before), (1, after)) if rows)


def forward(calls: Calls, edges: Edges, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """`out (*B, T, N, V)` and `lse (*B, N, T)` of this device's queries."""
    of, attended = calls.sharded, functools.partial(calls.passes.forward, calls.call)
    arrived = [_arrived(of, edge, operands) for edge in edges]
    out, lse = jax.lax.optimization_barrier(attended(own_operands(of, operands)))
    for edge, keys in zip(edges, arrived, strict=True):
        part, spans = _edge_operands(of, edge, operands, keys), _spans(of, edge)
        rows = sharded.take("out", out, spans), sharded.take("lse", lse, spans)
        combined_out, combined_lse = _combined(*rows, *attended(part), operands.sinks)
        out, lse = _put("out", out, combined_out, spans), _put("lse", lse, combined_lse, spans)
    return out, lse


def backward(
    calls: Calls,
    edges: Edges,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
) -> Gradients:
    """Gradients of this device's operands. Those of operands that devices share are its own queries' part."""
    of, present = calls.sharded, operands.present()
    arrived = [_arrived(of, edge, operands) for edge in edges]
    results = {"out": out, "lse": lse, "d_out": d_out, "d_lse": d_lse}

    def part(call: Call, operands: Operands, spans: Spans) -> Arrays:
        rows = (
            None if x is None else sharded.take(name.removeprefix("d_"), x, spans)
            for name, x in results.items()
        )
        return calls.passes.backward(call, operands, *rows).present()

    own = _own_spans(of)
    own_part = jax.lax.optimization_barrier(part(calls.call, own_operands(of, operands), own))
    gradients = {
        name: sharded.put(name, jnp.zeros_like(present[name]), x, own) for name, x in own_part.items()
    }
    for edge, keys in zip(edges, arrived, strict=True):
        of_edge = part(calls.wide_call, _edge_operands(of, edge, operands, keys), _spans(of, edge))
        home = Packed.of({name: x for name, x in of_edge.items() if sharded.goes_with_keys(name)})
        for name, x in of_edge.items():
            if not sharded.goes_with_keys(name):
                gradients[name] = _added(name, gradients[name], x, _spans(of, edge))
        for name, x in of.passed_on(home, edge.neighbour, wraps=False).unpacked().items():
            gradients[name] = _added(name, gradients[name], x, {"S": (edge.first_key, edge.rows)})
    return Gradients.of(gradients)


def own_operands(of: Sharded, operands: Operands) -> Operands:
    """The operands of the call for this device's queries, on its own keys."""
    parts = {
        name: x if sharded.goes_with_keys(name) else sharded.take(name, x, _own_spans(of))
        for name, x in operands.present().items()
    }
    own = of.order.chunk(of.device(), 0, _own(of))
    return of.placed(Operands.of(parts), own, own)[0]


def _edge_operands(of: Sharded, edge: Edge, operands: Operands, keys: Packed) -> Operands:
    """The operands of the call for an edge. Sinks are counted with a device's own keys."""
    parts = keys.unpacked()
    for name, x in operands.present().items():
        if name not in parts and name != "sinks":
            parts[name] = sharded.take(name, x, _spans(of, edge))
    first = of.device() * edge.own
    queries = Chunk(first + edge.first_query, 1, edge.rows)
    place = first + edge.neighbour * edge.own + edge.first_key
    # Where there is no neighbour, its keys are where no query sees them.
    is_there = (place >= 0) & (place < of.keys)
    keys_chunk = Chunk(jnp.where(is_there, place, place + edge.neighbour * of.keys), 1, edge.rows)
    return of.placed(Operands.of(parts), queries, keys_chunk)[0]


def _own(of: Sharded) -> int:
    return of.keys // of.order.shards


def _own_spans(of: Sharded) -> Spans:
    """The device's part of operands that have an axis of its queries or of all keys."""
    return {"T": (0, _own(of)), "S": (of.device() * _own(of), _own(of))}


def _spans(of: Sharded, edge: Edge) -> Spans:
    """The edge's part of such operands."""
    place = (of.device() + edge.neighbour) * edge.own + edge.first_key
    # Without a neighbour, any keys do: no query sees them.
    return {"T": (edge.first_query, edge.rows), "S": (jnp.maximum(place, 0), edge.rows)}


def _arrived(of: Sharded, edge: Edge, operands: Operands) -> Packed:
    """The neighbour's keys, and what goes with them."""
    spans: Spans = {"S": (edge.first_key, edge.rows)}
    rows = {name: sharded.take(name, x, spans) for name, x in sharded.key_side(operands).items()}
    return of.passed_on(Packed.of(rows), -edge.neighbour, wraps=False)


def _combined(
    out: jax.Array, lse: jax.Array, other_out: jax.Array, other_lse: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """An edge's results with its own keys, and with the neighbour's (without sinks), as one."""
    wide, other = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (out, other_out))
    results = Partial.of(wide, lse).combined(other, other_lse).results(None)
    if sinks is not None:
        # A row counts its sinks once it sees a key. If it sees none of its own, its sinks are added here.
        alone = Partial.of(other, other_lse).results(sinks)
        sees_none = lse == -jnp.inf
        of_out = jnp.swapaxes(sees_none, -1, -2)[..., None]
        results = jnp.where(of_out, alone[0], results[0]), jnp.where(sees_none, alone[1], results[1])
    return round_to(results[0], out.dtype), results[1]


def _added(name: str, x: jax.Array, part: jax.Array, spans: Spans) -> jax.Array:
    """`x` with `part` added where `take` would take it from, in float32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    there = sharded.take(name, x, spans).astype(wide) + part.astype(wide)
    return _put(name, x, there.astype(x.dtype), spans)


def _put(name: str, x: jax.Array, part: jax.Array, spans: Spans) -> jax.Array:
    """`sharded.put` into a kernel's result, in place.

    Without this barrier XLA computes `part` and copies `x` in one pass over all of `x`. The kernel's results
    have a barrier too: without it, XLA fuses the update with the kernel, and fails to compile
    (docs/limits.md, "XLA").
    """
    return sharded.put(name, x, jax.lax.optimization_barrier(part), spans)
