"""Attention on key-value caches by CUDA kernels: which calls they take, and how they run."""

import jax

from jax_flash._cache_spec import CacheOperands, CacheSpec, cache_sizes
from jax_flash._device import Device, current
from jax_flash._spec import shapes_of
from jax_flash.cuda import call, compile
from jax_flash.cuda.sm90 import COMPUTE_CAPABILITIES, MAX_HEAD_DIM, decode_plan
from jax_flash.cuda.sm90.decode_tiles import choose_tile

_DTYPES = ("bfloat16", "float16")
_LIMIT = 2**29  # positions and sides of the window add up in 32 bits
_TENSOR_MAP_LIMIT = 2**40  # bytes from one layer of a cache to the next

Shapes = CacheOperands[jax.ShapeDtypeStruct]


def supports(spec: CacheSpec, shapes: Shapes, device: Device) -> str | None:
    """Why these kernels can't run the call on `device`, or None.

    Raises NvrtcNotFoundError, an ImportError, where they could if NVRTC were installed.
    """
    if device.platform != "cuda":
        return f"it needs a CUDA GPU, and JAX's default device is {device.kind} ({device.platform})"
    if device.compute_capability not in COMPUTE_CAPABILITIES:
        return (
            f"it needs a Hopper GPU (compute capability 9.0), not {device.kind} {device.compute_capability}"
        )
    limit = _unsupported(shapes)
    if limit is None:
        compile.nvrtc_version()
    return limit


def _unsupported(shapes: Shapes) -> str | None:
    n, dtype = cache_sizes(shapes), shapes.query.dtype.name
    if dtype not in _DTYPES:
        return f"query's dtype is {dtype}; it may be {' or '.join(_DTYPES)}"
    for operand in ("key", "value", "new_key", "new_value"):
        array = getattr(shapes, operand)
        if array is not None and array.dtype.name != dtype:
            return f"{operand}'s dtype is {array.dtype.name}; it must be query's, {dtype}"
    for operand, head_dim in (("key", n.H), ("value", n.V)):
        if head_dim > MAX_HEAD_DIM or head_dim % 8:
            return f"{operand}'s head dim is {head_dim}; it may be a multiple of 8 up to {MAX_HEAD_DIM}"
    if min(n.B, n.T, n.S, n.N, n.K, n.H, n.V, *shapes.key.shape) == 0:
        return "the call has an empty array"
    if max(n.B * n.T, n.S, n.B * n.N, n.T * n.group) >= _LIMIT:
        return f"queries, keys and heads are limited to {_LIMIT}"
    if shapes.key.size * shapes.key.dtype.itemsize >= _TENSOR_MAP_LIMIT:
        return f"a cache of {shapes.key.size} elements is larger than any GPU's memory"
    return None


def describe(spec: CacheSpec, shapes: Shapes, device: Device) -> str:
    """The kernels' names and tile shapes for a call that `supports` accepts."""
    del spec, device
    n = cache_sizes(shapes)
    tile = choose_tile(n)
    loaded = "by TMA" if tile.box else "row by row"
    pages = "" if n.page is None else f", pages of {n.page} keys loaded {loaded}"
    dims = f"head dim {n.H}" if n.H == n.V else f"head dims {n.H} of keys and {n.V} of values"
    return (
        f"sm_90 decode kernel for {dims}: tiles of 64 rows (queries × {n.group} heads) × {tile.keys} keys, "
        f"{tile.stages} stages{pages}"
    )


def forward(
    spec: CacheSpec, operands: CacheOperands
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Append, then attention.

    Returns:
      out, as the query but with V columns; `lse (B, N, T)` float32, `(1, N, T)` of packed queries; and the
      cache's key and value after the append. They have their operands' memory, and XLA copies a cache
      before the call only if it is still needed as it was.
    """
    plan = decode_plan.plan_decode(spec, shapes_of(operands), current())
    arrays = operands.present()
    results = call.call("jax_flash_decode", plan, *(arrays[buffer.name] for buffer in plan.operands))
    named = {buffer.name: result for buffer, result in zip(plan.results, results, strict=True)}
    if operands.new_key is None:
        return named["out"], named["lse"], operands.key, operands.value
    return named["out"], named["lse"], named["key_after"], named.get("value_after")
