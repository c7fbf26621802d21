"""Attention with a window so narrow that a device needs few keys of its neighbours, and of no other device.

A device's queries attend to its own keys, where they lie, in one call. The few at an edge also attend to the
keys of the neighbour that they reach, in a small call (+):

    keys of               device 0   device 1   device 2
    queries of device 1          +   ◥■■■■■◣   +

Results of the two are combined by lse, in these rows alone. The backward pass computes both parts of the
gradients from lse of the whole rows, and sends those of a neighbour's keys home.

Lengths may move the diagonal, and then a window reaches elsewhere. They are data, so a program with lengths
has calls on all keys too (`gather.py`), and takes them where that happens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jax_flash._rounding import round_to
from jax_flash._spec import Gradients, Operands
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
    queries: int  # of a device
    keys: int

    @property
    def first_query(self) -> int:
        """Of those that the device has."""
        return 0 if self.neighbour < 0 else self.queries - self.rows

    @property
    def first_key(self) -> int:
        """Of those that the neighbour has."""
        return self.keys - self.rows if self.neighbour < 0 else 0


Edges = tuple[Edge, ...]


def edges_of(of: Sharded) -> Edges | None:
    """The edges of a call that a halo can run, or None.

    It takes consecutive tokens, no block mask, and a window whose sides reach the next shards at most. With
    lengths of queries and of keys, these must also leave the diagonal where it is (`_if_aligned`).
    """
    window, n = of.window, of.order.shards
    if of.order.kind is not None or of.spec.block_mask is not None or len(of.lengths) == 1:
        return None
    if window.left is None or window.right is None:
        return None
    queries, keys = of.queries // n, of.keys // n
    # From a device to the one before it, the diagonal moves so far among the keys of the device.
    step = keys - queries
    least, most = sorted((step, (n - 1) * step))
    before, after = max(window.left - least, 0), max(window.right + most, 0)
    fewest = min(queries, keys)
    reaches_all = before + after >= (n - 1) * fewest  # an all-gather sends no more
    if max(before, after) > fewest or reaches_all:
        return None
    return tuple(Edge(side, rows, queries, keys) for side, rows in ((-1, before), (1, after)) if rows)


def forward(
    calls: Calls, edges: Edges, operands: Operands, by_all: Callable[[], tuple[jax.Array, jax.Array]]
) -> tuple[jax.Array, jax.Array]:
    """`out (*B, T, N, V)` and `lse (*B, N, T)` of this device's queries.

    Args:
      by_all: gives them by calls on all keys.
    """
    of, attended = calls.sharded, functools.partial(calls.passes.forward, calls.call)
    arrived = [_arrived(of, edge, operands) for edge in edges]

    def by_halo() -> tuple[jax.Array, jax.Array]:
        out, lse = jax.lax.optimization_barrier(attended(own_operands(of, operands)))
        for edge, keys in zip(edges, arrived, strict=True):
            part, spans = _edge_operands(of, edge, operands, keys), _spans(of, edge)
            rows = sharded.take("out", out, spans), sharded.take("lse", lse, spans)
            combined_out, combined_lse = _combined(*rows, *attended(part), operands.sinks)
            out, lse = _put("out", out, combined_out, spans), _put("lse", lse, combined_lse, spans)
        return out, lse

    return _if_aligned(of, operands, by_halo, by_all)


def backward(
    calls: Calls,
    edges: Edges,
    operands: Operands,
    results: dict[str, jax.Array | None],
    by_all: Callable[[], Gradients],
) -> Gradients:
    """Gradients of this device's operands. Those of operands that devices share are its own queries' part.

    Args:
      results: out, lse and their cotangents.
      by_all: gives the gradients by calls on all keys.
    """
    of, present = calls.sharded, operands.present()
    arrived = [_arrived(of, edge, operands) for edge in edges]

    def part(call: Call, operands: Operands, spans: Spans) -> Arrays:
        rows = (
            None if x is None else sharded.take(name.removeprefix("d_"), x, spans)
            for name, x in results.items()
        )
        return calls.passes.backward(call, operands, *rows).present()

    def by_halo() -> tuple[Arrays, list[Packed]]:
        """And the gradients of neighbours' keys."""
        own = _own_spans(of)
        own_part = jax.lax.optimization_barrier(part(calls.call, own_operands(of, operands), own))
        gradients = {
            name: sharded.put(name, jnp.zeros_like(present[name]), x, own) for name, x in own_part.items()
        }
        of_neighbours: list[Packed] = []
        for edge, keys in zip(edges, arrived, strict=True):
            spans = _spans(of, edge)
            of_edge = part(calls.wide_call, _edge_operands(of, edge, operands, keys), spans)
            for name, x in of_edge.items():
                if not sharded.goes_with_keys(name):
                    gradients[name] = _added(name, gradients[name], x, spans)
            of_neighbours.append(
                Packed.of({name: x for name, x in of_edge.items() if sharded.goes_with_keys(name)})
            )
        return gradients, of_neighbours

    def without_neighbours() -> tuple[Arrays, list[Packed]]:
        dtype = calls.wide_call.spec.result_dtype(operands.key.dtype)
        rows = [{name: keys.unpacked()[name].astype(dtype) for name in ("key", "value")} for keys in arrived]
        return by_all().present(), [Packed.of(sharded.zeros_like(x)) for x in rows]

    gradients, of_neighbours = _if_aligned(of, operands, by_halo, without_neighbours)
    for edge, home in zip(edges, of_neighbours, strict=True):
        for name, x in of.passed_on(home, edge.neighbour, wraps=False).unpacked().items():
            gradients[name] = _added(name, gradients[name], x, {"S": (edge.first_key, edge.rows)})
    return Gradients.of(gradients)


