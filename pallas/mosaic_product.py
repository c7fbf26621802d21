"""The product of two operands in shared memory, in an accumulator that starts from nothing.

Pallas' own has accumulators start from what is in their registers, and so has them set to zero first: for 64
x 128 by 32 instructions of each thread, while the tensor cores wait for the product. The first of its matrix
instructions can write over whatever the registers hold instead.

In Pallas' interpreter each function is its definition.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from . import compat
from .mosaic_registers import ACCUMULATOR

_SLICE = 16  # of what is summed over, by one instruction
_ATOM_ROWS = 8  # rows that lie together, a swizzle's width of each, in memory that wgmma reads


def issued(a: Any, b: Any) -> jax.Array:
    """Issues `a @ b.T`, both `(rows, width)` in `compat.tiled_shared_memory`; `landed` makes it a value."""
    if compat.interpreting():
        return jnp.dot(a[...], b[...].T, preferred_element_type=jnp.float32)
    transforms = compat.tiles_of(a.shape[-1], a.dtype)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms), plgpu.RefType(transforms)),
        return_type=plgpu.ShapeDtypeStruct((a.shape[0], b.shape[0]), jnp.float32, layout=ACCUMULATOR),
    )
    def issue(_, a, b) -> Any:
        return _issue(a, b)

    return issue(a, b)


def landed(product: jax.Array, in_flight: int) -> jax.Array:
    """A product that was issued, once at most `in_flight` of those issued since are still under way."""
    if compat.interpreting():
        return product

    @plgpu.inline_mgpu(
        arg_types=(ACCUMULATOR,),
        return_type=plgpu.ShapeDtypeStruct(product.shape, product.dtype, layout=ACCUMULATOR),
    )
    def wait(_, product) -> Any:
        nvvm.wgmma_wait_group_sync_aligned(in_flight)
        return mgpu.optimization_barrier(product)

    return wait(product)


def _issue(a: ir.Value, b: ir.Value) -> mgpu.FragmentedArray:
    (_, tiles, _, tile_columns), element = ir.MemRefType(a.type).shape, ir.MemRefType(a.type).element_type
    columns = _ATOM_ROWS * ir.MemRefType(b.type).shape[0]
    shape = _ATOM_ROWS * ir.MemRefType(a.type).shape[0], columns
    count = columns // 2  # registers of a thread
    accumulator = ",".join(f"${i}" for i in range(count))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k{_SLICE}.f32.{element}.{element}"
    atom = _ATOM_ROWS * 2 * tile_columns
    lines = ["{ .reg .pred overwrite, add; .reg .b64 a, b;"]
    lines += ["setp.ne.b32 overwrite, 0, 0; setp.ne.b32 add, 1, 0; wgmma.fence.sync.aligned;"]
    for i in range(tiles * tile_columns // _SLICE):
        tile, slice_of_tile = divmod(i, tile_columns // _SLICE)
        offset = (tile * atom + slice_of_tile * 2 * _SLICE) >> 4
        lines += [f"add.s64 a, ${count}, {offset}; add.s64 b, ${count + 1}, {offset};"]
        scale = "add" if i else "overwrite"
        lines += [f"{instruction} {{{accumulator}}}, a, b, {scale}, 1, 1, 0, 0;"]
    lines += ["wgmma.commit_group.sync.aligned; }"]
    f32 = ir.F32Type.get()
    results = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * count),
        [_descriptor(operand, tiles * atom, 2 * tile_columns) for operand in (a, b)],
        "\n".join(lines),
        ",".join(["=f"] * count + ["l", "l"]),
        asm_dialect=0,
        has_side_effects=True,
    )
    pair = ir.VectorType.get((2,), f32)
    elements = [llvm.extractvalue(f32, results, [i]) for i in range(count)]
    registers = np.empty(count // 2, dtype=object)
    registers[:] = [vector.from_elements(pair, elements[i : i + 2]) for i in range(0, count, 2)]
    layout = mgpu.WGMMA_LAYOUT
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None
    )


def _descriptor(operand: ir.Value, row_stride: int, swizzle: int) -> ir.Value:
    """Of wgmma (PTX, "Matrix descriptor"): whole rows of `swizzle` bytes, the sum over columns."""
    i64 = ir.IntegerType.get_signless(64)

    def constant(value):
        return arith.constant(i64, ir.IntegerAttr.get(i64, value))

    address = llvm.ptrtoint(i64, utils.memref_ptr(operand))
    place = arith.shrui(arith.andi(address, constant(0x3FFFF)), constant(4))
    mode = {128: 1, 64: 2, 32: 3}[swizzle]
    upper = arith.shli(constant(mode << 30 | row_stride >> 4), constant(32))
    return arith.ori(place, upper)
