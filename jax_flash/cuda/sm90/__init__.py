"""The kernels for Hopper (compute capability 9.0): which calls they take, and how a call is launched.

A family of kernels is a package with the names in `__all__`; `jax_flash.cuda.families` lists them.
"""

import math

import jax

from jax_flash._cache_spec import CacheOperands, CacheSpec, cache_sizes
from jax_flash._device import Device
from jax_flash._float8 import DTYPE, is_float8
from jax_flash._quantize_spec import QuantizeOperands, QuantizeSpec
from jax_flash._spec import AttentionSpec, Operands, sizes
from jax_flash.cuda import user_score_mod
from jax_flash.cuda.launch_plan import Kernel, LaunchPlan
from jax_flash.cuda.sm90 import (
    backward_plan,
    decode_division,
    decode_plan,
    decode_tiles,
    forward_plan,
    prefill_plan,
)
from jax_flash.cuda.sm90.arrange_plan import plan_arrange
from jax_flash.cuda.sm90.backward_call import tile_of
from jax_flash.cuda.sm90.backward_plan import backward_block_lists, plan_backward, plan_backward_metadata
from jax_flash.cuda.sm90.forward_plan import forward_block_lists, plan_forward, plan_forward_metadata
from jax_flash.cuda.sm90.quantize_plan import plan_quantize, plan_quantize_rows
from jax_flash.cuda.sm90.tensor_maps import padded_head_dims

__all__ = [
    "COMPUTE_CAPABILITIES",
    "GENERATION",
    "backward_block_lists",
    "describe",
    "describe_decode",
    "forward_block_lists",
    "kernels",
    "keys_of_block",
    "plan_arrange",
    "plan_backward",
    "plan_backward_metadata",
    "plan_decode",
    "plan_forward",
    "plan_forward_metadata",
    "plan_quantize",
    "plan_quantize_rows",
    "unsupported",
    "unsupported_decode",
    "unsupported_quantize",
]

GENERATION = "Hopper"
COMPUTE_CAPABILITIES = ((9, 0),)
MAX_HEAD_DIM = 256
_DTYPES = ("bfloat16", "float16")
_FLOAT8_OPERANDS = ("query", "key", "value")  # of the forward pass, with `quantization="fp8"`
_OUT_DTYPES = (*_DTYPES, "float32")  # for arrays of 8 bits
_LIMIT = 2**29  # sums of rows, keys and window sides must fit 32 bits

_CACHE_ROWS_LIMIT = 2**31  # sequences or pages of all layers: KeyPlace has 32 bits
_CACHE_BYTES_LIMIT = 2**40  # what a tensor map can stride over, from one layer of a cache to the next

Shapes = Operands[jax.ShapeDtypeStruct]
CacheShapes = CacheOperands[jax.ShapeDtypeStruct]


def kernels(spec: AttentionSpec, shapes: Shapes, device: Device) -> list[Kernel]:
    """Every kernel of attention that such calls may run, whatever their lengths and number of heads."""
    return forward_plan.kernels(spec, shapes, device) + backward_plan.kernels(spec, shapes, device)


def unsupported(spec: AttentionSpec, shapes: Shapes) -> str | None:
    """Why these kernels can't run the call, or None."""
    n = sizes(shapes)
    if is_float8(shapes.query.dtype):
        if spec.out_dtype not in _OUT_DTYPES:
            return f"out_dtype is {spec.out_dtype}; it may be {' or '.join(_OUT_DTYPES)}"
    elif shapes.query.dtype.name not in _DTYPES:
        return f"query's dtype is {shapes.query.dtype.name}; it may be {' or '.join(_DTYPES)}"
    for operand, head_dim in (("key", n.H), ("value", n.V)):
        if head_dim > MAX_HEAD_DIM:
            return f"{operand}'s head dim is {head_dim}; it may be up to {MAX_HEAD_DIM}"
    if max(n.T, n.S) >= _LIMIT or n.B * n.N >= _LIMIT:
        return f"query and key sequences and batch times heads are limited to {_LIMIT}"
    if shapes.diagonal is not None and max(abs(spec.left or 0), abs(spec.right or 0)) >= _LIMIT:
        return f"with a diagonal as an operand, a window's sides are limited to {_LIMIT}"
    return None


def describe(spec: AttentionSpec, shapes: Shapes) -> str:
    """The kernels' names and tile shapes for a call that `unsupported` accepts."""
    n = sizes(shapes)
    forward_shapes = shapes
    if spec.quantization is not None:
        e4m3 = {name: jax.ShapeDtypeStruct(getattr(shapes, name).shape, DTYPE) for name in _FLOAT8_OPERANDS}
        forward_shapes = Operands.of(shapes.present() | e4m3)
    tile = forward_plan.configure(spec, forward_shapes).tile
    kernel = "forward in e4m3" if is_float8(forward_shapes.query.dtype) else "forward"
    forward = f"{kernel} {tile.rows} queries × {tile.keys} keys, {tile.stages} stages"
    head_dim, value_dim = padded_head_dims(n)
    dims = f"head dim {head_dim}" if n.H == n.V else f"head dims {head_dim} of keys and {value_dim} of values"
    if is_float8(shapes.query.dtype):
        return f"sm_90 kernel for {dims}: {forward}"
    back = tile_of(spec, shapes)
    backward = f"backward {back.queries} × {back.keys}, {back.stages} stages"
    return f"sm_90 kernels for {dims}: {forward}; {backward}"


