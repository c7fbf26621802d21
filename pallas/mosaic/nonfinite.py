"""How Mosaic GPU kernels keep NaN and infinities from what doesn't depend on them.

The plan is that of `triton/nonfinite.py`: a kernel marks its rows whose results aren't all finite, and a
second kernel computes the tiles with such rows once more, blocks in the same order and with the same
arithmetic. It ends at once where there are none. What is finite keeps its first result.

The consumers of the second kernel are those of the first. Its loading warpgroup changes what they read: after
a block is copied to shared memory, and before the consumers are signalled, if not all rows of the tile see
all of the block. In place of numbers that aren't finite it writes zeros, so that hidden pairs add nothing.
Visible pairs have to be NaN nevertheless, so it writes NaN into something else of the same query or key, from
which scores or their gradients are computed. In hidden pairs these are set to 0 by a select.

| kernel | made finite | NaN for the same query or key |
|---|---|---|
| forward | V | K |
| dQ | K | V |
| dK, dV | Q, dO | lse |

That NaN is in all columns of a result, also of one that sees NaN in one column alone. Where nothing hidden
had spoiled the others, they are finite in the first kernel, and so stay.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf

from jax_flash import _isolation
from jax_flash._mask import BlockRange, PositionMask

from .. import compat
from .mask_data import MaskData
from .registers import ACCUMULATOR, ROW, element, folded, integer
from .tile_scheduler import TileScheduler
from .tiles import ROWS

Carry = TypeVar("Carry")

MARKED_ROWS = 16
"""The rows of a mark: a warp's, of an accumulator."""

_WARP = 32
_CHUNK = 64  # columns that are made finite at a time, as the loading warpgroup has few registers


def isolates(mask: PositionMask, data: MaskData) -> bool:
    """Whether queries and keys that don't see each other are kept apart if they aren't finite."""
    return _isolation.KERNELS and (data.is_given or not mask.unbounded)


