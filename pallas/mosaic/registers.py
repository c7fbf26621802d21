"""What a Mosaic GPU kernel does with the registers of an accumulator, below what Pallas' arrays can say.

A thread holds rows r and r + 8 of an accumulator's 64, and of each 8 columns two, from 2 (thread % 4) on, as
`registers[0, column // 8, 0, 0, half of the rows, ...]` of a `FragmentedArray`, by pairs of columns. A vector
over the rows lies as an accumulator whose columns were reduced. In Pallas' interpreter each function is its
definition.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, scf, vector

from .. import compat

ACCUMULATOR = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)
FOLDED = 8  # columns of the narrowest accumulator, of which each thread has two


def folded(op: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`op` over the columns that a thread holds, as a tree: `(rows, columns)` to `(rows, FOLDED)`.

    To reduce the rest takes exchanges between threads, which can wait for the end of a sum over many blocks.
    """
    parts = [x[:, i : i + FOLDED] for i in range(0, x.shape[1], FOLDED)]
    while len(parts) > 1:
        pairs = [op(*pair) for pair in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


def scaled_unless_one(x: jax.Array, factors: jax.Array) -> jax.Array:
    """Rows of an accumulator times `factors`. A warp whose factors are all 1 skips the multiplication."""
    if compat.interpreting():
        return x * factors[:, None]

    @plgpu.inline_mgpu(
        arg_types=(ACCUMULATOR, ROW), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, ACCUMULATOR)
    )
    def scale(_, x, factors) -> Any:
        one = _float(1.0)
        differs = [
            arith.cmpf(arith.CmpFPredicate.UNE, _scalar(factor), one) for factor in factors.registers.flat
        ]
        warp, boolean = integer(-1), ir.IntegerType.get_signless(1)
        some = nvvm.vote_sync(warp, arith.ori(*differs), nvvm.VoteSyncKind.any, results=[boolean])
        registers = list(x.registers.flat)
        branch = scf.IfOp(some, [register.type for register in registers], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scaled = x * factors.broadcast_in_dim(x.shape, [0], x.layout)
            scf.YieldOp(list(scaled.registers.flat))
        with ir.InsertionPoint(branch.else_block):
            scf.YieldOp(registers)
        return like(x, list(branch.results))

    return scale(x, factors)


def store(target: Any, values: jax.Array) -> None:
    """Writes an accumulator to global memory, as a warp has it: 32 bytes of each of 8 rows at a time."""
    if compat.interpreting():
        target[...] = values
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACCUMULATOR))
    def write(_, target, values) -> None:
        values.store_untiled(target, optimized=False)

    write(target, values)


def where_between(
    x: jax.Array, first: jax.Array | None, end: jax.Array | None, otherwise: float
) -> jax.Array:
    """An accumulator's elements in columns `[first, end)` of each row, `otherwise` elsewhere. None: no bound.

    What a thread's columns have in common is taken from the bounds, so that they are compared with constants:
    an array of columns would cost an addition each, and registers to keep them in.
    """
    bounds = [bound for bound in (first, end) if bound is not None]
    if compat.interpreting():
        columns = jnp.arange(x.shape[1])
        for bound, tested in ((first, jnp.greater_equal), (end, jnp.less)):
            x = x if bound is None else jnp.where(tested(columns, bound[:, None]), x, otherwise)
        return x
    bounds = [plgpu.layout_cast(bound, ROW) for bound in bounds]  # may be the same for all rows
    tests = [arith.CmpIPredicate.sge] * (first is not None) + [arith.CmpIPredicate.slt] * (end is not None)

    @plgpu.inline_mgpu(
        arg_types=(ACCUMULATOR, *(ROW for _ in bounds)),
        return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, ACCUMULATOR),
    )
    def select(_, x, *bounds) -> Any:
        of_thread = arith.muli(arith.remui(mgpu.thread_idx(), integer(4)), integer(2))
        of_halves = [
            [arith.subi(_scalar(row), of_thread) for row in bound.registers.flat] for bound in bounds
        ]
        other = _float(otherwise)

        def selected(value, column: int, half: int):
            for test, of_half in zip(tests, of_halves, strict=True):
                value = arith.select(arith.cmpi(test, integer(column), of_half[half]), value, other)
            return value

        registers = []
        for place, pair in np.ndenumerate(x.registers):
            chunk, half = place[1], place[4]
            for i in range(2):
                value = selected(element(pair, i), FOLDED * chunk + i, half)
                pair = vector.insert(value, pair, dynamic_position=[], static_position=[i])
            registers.append(pair)
        return like(x, registers)

    return select(x, *bounds)


def like(x: mgpu.FragmentedArray, registers: list[ir.Value]) -> mgpu.FragmentedArray:
    """An array in the layout of `x`, from its registers."""
    array = np.empty(len(registers), dtype=object)
    array[:] = registers
    return mgpu.FragmentedArray(
        _registers=array.reshape(x.registers.shape), _layout=x.layout, _is_signed=None
    )


def element(register: ir.Value, i: int) -> ir.Value:
    return vector.extract(register, dynamic_position=[], static_position=[i])


def _scalar(register: ir.Value) -> Any:
    return element(register, 0) if isinstance(register.type, ir.VectorType) else register


def integer(value: int) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def _float(value: float) -> ir.Value:
    f32 = ir.F32Type.get()
    return arith.constant(f32, ir.FloatAttr.get(f32, value))
