"""Ring attention: keys and values go round, and each device attends to those that it has.

Step i of n: a device sends its keys to the next one, and attends to them meanwhile. They are the keys of the
device i places before it. Results of the steps are combined by lse, in float32.

    device 0      device 1      device 2      device 3
    K0 V0    →    K1 V1    →    K2 V2    →    K3 V3    →  (to device 0)

The backward pass goes round likewise. Each step computes what its pairs of queries and keys add to the
gradients, from lse and delta of the whole rows. dQ stays where the queries are. dK and dV are float32 sums
that follow their keys one step behind, so they also travel while a step computes; at last they go home.

A device keeps its own keys and values alone for the backward pass. Steps without a visible pair compute
nothing, and a causal window needs no more steps than it reaches back.

Ring Attention: https://arxiv.org/abs/2310.01889.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_flash import _gradients
from jax_flash._mask import PositionMask
from jax_flash._spec import DIFFERENTIABLE, Gradients, Operands
from jax_flash.context_parallel import sharded
from jax_flash.context_parallel.partial import Partial
from jax_flash.context_parallel.sharded import Sharded, Spans
from jax_flash.transforms import autodiff
from jax_flash.transforms.lowering import Call
from jax_flash.transforms.varying import vary_over, varying_axes

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Ring:
    """Everything static about a call."""

    sharded: Sharded
    call: Call  # of a step

    @property
    def steps(self) -> int:
        return steps(self.sharded)

    def passed_on(self, x: Any, places: int = 1) -> Any:
        """Arrays as the device so many places before this one has them."""
        n = self.sharded.order.shards
        places = [(i, (i + places) % n) for i in range(n)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.sharded.axis_name, places), x)


def steps(of: Sharded) -> int:
    """How many steps a call takes: one for each device; fewer if a causal window reaches less far back."""
    n, window = of.order.shards, of.window
    is_causal = window.right is not None and window.right <= 0 and not of.has_lengths
    if of.order.kind is not None or window.left is None or not is_causal or of.queries != of.keys:
        return n
    return min(n, 1 + math.ceil(max(window.left, 0) / (of.keys // n)))


@dataclasses.dataclass(frozen=True)
class Pair:
    """A chunk of this device's queries and one of the keys that it has in a step."""

    operands: Operands  # of an ordinary call
    mask: PositionMask
    own: Spans  # the pair's part of this device's operands
    of_keys: Spans  # and of those that go with the keys


def _pairs(of: Sharded, operands: Operands, keys: Arrays, source: jax.Array) -> list[Pair]:
    """The pairs of chunks of a step with the keys of device `source`, those of a query chunk together."""
    chunks = range(of.chunks)
    return [_pair(of, operands, keys, q, (source, k)) for q in chunks for k in chunks]


def _pair(of: Sharded, operands: Operands, keys: Arrays, q: int, key_chunk: tuple[jax.Array, int]) -> Pair:
    """Chunk `q` of this device's queries with a chunk of a device's keys. Sinks are left to the last step."""
    t, s, (source, k) = of.queries_per_chunk, of.keys_per_chunk, key_chunk
    own: Spans = {"T": (q * t, t), "S": ((source * of.chunks + k) * s, s)}
    of_keys: Spans = {"S": (k * s, s)}
    parts = {
        name: sharded.take(name, keys[name], of_keys) if name in keys else sharded.take(name, x, own)
        for name, x in operands.present().items()
        if name != "sinks"
    }
    chunks = of.order.chunk(of.device(), q, t), of.order.chunk(source, k, s)
    placed, mask = of.placed(Operands(**parts), *chunks)
    return Pair(placed, mask, own, of_keys)


def _where_visible(of: Sharded, pair: Pair, run: Callable[[Any], Any], state: Any) -> Any:
    """`run(state)`, or `state` if no query of the pair sees a key."""
    if not of.may_be_skipped():
        return run(state)
    visited = pair.mask.block_range(0, pair.mask.rows, of.keys_per_chunk)
    return jax.lax.cond(jnp.any(visited.first < visited.last), run, lambda state: state, state)


def _source(of: Sharded, step: jax.Array | int) -> jax.Array:
    """The device whose keys this one has in a step."""
    return (of.device() - step) % of.order.shards


def step_operands(of: Sharded, operands: Operands) -> Operands:
    """The operands of the first step, as implementations are asked about them."""
    return _pair(of, operands, sharded.key_side(operands), 0, (of.device(), 0)).operands


def attend(ring: Ring, operands: Operands) -> Any:
    """`out (*B, T, N, V)` of this device's queries, and with `return_residual` also `lse (*B, N, T)`.

    The operands are typed alike (`varying.py`).
    """
    return _attend(ring, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, operands: Operands) -> Any:
    out, lse = _forward(ring, operands)
    return (out, lse) if ring.sharded.spec.return_residual else out


def _attend_forward(ring: Ring, operands: Operands) -> Any:
    out, lse = _forward(ring, operands)
    out = checkpoint_name(out, "jax_flash_out")
    lse = checkpoint_name(lse, "jax_flash_lse")
    return (out, lse) if ring.sharded.spec.return_residual else out, (operands, out, lse)


