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
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_flash import _gradients, _settings
from jax_flash._block_kinds import Kind
from jax_flash._mask import Index, PositionMask, Window, both
from jax_flash._rounding import round_to
from jax_flash._spec import Gradients, Operands, functions_of
from jax_flash.context_parallel import sharded
from jax_flash.context_parallel.load_balance import ZIGZAG, Chunk
from jax_flash.context_parallel.partial import Partial
from jax_flash.context_parallel.sharded import Sharded, Spans
from jax_flash.transforms.lowering import Call
from jax_flash.transforms.varying import vary_over, varying_axes

Arrays = dict[str, jax.Array]
State = TypeVar("State")


class Passes(NamedTuple):
    """The functions that run a step: those of `lowering.py`, or of a transform above it."""

    forward: Callable[[Call, Operands], tuple[jax.Array, jax.Array]]
    backward: Callable[..., Gradients]


@dataclasses.dataclass(frozen=True)
class Ring:
    """Everything static about a call."""

    sharded: Sharded
    call: Call  # of an ordinary call on what a step has
    passes: Passes

    @property
    def steps(self) -> int:
        return steps(self.sharded)

    @property
    def step_call(self) -> Call:
        """The call of a step. Its results are float32, as they are added up."""
        return dataclasses.replace(self.call, spec=self.call.spec.wide())

    def passed_on(self, x: Any, places: int = 1) -> Any:
        """Arrays as the device so many places before this one has them."""
        place_of = self.sharded.place_of
        n = len(place_of)
        ring = [(place_of[i], place_of[(i + places) % n]) for i in range(n)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.sharded.axis_name, ring), x)


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

    operands: Operands  # of an ordinary call; without sinks, which are left to the last step
    mask: PositionMask
    own: Spans  # the pair's part of this device's operands
    of_keys: Spans  # and of those that go with the keys


def _pair(
    of: Sharded, operands: Operands, keys: Arrays, source: jax.Array, q: Index = 0, k: Index = 0
) -> Pair:
    """Chunk `q` of this device's queries, and chunk `k` of the keys of device `source`."""
    t, s = of.queries_per_chunk, of.keys_per_chunk
    chunks = of.order.chunk(of.device(), q, t), of.order.chunk(source, k, s)
    return _placed(of, operands, keys, source, (q * t, k * s), chunks)


