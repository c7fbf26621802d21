"""Attention on key-value caches by CUDA kernels: which calls they take, and how they run."""

import jax

from jax_flash import cuda
from jax_flash._cache_spec import CacheOperands, CacheSpec
from jax_flash._device import Device, current
from jax_flash._spec import shapes_of
from jax_flash.cuda import call

Shapes = CacheOperands[jax.ShapeDtypeStruct]


def supports(spec: CacheSpec, shapes: Shapes, device: Device) -> str | None:
    """Why these kernels can't run the call on `device`, or None.

    Raises NvrtcNotFoundError, an ImportError, where they could if NVRTC were installed.
    """
    limit = cuda.device_limit(device)
    if limit is None and spec.attention.score_mod is not None:
        limit = "its kernels for key-value caches take no score_mod"
    limit = limit or cuda.family(device).unsupported_decode(shapes)
    if limit is None:
        cuda.require_nvrtc()
    return limit


def describe(spec: CacheSpec, shapes: Shapes, device: Device) -> str:
    """The kernels' names and tile shapes for a call that `supports` accepts."""
    return cuda.family(device).describe_decode(spec, shapes, device)


def forward(
    spec: CacheSpec, operands: CacheOperands
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Append, then attention.

    Returns:
      out, as the query but with V columns; `lse (B, N, T)` float32, `(1, N, T)` of packed queries; and the
      cache's key and value after the append. They have their operands' memory, and XLA copies a cache
      before the call only if it is still needed as it was.
    """
    plan = cuda.family(current()).plan_decode(spec, shapes_of(operands), current())
    arrays = operands.present()
    results = call.call("jax_flash_decode", plan, *(arrays[buffer.name] for buffer in plan.operands))
    named = {buffer.name: result for buffer, result in zip(plan.results, results, strict=True)}
    if operands.new_key is None:
        return named["out"], named["lse"], operands.key, operands.value
    return named["out"], named["lse"], named["key_after"], named.get("value_after")
