"""One call and its derivative: the only `custom_vjp` of the package.

The backward pass recomputes the attention weights, so it keeps the operands, the output and the
log-sum-exp, nothing of size T×S. The last two are tagged for `jax.checkpoint`: under

    jax.checkpoint_policies.save_only_these_names("jax_flash_out", "jax_flash_lse")

the attention of a rematerialised block is not run a second time.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_flash import _device
from jax_flash._spec import DIFFERENTIABLE, AttentionSpec, Gradients, Operands
from jax_flash.transforms import batching
from jax_flash.transforms.lowering import Call
from jax_flash.transforms.varying import vary_alike


def attend(spec: AttentionSpec, implementation: tuple[str, ...], operands: Operands) -> Any:
    """Runs a validated call on canonical operands; where they have one batch axis, here may be more.

    Of several, each may be 1 in the operands whose batch axis may be. Implementations get them as
    one: see `_lowering.py`.

    `implementation` names the one to run, as `("cuda",)`; two names, `("cuda", "xla")`, mean the
    first where the program is lowered for the platform planned for, and the second elsewhere.

    Returns `out (*B, T, N, V)` in query's dtype, and with `spec.return_residual` also
    `lse (*B, N, T)` float32. Differentiable in reverse mode, once.
    """
    call = Call(spec, implementation, _device.current())
    # Outside of the custom derivative, so that the gradient of an operand which is replicated under
    # `shard_map` is summed over the mesh by the transpose of this very cast.
    return _attend(call, vary_alike(operands))


def _differentiable_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(call, *args)`, with a clear error in the place of a second derivative."""
    guarded = jax.custom_jvp(function, nondiff_argnums=(0,))

    @guarded.defjvp
    def refuse(call: Call, primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            "jax_flash attention can be differentiated once, in reverse mode; second derivatives "
            "(jax.hessian, jax.grad of jax.grad) are not supported"
        )

    return guarded


# Compiled as one program when called outside of `jit`; inside, one function for all layers alike.
@_differentiable_once
@functools.partial(jax.jit, static_argnums=0)
def jax_flash_forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    return batching.forward(call, operands)


@_differentiable_once
@functools.partial(jax.jit, static_argnums=0)
def jax_flash_backward(call: Call, *args: Any) -> Gradients:
    return batching.backward(call, *args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, operands: Operands) -> Any:
    out, lse = jax_flash_forward(call, operands)
    return (out, lse) if call.spec.return_residual else out


def _attend_forward(call: Call, operands: Operands) -> Any:
    out, lse = jax_flash_forward(call, operands)
    out = checkpoint_name(out, "jax_flash_out")
    lse = checkpoint_name(lse, "jax_flash_lse")
    return (out, lse) if call.spec.return_residual else out, (operands, out, lse)


def _attend_backward(call: Call, residuals: Any, cotangents: Any) -> tuple[Operands]:
    operands, out, lse = residuals
    d_out, d_lse = cotangents if call.spec.return_residual else (cotangents, None)
    gradients = jax_flash_backward(call, operands, out, lse, d_out, d_lse)
    # None stands for the absent cotangent of an operand that is not differentiable.
    differentiable = {name: getattr(gradients, name) for name in DIFFERENTIABLE}
    rest = {name: None for name in operands.present() if name not in DIFFERENTIABLE}
    return (Operands(**differentiable, **rest),)


_attend.defvjp(_attend_forward, _attend_backward)