def _placed(
    of: Sharded,
    operands: Operands,
    keys: Arrays,
    source: jax.Array,
    starts: tuple[Index, Index],
    chunks: tuple[Chunk, Chunk],
) -> Pair:
    """Queries and keys from these places on in what devices have, which are these chunks of the sequences."""
    (q, k), (t, s) = starts, (chunk.length for chunk in chunks)
    own: Spans = {"T": (q, t), "S": (source * (of.keys // of.order.shards) + k, s)}
    of_keys: Spans = {"S": (k, s)}
    parts = {
        name: sharded.take(name, keys[name], of_keys) if name in keys else sharded.take(name, x, own)
        for name, x in operands.present().items()
        if name != "sinks"
    }
    placed, mask = of.placed(Operands.of(parts), *chunks)
    return Pair(placed, mask, own, of_keys)


def _over_pairs(
    of: Sharded,
    operands: Operands,
    keys: Arrays,
    step: Index,
    visit: Callable[[Pair, State], State],
    state: State,
) -> State:
    """`state` after `visit(pair, state)` for the pairs of a step of which a query may see a key.

    A state of None is that before the first pair, which is visited.
    """
    source = (of.device() - step) % of.order.shards
    if _is_folded(of, operands):
        return _over_folded(of, operands, keys, step, visit, state)

    def one(index: Index, state: State) -> State:
        pair = _pair(of, operands, keys, source, index // of.chunks, index % of.chunks)
        may_see = None if state is None else _may_see(of, pair)
        if may_see is None:
            return visit(pair, state)
        return jax.lax.cond(jnp.any(may_see), lambda state: visit(pair, state), lambda state: state, state)

    return one(0, state) if of.chunks == 1 else jax.lax.fori_loop(0, of.chunks**2, one, state)


def _is_folded(of: Sharded, operands: Operands) -> bool:
    """Whether the pairs of a zigzag step are one: under a causal mask, with nothing else that has positions.

    Segment ids can hide some of the pairs, so these stay apart.
    """
    is_causal = of.window == Window(None, 0) and of.queries == of.keys and not of.has_lengths
    is_plain = not of.has_alibi and functions_of(of.spec) is None and operands.query_segment_ids is None
    return of.order.kind == ZIGZAG and is_causal and is_plain


def _has_one_pair(of: Sharded, operands: Operands) -> bool:
    """Whether the first step has one pair, of all that the device has."""
    return of.chunks == 1 or _is_folded(of, operands)


def _over_folded(
    of: Sharded,
    operands: Operands,
    keys: Arrays,
    step: Index,
    visit: Callable[[Pair, State], State],
    state: State,
) -> State:
    """A step of zigzag as one pair, of whole shards or halves of them. All devices have the same work.

    own keys                  keys of a lower device    keys of a higher device
    early queries  ◣ ·        early queries  ■ ·        early queries  · ·
    late queries   ■ ◣        late queries   ■ ·        late queries   ■ ■
    """
    t, s = of.queries // of.order.shards, of.keys // of.order.shards
    device = of.device()
    source = (device - step) % of.order.shards

    def pair(rows: slice, columns: slice, first: int) -> Pair:
        chunks = Chunk(first, 1, rows.stop - rows.start), Chunk(0, 1, columns.stop - columns.start)
        return _placed(of, operands, keys, source, (rows.start, columns.start), chunks)

    if isinstance(step, int) and step == 0:
        return visit(pair(slice(0, t), slice(0, s), 0), state)
    # Queries behind all keys of the sequence see each of them.
    return jax.lax.cond(
        source < device,
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


def step_operands(of: Sharded, operands: Operands) -> Operands:
    """The operands of the first step, as implementations are asked about them."""
    return _pair(of, operands, sharded.key_side(operands), of.device()).operands


def attend(ring: Ring, operands: Operands) -> Any:
    """`out (*B, T, N, V)` of this device's queries, and with `return_residual` also `lse (*B, N, T)`.

    The operands are typed alike (`varying.py`).
    """
    return _attend(ring, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, operands: Operands) -> Any:
    out, lse = forward(ring, operands)
    return (out, lse) if ring.sharded.spec.return_residual else out


def _attend_forward(ring: Ring, operands: Operands) -> Any:
    out, lse = forward(ring, operands)
    out = checkpoint_name(out, "jax_flash_out")
    lse = checkpoint_name(lse, "jax_flash_lse")
    return (out, lse) if ring.sharded.spec.return_residual else out, (operands, out, lse)


def _attend_backward(ring: Ring, residuals: Any, cotangents: Any) -> tuple[Operands]:
    operands, out, lse = residuals
    d_out, d_lse = cotangents if ring.sharded.spec.return_residual else (cotangents, None)
    gradients = backward(ring, operands, out, lse, d_out, d_lse)
    # None stands for the absent cotangent of an operand that is not differentiable.
    none = dict.fromkeys(operands.present())
    return (Operands.of(none | gradients.present()),)


_attend.defvjp(_attend_forward, _attend_backward)


@_settings.as_written
def forward(ring: Ring, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """`out (*B, T, N, V)` and `lse (*B, N, T)` of this device's queries; query has all batch axes in full."""

    def attended(pair: Pair, partial: Partial | None) -> Partial:
        out, lse = ring.passes.forward(ring.step_call, pair.operands)
        if partial is None:
            return Partial.of(out, lse)
        return partial.put(partial.take(pair.own).merged(out, lse), pair.own)

    def step(index: Index, keys: Arrays, partial: Any) -> Partial:
        return _over_pairs(ring.sharded, operands, keys, index, attended, partial)

    def step_and_send(carry: tuple[Arrays, Partial], index: jax.Array) -> Any:
        keys, partial = carry
        sent = ring.passed_on(keys)  # issued before the step's computation
        return (sent, step(index, keys, partial)), None

    keys = sharded.key_side(operands)
    partial = None
    if not _has_one_pair(ring.sharded, operands):
        partial = Partial.of_no_keys(operands.query, operands.value.shape[-1])
    sent = ring.passed_on(keys) if ring.steps > 1 else keys
    carry = sent, step(0, keys, partial)
    if ring.steps > 2:
        carry, _ = jax.lax.scan(step_and_send, carry, jnp.arange(1, ring.steps - 1, dtype=jnp.int32))
    partial = step(ring.steps - 1, *carry) if ring.steps > 1 else carry[1]
    out, lse = partial.results(operands.sinks)
    return round_to(out, operands.query.dtype), lse  # the backward pass takes what the caller gets


# A second derivative would differentiate a step as if lse were that of its own keys.
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
        gradients = ring.passes.backward(ring.step_call, pair.operands, *results).present()

        def with_its_part(sums: Arrays, spans: Spans) -> Arrays:
            return {name: sharded.add(name, x, gradients[name], spans) for name, x in sums.items()}

        d_own, d_keys = sums
        return with_its_part(d_own, pair.own), with_its_part(d_keys, pair.of_keys)

    def step(index: Index, keys: Arrays, d_own: Arrays, d_keys: Arrays) -> tuple[Arrays, Arrays]:
        return _over_pairs(ring.sharded, operands, keys, index, added, (d_own, d_keys))

    def sent_and_step(carry: Any, index: Index, *, is_last: bool) -> Any:
        keys, d_own, d_keys = carry
        # Both issued before the step's computation. What the step adds to the sums is added afterwards.
        sent = keys if is_last else ring.passed_on(keys)
        arrived = ring.passed_on(d_keys)
        d_own, added = step(index, keys, d_own, _zeros(d_keys))
        return (sent, d_own, jax.tree.map(jnp.add, arrived, added)), None

    keys = sharded.key_side(operands)
    dtype = jnp.promote_types(operands.query.dtype, jnp.float32)
    wide = {name: x.astype(dtype) for name, x in operands.differentiable().items()}
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
    return Gradients.of({name: x.astype(present[name].dtype) for name, x in (d_own | d_keys).items()})


@backward.defjvp
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
    lse = lse.reshape(-1, *lse.shape[-2:])
    d_lse = None if d_lse is None else d_lse.reshape(lse.shape)
    lse, delta = _gradients.lse_and_delta(out, lse, d_out, d_lse, lse.dtype)
    return _gradients.of_sinks(sinks.reshape(1, -1), lse, delta).reshape(sinks.shape)
