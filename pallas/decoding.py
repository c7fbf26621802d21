"""Attention on a key-value cache in Pallas, by the Triton lowering on NVIDIA GPUs from Ampere on.

What is appended, and rotated, is so in plain JAX: XLA writes it to the cache in place. The kernels then read
the cache as it lies, pages and layers too.
"""

import jax
import jax.numpy as jnp

from jax_flash import _cache_rows, _device, _float8, _rotary
from jax_flash._cache_spec import CacheOperands, CacheSpec, cache_sizes
from jax_flash._device import Device
from jax_flash.transforms.varying import vary_alike

from . import compat, limits, lowering
from .triton import decode_tiles, functions


def supports(spec: CacheSpec, shapes: CacheOperands, device: Device) -> str | None:
    """The reason why this implementation can't run such a call on `device`, or None.

    Raises ImportError where it could if the installed JAX had the Triton lowering of Pallas.
    """
    why_not = limits.device_reason(device) or _float8_reason(shapes, device) or _call_reason(shapes)
    if why_not is None and spec.attention.score_mod is not None:
        why_not = functions.score_mod_limit(spec.attention.score_mod, deterministic=False)
    if why_not is not None:
        return why_not
    if not lowering.allowed(lowering.TRITON):
        return f"only {lowering.MOSAIC} is allowed, which has no kernels for key-value caches"
    if not compat.interpreting():
        compat.require_triton()
    return None


def _float8_reason(shapes: CacheOperands, device: Device) -> str | None:
    if not _float8.is_float8(shapes.key.dtype) or compat.interpreting():
        return None
    assert device.compute_capability is not None
    if device.compute_capability < (8, 9):
        major, minor = device.compute_capability
        return (
            "key's dtype is float8_e4m3fn, which needs compute capability 8.9 (Ada) or newer, and "
            f"{device.kind} has {major}.{minor}"
        )
    return None


def _call_reason(shapes: CacheOperands) -> str | None:
    n = cache_sizes(shapes)
    arrays = [x for x in (shapes.query, shapes.key, shapes.value) if x is not None]
    if _float8.is_float8(shapes.key.dtype):
        arrays = [shapes.query]
    if why_not := limits.operand_reason(arrays, (n.H, n.V), (n.T, n.S)):
        return why_not
    if shapes.query_offsets is not None and n.B > decode_tiles.MOST_SEQUENCES:
        return f"packed queries must be of at most {decode_tiles.MOST_SEQUENCES} sequences, not {n.B}"
    return None


def describe(spec: CacheSpec, shapes: CacheOperands, device: Device) -> str:
    """The kernels that would run, and how they cut the call."""
    return f"Triton decoding ({decode_tiles.choose(spec, shapes, device)})"


def forward(
    spec: CacheSpec, operands: CacheOperands
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Append, then attention.

    Returns:
      out in query's dtype, as the query with V columns; lse `(B, N, T)` in float32, `(1, N, T)` of packed
      queries; and the cache's key and value after the append.
    """
    from .triton import decode

    operands = _cache_rows.of_layer(vary_alike(operands))
    key, value = _cache_rows.append(spec, operands)
    operands = operands.replace(key=key, value=value, query=_rotated_query(spec, operands))
    out, lse = decode.forward(spec, operands, decode_tiles.choose(spec, operands, _device.current()))
    return out, lse, key, value


def _rotated_query(spec: CacheSpec, operands: CacheOperands) -> jax.Array:
    if operands.rotary_cos is None:
        return operands.query
    tables = operands.rotary_cos, operands.rotary_sin
    return _rotary.rotated(operands.query, *tables, _query_positions(spec, operands), spec.rotary_interleaved)


def _query_positions(spec: CacheSpec, operands: CacheOperands) -> jax.Array:
    """Where queries are rotated, `(B, T)`, or `(1, T)` of packed ones."""
    n = cache_sizes(operands)
    before, after = operands.lengths[:, None], _cache_rows.lengths_after(operands)[:, None]
    query, count = jnp.arange(n.T, dtype=jnp.int32)[None], n.T
    if operands.query_offsets is not None:
        starts, ends = operands.query_offsets[:-1], operands.query_offsets[1:]
        sequence = jnp.searchsorted(ends, query, side="right")
        starts, ends, before, after = (
            jnp.take(x.reshape(-1), sequence, mode="clip") for x in (starts, ends, before, after)
        )
        query, count = query - starts, ends - starts
    if spec.query_positions == "own":
        return after - count + query
    return before + query if spec.query_positions == "appended" else before
