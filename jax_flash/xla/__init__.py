"""Attention in plain JAX: any device, any dtype, every feature, memory linear in the sequence.

Loops over blocks of queries and blocks of keys, which XLA compiles once, keep the online softmax of
FlashAttention. The backward pass computes logits again. Blocks without a visible pair, by causality, window,
lengths or segment ids, are skipped. Varlen sequences become padded batch rows.

    blocks    how the sequences and the batch are cut, and which key blocks a query block needs
    symbolic  lengths that are symbolic, in an export: padded to whole blocks
    logits    one block of logits: scale, soft cap, bias, alibi, every kind of masking
    forward   the forward pass
    backward  the backward pass
    differentiable  attention that JAX differentiates, for second derivatives of every implementation
"""

from jax_flash import _varlen_unpacking
from jax_flash._device import Device
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.xla import blocks
from jax_flash.xla.backward import backward
from jax_flash.xla.forward import forward

__all__ = ["backward", "describe", "forward", "name", "supports"]

name = "xla"


def supports(spec: AttentionSpec, shapes: Operands, device: Device) -> str | None:
    """None: it runs every call on every device."""
    return None


def describe(spec: AttentionSpec, shapes: Operands, device: Device) -> str:
    """The loops a call becomes, for `explain`."""
    plan = blocks.plan(*_varlen_unpacking.unpacked_shapes(spec, shapes), device)
    return (
        f"plain JAX, blocks of {plan.queries.size} queries by {plan.keys.size} keys, "
        f"{plan.batch.size} of {plan.batch.length} batch rows at a time"
    )
