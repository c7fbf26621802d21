"""The devices, dtypes and sizes that all Pallas kernels take."""

from collections.abc import Sequence
from typing import Any

from jax_flash._device import Device

from . import compat

DTYPES = ("bfloat16", "float16")
MAX_HEAD_DIM = 256
MAX_SEQUENCE = 1 << 29  # sums of a few row and column indices stay within int32


def device_reason(device: Device) -> str | None:
    """Why the kernels can't run on `device`, or None."""
    if compat.interpreting():
        return None
    if device.platform != "cuda" or device.compute_capability is None:
        return f"it needs an NVIDIA GPU, and the device is {device.platform!r}"
    if device.compute_capability < (8, 0):
        major, minor = device.compute_capability
        return f"it needs compute capability 8.0 (Ampere) or newer, and {device.kind} has {major}.{minor}"
    return None


def operand_reason(
    arrays: Sequence[Any], head_dims: Sequence[int], lengths: Sequence[int], allowed: Sequence[str] = DTYPES
) -> str | None:
    """Why the kernels can't take such a call, or None.

    Args:
      arrays: query, key and value, or their shapes.
      head_dims: of keys and of values.
      lengths: of queries and of keys, at most.
      allowed: dtypes.
    """
    dtypes = [str(x.dtype) for x in arrays]
    if len(set(dtypes)) != 1 or dtypes[0] not in allowed:
        return f"query, key and value must all be bfloat16 or all float16, not {', '.join(dtypes)}"
    if max(head_dims) > MAX_HEAD_DIM:
        return f"head dims must be at most {MAX_HEAD_DIM}, not {max(head_dims)}"
    if max(lengths) > MAX_SEQUENCE:
        return f"sequences must be at most {MAX_SEQUENCE} long, not {max(lengths)}"
    return None