def unsupported_decode(spec: CacheSpec, shapes: CacheShapes) -> str | None:
    """Why no kernel for caches can run the call, or None."""
    n, dtype = cache_sizes(shapes), shapes.query.dtype.name
    in_8_bits = is_float8(shapes.key.dtype)
    if dtype not in _DTYPES:
        return f"query's dtype is {dtype}; it may be {' or '.join(_DTYPES)}"
    for operand in ("new_key", "new_value") if in_8_bits else ("key", "value", "new_key", "new_value"):
        array = getattr(shapes, operand)
        if array is not None and array.dtype.name != dtype:
            return f"{operand}'s dtype is {array.dtype.name}; it must be query's, {dtype}"
    multiple, of_dtype = (16, " of a cache in float8_e4m3fn") if in_8_bits else (8, "")
    for operand, head_dim in (("key", n.H), ("value", n.V)):
        if head_dim > MAX_HEAD_DIM or head_dim % multiple:
            return (
                f"{operand}'s head dim is {head_dim}; it may be a multiple of {multiple} up to "
                f"{MAX_HEAD_DIM}{of_dtype}"
            )
    if min(n.B, n.T, n.S, n.N, n.K, n.H, n.V, *shapes.key.shape) == 0:
        return "the call has an empty array"
    if max(n.B * n.T, n.S, n.B * n.N, n.T * n.group) >= _LIMIT:
        return f"queries, keys and heads are limited to {_LIMIT}"
    if decode_division.max_counted_blocks(shapes) >= decode_division.COUNTED_BLOCKS_LIMIT:
        return "its tiles of queries, times the blocks of keys that a sequence has room for, are too many"
    if math.prod(shapes.key.shape[:-3]) >= _CACHE_ROWS_LIMIT:
        return f"the sequences or pages of a cache, times its layers, are limited to {_CACHE_ROWS_LIMIT}"
    if shapes.key.size * shapes.key.dtype.itemsize >= _CACHE_BYTES_LIMIT:
        return f"a cache of {shapes.key.size} elements is larger than any GPU's memory"
    function = spec.attention.score_mod
    return None if function is None else user_score_mod.unsupported(function, 0)


def keys_of_block(spec: CacheSpec, shapes: CacheShapes, device: Device) -> int | None:
    """How many keys a block has of a call on a cache that the forward kernel runs; None for other calls."""
    return prefill_plan.keys_of_block(spec, shapes) if prefill_plan.suits(spec, shapes, device) else None


def plan_decode(spec: CacheSpec, shapes: CacheShapes, device: Device) -> LaunchPlan:
    """How `device` runs a call on a cache: by the forward kernel, or by the decode kernel."""
    if prefill_plan.suits(spec, shapes, device):
        return prefill_plan.plan_prefill(spec, shapes, device)
    return decode_plan.plan_decode(spec, shapes, device)


def describe_decode(spec: CacheSpec, shapes: CacheShapes, device: Device) -> str:
    """The kernel's name and tile shape for a call that `unsupported_decode` accepts."""
    if prefill_plan.suits(spec, shapes, device):
        return prefill_plan.describe(spec, shapes)
    n = cache_sizes(shapes)
    tile = decode_tiles.choose_tile(shapes)
    loaded = "by TMA" if tile.box else "row by row"
    pages = "" if n.page is None else f", pages of {n.page} keys loaded {loaded}"
    dims = f"head dim {n.H}" if n.H == n.V else f"head dims {n.H} of keys and {n.V} of values"
    return (
        f"sm_90 decode kernel for {dims}: tiles of {tile.query_rows} rows (queries × {n.group} heads) × "
        f"{tile.keys} keys, {tile.stages} stages, {tile.ctas_of_sm} CTAs on a multiprocessor{pages}"
    )


def unsupported_quantize(spec: QuantizeSpec, shapes: QuantizeOperands) -> str | None:
    """Why no kernel can round the rows of the call, or None."""
    batch, rows, heads, dim = shapes.rows.shape
    if spec.scales != "block":
        return f'scales are "{spec.scales}"; they may be "block"'
    if shapes.rows.dtype.name not in _DTYPES:
        return f"the dtype is {shapes.rows.dtype.name}; it may be {' or '.join(_DTYPES)}"
    if dim > MAX_HEAD_DIM:
        return f"the head dim is {dim}; it may be up to {MAX_HEAD_DIM}"
    if 0 in shapes.rows.shape:
        return "the array is empty"
    if rows >= _LIMIT or batch * heads >= _LIMIT:
        return f"sequences and batch times heads are limited to {_LIMIT}"
    return None
