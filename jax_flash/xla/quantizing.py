"""Rounding of rows to e4m3 in plain JAX: any device, any dtype, every kind of descales."""

import jax
import jax.numpy as jnp

from jax_flash import _float8
from jax_flash._device import Device
from jax_flash._quantize_spec import QuantizeOperands, QuantizeSpec


def supports(spec: QuantizeSpec, shapes: QuantizeOperands, device: Device) -> str | None:
    """None: it runs every call on every device."""
    return None


def describe(spec: QuantizeSpec, shapes: QuantizeOperands, device: Device) -> str:
    """What a call becomes."""
    return "plain JAX"


def forward(spec: QuantizeSpec, operands: QuantizeOperands) -> tuple[jax.Array, jax.Array]:
    """The rows in e4m3, and what they are multiplied by: float32 `(B, K, blocks)`, or `(B, K, 1)`."""
    x = rotated(operands)
    return _float8.rounded(x, x.shape[2] // spec.group, valid(operands), spec.scales)


def rotated(operands: QuantizeOperands) -> jax.Array:
    """The rows, times the matrix of incoherent processing where there are signs."""
    if operands.signs is None:
        return operands.rows
    return _float8.rotated(operands.rows, operands.signs[:, None, None])


def valid(operands: QuantizeOperands) -> jax.Array | None:
    """Which rows are no padding, bool `(B, rows)`; None where all are."""
    if operands.lengths is None:
        return None
    return jnp.arange(operands.rows.shape[1]) < operands.lengths[:, None]
