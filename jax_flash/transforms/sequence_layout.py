"""Whether a partitioned call keeps its sequences sharded, and by which strategy.

A caller names a strategy, or leaves the choice to "auto" (`PlannedCall.context_parallel`). "auto" takes the
cheapest one that can run the call, and gathers sequences if none can. A strategy that is named runs or is
refused.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from jax_flash import _dispatch
from jax_flash._axes import axes_of, batch_shape
from jax_flash._float8 import is_float8
from jax_flash._spec import Operands, batch_axis_may_be_one
from jax_flash.context_parallel import functions, ulysses
from jax_flash.context_parallel import strategy as strategies
from jax_flash.context_parallel.sharded import Sharded
from jax_flash.context_parallel.strategy import AUTO, STRATEGIES, Strategy
from jax_flash.transforms.layout import Layout, MeshAxes, Specs, mesh_axes
from jax_flash.transforms.lowering import PlannedCall
from jax_flash.transforms.sharded_sequences import sharded

Shapes = Operands[jax.ShapeDtypeStruct]


def may_be_sharded(operands: Operands) -> bool:
    """Whether the sequences of a call may be sharded. Those of a call with a diagonal are shards already."""
    return operands.diagonal is None


def choose(
    call: PlannedCall, whole: Shapes, specs: Specs, layout: Callable[[MeshAxes, MeshAxes], Layout]
) -> Layout:
    """The layout of a call, by the shapes of its whole operands and how these are sharded.

    Queries and keys that are sharded alike stay so. Keys that are sharded otherwise are gathered before the
    call, so that each device has all of them; this counts as "all_gather" too.

    Args:
      layout: gives the layout with queries and keys sharded over these mesh axes along the sequence.

    Raises:
      RefusedStrategyError: a strategy was named, and can't run the call.
    """
    of_whole = layout((), ())
    queries, keys = _sequence_axes(whole, specs, of_whole)
    named = call.context_parallel
    names = [name for name in STRATEGIES if named in (AUTO, name)]
    attempts: list[tuple[list[Strategy], MeshAxes]] = []
    if queries and keys == queries:
        attempts.append((names, keys))
    if queries and "all_gather" in names:
        attempts.append((["all_gather"], ()))
    # Said of a ring and of Ulysses, where there is nothing to attempt.
    reason: str | None = "queries and keys must be sharded over the same devices along the sequence"
    for candidates, of_keys in attempts:
        sequences = layout(queries, of_keys)
        layouts = {name: dataclasses.replace(sequences, strategy=name) for name in candidates}
        refused = {name: _refusal(call, whole, candidate) for name, candidate in layouts.items()}
        able = [name for name in candidates if refused[name] is None]
        if able:
            of, local = _on_device(call, whole, layouts[able[0]])
            work = strategies.work_of(of, local, keeps_heads=False)
            return layouts[strategies.cheapest(work, able)]
        reason = refused[candidates[0]]
    is_gathered = queries or (keys and named != "all_gather")
    if named != AUTO and is_gathered:
        raise RefusedStrategyError(named, reason)
    return of_whole


class RefusedStrategyError(NotImplementedError):
    """A strategy that was named, and can't run the call.

    Attributes:
      reason: why it can't.
    """

    def __init__(self, name: str, reason: str | None):
        super().__init__(f'context_parallel="{name}" can\'t run this call: {reason}')
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class StrategyChoice:
    """One strategy's answer to a call on sharded sequences."""

    name: Strategy
    reason: str | None  # why it can't run the call, or does nothing; None where it runs
    # That a device sends beside no computation, forward and backward; None where it doesn't run.
    exposed_bytes: float | None
    busiest: float = 1.0  # what the device with most work computes, in means over devices
    combined_bytes: float = 0.0  # whose sending takes as long as adding up the results of a ring's steps

    def __str__(self) -> str:
        if self.exposed_bytes is None:
            return f"{self.name:<10} does not run: {self.reason}"
        text = f"{self.name:<10} runs: a device sends {self.exposed_bytes / 1e6:.3g} MB beside no computation"
        if self.combined_bytes:
            text += f", adds up results of steps for as long as {self.combined_bytes / 1e6:.3g} MB take"
        return text if self.busiest == 1 else f"{text}, and one computes {self.busiest:.3g} times the mean"


def explained(
    call: PlannedCall, whole: Shapes, specs: Specs, layout: Callable[[MeshAxes, MeshAxes], Layout]
) -> tuple[StrategyChoice, ...]:
    """What `choose` has each strategy for; none where no sequence is sharded."""
    queries, keys = _sequence_axes(whole, specs, layout((), ()))
    if not queries and not keys:
        return ()

    def choice(name: Strategy) -> StrategyChoice:
        try:
            found = choose(dataclasses.replace(call, context_parallel=name), whole, specs, layout)
        except RefusedStrategyError as error:
            return StrategyChoice(name, error.reason, None)
        if found.shards is None:
            return StrategyChoice(name, "queries are whole, so keys are gathered", None)
        of, local = _on_device(call, whole, found)
        work = strategies.work_of(of, local, keeps_heads=False)
        busiest = 1.0 if name == "ulysses" else work.busiest
        if found.shards.keys:
            combined = strategies.combined_bytes(name, work)
            return StrategyChoice(name, None, strategies.exposed_bytes(name, work), busiest, combined)
        parts = math.prod(found.mesh[axis] for axis in keys)  # in which keys lie before they are gathered
        return StrategyChoice(name, None, strategies.bytes_of_whole_keys(work, parts), busiest)

    return tuple(choice(name) for name in STRATEGIES)


