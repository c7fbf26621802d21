"""Attention in Pallas: by Mosaic GPU on Hopper, and by the Triton lowering on NVIDIA GPUs from Ampere on.

One of the implementations behind `jax_flash.flash_attention`, in kernels of plain Python.
"""

import dataclasses
import math

import jax

from jax_flash import _device, _float8, _query_parts, _varlen_unpacking
from jax_flash._device import Device
from jax_flash._mask import keys_of_queries
from jax_flash._spec import AttentionSpec, Gradients, Operands, Sizes, sizes

from . import compat, features, limits, lowering, packed_rows
from .mosaic import head_dims, head_shares
from .mosaic import tiles as mosaic_tiles
from .triton import functions
from .triton import tiles as triton_tiles

name = "pallas"

_BIAS_DTYPES = ("bfloat16", "float16", "float32")
_SIDE_LIMIT = 2**29  # positions and window sides are added up in 32 bits


def supports(spec: AttentionSpec, shapes: Operands, device: Device) -> str | None:
    """The reason why this implementation can't run such a call on `device`, or None.

    Raises ImportError where it could if the installed JAX had a lowering of Pallas for the device.
    """
    if (why_not := limits.device_reason(device) or _function_reason(spec)) is not None:
        return why_not
    spec, shapes = _varlen_unpacking.unpacked_shapes(spec, shapes)
    if (why_not := _call_reason(spec, shapes)) is not None:
        return why_not
    if lowering.runs_in_float8(spec, shapes):
        return lowering.mosaic_reason(spec, shapes, device)
    if not lowering.allowed(lowering.TRITON):
        return lowering.mosaic_reason(spec, shapes, device)
    if not compat.interpreting():
        compat.require_triton()
    return None


def _function_reason(spec: AttentionSpec) -> str | None:
    reason = None
    if spec.score_mod is not None:
        reason = functions.score_mod_limit(spec.score_mod, spec.deterministic)
    if reason is None and spec.block_mask is not None and spec.block_mask.mask_mod is not None:
        reason = functions.mask_mod_limit(spec.block_mask.mask_mod)
    return reason


def _call_reason(spec: AttentionSpec, shapes: Operands) -> str | None:
    size = sizes(shapes)
    arrays = (shapes.query, shapes.key, shapes.value)
    dtypes = limits.DTYPES
    if _float8.is_float8(shapes.query.dtype):
        dtypes = (_float8.DTYPE.__name__,)
    if why_not := limits.operand_reason(arrays, (size.H, size.V), (size.T, size.S), dtypes):
        return why_not
    if shapes.bias is not None and str(shapes.bias.dtype) not in _BIAS_DTYPES:
        return f"bias must be {' or '.join(_BIAS_DTYPES)}, not {shapes.bias.dtype}"
    if shapes.diagonal is not None and max(abs(spec.left or 0), abs(spec.right or 0)) >= _SIDE_LIMIT:
        return f"with a diagonal as an operand, a window's sides are limited to {_SIDE_LIMIT}"
    of_bytes = {"a mask": shapes.mask, "blocks of a block_mask": shapes.block_kinds}
    of_bytes |= {f"a captured array ({name})": x for name, x in shapes.captured.items()}
    for name, x in of_bytes.items():
        if x is not None and x.dtype.itemsize == 1 and 1 << 31 <= x.size <= 1 << 32:
            return f"the Triton lowering of Pallas can't address {name} of 2 to 4 GiB"
    return None


def describe(spec: AttentionSpec, shapes: Operands, device: Device) -> str:
    """The kernels that would run, and their tile shapes."""
    if not lowering.takes_offsets(spec, shapes, device):
        spec, shapes = _varlen_unpacking.unpacked_shapes(spec, shapes)
    of_16_bits = not lowering.runs_in_float8(spec, shapes)
    if of_16_bits and packed_rows.suits(shapes) and lowering.mosaic_reason(spec, shapes, device) is None:
        spec, shapes = packed_rows.packed_shapes(spec, shapes)
    forward = _describe_forward(spec, shapes, device)
    if _float8.is_float8(shapes.query.dtype):
        return forward
    return f"{forward}, {_describe_backward(*_of_16_bits(spec, shapes), device)}"


def _describe_forward(spec: AttentionSpec, shapes: Operands, device: Device) -> str:
    if lowering.runs_in_float8(spec, shapes):
        return f"Mosaic GPU forward in e4m3 ({mosaic_tiles.forward(head_dims.padded_sizes(shapes), True)})"
    if lowering.mosaic_reason(spec, shapes, device) is None:
        return f"Mosaic GPU forward ({mosaic_tiles.forward(head_dims.padded_sizes(shapes))})"
    return f"Triton forward ({triton_tiles.choose(spec, shapes, device).forward})"


