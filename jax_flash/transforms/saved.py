"""What the forward pass saves for the backward pass, and the cotangents that a `custom_vjp` returns."""

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_flash._spec import Gradients, Operands

NAMES = ("jax_flash_out", "jax_flash_lse")
"""The names of output and log-sum-exp for policies of `jax.checkpoint`."""


def named(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    return checkpoint_name(out, NAMES[0]), checkpoint_name(lse, NAMES[1])


def cotangents(operands: Operands, gradients: Gradients) -> tuple[Operands]:
    """Those of operands: None, the absent cotangent, for one that is not differentiable."""
    return (Operands.of(dict.fromkeys(operands.present()) | gradients.present()),)