Result = TypeVar("Result")


def _if_aligned(
    of: Sharded, operands: Operands, by_halo: Callable[[], Result], by_all: Callable[[], Result]
) -> Result:
    """`by_halo()` if each query is aligned with the key that it would be aligned with without lengths.

    Lengths are data, and all devices of the sequence have the same ones. Other devices of the mesh may take
    the other branch. So `ppermute`, which waits for the whole mesh, stays out of both.
    """
    if not of.lengths:
        return by_halo()
    queries, keys = operands.query_seq_lengths, operands.key_value_seq_lengths
    assert queries is not None and keys is not None
    return jax.lax.cond(jnp.all(keys - queries == of.keys - of.queries), by_halo, by_all)


def own_operands(of: Sharded, operands: Operands) -> Operands:
    """The operands of the call for this device's queries, on its own keys."""
    parts = {
        name: x if sharded.goes_with_keys(name) else sharded.take(name, x, _own_spans(of))
        for name, x in operands.present().items()
    }
    queries, keys = (
        of.order.chunk(of.own_shard(), 0, length) for length in (of.queries_per_chunk, of.keys_per_chunk)
    )
    return of.placed(Operands.of(parts), queries, keys)[0]


def _edge_operands(of: Sharded, edge: Edge, operands: Operands, keys: Packed) -> Operands:
    """The operands of the call for an edge. Sinks are counted with a device's own keys."""
    parts, spans = keys.unpacked(), _spans(of, edge)
    for name, x in operands.present().items():
        if name not in parts and name != "sinks":
            parts[name] = sharded.take(name, x, spans)
    queries = Chunk(of.own_shard() * edge.queries + edge.first_query, 1, edge.rows)
    return of.placed(Operands.of(parts), queries, Chunk(spans["S"][0], 1, edge.rows))[0]


def _own_spans(of: Sharded) -> Spans:
    """The device's part of operands that have an axis of its queries or of all keys."""
    return {"T": (0, of.queries_per_chunk), "S": (of.own_shard() * of.keys_per_chunk, of.keys_per_chunk)}


def _spans(of: Sharded, edge: Edge) -> Spans:
    """The edge's part of such operands.

    A device at an end of the sequence takes the other end for its neighbour. No query sees the keys there, as
    the window doesn't reach all keys. What it gets for them is zeros.
    """
    neighbour = (of.own_shard() + edge.neighbour) % of.order.shards
    return {"T": (edge.first_query, edge.rows), "S": (neighbour * edge.keys + edge.first_key, edge.rows)}


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