def check_unnamed(call: PlannedCall, unknown: Iterable[str]) -> None:
    """Refuses a strategy that was named, if there are mesh axes on which sequences lie in an unknown way."""
    if call.context_parallel != AUTO and (axes := tuple(unknown)):
        raise NotImplementedError(
            'context_parallel must be "auto" in an exported program, and inside of a shard_map that leaves '
            f'mesh axes Auto: it isn\'t known how arrays lie on {axes}; got "{call.context_parallel}"'
        )


def _sequence_axes(whole: Shapes, specs: Specs, layout: Layout) -> tuple[MeshAxes, MeshAxes]:
    """The mesh axes that shard queries, and those that shard keys, along the sequence."""
    queries, keys = (
        tuple(axis for axis in mesh_axes(specs[name], len(x.shape) - 3) if layout.mesh[axis] > 1)
        for name, x in (("query", whole.query), ("key", whole.key))
    )
    return queries, keys


def _refusal(call: PlannedCall, whole: Shapes, layout: Layout) -> str | None:
    """Why the layout's strategy can't run the call, or None."""
    shards, strategy = layout.shards, layout.strategy
    assert shards is not None
    for name, x in (("queries", whole.query), ("keys", whole.key))[: 1 + shards.keys]:
        size = x.shape[-3]
        if not isinstance(size, int) or size % shards.count:
            return f"the {size} {name} must be divisible by the {shards.count} devices of the sequence"
    if is_float8(whole.query.dtype):
        return "arrays of 8 bits go with whole sequences"
    if strategy != "ulysses" and whole.query_offsets is not None:
        return 'varlen sequences that are sharded go with "ulysses"'
    of, local = _on_device(call, whole, layout)
    if strategy == "ulysses":
        reason = ulysses.refusal(of, local)
    else:
        reason = of.refusal_of_functions(keys_are_whole=strategy == "all_gather")
    if reason is not None:
        return reason
    shapes = _of_ordinary_call(of, layout, whole, local)
    # Steps of a ring are wide, and so are gradients of an all-gather.
    spec = call.spec if strategy == "ulysses" else of.local_spec.wide()
    reasons = {name: _dispatch.reason(name, spec, shapes, call.device) for name in call.implementation}
    return next((f'"{name}": {reason}' for name, reason in reasons.items() if reason is not None), None)


def _on_device(call: PlannedCall, whole: Shapes, layout: Layout) -> tuple[Sharded, Shapes]:
    """The call on shards, and the operands that one device has."""
    assert layout.shards is not None
    shapes = layout.local_shapes({name: x.shape for name, x in whole.present().items()})
    local = {name: jax.ShapeDtypeStruct(shapes[name], x.dtype) for name, x in whole.present().items()}
    operands = Operands.of(local)
    return sharded(call, operands, layout.shards), operands


def _of_ordinary_call(of: Sharded, layout: Layout, whole: Shapes, local: Shapes) -> Shapes:
    """The operands of the ordinary call, or of a ring's step, that a device runs; with one batch axis."""
    n, is_step, by_heads = of.order.shards, layout.strategy == "ring", layout.strategy == "ulysses"
    sizes = {"T": of.queries // n, "S": of.keys // n if is_step else of.keys}
    if by_heads:
        query_heads, key_heads = local.query.shape[-2], local.key.shape[-2]
        sizes = {"T": of.queries, "S": of.keys}
        sizes |= {"N": query_heads // n, "K": ulysses.key_heads_sent(key_heads, n) // n}
    batch = math.prod(batch_shape(local))

    def of_call(name: str, x: jax.ShapeDtypeStruct, is_one: list[bool]) -> jax.ShapeDtypeStruct:
        letters = axes_of(name)
        leading = len(x.shape) - len(letters)
        is_shared = batch_axis_may_be_one(name) and math.prod(x.shape[:leading]) == 1
        own = zip(letters, x.shape[leading:], is_one[leading:], strict=True)
        # An axis of size 1 stands for all positions or heads.
        shape = (size if one else sizes.get(letter, size) for letter, size, one in own)
        return jax.ShapeDtypeStruct((1 if is_shared else batch, *shape), x.dtype)

    is_one = {name: [size == 1 for size in x.shape] for name, x in whole.present().items()}
    shapes = Operands.of({name: of_call(name, x, is_one[name]) for name, x in local.present().items()})
    if of.has_diagonal and not by_heads:
        rows = batch if of.has_lengths else 1
        shapes = shapes.replace(diagonal=jax.ShapeDtypeStruct((rows, 1), jnp.int32))
    if not by_heads:
        chunks = (of.order.chunk(0, 0, sizes[letter]) for letter in "TS")
        shapes = jax.eval_shape(lambda x: functions.placed(of.spec, x, *chunks), shapes)
    return shapes.replace(sinks=None) if is_step else shapes
