"""The last step above an implementation: what each device runs on the arrays that it holds.

Batch axes are folded into one. The transforms above keep all of them apart, since a sharded axis that is
merged with another would be gathered. Here arrays are local. An implementation plans its launch for static
shapes, so it gets folded ones.

A choice of two implementations, `("cuda", "xla")`, is settled when the program is lowered. The first runs on
the platform that it was chosen for and the second on any other. So one trace serves a `jit` over CPU arrays
on a machine with a GPU, and an export for several platforms.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax

from jax_flash import _device, _dispatch, _gradients, _settings
from jax_flash._axes import batch_shape, fold
from jax_flash._cache_spec import CacheSpec
from jax_flash._quantize_spec import QuantizeSpec
from jax_flash._spec import AttentionSpec, Gradients, Operands
from jax_flash.transforms import off_gpu
from jax_flash.transforms.varying import vary_over, varying_axes

Spec = TypeVar("Spec", bound=AttentionSpec | CacheSpec | QuantizeSpec)


@dataclasses.dataclass(frozen=True)
class PlannedCall(Generic[Spec]):
    """Everything static about a call on its way down; hashable, so `jit` can key on it.

    `device` is the one that the call is planned for. It is part of the call because the backward pass and the
    body of a partitioned computation are traced later, when another device may be the current one.

    `context_parallel` is the strategy for sharded sequences, see `sequence_layout.py`.
    """

    spec: Spec
    implementation: tuple[str, ...]
    device: _device.Device
    context_parallel: str = "auto"


def forward(call: PlannedCall, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """`out (*B, T, N, V)` and `lse (*B, N, T)` for operands with any number of batch axes `*B`."""
    batch = batch_shape(operands)
    out, lse = run(call, "forward", fold(operands, batch))
    return _unfold(out, batch), _unfold(lse, batch)


def backward(
    call: PlannedCall,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
) -> Gradients:
    """Gradients of the differentiable operands, each with its operand's shape."""
    batch = batch_shape(operands)
    flat = [None if x is None else x.reshape(-1, *x.shape[len(batch) :]) for x in (out, lse, d_out, d_lse)]
    gradients = run(call, "backward", fold(operands, batch), *flat)

    def restore(gradient: jax.Array, operand: jax.Array) -> jax.Array:
        if gradient.size == operand.size:
            return gradient.reshape(operand.shape)
        return _gradients.sum_to(_unfold(gradient, batch), operand.shape)

    present = operands.present()
    return Gradients.of({name: restore(x, present[name]) for name, x in gradients.present().items()})


def _unfold(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    return x.reshape(*batch, *x.shape[1:])


def run(call: PlannedCall, entry: str, *args: Any) -> Any:
    """What the call's implementation returns from that function of it."""
    axes = varying_axes(args)  # a custom call's results vary over none until they are told to

    def runner(name: str) -> Callable[..., Any]:
        function = getattr(_dispatch.get(name, call.spec.operation), entry)

        @functools.wraps(function)
        @_settings.as_written
        def run(*args: Any) -> Any:
            with _device.assume(call.device):
                return vary_over(function(call.spec, *args), axes)

        return run

    first, *others = call.implementation
    if not others:
        return runner(first)(*args)
    if call.implementation == _dispatch.PLANNED_OFF_GPU:
        return runner(first)(*jax.tree.map(off_gpu.watched, args))
    platforms = {call.device.platform: runner(first)}
    return jax.lax.platform_dependent(*args, **platforms, default=runner(others[-1]))
