"""Rounding of rows to e4m3 by a CUDA kernel: which calls it takes, and how they run."""

import jax

from jax_flash import cuda
from jax_flash._device import Device, current
from jax_flash._quantize_spec import QuantizeOperands, QuantizeSpec
from jax_flash._spec import shapes_of
from jax_flash.cuda import call

Shapes = QuantizeOperands[jax.ShapeDtypeStruct]


def supports(spec: QuantizeSpec, shapes: Shapes, device: Device) -> str | None:
    """Why the kernel can't run the call on `device`, or None.

    Raises NvrtcNotFoundError, an ImportError, where it could if NVRTC were installed.
    """
    limit = cuda.device_limit(device) or cuda.family(device).unsupported_quantize(spec, shapes)
    if limit is None:
        cuda.require_nvrtc()
    return limit


def describe(spec: QuantizeSpec, shapes: Shapes, device: Device) -> str:
    """The kernel's name for a call that `supports` accepts."""
    return f"{device.arch} kernel, blocks of 128 rows of {spec.group} heads"


def forward(spec: QuantizeSpec, operands: QuantizeOperands) -> tuple[jax.Array, jax.Array]:
    """The rows in e4m3, and what they are multiplied by: float32 `(B, K, blocks)`."""
    columns = operands.rows.shape[-1]
    rows = cuda.padded_rows(operands.rows, multiple=16)
    arrays = QuantizeOperands(rows, operands.signs, operands.lengths)
    plan = cuda.family(current()).plan_quantize_rows(spec, shapes_of(arrays), current())
    quantized, descale = call.call("jax_flash_quantize", plan, *arrays.present().values())
    return cuda.without_padding(quantized, columns), descale
