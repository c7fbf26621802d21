"""Products on the tensor cores that are issued in one place and waited for in another.

`issue_product`, `issue_accumulate` and `issue_share` return the registers that will hold a product. They hold
its value only after `wait_product`. A product by Pallas ends with the scope of its accumulator instead.

A product by Pallas also adds to its registers, so they are set to zero first: 64 x 128 of them by 32
instructions of each thread, while the tensor cores wait. A product issued here without a total overwrites its
registers.

In Pallas' interpreter each function is its definition.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from .. import compat
from .registers import ACCUMULATOR, element

_SLICE_BYTES = 32  # of what is summed over, by one instruction
_ATOM_ROWS = 8  # rows that lie together, a swizzle's width of each, in memory that wgmma reads


def issue_product(a: Any, b: Any) -> jax.Array:
    """Issues `a @ b.T`, both `(rows, width)` in `compat.tiled_shared_memory`."""
    if compat.interpreting():
        return _dot(a[...], b[...].T)

    @plgpu.inline_mgpu(arg_types=(_tiled(a), _tiled(b)), return_type=_accumulator(a.shape[0], b.shape[0]))
    def issue(_, a, b) -> Any:
        shape = _Tiles.of(a).rows, _Tiles.of(b).rows
        pair = _Tiles.of(a).summed_over_columns(a), _Tiles.of(b).summed_over_columns(b)
        return _issue(shape, ir.MemRefType(a.type).element_type, [pair])

    return issue(a, b)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """A product in the interpreter. Few devices have one of e4m3 numbers, which bfloat16 holds exactly."""
    a, b = (x.astype(jnp.bfloat16) if x.dtype == jnp.float8_e4m3fn else x for x in (a, b))
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def issue_accumulate(total: jax.Array, a: jax.Array, b: Any) -> jax.Array:
    """Issues `total + a @ b`, `a` in registers and `b` in `compat.tiled_shared_memory`."""
    if compat.interpreting():
        return total + jnp.dot(a, b[...], preferred_element_type=jnp.float32)

    @plgpu.inline_mgpu(
        arg_types=(ACCUMULATOR, ACCUMULATOR, _tiled(b)), return_type=_accumulator(*total.shape)
    )
    def issue(_, total, a, b) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        # Of 16 columns a thread has four pairs, in the order in which its registers are named here.
        pairs = _Operand([utils.bitcast(pair, i32) for pair in a.registers.flat])
        return _issue(total.shape, a.mlir_dtype, [(pairs, _Tiles.of(b).summed_over_rows(b))], total)

    return issue(total, a, b)


_OF_WORD = 4  # e4m3 numbers


def as_operand(x: jax.Array) -> jax.Array:
    """`x (rows, columns)` rounded to e4m3, as `issue_operand_product` takes it: `(rows, columns / 4)` words.

    Of each 16 columns, thread t of a group of four has 2t, 2t + 1, 2t + 8 and 2t + 9 of an accumulator. Of an
    e4m3 operand it would have 4t to 4t + 3. It passes its own columns as these, so that none are exchanged.
    """
    if compat.interpreting():
        return in_operand_order(x).astype(jnp.float8_e4m3fn)
    words = plgpu.ShapeDtypeStruct((x.shape[0], x.shape[1] // _OF_WORD), jnp.int32, layout=ACCUMULATOR)

    @plgpu.inline_mgpu(arg_types=(ACCUMULATOR,), return_type=words)
    def pack(_, x) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        # By 16 columns: the two pairs of each of both rows.
        pairs = x.registers.reshape(x.shape[1] // 16, 2, 2).swapaxes(1, 2).reshape(-1, 2)
        operands = [
            llvm.inline_asm(i32, [element(pair, i) for pair in both for i in range(2)], *_TO_WORD)
            for both in pairs
        ]
        pair_of_words = ir.VectorType.get((2,), i32)
        registers = np.empty(len(operands) // 2, dtype=object)
        registers[:] = [
            vector.from_elements(pair_of_words, operands[i : i + 2]) for i in range(0, len(operands), 2)
        ]
        layout = mgpu.WGMMA_LAYOUT
        return mgpu.FragmentedArray(
            _registers=registers.reshape(layout.registers_shape(words.shape)),
            _layout=layout,
            _is_signed=True,
        )

    return pack(x)


# The instruction that rounds has the higher of two numbers first.
_TO_WORD = (
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
    "=r,f,f,f,f",
)


def in_operand_order(x: jax.Array) -> jax.Array:
    """The columns of `x (…, columns)`, of each 16, in the order in which `as_operand` has them."""
    halves = x.reshape(*x.shape[:-1], -1, 2, 4, 2)
    return halves.swapaxes(-3, -2).reshape(x.shape)


def issue_operand_product(a: jax.Array, b: Any, rows: slice) -> jax.Array:
    """Issues `a @ b[rows].T`.

    Args:
      a: of `as_operand`.
      b: e4m3 numbers `(rows, columns)` in `compat.tiled_shared_memory`, columns in the order of `as_operand`.
    """
    if compat.interpreting():
        return _dot(a, b[rows].T)
    part = b.at[pl.ds(rows.start, rows.stop - rows.start)]

    @plgpu.inline_mgpu(
        arg_types=(ACCUMULATOR, _tiled(b)), return_type=_accumulator(a.shape[0], part.shape[0])
    )
    def issue(_, a, b) -> Any:
        words = _Operand([element(pair, i) for pair in a.registers.flat for i in range(2)])
        tiles = _Tiles.of(b)
        shape = a.shape[0], tiles.rows
        return _issue(shape, ir.MemRefType(b.type).element_type, [(words, tiles.summed_over_columns(b))])

    return issue(a, part)


def issue_share(a: Sequence[Any], b: Sequence[Any]) -> jax.Array:
    """Issues this warpgroup's columns of the sum of `a.T @ b` over pairs, one pair for each warpgroup.

    All are `(rows, columns)` in `compat.tiled_shared_memory`. Warpgroups have equal shares of the columns of
    `b`, in whole tiles.
    """
    width = b[0].shape[-1] // len(b)
    if compat.interpreting():
        products = [
            jnp.dot(x[...].T, y[...], preferred_element_type=jnp.float32) for x, y in zip(a, b, strict=True)
        ]
        return lax.dynamic_slice_in_dim(sum(products), lax.axis_index("warpgroup") * width, width, axis=1)

    @plgpu.inline_mgpu(
        arg_types=(tuple(map(_tiled, a)), tuple(map(_tiled, b))),
        return_type=_accumulator(a[0].shape[-1], width),
    )
    def issue(_, a, b) -> Any:
        tiles = _Tiles.of(b[0])
        i64 = ir.IntegerType.get_signless(64)
        share_bytes = tiles.tiles // len(b) * tiles.atom
        share = arith.muli(arith.extui(i64, mgpu.warpgroup_idx()), _long(share_bytes >> 4))
        pairs = []
        for x, y in zip(a, b, strict=True):
            columns = _Tiles.of(y).summed_over_rows(y)
            columns = columns._replace(inputs=[arith.addi(columns.inputs[0], share)])
            pairs.append((_Tiles.of(x).summed_over_rows(x), columns))
        shape = _Tiles.of(a[0]).columns, width
        return _issue(shape, ir.MemRefType(a[0].type).element_type, pairs)

    return issue(tuple(a), tuple(b))


def wait_product(product: jax.Array, in_flight: int) -> jax.Array:
    """Waits until at most `in_flight` of the products issued since are under way; returns its value."""
    if compat.interpreting():
        return product

    @plgpu.inline_mgpu(arg_types=(ACCUMULATOR,), return_type=_accumulator(*product.shape))
    def wait(_, product) -> Any:
        nvvm.wgmma_wait_group_sync_aligned(in_flight)
        return mgpu.optimization_barrier(product)

    return wait(product)


def _tiled(ref: Any) -> Any:
    return plgpu.RefType(compat.tiles_of(ref.shape[-1], ref.dtype))


def _accumulator(rows: int, columns: int) -> Any:
    return plgpu.ShapeDtypeStruct((rows, columns), jnp.float32, layout=ACCUMULATOR)


class _Operand(NamedTuple):
    """One side of a product, of which an instruction reads one slice."""

    inputs: list[ir.Value]  # registers, four for each slice; or one descriptor of memory
    offsets: list[int] | None = None  # of each slice in that memory, in bytes
    summed_over_rows: bool = False


class _Tiles(NamedTuple):
    """Tiled shared memory: whole rows of tiles, one after the other."""

    rows: int
    tiles: int  # side by side
    tile_columns: int
    itemsize: int

    @classmethod
    def of(cls, ref: ir.Value) -> "_Tiles":
        of = ir.MemRefType(ref.type)
        row_tiles, tiles, _, tile_columns = of.shape
        return cls(_ATOM_ROWS * row_tiles, tiles, tile_columns, utils.bitwidth(of.element_type) // 8)

    @property
    def columns(self) -> int:
        return self.tiles * self.tile_columns

    @property
    def swizzle(self) -> int:
        return self.itemsize * self.tile_columns

    @property
    def atom(self) -> int:
        return _ATOM_ROWS * self.swizzle

    def summed_over_columns(self, ref: ir.Value) -> _Operand:
        slices = range(self.swizzle // _SLICE_BYTES)
        offsets = [tile * self.atom + _SLICE_BYTES * i for tile in range(self.tiles) for i in slices]
        return _Operand([self._descriptor(ref, leading=0)], offsets)

    def summed_over_rows(self, ref: ir.Value) -> _Operand:
        rows_of_slice = _SLICE_BYTES // self.itemsize
        slice_bytes = rows_of_slice // _ATOM_ROWS * self.tiles * self.atom
        offsets = [i * slice_bytes for i in range(self.rows // rows_of_slice)]
        return _Operand([self._descriptor(ref, leading=self.atom)], offsets, summed_over_rows=True)

    def _descriptor(self, ref: ir.Value, leading: int) -> ir.Value:
        """The descriptor of the memory, for wgmma (PTX, "Matrix descriptor").

        Args:
          leading: bytes from a tile to the one beside it, where columns are not summed over.
        """
        address = llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))
        place = arith.shrui(arith.andi(address, _long(0x3FFFF)), _long(4))
        mode, from_row_to_row = {128: 1, 64: 2, 32: 3}[self.swizzle], self.tiles * self.atom
        upper = arith.shli(_long(mode << 30 | from_row_to_row >> 4), _long(32))
        return arith.ori(arith.ori(place, _long(leading >> 4 << 16)), upper)


def _issue(
    shape: tuple[int, ...],
    dtype: ir.Type,
    pairs: Sequence[tuple[_Operand, _Operand]],
    total: mgpu.FragmentedArray | None = None,
) -> mgpu.FragmentedArray:
    """Issues the sum of the pairs' products, added to `total` if given. The registers that are returned hold
    it after the wait."""
    count = shape[1] // 2  # registers of a thread
    onto = [] if total is None else [element(pair, i) for pair in total.registers.flat for i in range(2)]
    inputs, constraints = list(onto), ["=f"] * count + [str(i) for i in range(len(onto))]
    is_float8 = str(dtype) == "f8E4M3FN"
    kind, slice_columns = ("e4m3", 32) if is_float8 else (dtype, 16)
    instruction = f"wgmma.mma_async.sync.aligned.m64n{shape[1]}k{slice_columns}.f32.{kind}.{kind}"
    lines = ["{ .reg .pred overwrite, add; .reg .b64 a, b;"]
    lines += ["setp.ne.b32 overwrite, 0, 0; setp.ne.b32 add, 1, 0; wgmma.fence.sync.aligned;"]
    scale = "overwrite" if total is None else "add"
    for a, b in pairs:
        first_a = count + len(inputs)
        first_b = first_a + len(a.inputs)
        inputs += [*a.inputs, *b.inputs]
        constraints += ["r" if a.offsets is None else "l"] * len(a.inputs) + ["l"]
        assert b.offsets is not None
        for i, offset in enumerate(b.offsets):
            lines += [f"add.s64 b, ${first_b}, {offset >> 4};"]
            if a.offsets is None:
                rows, of_rows = _braced(range(first_a + 4 * i, first_a + 4 * i + 4)), []
            else:
                lines += [f"add.s64 a, ${first_a}, {a.offsets[i] >> 4};"]
                rows, of_rows = "a", [str(int(a.summed_over_rows))]
            # e4m3 operands are summed over columns only, so the instruction doesn't say which.
            transposed = [] if is_float8 else [*of_rows, str(int(b.summed_over_rows))]
            modes = ", ".join([scale, "1", "1", *transposed])
            lines += [f"{instruction} {_braced(range(count))}, {rows}, b, {modes};"]
            scale = "add"
    lines += ["wgmma.commit_group.sync.aligned; }"]
    f32 = ir.F32Type.get()
    results = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * count),
        inputs,
        "\n".join(lines),
        ",".join(constraints),
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


def _braced(numbers: Iterable[int]) -> str:
    return "{" + ",".join(f"${i}" for i in numbers) + "}"


def _long(value: int) -> ir.Value:
    i64 = ir.IntegerType.get_signless(64)
    return arith.constant(i64, ir.IntegerAttr.get(i64, value))
