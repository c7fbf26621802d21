"""Ring attention: keys and values go round, and each device attends to those that it has.

Step i of n: a device sends its keys to the next one, and attends to them meanwhile. They are the keys of the
device i places before it. Results of the steps are combined by lse, in float32.

    device 0      device 1      device 2      device 3
    K0 V0    →    K1 V1    →    K2 V2    →    K3 V3    →  (to device 0)

The backward pass goes round likewise. Each step computes what its pairs of queries and keys add to the
gradients, from lse and delta of the whole rows. dQ stays where the queries are. dK and dV are float32 sums
that follow their keys one step behind, so they also travel while a step computes; at last they go home.

A device keeps its own keys and values alone for the backward pass. Steps in which causality, the window,
lengths or segment ids leave no visible pair compute nothing, and a causal window needs no more steps than it
reaches back.

Ring Attention: https://arxiv.org/abs/2310.01889.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import _gradients, _settings
from jax_flash._mask import Index
from jax_flash._rounding import round_to
from jax_flash._spec import Gradients, Operands
from jax_flash.context_parallel import sharded
from jax_flash.context_parallel.packed import Arrays, Packed
from jax_flash.context_parallel.pairs import Pair, has_one_pair, over_pairs
from jax_flash.context_parallel.partial import Partial
from jax_flash.context_parallel.sharded import Calls, Sharded, Spans
from jax_flash.transforms import debugging, saved


@dataclasses.dataclass(frozen=True)
class Ring(Calls):
    """Everything static about a call. Its ordinary calls are on what a step has."""

    @property
    def steps(self) -> int:
        return steps(self.sharded)


def steps(of: Sharded) -> int:
    """How many steps a call takes: one for each device; fewer if a causal window reaches less far back."""
    n, window = of.order.shards, of.window
    is_causal = window.right is not None and window.right <= 0 and not of.has_lengths
    if of.order.kind is not None or window.left is None or not is_causal or of.queries != of.keys:
        return n
    return min(n, 1 + math.ceil(max(window.left, 0) / (of.keys // n)))


def attend(ring: Ring, operands: Operands) -> Any:
    """`out (*B, T, N, V)` of this device's queries, and with `return_residual` also `lse (*B, N, T)`.

    The operands are typed alike (`varying.py`).
    """
    return _attend(ring, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, operands: Operands) -> Any:
    out, lse = debugging.forward(forward, ring.sharded.spec.return_residual, ring, operands)
    return (out, lse) if ring.sharded.spec.return_residual else out


def _attend_forward(ring: Ring, operands: Operands) -> Any:
    out, lse = debugging.forward(forward, ring.sharded.spec.return_residual, ring, operands)
    out, lse = saved.named(out, lse)
    return (out, lse) if ring.sharded.spec.return_residual else out, (operands, out, lse)


def _attend_backward(ring: Ring, residuals: Any, cotangents: Any) -> tuple[Operands]:
    operands, out, lse = residuals
    d_out, d_lse = cotangents if ring.sharded.spec.return_residual else (cotangents, None)
    gradients = debugging.checked(backward, ring, operands, out, lse, d_out, d_lse)
    return saved.cotangents(operands, gradients)


_attend.defvjp(_attend_forward, _attend_backward)


@_settings.as_written
def forward(ring: Ring, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """`out (*B, T, N, V)` and `lse (*B, N, T)` of this device's queries; query has all batch axes in full."""

    def results(partial: Partial) -> tuple[jax.Array, jax.Array]:
        out, lse = partial.results(operands.sinks)
        return round_to(out, operands.query.dtype), lse  # the backward pass takes what the caller gets

    def with_rows_of(pair: Pair, partial: Partial | None) -> Partial:
        """The pair's rows, with its keys."""
        found = ring.passes.forward(ring.wide_call(), pair.operands)
        return Partial.of(*found) if partial is None else partial.take(pair.own).combined(*found)

    def attended(pair: Pair, partial: Partial | None) -> Partial:
        rows = with_rows_of(pair, partial)
        return rows if partial is None else partial.put(rows, pair.own)

    def finished(pair: Pair, partial: Partial | None) -> tuple[jax.Array, jax.Array]:
        """The results after the only pair of the last step: its rows, and those before them."""
        found = results(with_rows_of(pair, partial))
        start, _ = pair.own["T"]
        if partial is None or (isinstance(start, int) and start == 0):
            return found
        assert isinstance(start, int)
        (out_before, lse_before), (out, lse) = results(partial.take({"T": (0, start)})), found
        return jnp.concatenate([out_before, out], axis=-3), jnp.concatenate([lse_before, lse], axis=-1)

    def step(index: Index, keys: Packed, partial: Any) -> Partial:
        return over_pairs(ring.sharded, operands, keys, index, attended, partial)

    def send_and_step(carry: tuple[Packed, Partial], index: jax.Array) -> Any:
        keys, partial = carry
        sent = ring.sharded.passed_on(keys)  # issued before the step's computation
        return (sent, step(index, keys, partial)), None

    keys = Packed.of(sharded.key_side(operands))
    is_one = has_one_pair(ring.sharded, operands)
    partial = None if is_one else Partial.of_no_keys(operands.query, operands.value.shape[-1])
    if ring.steps == 1:
        return results(step(0, keys, partial))
    carry = ring.sharded.passed_on(keys), step(0, keys, partial)
    if ring.steps > 2:
        carry, _ = jax.lax.scan(send_and_step, carry, jnp.arange(1, ring.steps - 1, dtype=jnp.int32))
    keys, partial = carry
    if not is_one:
        return results(step(ring.steps - 1, keys, partial))
    return over_pairs(ring.sharded, operands, keys, ring.steps - 1, finished, partial, results)


