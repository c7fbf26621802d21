"""Attention with a window so narrow that a device needs few keys of its neighbours, and of no other device.

A device's queries attend to its own keys, where they lie, in one call. The few at an edge also attend to the
keys of the neighbour that they reach, in a small call (+):

    keys of               device 0   device 1   device 2
    queries of device 1          +   ◥■■■■■◣   +

Results of the two are combined by lse, in these rows alone. The backward pass computes both parts of the
gradients from lse of the whole rows, and sends those of a neighbour's keys home.

With zigzag a device has two chunks, and each has neighbours of its own. They are one call all the same, and
so are their edges (`chunk_axis.py`). The two of the last device are neighbours themselves.

Lengths may move the diagonal, and then a window reaches elsewhere. They are data, so a program with lengths
has calls on all keys too (`gather.py`), and takes them where that happens.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp

from jax_flash._mask import Index
from jax_flash._rounding import round_to
from jax_flash._spec import Gradients, Operands
from jax_flash.context_parallel import chunk_axis, sharded
from jax_flash.context_parallel.load_balance import Chunk
from jax_flash.context_parallel.packed import Arrays, Packed
from jax_flash.context_parallel.partial import Partial
from jax_flash.context_parallel.sharded import Calls, Sharded, Spans


@dataclasses.dataclass(frozen=True)
class Edge:
    """Queries at one end of each chunk of a device, and the keys of the neighbouring chunk that they see."""

    side: int  # -1: keys of the chunk before; 1: of the next one
    rows: int  # queries, and as many keys
    chunk_queries: int
    chunk_keys: int

    @property
    def first_query(self) -> int:
        """Where the edge's queries start in the chunk."""
        return 0 if self.side < 0 else self.chunk_queries - self.rows

    @property
    def first_key(self) -> int:
        """Where the edge's keys start in the neighbouring chunk."""
        return self.chunk_keys - self.rows if self.side < 0 else 0

    @property
    def of_queries(self) -> Spans:
        """The edge's queries, as a part of one chunk."""
        return {"T": (self.first_query, self.rows)}

    def of_keys(self, chunk: int) -> Spans:
        """The keys that other devices' edges see in that chunk of this device, as a part of the device's."""
        return {"S": (chunk * self.chunk_keys + self.first_key, self.rows)}

    def shards_to_neighbour(self, chunk: int) -> int:
        """How many shards further that chunk's neighbour is: 1 or -1. Zigzag's late chunks run backwards."""
        return self.side if chunk == 0 else -self.side


Edges = tuple[Edge, ...]

Rows = dict[str, jax.Array | None]
"""The results and their cotangents, with an axis of chunks."""

Neighbours = list[Packed]
"""Of an edge: the keys that each chunk gets of its neighbour, and what goes with them; or their gradients."""


def edges_of(of: Sharded) -> Edges | None:
    """The edges of a call that a halo can run, or None.

    It needs chunks of consecutive tokens, no block mask, and a window with two sides. Each side ends within
    the neighbouring chunk. On n devices the two reach fewer than n - 1 chunks: an all-gather sends as many.
    Lengths are those of queries and of keys, and must leave the diagonal where it is (`_if_aligned`).
    """
    window, chunks = of.window, of.chunks * of.order.shards
    if of.order.stride != 1 or of.spec.block_mask is not None or len(of.lengths) == 1:
        return None
    if window.left is None or window.right is None:
        return None
    if of.lengths and of.automatic:
        return None  # devices may take different branches, and the compiler communicates within each
    queries, keys = of.queries_per_chunk, of.keys_per_chunk
    # A query is aligned with a key that lies so much further in its chunk than that of the chunk before.
    shift = keys - queries
    least, most = sorted((shift, (chunks - 1) * shift))
    before, after = max(window.left - least, 0), max(window.right + most, 0)
    fewest = min(queries, keys)
    reaches_all = before + after >= (of.order.shards - 1) * fewest
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
    of, passes = calls.sharded, calls.passes
    arrived = [_arrived(of, edge, operands) for edge in edges]

    def by_halo() -> tuple[jax.Array, jax.Array]:
        own = own_operands(of, operands)
        out, lse = jax.lax.optimization_barrier(passes.forward(calls.call, own))
        for edge, keys in zip(edges, arrived, strict=True):
            of_edge = passes.forward(calls.wide_call(), _edge_operands(of, edge, operands, keys))
            spans = edge.of_queries
            rows = sharded.take("out", out, spans), sharded.take("lse", lse, spans)
            combined_out, combined_lse = _combined(*rows, *of_edge, own.sinks)
            out, lse = _put("out", out, combined_out, spans), _put("lse", lse, combined_lse, spans)
        return chunk_axis.merged(of, "out", out), chunk_axis.merged(of, "lse", lse)

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
    of = calls.sharded
    arrived = [_arrived(of, edge, operands) for edge in edges]

    def by_halo() -> tuple[Arrays, list[Neighbours]]:
        """This device's gradients, and those of its neighbours' keys."""
        rows = {
            name: None if x is None else chunk_axis.split(of, name.removeprefix("d_"), x)
            for name, x in results.items()
        }
        gradients, of_neighbours = _own_gradients(calls, operands, rows), []
        for edge, keys in zip(edges, arrived, strict=True):
            gradients, of_edge = _with_edge(calls, edge, operands, keys, rows, gradients)
            of_neighbours.append(of_edge)
        return {
            name: chunk_axis.merged(of, name, x) if name in _VIEWS else x for name, x in gradients.items()
        }, of_neighbours

    def without_neighbours() -> tuple[Arrays, list[Neighbours]]:
        spec = calls.wide_call().spec

        def nothing(keys: Packed) -> Packed:
            rows = {name: keys.unpacked()[name] for name in ("key", "value")}
            rows = {name: x.astype(spec.result_dtype(name, x.dtype)) for name, x in rows.items()}
            return Packed.of(sharded.zeros_like(rows))

        return by_all().present(), [[nothing(keys) for keys in of_edge] for of_edge in arrived]

    gradients, of_neighbours = _if_aligned(of, operands, by_halo, without_neighbours)
    for edge, found in zip(edges, of_neighbours, strict=True):
        for chunk, home in _sent_home(of, edge, found):
            for name, x in home.unpacked().items():
                gradients[name] = _added(name, gradients[name], x, edge.of_keys(chunk))
    return Gradients.of(gradients)


