"""All-gather of keys and values: each device attends with its queries to all keys.

One all-gather of each array that goes with the keys, and one ordinary call, in which each chunk of queries
has a diagonal. Lengths and functions are a chunk's own, so with them each chunk is a call. Grouped heads make
it cheap: keys and values are small beside queries. The gathered ones are not kept for the backward pass,
which gathers them again; out and lse are kept, so attention runs once. Each device's part of the gradients of
keys and values is float32. A reduce-scatter adds these parts up, and their sum is rounded once.

A narrow window sends only the keys that it reaches, where lengths don't move the diagonal: `halo.py`.

It is how Llama 3 was trained on long contexts (https://arxiv.org/abs/2407.21783, section 3.3.2).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import _query_parts, _settings
from jax_flash._axes import axes_of, axis_of
from jax_flash._spec import Gradients, Operands
from jax_flash.context_parallel import halo, sharded
from jax_flash.context_parallel.load_balance import Chunk, reordered, restored_slices
from jax_flash.context_parallel.packed import Arrays
from jax_flash.context_parallel.sharded import Calls, Sharded
from jax_flash.transforms import debugging, saved

Whole = Callable[[Operands], Any]
"""The same attention, by ordinary calls that have a derivative."""


def attend(calls: Calls, whole: Whole, operands: Operands) -> Any:
    """`out (*B, T, N, V)` of this device's queries, and with `return_residual` also `lse (*B, N, T)`.

    Args:
      whole: `attend_by(calls.sharded, …)`, for second derivatives.
      operands: typed alike (`varying.py`).
    """
    return _attend(calls, whole, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(calls: Calls, whole: Whole, operands: Operands) -> Any:
    out, lse = debugging.forward(forward, calls.sharded.spec.return_residual, calls, operands)
    return (out, lse) if calls.sharded.spec.return_residual else out


def _attend_forward(calls: Calls, whole: Whole, operands: Operands) -> Any:
    out, lse = debugging.forward(forward, calls.sharded.spec.return_residual, calls, operands)
    out, lse = saved.named(out, lse)
    return (out, lse) if calls.sharded.spec.return_residual else out, (operands, out, lse)


def _attend_backward(calls: Calls, whole: Whole, residuals: Any, cotangents: Any) -> tuple[Operands]:
    gradients = _gradients(calls, whole, *residuals, cotangents)
    return saved.cotangents(residuals[0], gradients)


_attend.defvjp(_attend_forward, _attend_backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gradients(
    calls: Calls, whole: Whole, operands: Operands, out: jax.Array, lse: jax.Array, cotangents: Any
) -> Gradients:
    d_out, d_lse = cotangents if calls.sharded.spec.return_residual else (cotangents, None)
    return debugging.checked(backward, calls, operands, out, lse, d_out, d_lse)


# An edge's call takes lse of whole rows, but its own derivative takes it as that of the call's keys. So a
# second derivative differentiates `whole`.
@_gradients.defjvp
def _gradients_jvp(calls: Calls, whole: Whole, primals: Any, tangents: Any) -> Any:
    operands, _, _, cotangents = primals
    # out and lse are functions of the operands, so the gradients are functions of the others alone.
    d_operands, _, _, d_cotangents = tangents

    def gradients(values: Arrays, cotangents: Any) -> Arrays:
        _, pullback = jax.vjp(lambda values: whole(operands.replace(**values)), values)
        return pullback(cotangents)[0]

    values, of_values = operands.differentiable(), d_operands.present()
    given = (values, cotangents), ({name: of_values[name] for name in values}, d_cotangents)
    return _gradients(calls, whole, *primals), Gradients.of(jax.jvp(gradients, *given)[1])


@_settings.as_written
def forward(calls: Calls, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """`out (*B, T, N, V)` and `lse (*B, N, T)` of this device's queries."""
    edges = halo.edges_of(calls.sharded)
    ordinary = functools.partial(calls.passes.forward, calls.call)
    by_all = functools.partial(attend_by, calls.sharded, ordinary, operands)
    return by_all() if edges is None else halo.forward(calls, edges, operands, by_all)


@_settings.as_written
def backward(
    calls: Calls,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
) -> Gradients:
    """Gradients of this device's operands. Those of operands that devices share are its own queries' part."""
    results = {"out": out, "lse": lse, "d_out": d_out, "d_lse": d_lse}
    edges = halo.edges_of(calls.sharded)
    by_all = functools.partial(_backward, calls, operands, results)
    return by_all() if edges is None else halo.backward(calls, edges, operands, results, by_all)


