"""Which lowering of Pallas runs a call: Mosaic GPU on Hopper, where its kernels can, else Triton.

The environment variable `JAX_FLASH_PALLAS` set to "mosaic" or "triton" allows only that one.
"""

import os

from jax_flash import _float8, _slower, _varlen_unpacking
from jax_flash._device import Device
from jax_flash._spec import AttentionSpec, Operands, sizes

from . import compat, features, limits
from .mosaic import head_dims
from .mosaic import tiles as mosaic_tiles

MOSAIC, TRITON = "mosaic", "triton"
_KNOWN_FLOAT8 = ("logits_soft_cap", "sinks")  # options that the Mosaic GPU kernel on e4m3 numbers takes
_KNOWN = (  # and those on 16-bit ones
    *_KNOWN_FLOAT8,
    "query_seq_lengths",
    "key_value_seq_lengths",
    "query_segment_ids",
    "key_value_segment_ids",
)
_ENVIRONMENT = "JAX_FLASH_PALLAS"


def allowed(name: str) -> bool:
    return _only_allowed() in (None, name)


def _only_allowed() -> str | None:
    """The lowering that alone is allowed; None if both are."""
    chosen = os.environ.get(_ENVIRONMENT) or None
    if chosen not in (None, MOSAIC, TRITON):
        raise ValueError(f'{_ENVIRONMENT} must be "{MOSAIC}" or "{TRITON}", not "{chosen}"')
    return chosen


def mosaic_reason(spec: AttentionSpec, shapes: Operands, device: Device) -> str | None:
    """Why the Mosaic GPU kernels can't run a call that the Triton ones can, or None."""
    if not allowed(MOSAIC):
        return f"only {TRITON} is allowed"
    if compat.interpreting():
        if not compat.mosaic_interprets():
            return "the installed JAX interprets no Mosaic GPU kernels"
        if _only_allowed() is None:
            return "the interpreter runs it when it alone is allowed"
    elif device.compute_capability != (9, 0):
        return f"it needs a Hopper GPU, not {device.kind}"
    known = _KNOWN_FLOAT8 if runs_in_float8(spec, shapes) else _KNOWN
    if unknown := [name for name in features.names(spec, shapes) if name not in known]:
        return f"its kernels for Hopper take no {' and no '.join(unknown)}"
    if shapes.diagonal is not None:
        return "its kernels for Hopper take no diagonal as an operand, as calls on parts of sequences have"
    if spec.wide_results:
        return "its kernels for Hopper write no float32 results, as steps of a ring have"
    if (float8 := runs_in_float8(spec, shapes)) and (reason := _float8_reason(spec)) is not None:
        return reason
    if mosaic_tiles.forward(head_dims.padded_sizes(shapes), float8) is None:
        size = sizes(shapes)
        return f"head dims {size.H} and {size.V} need more shared memory than there is"
    try:
        compat.require_mosaic()
    except ImportError as error:
        if allowed(TRITON):
            _slower.warn(f"On {device.kind} jax_flash's Pallas kernels run by Triton, slower: {error}")
        return str(error)
    return None


def takes_offsets(spec: AttentionSpec, shapes: Operands, device: Device) -> bool:
    """Whether the Mosaic GPU kernels run a varlen call on packed sequences, with no batch row for each."""
    others = shapes.query_seq_lengths, shapes.key_value_seq_lengths, shapes.query_segment_ids
    if shapes.query_offsets is None or runs_in_float8(spec, shapes) or any(x is not None for x in others):
        return False
    if max(sizes(shapes).T, sizes(shapes).S) > limits.MAX_SEQUENCE:
        return False
    return mosaic_reason(*_varlen_unpacking.unpacked_shapes(spec, shapes), device) is None


def runs_in_float8(spec: AttentionSpec, shapes: Operands) -> bool:
    """Whether the forward pass computes on e4m3 numbers: those of the call, or rounded from 16 bits."""
    return spec.quantization is not None or _float8.is_float8(shapes.query.dtype)


def _float8_reason(spec: AttentionSpec) -> str | None:
    if spec.out_dtype not in (None, *limits.DTYPES):
        return f"out_dtype must be {' or '.join(limits.DTYPES)}, not {spec.out_dtype}"
    return None
