"""How `vmap` maps a call: the mapped axis becomes one more batch axis in front.

`vmap` can't map the implementations themselves, since a custom call's attributes are fixed for the shapes
that it was traced with. The new axis is not folded into the batch here either. Merging an unsharded axis with
a sharded one would make the partitioner gather, and with explicit shardings it is an error. `lowering.py`
folds batch axes on each device.

An operand that is not mapped gets an axis of size 1, which stands for all rows. The backward pass expands
the differentiable ones, since each mapped instance has a gradient of its own.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec

from jax_flash._spec import Gradients, Operands
from jax_flash.transforms import partitioning
from jax_flash.transforms.lowering import PlannedCall


def forward(call: PlannedCall, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """`out (*B, T, N, V)` and `lse (*B, N, T)`, mappable by `vmap`."""

    @custom_vmap
    def mappable(operands: Operands) -> tuple[jax.Array, jax.Array]:
        return partitioning.forward(call, operands)

    @mappable.def_vmap
    def rule(size: int, in_batched: Any, operands: Operands) -> Any:
        (is_mapped,) = in_batched
        if size == 0:
            return of_no_calls(functools.partial(forward, call), in_batched, operands), (True, True)
        operands = jax.tree.map(lambda x, mapped: x if mapped else x[None], operands, is_mapped)
        out, lse = forward(call, operands)
        return (out, lse), (True, True)

    return mappable(operands)


def backward(
    call: PlannedCall,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
) -> Gradients:
    """Gradients of the differentiable operands, mappable by `vmap`."""

    @custom_vmap
    def mappable(operands: Operands, *rest: jax.Array | None) -> Gradients:
        return partitioning.backward(call, operands, *rest)

    @mappable.def_vmap
    def rule(size: int, in_batched: Any, operands: Operands, *rest: jax.Array | None) -> Any:
        if size == 0:
            run = functools.partial(backward, call)
            gradients = of_no_calls(run, tuple(in_batched), operands, *rest)
            return gradients, jax.tree.map(lambda _: True, gradients)
        operands_mapped, *rest_mapped = in_batched
        is_mapped = operands_mapped.present()
        differentiable = operands.differentiable()
        spread = spread_over(size, (operands, *rest), in_batched)

        def expand(x: jax.Array, mapped: bool) -> jax.Array:
            return x if mapped else spread(x)

        expanded = {
            name: expand(x, is_mapped[name])
            if name in differentiable
            else (x if is_mapped[name] else x[None])
            for name, x in operands.present().items()
        }
        rest = jax.tree.map(expand, rest, tuple(rest_mapped))
        gradients = backward(call, Operands.of(expanded), *rest)
        return gradients, jax.tree.map(lambda _: True, gradients)

    return mappable(operands, out, lse, d_out, d_lse)


def of_no_calls(run: Callable[..., Any], is_mapped: Any, *args: Any) -> Any:
    """The results of `run` under a `vmap` over an axis of size 0, which the mapped arrays have in front."""
    of_one = jax.tree.map(
        lambda x, mapped: jax.ShapeDtypeStruct(x.shape[1:] if mapped else x.shape, x.dtype),
        args,
        tuple(is_mapped),
    )
    return jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), jax.eval_shape(run, *of_one))


def spread_over(size: int, arrays: Any, is_mapped: Any) -> Callable[[jax.Array], jax.Array]:
    """Expands an array that is not mapped, along the mapped axis in front.

    If that axis is sharded over explicit mesh axes, it is so in every array: `vmap` asks for it in results.
    """
    mapped = next(x for x, m in zip(*map(jax.tree.leaves, (arrays, is_mapped)), strict=True) if m)
    sharding = jax.typeof(mapped).sharding
    axis = sharding.spec[0]

    def spread(x: jax.Array) -> jax.Array:
        spec = PartitionSpec(axis, *jax.typeof(x).sharding.spec)
        wide = jnp.broadcast_to(x, (size, *x.shape))
        return wide if axis is None else jax.sharding.reshard(wide, NamedSharding(sharding.mesh, spec))

    return spread
