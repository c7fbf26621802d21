"""Calls of `context_parallel_attention` on simulated devices, with the arguments of a call on one.

Arguments and results are whole and in the sequence's own order, so both kinds of call have one definition.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from attention_case import OPERAND_OF
from implementation_suite import Implementation
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash.transforms.lowering import AXES

AXIS = "sequence"


def sequence_mesh(shards, axis=AXIS):
    return jax.make_mesh((shards,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:shards])


def token_axes(name, x):
    """The axes of tokens of an argument, counted from the end, and whether it is sharded along each.

    A bias or mask is sharded along its queries alone. An axis of size 1 stands for all tokens.
    """
    letters = AXES.get(OPERAND_OF.get(name, name), "")
    axes = {letter: letters.index(letter) - len(letters) for letter in "TS" if letter in letters}
    axes = {letter: axis for letter, axis in axes.items() if x.ndim >= -axis and x.shape[axis] != 1}
    return {axis: letter == "T" or "T" not in letters for letter, axis in axes.items()}


def reorder(x, axis, shards, kind):
    return x if kind is None else jax_flash.reorder_for_load_balance(x, axis, shards, kind)


def restore(x, axis, shards, kind):
    return x if kind is None else jax_flash.restore_order(x, axis, shards, kind)


def spec_of(name, x):
    spec = [None] * x.ndim
    for axis, is_sharded in token_axes(name, x).items():
        spec[axis] = AXIS if is_sharded else None
    return P(*spec)


def attend(arguments, shards, strategy, kind, return_residual=False, check_vma=True, **options):
    """The results for whole arguments, whole."""
    static = {name: x for name, x in arguments.items() if not hasattr(x, "shape")}
    arrays = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
    arrays = {name: x for name, x in arrays.items() if name not in static}
    for name, x in arrays.items():
        for axis in token_axes(name, x):
            x = reorder(x, axis, shards, kind)
        arrays[name] = x

    def local(arrays):
        return jax_flash.context_parallel_attention(
            **arrays, **static, axis_name=AXIS, strategy=strategy, load_balance=kind,
            return_residual=return_residual, **options,
        )  # fmt: skip

    out_specs = P(*[None] * (arrays["query"].ndim - 3), AXIS)
    results = jax.shard_map(
        local,
        mesh=sequence_mesh(shards),
        in_specs=({name: spec_of(name, x) for name, x in arrays.items()},),
        out_specs=(out_specs, out_specs) if return_residual else out_specs,
        check_vma=check_vma,
    )(arrays)
    axis = arrays["query"].ndim - 3
    return jax.tree.map(lambda x: restore(x, axis, shards, kind), results)


@dataclasses.dataclass
class ShardedCalls(Implementation):
    """An implementation for `check`, by a strategy on so many devices."""

    shards: int
    strategy: str
    kind: str | None = None
    options: dict = dataclasses.field(default_factory=dict)

    implementation = "xla"

    def attend(self, arguments, **options):
        options = options | self.options
        return attend(arguments, self.shards, self.strategy, self.kind, **options)