_VIEWS = ("query", "key", "value")
"""Operands that get the axis of chunks without a copy."""


def _own_gradients(calls: Calls, operands: Operands, rows: Rows) -> Arrays:
    """Gradients by the call on the chunks' own keys. Those of `_VIEWS` have the axis of chunks."""
    of = calls.sharded
    found = calls.passes.backward(calls.call, own_operands(of, operands), *rows.values())
    gradients = jax.lax.optimization_barrier(found.present())
    for name, x in gradients.items():
        if name not in _VIEWS:
            gradients[name] = jnp.zeros_like(operands.present()[name])
            for chunk, part in enumerate(chunk_axis.parts(of, name, x)):
                gradients[name] = sharded.put(name, gradients[name], part, _own_spans(of, chunk)[0])
    return gradients


def _with_edge(
    calls: Calls, edge: Edge, operands: Operands, arrived: Neighbours, rows: Rows, gradients: Arrays
) -> tuple[Arrays, Neighbours]:
    """`gradients` and those by an edge's call, added; and the gradients of the neighbours' keys."""
    of, gradients = calls.sharded, dict(gradients)
    of_edge = (
        None if x is None else sharded.take(name.removeprefix("d_"), x, edge.of_queries)
        for name, x in rows.items()
    )
    edge_operands = _edge_operands(of, edge, operands, arrived)
    found = calls.passes.backward(calls.wide_call(), edge_operands, *of_edge).present()
    keys, values = (chunk_axis.parts(of, name, found.pop(name)) for name in ("key", "value"))
    gradients["query"] = _added("query", gradients["query"], found.pop("query"), edge.of_queries)
    for name, x in found.items():
        for chunk, part in enumerate(chunk_axis.parts(of, name, x)):
            gradients[name] = _added(name, gradients[name], part, _spans(of, edge, chunk))
    return gradients, [Packed.of({"key": k, "value": v}) for k, v in zip(keys, values, strict=True)]


Result = TypeVar("Result")


def _if_aligned(
    of: Sharded, operands: Operands, by_halo: Callable[[], Result], by_all: Callable[[], Result]
) -> Result:
    """`by_halo()` if lengths leave the diagonal where it is, else `by_all()`.

    Lengths are data, and all devices of the sequence have the same ones. Other devices of the mesh may take
    the other branch. So `ppermute`, which waits for the whole mesh, stays out of both.
    """
    if not of.lengths:
        return by_halo()
    queries, keys = operands.query_seq_lengths, operands.key_value_seq_lengths
    assert queries is not None and keys is not None
    return jax.lax.cond(jnp.all(keys - queries == of.keys - of.queries), by_halo, by_all)


