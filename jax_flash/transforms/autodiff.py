"""A call and its derivative: a `custom_vjp`.

The backward pass computes the attention weights again, so the forward pass saves the operands, the output and
the log-sum-exp, nothing of size T×S. The last two have names for `jax.checkpoint`. With the policy

    jax.checkpoint_policies.save_only_these_names("jax_flash_out", "jax_flash_lse")

a rematerialised block does not run its attention a second time.

With a quantization the forward pass is that of rounded operands, and the backward pass that of the operands
as they are, with the output and log-sum-exp of the forward pass.

A second derivative differentiates the two passes. Their results come from the implementation, and their
tangents from `xla/differentiable.py`, in memory linear in T and S.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import _device, _float8, _settings
from jax_flash._spec import AttentionSpec, Gradients, Operands
from jax_flash.transforms import batching, debugging, saved
from jax_flash.transforms.lowering import PlannedCall
from jax_flash.transforms.varying import vary_alike
from jax_flash.xla import differentiable


def attend(
    spec: AttentionSpec,
    implementation: tuple[str, ...],
    operands: Operands,
    context_parallel: str = "auto",
) -> Any:
    """Runs a checked call. Differentiable in reverse mode; its gradients in every mode.

    Args:
      implementation: the name of the one to run, as `("cuda",)`. Of two names, `("cuda", "xla")`, the first
        runs on the platform that the call is planned for, and the second on all others.
      operands: canonical ones, except that they may have several batch axes `*B`. Any of these may be 1 in an
        operand whose batch axis may be. `lowering.py` folds them into one.
      context_parallel: the strategy for sequences that are sharded under `jit`.

    Returns:
      `out (*B, T, N, V)` in query's dtype, and with `spec.return_residual` also `lse (*B, N, T)` float32.
    """
    call = PlannedCall(spec, implementation, _device.current(), context_parallel)
    # The cast is outside of the custom derivative: under `shard_map` its transpose sums the gradient of a
    # replicated operand over the mesh.
    return _attend(call, vary_alike(operands))


# Compiled as one program when called outside of `jit`; inside, one function for all layers alike.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)
def jax_flash_forward(call: PlannedCall[AttentionSpec], operands: Operands) -> tuple[jax.Array, jax.Array]:
    return batching.forward(call, operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)
def jax_flash_backward(call: PlannedCall[AttentionSpec], *args: Any) -> Gradients:
    return batching.backward(call, *args)


# A second derivative differentiates the two functions above. JAX can't differentiate a kernel, so it takes
# the tangents of portable code, `differentiable.forward`.
@jax_flash_forward.defjvp
def _forward_jvp(call: PlannedCall[AttentionSpec], primals: Any, tangents: Any) -> Any:
    (operands,), (d_operands,) = primals, tangents
    results_tangent = _forward_tangent(call, operands, _differentiable(operands, d_operands))
    return jax_flash_forward(call, operands), results_tangent


@jax_flash_backward.defjvp
def _backward_jvp(call: PlannedCall[AttentionSpec], primals: Any, tangents: Any) -> Any:
    operands, _, lse, d_out, d_lse = primals
    # out and lse are functions of the operands, so the gradients are functions of the others alone.
    d_operands, _, _, *cotangents_tangent = tangents
    d_lse, d_lse_tangent = (jnp.zeros_like(lse),) * 2 if d_lse is None else (d_lse, cotangents_tangent[1])
    tangent = _backward_tangent(
        call,
        operands,
        _differentiable(operands, d_operands),
        (d_out, d_lse),
        (cotangents_tangent[0], d_lse_tangent),
    )
    return jax_flash_backward(call, *primals), tangent


def _differentiable(operands: Operands, of: Operands) -> dict[str, jax.Array]:
    """The fields of `of` for the differentiable operands."""
    present = of.present()
    return {name: present[name] for name in operands.differentiable()}


def _of_differentiable(
    call: PlannedCall[AttentionSpec], operands: Operands
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    return lambda values: differentiable.forward(call.spec, operands.replace(**values))


@functools.partial(jax.jit, static_argnums=0)
@_settings.as_written
def _forward_tangent(
    call: PlannedCall[AttentionSpec], operands: Operands, tangents: dict[str, jax.Array]
) -> Any:
    values = _differentiable(operands, operands)
    return jax.jvp(_of_differentiable(call, operands), (values,), (tangents,))[1]


@functools.partial(jax.jit, static_argnums=0)
@_settings.as_written
def _backward_tangent(
    call: PlannedCall[AttentionSpec],
    operands: Operands,
    d_operands: dict[str, jax.Array],
    cotangents: Any,
    d_cotangents: Any,
) -> Gradients:
    def gradients(values: dict[str, jax.Array], cotangents: Any) -> Any:
        _, vjp = jax.vjp(_of_differentiable(call, operands), values)
        return vjp(cotangents)[0]

    values = _differentiable(operands, operands)
    return Gradients.of(jax.jvp(gradients, (values, cotangents), (d_operands, d_cotangents))[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: PlannedCall[AttentionSpec], operands: Operands) -> Any:
    out, lse = debugging.forward(jax_flash_forward, call.spec.return_residual, call, operands)
    return (out, lse) if call.spec.return_residual else out


def _attend_forward(call: PlannedCall[AttentionSpec], operands: Operands) -> Any:
    if _float8.is_float8(operands.query.dtype):
        raise NotImplementedError(
            "a call on float8_e4m3fn arrays has no gradients: differentiate "
            'flash_attention(..., quantization="fp8") of the arrays they were made from'
        )
    out, lse = debugging.forward(jax_flash_forward, call.spec.return_residual, call, operands)
    out, lse = saved.named(out, lse)
    return (out, lse) if call.spec.return_residual else out, (operands, out, lse)


def _attend_backward(call: PlannedCall[AttentionSpec], residuals: Any, cotangents: Any) -> tuple[Operands]:
    operands, out, lse = residuals
    d_out, d_lse = cotangents if call.spec.return_residual else (cotangents, None)
    gradients = debugging.checked(jax_flash_backward, call, operands, out, lse, d_out, d_lse)
    return saved.cotangents(operands, gradients)


_attend.defvjp(_attend_forward, _attend_backward)