def _describe_backward(spec: AttentionSpec, shapes: Operands, device: Device) -> str:
    if lowering.mosaic_reason(spec, shapes, device) is None:
        return f"Mosaic GPU backward {_mosaic_backward(spec, head_dims.padded_sizes(shapes), device)}"
    by_triton = triton_tiles.choose(spec, shapes, device)
    backward = f"of keys ({by_triton.backward_keys}) and of queries ({by_triton.backward_queries})"
    if features.bias_gradient(shapes) == "shared":
        backward += f" and of bias ({by_triton.backward_bias})"
    return f"Triton backward {backward}"


def forward(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """query (B,T,N,H), key (B,S,K,H), value (B,S,K,V), all bfloat16 or all float16, heads as they are; the
    other operands as `Operands` has them.

    Returns:
      out (B,T,N,V) in query's dtype, or as `spec.wide_results` says, and lse (B,N,T) float32, the natural
      log-sum-exp. Rows that have no key to attend to get 0 and -inf.
    """
    device = _device.current()
    if operands.query_offsets is not None and not lowering.takes_offsets(spec, operands, device):
        return _varlen_unpacking.forward(forward, spec, operands)
    if _query_parts.are_several(operands):
        return _query_parts.forward(forward, spec, operands)
    if lowering.runs_in_float8(spec, operands):
        from .mosaic import forward_float8

        config = mosaic_tiles.forward(head_dims.padded_sizes(operands), float8=True)
        assert config is not None  # or there would be a reason
        return forward_float8.forward(spec, operands, config, device.sm_count or 1)
    if lowering.mosaic_reason(spec, operands, device) is None:
        if packed_rows.suits(operands):
            return packed_rows.forward(forward, spec, operands)
        from .mosaic import forward as mosaic_forward

        config = mosaic_tiles.forward(head_dims.padded_sizes(operands))
        assert config is not None  # or there would be a reason
        padded = head_dims.pad_operands(operands)
        out, lse = mosaic_forward.forward(spec, padded, config, device.sm_count or 1)
        return out[..., : operands.value.shape[-1]], lse

    from .triton import forward as triton_forward

    return triton_forward.forward(spec, operands, triton_tiles.choose(spec, operands, device).forward)


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
) -> Gradients:
    """What `forward` took and gave, with d_out (B,T,N,V) and d_lse (B,N,T) float32 or None for zeros.

    Returns:
      Gradients of the differentiable operands, in their shapes and dtypes, or as `spec.wide_results` says;
      with `spec.deterministic`, bitwise equal from run to run.
    """
    device = _device.current()
    if operands.query_offsets is not None and not lowering.takes_offsets(
        *_of_16_bits(spec, operands), device
    ):
        return _varlen_unpacking.backward(backward, spec, operands, out, lse, d_out, d_lse)
    if _query_parts.are_several(operands):
        return _query_parts.backward(backward, spec, operands, out, lse, d_out, d_lse)
    spec, operands = _of_16_bits(spec, operands)
    if lowering.mosaic_reason(spec, operands, device) is None:
        if packed_rows.suits(operands):
            return packed_rows.backward(backward, spec, operands, out, lse, d_out, d_lse)
        from .mosaic import backward as mosaic_backward

        configs = _mosaic_backward(spec, head_dims.padded_sizes(operands), device)
        gradients = mosaic_backward.backward(
            spec,
            head_dims.pad_operands(operands),
            head_dims.pad(out),
            lse,
            head_dims.pad(d_out),
            d_lse,
            configs,
            device.sm_count or 1,
        )
        return head_dims.cut_gradients(gradients, sizes(operands))

    from .triton import backward as triton_backward

    chosen = triton_tiles.choose(spec, operands, device)
    return triton_backward.backward(spec, operands, out, lse, d_out, d_lse, chosen)


def _of_16_bits(spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """The call without its quantization, as the backward pass has it."""
    return dataclasses.replace(spec, quantization=None), operands.replace(rotation_signs=None)


def _mosaic_backward(spec: AttentionSpec, size: Sizes, device: Device) -> mosaic_tiles.BackwardConfigs:
    spec, size = _of_longest(spec, size)
    keys = keys_of_queries(spec, size).mean_visible_columns()
    in_any_order = not spec.deterministic and compat.adds_to_arrays()
    configs = mosaic_tiles.backward(size, in_any_order and keys >= mosaic_tiles.KEYS_TO_SUM_TOGETHER)
    return head_shares.divided(configs, spec, size, device.sm_count or 1)


def _of_longest(spec: AttentionSpec, size: Sizes) -> tuple[AttentionSpec, Sizes]:
    """For estimates of a varlen call: one of as many batch rows as its tokens make longest sequences."""
    if spec.max_query_length is None or spec.max_key_value_length is None:
        return spec, size
    queries, keys = max(spec.max_query_length, 1), max(spec.max_key_value_length, 1)
    rows = size.B * math.ceil(size.T / queries)
    spec = dataclasses.replace(spec, max_query_length=None, max_key_value_length=None)
    return spec, dataclasses.replace(size, B=rows, T=queries, S=keys)