# lse is of whole rows, but a step's own derivative takes it as that of the step's keys. So a second
# derivative is refused.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@_settings.as_written
def backward(
    ring: Ring,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
) -> Gradients:
    """Gradients of this device's operands. Those of operands that devices share are its own queries' part."""
    of_rows = {"out": out, "lse": lse, "d_out": d_out} | ({} if d_lse is None else {"d_lse": d_lse})

    def added(pair: Pair, sums: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        rows = {name: sharded.take(name.removeprefix("d_"), x, pair.own) for name, x in of_rows.items()}
        results = rows["out"], rows["lse"], rows["d_out"], rows.get("d_lse")
        gradients = ring.passes.backward(ring.wide_call(), pair.operands, *results).present()

        def with_its_part(sums: Arrays, spans: Spans) -> Arrays:
            return {name: sharded.add(name, x, gradients[name], spans) for name, x in sums.items()}

        d_own, d_keys = sums
        return with_its_part(d_own, pair.own), with_its_part(d_keys, pair.of_keys)

    def step(index: Index, keys: Packed, d_own: Arrays, d_keys: Arrays) -> tuple[Arrays, Arrays]:
        return over_pairs(ring.sharded, operands, keys, index, added, (d_own, d_keys))

    def send_and_step(carry: Any, index: Index, *, is_last: bool) -> Any:
        keys, d_own, d_keys = carry
        # Both issued before the step's computation. What the step adds to the sums is added afterwards.
        sent = keys if is_last else ring.sharded.passed_on(keys)
        # XLA runs the last of them beside the computation: let it be the longer one.
        d_keys, sent = jax.lax.optimization_barrier((d_keys, sent))
        arrived = ring.sharded.passed_on(d_keys)
        d_own, d_step = step(index, keys, d_own, sharded.zeros_like(d_keys.unpacked()))
        return (sent, d_own, jax.tree.map(jnp.add, arrived, Packed.of(d_step))), None

    keys = sharded.key_side(operands)
    dtype = jnp.promote_types(operands.query.dtype, jnp.float32)
    wide = {name: x.astype(dtype) for name, x in operands.differentiable().items()}
    d_own = sharded.zeros_like({name: x for name, x in wide.items() if name not in keys and name != "sinks"})
    d_keys = sharded.zeros_like({name: x for name, x in wide.items() if name in keys})
    packed = Packed.of(keys)
    sent = ring.sharded.passed_on(packed) if ring.steps > 1 else packed
    d_own, d_keys = step(0, packed, d_own, d_keys)
    carry = sent, d_own, Packed.of(d_keys)
    if ring.steps > 2:
        middle = functools.partial(send_and_step, is_last=False)
        carry, _ = jax.lax.scan(middle, carry, jnp.arange(1, ring.steps - 1, dtype=jnp.int32))
    if ring.steps > 1:
        carry, _ = send_and_step(carry, ring.steps - 1, is_last=True)
    _, d_own, d_keys = carry
    if ring.steps > 1:
        d_keys = ring.sharded.passed_on(d_keys, 1 - ring.steps)
    d_keys = d_keys.unpacked()
    if operands.sinks is not None:
        d_own["sinks"] = _of_sinks(operands.sinks, out, lse, d_out, d_lse)
    present = operands.present()
    return Gradients.of({name: x.astype(present[name].dtype) for name, x in (d_own | d_keys).items()})


@backward.defjvp
def _no_second_derivative(ring: Ring, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        'context_parallel_attention with strategy="ring" has no second derivative; with "all_gather" and '
        '"ulysses" it has'
    )


def _of_sinks(
    sinks: jax.Array, out: jax.Array, lse: jax.Array, d_out: jax.Array, d_lse: jax.Array | None
) -> jax.Array:
    """The gradient of the sinks, from this device's rows."""
    out, d_out = (x.reshape(-1, *x.shape[-3:]) for x in (out, d_out))
    lse = lse.reshape(-1, *lse.shape[-2:])
    d_lse = None if d_lse is None else d_lse.reshape(lse.shape)
    lse, delta = _gradients.lse_and_delta(out, lse, d_out, d_lse, lse.dtype)
    return _gradients.of_sinks(sinks.reshape(1, -1), lse, delta).reshape(sinks.shape)