def marks_of(batch: int, heads: int, rows: int, like: jax.Array) -> jax.ShapeDtypeStruct:
    """Marks of results with `rows` in whole tiles: a byte each, not 0 where something isn't finite."""
    return compat.result((batch, heads, rows // MARKED_ROWS), jnp.int8, like=like)


def marks_of_rows(x: jax.Array, tile_rows: int) -> jax.Array:
    """The marks of an array `(B, rows, heads, width)`, for a kernel with tiles of `tile_rows`."""
    spoiled = jnp.logical_not(jnp.max(jnp.abs(x), axis=3) < jnp.inf).swapaxes(1, 2)
    spoiled = jnp.pad(spoiled, ((0, 0), (0, 0), (0, -spoiled.shape[2] % tile_rows)))
    return spoiled.reshape(*spoiled.shape[:2], -1, MARKED_ROWS).any(3).astype(jnp.int8)


def mark(marks: Any, results: Iterable[jax.Array]) -> None:
    """Marks a warpgroup's rows, of accumulators of `ROWS`."""
    highest = [folded(jnp.maximum, jnp.abs(x)) for x in results]
    top = jnp.maximum(*highest) if len(highest) == 2 else highest[0]
    if compat.interpreting():
        spoiled = jnp.logical_not(top < jnp.inf).reshape(ROWS // MARKED_ROWS, -1)
        marks[...] = spoiled.any(1).astype(jnp.int8)
        return

    @plgpu.inline_mgpu(arg_types=(ACCUMULATOR, plgpu.RefType()))
    def store(_, top, marks) -> None:
        infinity = arith.constant(ir.F32Type.get(), ir.FloatAttr.get_f32(np.inf))
        spoiled = [
            arith.cmpf(arith.CmpFPredicate.UGE, element(pair, i), infinity)  # so of NaN
            for pair in top.registers.flat
            for i in range(2)
        ]
        some = spoiled[0]
        for one in spoiled[1:]:
            some = arith.ori(some, one)
        boolean = ir.IntegerType.get_signless(1)
        some = nvvm.vote_sync(integer(-1), some, nvvm.VoteSyncKind.any, results=[boolean])
        thread = mgpu.thread_idx()
        warp = arith.remui(arith.divui(thread, integer(_WARP)), integer(ROWS // MARKED_ROWS))
        is_first = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(thread, integer(_WARP)), integer(0))
        branch = scf.IfOp(is_first)
        with ir.InsertionPoint(branch.then_block):
            llvm.store(arith.extui(ir.IntegerType.get_signless(8), some), _address(marks, warp))
            scf.YieldOp([])

    store(top, marks)


def some_marked(marks: Any, warpgroups: int | None = None) -> jax.Array:
    """Whether one of the marks is set, in each thread.

    Args:
      marks: a ref whose bytes lie one behind the other, a multiple of 4.
      warpgroups: all those of the block of the grid, where they share the work.
    """
    if compat.interpreting():
        return jnp.any(marks[...] != 0)
    count = math.prod(marks.shape) // 4
    words = next(words for words in (4, 2, 1) if count % words == 0)  # of one load

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def read(_, marks) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        loads, threads = count // words, 1 if warpgroups is None else 128 * warpgroups
        first = integer(0) if warpgroups is None else mgpu.thread_idx()
        loop = scf.ForOp(integer(0), integer(pl.cdiv(loads, threads)), integer(1), [integer(0)])
        with ir.InsertionPoint(loop.body):
            # The last ones are read again where threads outnumber what is left.
            index = arith.addi(first, arith.muli(loop.induction_variable, integer(threads)))
            index = arith.minui(index, integer(loads - 1))
            address = _address(marks, arith.muli(index, integer(4 * words)))
            loaded = llvm.load(ir.VectorType.get((words,), i32), address, alignment=4 * words)
            found = loop.inner_iter_args[0]
            for i in range(words):
                found = arith.ori(found, element(loaded, i))
            scf.YieldOp([found])
        found = loop.results[0]
        if warpgroups is not None:
            lines = "{ .reg .pred own, some; setp.ne.u32 own, $1, 0;"
            lines += " bar.red.or.pred some, 0, own; selp.u32 $0, 1, 0, some; }"
            found = llvm.inline_asm(i32, [found], lines, "=r,r", asm_dialect=0, has_side_effects=True)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return read(marks) != 0


@dataclasses.dataclass(frozen=True)
class SpoiledTiles:
    """The tiles that a second kernel computes again: those with marks."""

    marks: Any
    scheduler: TileScheduler
    tile_rows: int
    first_full: Any  # barriers: a warpgroup's results of the first kernel are in shared memory

    def over(self, body: Callable[..., Carry], carry: Carry) -> Carry:
        """`scheduler.over` these tiles."""
        count = self.tile_rows // MARKED_ROWS

        def step(tile, head, batch, carry):
            own = self.marks.at[batch, head, pl.ds(tile * count, count)]
            compute = lambda carry: body(tile, head, batch, carry)  # noqa: E731
            return lax.cond(some_marked(own), compute, lambda carry: carry, carry)

        return self.scheduler.over(step, carry)

    def unless_finite(self, first: Any, staged: Any, warpgroup: jax.Array, again: jax.Array) -> jax.Array:
        """Results of the first kernel where they are finite, those of the second elsewhere.

        Args:
          first: the results of the first kernel, in global memory.
          staged: shared memory for them, that wgmma reads.
          again: the results of the second, an accumulator.
        """
        full = self.first_full.at[warpgroup]
        plgpu.copy_gmem_to_smem(first, staged, full)
        plgpu.barrier_wait(full)
        return finite_or(compat.load(staged, ACCUMULATOR).astype(jnp.float32), again)


def finite_or(first: jax.Array, again: jax.Array) -> jax.Array:
    """`first` where it is finite, `again` elsewhere."""
    return jnp.where(jnp.abs(first) < jnp.inf, first, again)


def is_partial(blocks: BlockRange, block: jax.Array) -> jax.Array:
    """Whether not all rows of a tile with these blocks see all columns of a block."""
    return (block < blocks.full_begin) | (block >= blocks.full_end)


def make_finite(operands: Iterable[Any], poisoned: Any) -> None:
    """Writes zeros into what isn't finite of the operands, and NaN into `poisoned` for its rows.

    Args:
      operands: refs `(rows, width)` to shared memory that wgmma reads.
      poisoned: another such ref, or one `(rows,)`.
    """
    for first in range(0, poisoned.shape[0], ROWS):
        rows = pl.ds(first, ROWS)
        spoiled = sum(_made_finite(operand, rows) for operand in operands) > 0.0
        if len(poisoned.shape) == 1:
            x = compat.load(poisoned.at[rows], ROW)
            poisoned[rows] = jnp.where(spoiled, jnp.nan, x)
            continue
        for columns in _chunks(poisoned):
            x = compat.load(poisoned.at[rows, columns], ACCUMULATOR).astype(jnp.float32)
            x = jnp.where(lax.broadcast_in_dim(spoiled, x.shape, [0]), jnp.nan, x)
            poisoned[rows, columns] = x.astype(poisoned.dtype)
    plgpu.commit_smem()


def _made_finite(operand: Any, rows: Any) -> jax.Array:
    """How much of each row was not finite: 0 for nothing."""
    count = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
    for columns in _chunks(operand):
        x = compat.load(operand.at[rows, columns], ACCUMULATOR).astype(jnp.float32)
        is_finite = jnp.abs(x) < jnp.inf
        count += jnp.where(is_finite, 0.0, 1.0).sum(axis=1)
        operand[rows, columns] = jnp.where(is_finite, x, 0.0).astype(operand.dtype)
    return count


def _chunks(ref: Any) -> list[Any]:
    """The columns of a ref in parts of whole tiles in shared memory."""
    width = ref.shape[-1]
    chunk = math.gcd(width, _CHUNK)
    return [pl.ds(first, chunk) for first in range(0, width, chunk)]


def _address(ref: ir.Value, offset: ir.Value) -> ir.Value:
    """The address of the byte at an offset."""
    i64, pointer = ir.IntegerType.get_signless(64), utils.memref_ptr(ref)
    address = arith.addi(llvm.ptrtoint(i64, pointer), arith.extui(i64, offset))
    return llvm.inttoptr(pointer.type, address)
