"""Attention on key-value caches by CUDA kernels: which calls they take, and how they run."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_flash import _cache_rows, cuda
from jax_flash._cache_spec import CacheOperands, CacheSpec, cache_sizes
from jax_flash._device import Device, current
from jax_flash._spec import captured_name, shapes_of
from jax_flash.cuda import call
from jax_flash.functions.chunks import on_chunks

Shapes = CacheOperands[jax.ShapeDtypeStruct]


def supports(spec: CacheSpec, shapes: Shapes, device: Device) -> str | None:
    """Why these kernels can't run the call on `device`, or None.

    Raises NvrtcNotFoundError, an ImportError, where they could if NVRTC were installed.
    """
    limit = cuda.device_limit(device) or cuda.family(device).unsupported_decode(spec, shapes)
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
    device = current()
    family = cuda.family(device)
    if spec.attention.score_mod is not None:
        keys_of_block = family.keys_of_block(spec, shapes_of(operands), device)
        if keys_of_block is not None:
            spec, operands = from_positions(spec, operands, keys_of_block)
    plan = family.plan_decode(spec, shapes_of(operands), device)
    arrays = operands.present()
    results = call.call("jax_flash_decode", plan, *(arrays[buffer.name] for buffer in plan.operands))
    named = {buffer.name: result for buffer, result in zip(plan.results, results, strict=True)}
    if operands.new_key is None:
        return named["out"], named["lse"], operands.key, operands.value
    return named["out"], named["lse"], named["key_after"], named.get("value_after")


def from_positions(
    spec: CacheSpec, operands: CacheOperands, keys_of_block: int
) -> tuple[CacheSpec, CacheOperands]:
    """The same call with a score_mod of the forward kernel's indices, in place of one of positions.

    That kernel counts queries from 0. It counts keys of pages from 0, too, and others so that the last block
    ends with the sequence's last key (cuda/kernels/sm90/prefill/preprocess.cu). One more captured array,
    `(B, 2)`, has what is added to both. The decode kernel takes positions.
    """
    function, lengths = spec.attention.score_mod, _cache_rows.lengths_after(operands)
    assert function is not None
    if operands.page_table is None:
        first_key = lengths - -(-lengths // keys_of_block) * keys_of_block
    else:
        first_key = jnp.zeros_like(lengths)
    starts = jnp.stack([lengths - cache_sizes(operands).T, first_key], axis=1).astype(jnp.int32)
    name = captured_name("score_mod", len(function.shapes))
    operands = operands.replace(captured={**operands.captured, name: starts})
    attention = dataclasses.replace(spec.attention, score_mod=on_chunks(function, stride=1))
    return dataclasses.replace(spec, attention=attention), operands