def _attend_backward(ring: Ring, residuals: Any, cotangents: Any) -> tuple[Operands]:
    operands, out, lse = residuals
    d_out, d_lse = cotangents if ring.sharded.spec.return_residual else (cotangents, None)
    gradients = _backward(ring, operands, out, lse, d_out, d_lse)
    given = {name: getattr(gradients, name) for name in DIFFERENTIABLE}
    rest = {name: None for name in operands.present() if name not in DIFFERENTIABLE}
    return (Operands(**given, **rest),)


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(ring: Ring, operands: Operands) -> tuple[jax.Array, jax.Array]:
    of = ring.sharded
    t = of.queries_per_chunk

    def step(index: jax.Array | int, keys: Arrays, partials: list[Partial]) -> list[Partial]:
        partials = list(partials)
        for i, pair in enumerate(_pairs(of, operands, keys, _source(of, index))):
            q = i // of.chunks

            def attended(partial: Partial, pair: Pair = pair) -> Partial:
                return partial.merged(*autodiff.jax_flash_forward(ring.call, pair.operands))

            partials[q] = _where_visible(of, pair, attended, partials[q])
        return partials

    def step_and_send(carry: Any, index: jax.Array) -> Any:
        keys, partials = carry
        sent = ring.passed_on(keys)  # issued before the step's computation
        return (sent, step(index, keys, partials)), None

    V = operands.value.shape[-1]
    parts = (sharded.take("query", operands.query, {"T": (q * t, t)}) for q in range(of.chunks))
    carry = sharded.key_side(operands), [Partial.of_no_keys(part, V) for part in parts]
    if ring.steps > 1:
        carry, _ = jax.lax.scan(step_and_send, carry, jnp.arange(ring.steps - 1, dtype=jnp.int32))
    partials = step(ring.steps - 1, *carry)
    if operands.sinks is not None:
        partials = [partial.with_sinks(operands.sinks) for partial in partials]
    out = jnp.concatenate([partial.out for partial in partials], axis=-3)
    return out.astype(operands.query.dtype), jnp.concatenate([partial.lse for partial in partials], axis=-1)


# A second derivative would differentiate a step as if lse were that of its own keys.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(
    ring: Ring,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
) -> Gradients:
    """Gradients of this device's operands. Those of operands that devices share are its own queries' part."""
    of = ring.sharded
    of_rows = {"out": out, "lse": lse, "d_out": d_out} | ({} if d_lse is None else {"d_lse": d_lse})
    letters = {"out": "out", "lse": "lse", "d_out": "out", "d_lse": "lse"}

    def step(index: jax.Array | int, keys: Arrays, d_own: Arrays, d_keys: Arrays) -> tuple[Arrays, Arrays]:
        for pair in _pairs(of, operands, keys, _source(of, index)):

            def added(state: tuple[Arrays, Arrays], pair: Pair = pair) -> tuple[Arrays, Arrays]:
                rows = {name: sharded.take(letters[name], x, pair.own) for name, x in of_rows.items()}
                results = (rows["out"], rows["lse"], rows["d_out"], rows.get("d_lse"))
                gradients = vars(autodiff.jax_flash_backward(ring.call, pair.operands, *results))
                return tuple(
                    {name: sharded.add(name, x, gradients[name], spans) for name, x in sums.items()}
                    for sums, spans in zip(state, (pair.own, pair.of_keys), strict=True)
                )  # pyright: ignore[reportReturnType]

            d_own, d_keys = _where_visible(of, pair, added, (d_own, d_keys))
        return d_own, d_keys

    def sent_and_step(carry: Any, index: jax.Array | int, *, is_last: bool) -> Any:
        keys, d_own, d_keys = carry
        # Both issued before the step's computation. What the step adds to the sums is added afterwards.
        sent = keys if is_last else ring.passed_on(keys)
        arrived = ring.passed_on(d_keys)
        d_own, added = step(index, keys, d_own, _zeros(d_keys))
        return (sent, d_own, jax.tree.map(jnp.add, arrived, added)), None

    keys = sharded.key_side(operands)
    dtype = jnp.promote_types(operands.query.dtype, jnp.float32)
    wide = {name: x.astype(dtype) for name, x in operands.present().items() if name in DIFFERENTIABLE}
    d_own = _zeros({name: x for name, x in wide.items() if name not in keys and name != "sinks"})
    d_keys = _zeros({name: x for name, x in wide.items() if name in keys})
    sent = ring.passed_on(keys) if ring.steps > 1 else keys
    carry = sent, *step(0, keys, d_own, d_keys)
    if ring.steps > 2:
        middle = functools.partial(sent_and_step, is_last=False)
        carry, _ = jax.lax.scan(middle, carry, jnp.arange(1, ring.steps - 1, dtype=jnp.int32))
    if ring.steps > 1:
        carry, _ = sent_and_step(carry, ring.steps - 1, is_last=True)
    _, d_own, d_keys = carry
    if ring.steps > 1:
        d_keys = ring.passed_on(d_keys, 1 - ring.steps)
    if operands.sinks is not None:
        d_own["sinks"] = _of_sinks(operands.sinks, out, lse, d_out, d_lse)
    present = operands.present()
    return Gradients(**{name: x.astype(present[name].dtype) for name, x in (d_own | d_keys).items()})


@_backward.defjvp
def _no_second_derivative(ring: Ring, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        'context_parallel_attention with strategy="ring" has no second derivative; with "all_gather" and '
        '"ulysses" it has'
    )


def _zeros(like: Arrays) -> Arrays:
    return {name: vary_over(jnp.zeros(x.shape, x.dtype), varying_axes(x)) for name, x in like.items()}


def _of_sinks(
    sinks: jax.Array, out: jax.Array, lse: jax.Array, d_out: jax.Array, d_lse: jax.Array | None
) -> jax.Array:
    """The gradient of the sinks, from this device's rows."""
    out, d_out = (x.reshape(-1, *x.shape[-3:]) for x in (out, d_out))
    lse, d_lse = (None if x is None else x.reshape(-1, *x.shape[-2:]) for x in (lse, d_lse))
    assert lse is not None
    lse, delta = _gradients.lse_and_delta(out, lse, d_out, d_lse, lse.dtype)
    return _gradients.of_sinks(sinks.reshape(1, -1), lse, delta).reshape(sinks.shape)