def own_operands(of: Sharded, operands: Operands) -> Operands:
    """The operands of the call for this device's queries, on the keys of their own chunk."""

    def of_chunk(chunk: int) -> Operands:
        own, of_keys = _own_spans(of, chunk)
        parts = {  # those of `_VIEWS` whole, as `views` takes their place
            name: x
            if name in _VIEWS
            else sharded.take(name, x, of_keys if sharded.goes_with_keys(name) else own)
            for name, x in operands.present().items()
        }
        lengths = of.queries_per_chunk, of.keys_per_chunk
        queries, keys = (of.order.chunk(of.own_shard(), chunk, length) for length in lengths)
        return of.placed(Operands.of(parts), queries, keys)[0]

    views = {name: chunk_axis.split(of, name, operands.present()[name]) for name in _VIEWS}
    return chunk_axis.as_one_call(of, of_chunk).replace(**views)


def _edge_operands(of: Sharded, edge: Edge, operands: Operands, arrived: Neighbours) -> Operands:
    """The operands of the call for an edge. Sinks are counted with a chunk's own keys."""

    def of_chunk(chunk: int) -> Operands:
        parts, spans = arrived[chunk].unpacked(), _spans(of, edge, chunk)
        for name, x in operands.present().items():
            if name not in parts and name != "sinks":
                parts[name] = sharded.take(name, x, spans)
        number, neighbour = of.order.number(of.own_shard(), chunk), _neighbour(of, edge, chunk)
        queries = Chunk(number * edge.chunk_queries + edge.first_query, 1, edge.rows)
        keys = Chunk(neighbour * edge.chunk_keys + edge.first_key, 1, edge.rows)
        return of.placed(Operands.of(parts), queries, keys)[0]

    return chunk_axis.as_one_call(of, of_chunk)


def _own_spans(of: Sharded, chunk: int) -> tuple[Spans, Spans]:
    """A chunk's part of arrays with the device's queries or all keys, and of those with the device's keys."""
    t, s = of.queries_per_chunk, of.keys_per_chunk
    return {"T": (chunk * t, t), "S": (_first_key(of, of.own_shard(), chunk), s)}, {"S": (chunk * s, s)}


def _spans(of: Sharded, edge: Edge, chunk: int) -> Spans:
    """The part that a chunk's edge has of arrays with this device's queries or all keys."""
    first_query = chunk * edge.chunk_queries + edge.first_query
    first_key = _first_key(of, *of.order.holder(_neighbour(of, edge, chunk))) + edge.first_key
    return {"T": (first_query, edge.rows), "S": (first_key, edge.rows)}


def _first_key(of: Sharded, shard: jax.Array, chunk: Index) -> jax.Array:
    """Where the keys of a chunk start in arrays of all keys, which are in the order of the shards."""
    return (shard * of.chunks + chunk) * of.keys_per_chunk


def _neighbour(of: Sharded, edge: Edge, chunk: int) -> jax.Array:
    """The number of the neighbouring chunk.

    A chunk at an end of the sequence takes the other end for its neighbour. No query sees the keys there, as
    the window doesn't reach all keys. What arrives for them is zeros.
    """
    number = jnp.asarray(of.order.number(of.own_shard(), chunk))
    return (number + edge.side) % (of.chunks * of.order.shards)


def _is_at_fold(of: Sharded, edge: Edge, chunk: int) -> bool:
    """Whether the chunk's neighbour, on the last device, is that device's other chunk.

    Zigzag's early chunks end there, and its late ones start.
    """
    return of.chunks == 2 and edge.shards_to_neighbour(chunk) > 0


def _on_last_device(of: Sharded, there: Packed, elsewhere: Packed) -> Packed:
    """`there` on the device with the last shard, else `elsewhere`."""
    is_last = of.own_shard() == of.order.shards - 1
    return jax.tree.map(lambda x, y: jnp.where(is_last, x, y), there, elsewhere)


def _arrived(of: Sharded, edge: Edge, operands: Operands) -> Neighbours:
    """The keys of each chunk's neighbour, and what goes with them."""

    def keys(chunk: int) -> Packed:
        rows = sharded.key_side(operands).items()
        return Packed.of({name: sharded.take(name, x, edge.of_keys(chunk)) for name, x in rows})

    def of_chunk(chunk: int) -> Packed:
        found = of.passed_on(keys(chunk), -edge.shards_to_neighbour(chunk), wraps=False)
        return _on_last_device(of, keys(1 - chunk), found) if _is_at_fold(of, edge, chunk) else found

    return [of_chunk(chunk) for chunk in range(of.chunks)]


def _sent_home(of: Sharded, edge: Edge, gradients: Neighbours) -> Iterator[tuple[int, Packed]]:
    """Chunks of this device, each with gradients of its keys that edges of other chunks gave."""
    for chunk, found in enumerate(gradients):
        yield chunk, of.passed_on(found, edge.shards_to_neighbour(chunk), wraps=False)
        if _is_at_fold(of, edge, chunk):
            yield 1 - chunk, _on_last_device(of, found, jax.tree.map(jnp.zeros_like, found))


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