def _backward(calls: Calls, operands: Operands, results: dict[str, jax.Array | None]) -> Gradients:
    """By calls on all keys."""
    of = calls.sharded
    parts: list[Arrays] = []
    for call, of_call in enumerate(call_operands(of, operands)):
        rows = (
            None if x is None else sharded.take(name.removeprefix("d_"), x, _spans(of, call))
            for name, x in results.items()
        )
        parts.append(calls.passes.backward(calls.wide_call("shared"), of_call, *rows).present())
    present = operands.present()
    gradients = {name: _sum_of(of, name, present[name], [part[name] for part in parts]) for name in parts[0]}
    return Gradients.of(gradients)


def _sum_of(of: Sharded, name: str, operand: jax.Array, parts: list[jax.Array]) -> jax.Array:
    """The gradient of an operand, from those of the operands of each call."""
    total = _query_parts.total(name, operand, parts)
    axis = axis_of(name, operand, "S") if "S" in axes_of(name) else None
    if axis is not None and operand.shape[axis] != 1:  # which stands for all positions
        if _restores(of):
            total = reordered(total, axis, of.order)
        if sharded.goes_with_keys(name):
            total = _scattered(of, axis, total)
    return total.astype(operand.dtype)


def attend_by(of: Sharded, ordinary: Callable[[Operands], Any], operands: Operands) -> Any:
    """What `ordinary`, which runs a call of `of.local_spec`, gives for all queries of this device."""
    results = [ordinary(call) for call in call_operands(of, operands)]
    if not isinstance(results[0], tuple):
        return _query_parts.joined("out", results)
    out, lse = zip(*results, strict=True)
    return _query_parts.joined("out", out), _query_parts.joined("lse", lse)


def call_operands(of: Sharded, operands: Operands) -> list[Operands]:
    """The operands of each call on all keys, in their own order: of this device's queries, or of a chunk."""
    whole: dict[str, jax.Array] = {}
    for name, x in operands.present().items():
        if "S" in axes_of(name):
            axis = axis_of(name, x, "S")
            if sharded.goes_with_keys(name):
                x = gathered(of, axis, x)
            if x.shape[axis] != 1 and _restores(of):
                x = restored_slices(x, axis, of.order)
        whole[name] = x
    keys, shard = Chunk(0, 1, of.keys), of.own_shard()
    chunks = [of.order.chunk(shard, q, of.queries_per_chunk) for q in range(of.chunks)]
    if of.joins_chunks:
        return [of.placed_together(Operands.of(whole), chunks, keys)]

    def of_chunk(q: int) -> Operands:
        parts = {name: sharded.take(name, x, _spans(of, q)) for name, x in whole.items()}
        return of.placed(Operands.of(parts), chunks[q], keys)[0]

    return [of_chunk(q) for q in range(of.chunks)]


def _spans(of: Sharded, call: int) -> sharded.Spans:
    """The queries of that call, as a part of this device's."""
    t = of.queries_per_chunk * (of.chunks if of.joins_chunks else 1)
    return {"T": (call * t, t)}


def _restores(of: Sharded) -> bool:
    """Whether keys are brought to their own order. Else tokens in any order give the same."""
    return of.chunks > 1 or of.has_lengths


def gathered_keys(of: Sharded) -> int:
    """How many keys of other devices a device gets. With lengths: if these leave the diagonal where it is."""
    edges = halo.edges_of(of)
    own = of.keys // of.order.shards
    return of.keys - own if edges is None else of.chunks * sum(edge.rows for edge in edges)


def first_call(of: Sharded, operands: Operands) -> Operands:
    """The operands of the first call, as implementations are asked about them."""
    if halo.edges_of(of) is not None:
        return halo.own_operands(of, operands)
    return call_operands(of, operands)[0]


def gathered(of: Sharded, axis: int, x: jax.Array) -> jax.Array:
    """The shards of all devices, one behind the other along `axis`."""
    gather = _gathered if jnp.issubdtype(x.dtype, jnp.floating) else _all_gather
    return gather(of, axis, x)


def _all_gather(of: Sharded, axis: int, x: jax.Array) -> jax.Array:
    return of.by_shard(jax.lax.all_gather(x, of.axis_name, axis=axis, tiled=True), axis)


def _scattered(of: Sharded, axis: int, x: jax.Array) -> jax.Array:
    """This device's shard of the sum over devices, in float32."""
    wide = of.by_place(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axis)
    return jax.lax.psum_scatter(wide, of.axis_name, scatter_dimension=axis, tiled=True)


_gathered = jax.custom_vjp(_all_gather, nondiff_argnums=(0, 1))


def _gathered_forward(of: Sharded, axis: int, x: jax.Array) -> tuple[jax.Array, None]:
    return _all_gather(of, axis, x), None


def _gathered_backward(of: Sharded, axis: int, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (_scattered(of, axis, cotangent).astype(cotangent.dtype),)


_gathered.defvjp(_gathered_forward, _gathered_backward)
