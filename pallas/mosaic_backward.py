"""Backward by Mosaic GPU, for Hopper: the sums of `triton_backward`, a kernel for dK and dV, and one for dQ.

In both, each computing warpgroup owns 64 rows of a gradient: keys, or queries. Its two operands stay in
shared memory, and a loading warpgroup streams the blocks of columns past them that it meets, in rings as in
`mosaic_forward`. A step issues both products of rows and columns, takes the exponentials of the first beside
the second, and adds to the gradients from registers, to that of values beside what is left to do for that of
keys. Scores of the kernel for dK and dV are held transposed,
so that their rows are keys. Every sum has one owner and a fixed order: gradients are bitwise equal from run
to run.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash._spec import AttentionSpec, Gradients, Operands, Sizes, sizes

from . import compat
from .band import Band, Blocks, keys_of_queries
from .loop import over_blocks
from .mosaic_forward import drain
from .mosaic_registers import ACCUMULATOR
from .mosaic_tiles import ROWS, BackwardConfig
from .mosaic_walk import div, rem
from .scores import LOG2_E

COLUMN = plgpu.Layout.WGMMA.reduce(0)
ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class Side:
    """What one of the two kernels does with rows and columns."""

    size: Sizes
    band: Band  # of rows
    config: BackwardConfig
    rows_are_keys: bool

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.size.S if self.rows_are_keys else self.size.T, ROWS * self.config.warpgroups)

    @property
    def heads(self) -> int:
        """Of the gradient."""
        return self.size.K if self.rows_are_keys else self.size.N

    @property
    def passes(self) -> int:
        """Over the columns: one for each query head that shares the keys."""
        return self.size.group if self.rows_are_keys else 1

    def tile(self):
        """-> first row, head and batch row of this block of the grid."""
        block = lax.axis_index("block")
        tile, others = rem(block, self.tiles), div(block, self.tiles)
        if self.band.high is not None:
            tile = self.tiles - 1 - tile  # the last rows meet the most columns: those first
        return tile * (ROWS * self.config.warpgroups), rem(others, self.heads), div(others, self.heads)

    def column_head(self, head, of_pass):
        return head * self.size.group + of_pass if self.rows_are_keys else div(head, self.size.group)

    def blocks(self, first) -> Blocks:
        """Of columns that the block of the grid meets."""
        return self.band.blocks(first, ROWS * self.config.warpgroups, self.config.columns)

    def blocks_of_warpgroup(self, first, blocks: Blocks) -> Blocks:
        own = self.band.blocks(first, ROWS, self.config.columns)
        if isinstance(own.full_start, int) and isinstance(own.full_stop, int):
            return own
        full_start = jnp.clip(own.full_start, blocks.start, blocks.stop)
        full_stop = jnp.clip(own.full_stop, full_start, blocks.stop)
        return dataclasses.replace(blocks, full_start=full_start, full_stop=full_stop)


class Operand(NamedTuple):
    """The pair of arrays whose products with the other side's are scores and their gradients.

    Keys and values, or queries and the gradient of the output.
    """

    first: Any
    second: Any


class Shared(NamedTuple):
    rows: Operand
    columns: Operand
    lse: Any  # of queries, as rows or columns; in base 2
    delta: Any


class Barriers(NamedTuple):
    """`full` where TMA has filled a place, `free` where its readers are done with it."""

    rows_full: Any
    first_full: Any
    first_free: Any
    second_full: Any
    second_free: Any


def flash_backward(rows, columns, lse, delta, out, shared, barriers, *, scale: float, side: Side) -> None:
    """`rows` and `columns` are `Operand`s (B, length, heads, width); lse and delta (B,N,T in whole blocks).

    `out` has the gradients of the rows: dK and dV, or dQ and None.
    """
    config = side.config
    warpgroup = lax.axis_index("warpgroup")
    more, fewer = compat.registers(config.warpgroups)

    @pl.when(warpgroup < config.warpgroups)
    def _():
        plgpu.set_max_registers(more, action="increase")
        _compute(warpgroup, out, shared, barriers, scale=scale, side=side)

    @pl.when(warpgroup == config.warpgroups)
    def _():
        plgpu.set_max_registers(fewer, action="decrease")
        _load(rows, columns, lse, delta, shared, barriers, side=side)


def _load(rows, columns, lse, delta, shared, barriers, *, side: Side) -> None:
    config = side.config
    first, head, batch = side.tile()
    for w in range(config.warpgroups):
        own = pl.ds(first + w * ROWS, ROWS)
        full = barriers.rows_full.at[w]
        for source, target in zip(rows, shared.rows, strict=True):
            plgpu.copy_gmem_to_smem(source.at[batch, own, head], target.at[w], full)
        if not side.rows_are_keys:
            for source, target in ((lse, shared.lse), (delta, shared.delta)):
                plgpu.copy_gmem_to_smem(source.at[batch, head, own], target.at[w], full)

    blocks = side.blocks(first)

    def one_pass(of_pass, done):
        column_head = side.column_head(head, of_pass)

        def block(i, done):
            slot = rem(done, config.stages)
            own = pl.ds(i * config.columns, config.columns)
            for source, ring, vector, of_vector, full, free in (
                (
                    columns.first,
                    shared.columns.first,
                    lse,
                    shared.lse,
                    barriers.first_full,
                    barriers.first_free,
                ),
                (
                    columns.second,
                    shared.columns.second,
                    delta,
                    shared.delta,
                    barriers.second_full,
                    barriers.second_free,
                ),
            ):
                pl.when(done >= config.stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
                plgpu.copy_gmem_to_smem(source.at[batch, own, column_head], ring.at[slot], full.at[slot])
                if side.rows_are_keys:
                    source = vector.at[batch, column_head, own]
                    plgpu.copy_gmem_to_smem(source, of_vector.at[slot], full.at[slot])
            return done + 1

        return lax.fori_loop(*_int32(blocks.start, blocks.stop), block, done)

    filled = lax.fori_loop(*_int32(0, side.passes), one_pass, jnp.int32(0))
    drain(filled, config.stages, barriers.first_free, barriers.second_free)


def _int32(*indices):
    """Indices of 32 bits, also where 64-bit types are on."""
    return [np.int32(x) if isinstance(x, int) else x for x in indices]


def _compute(warpgroup, out, shared, barriers, *, scale: float, side: Side) -> None:
    """One warpgroup's rows of the gradients."""
    config, size, band = side.config, side.size, side.band
    first, head, batch = side.tile()
    blocks = side.blocks(first)
    first += warpgroup * ROWS
    blocks = side.blocks_of_warpgroup(first, blocks)
    rows = Operand(*(x.at[warpgroup] for x in shared.rows))
    dtype = rows.first.dtype
    shape = (ROWS, config.columns)
    tail = not side.rows_are_keys and size.S % config.columns != 0

    def zeros(width: int):
        return plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), ACCUMULATOR)

    def packed(x):
        # Without the barrier LLVM carries x in float32, and converts it where it is used.
        return lax.optimization_barrier(x.astype(dtype))

    def spread(vector):
        return lax.broadcast_in_dim(vector, shape, [1 if side.rows_are_keys else 0])

    def step(edge: bool, i, carry):
        sums, done = carry
        slot = rem(done, config.stages)
        columns = Operand(*(x.at[slot] for x in shared.columns))

        def probabilities(scores):
            p = jnp.exp2(scores * (scale * LOG2_E) - spread(vector_of(shared.lse, slot)))
            if not edge:
                return p
            row, column = (
                plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=ACCUMULATOR) for axis in (0, 1)
            )
            column += i * config.columns
            met = band.meets(row + first, column)
            if tail:
                met = column < size.S if met is None else met & (column < size.S)
            return p if met is None else jnp.where(met, p, 0.0)

        def differentiated(p, gradients):
            return packed(p * (gradients - spread(vector_of(shared.delta, slot))))

        def add(totals, scores, gradients):
            plgpu.barrier_wait(barriers.first_full.at[slot])
            compat.wgmma(scores, rows.first, columns.first.transpose((1, 0)))
            plgpu.barrier_wait(barriers.second_full.at[slot])
            compat.wgmma(gradients, rows.second, columns.second.transpose((1, 0)))
            p = probabilities(compat.awaited(scores, in_flight=1))
            if side.rows_are_keys:
                compat.wgmma(totals.second, packed(p), columns.second)
            ds = differentiated(p, compat.awaited(gradients, in_flight=int(side.rows_are_keys)))
            compat.wgmma(totals.first, ds, columns.first)

        def add_to(totals):
            compat.from_zero(functools.partial(add, totals), shape, shape)

        sums, _ = compat.accumulate(add_to, sums)
        plgpu.barrier_arrive(barriers.first_free.at[slot])
        plgpu.barrier_arrive(barriers.second_free.at[slot])
        return sums, done + 1

    def vector_of(ref, slot):
        if side.rows_are_keys:
            return compat.load_vector(ref.at[slot], COLUMN)
        return compat.load_vector(ref.at[warpgroup], ROW)

    plgpu.barrier_wait(barriers.rows_full.at[warpgroup])
    sums = Operand(zeros(size.H), zeros(size.V) if side.rows_are_keys else None)
    carry = (sums, jnp.int32(0))
    if side.passes == 1:
        sums, _ = over_blocks(blocks, step, carry)
    else:
        one_pass = lambda _, carry: over_blocks(blocks, step, carry)  # noqa: E731
        sums, _ = lax.fori_loop(*_int32(0, side.passes), one_pass, carry)
    results = Operand(sums.first * scale, sums.second)
    own = pl.ds(first, ROWS)
    for values, staged, target in zip(results, rows, out, strict=True):
        if values is not None:
            staged[...] = values.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged, target.at[batch, own, head])
    plgpu.wait_smem_to_gmem(0)


def _gradients(side: Side, scale: float, rows: Operand, columns: Operand, lse, delta) -> Operand:
    """The gradients of `rows`, whose lengths are in whole tiles of 8."""
    config, dtype = side.config, rows.first.dtype
    widths = (side.size.H, side.size.V)
    warpgroups, stages = config.warpgroups, config.stages
    per_vector = (stages, config.columns) if side.rows_are_keys else (warpgroups, ROWS)
    shared = Shared(
        rows=Operand(*(compat.tiled_shared_memory((warpgroups, ROWS, width), dtype) for width in widths)),
        columns=Operand(
            *(compat.tiled_shared_memory((stages, config.columns, width), dtype) for width in widths)
        ),
        lse=plgpu.SMEM(per_vector, jnp.float32),
        delta=plgpu.SMEM(per_vector, jnp.float32),
    )
    full = plgpu.Barrier(num_barriers=stages, num_arrivals=2 if side.rows_are_keys else 1)
    free = plgpu.Barrier(num_barriers=stages, num_arrivals=warpgroups)
    barriers = Barriers(
        plgpu.Barrier(num_barriers=warpgroups, num_arrivals=2 if side.rows_are_keys else 4),
        full,
        free,
        full,
        free,
    )
    targets = rows if side.rows_are_keys else Operand(rows.first, None)
    return compat.mosaic_call(
        functools.partial(flash_backward, scale=scale, side=side),
        blocks=side.tiles * side.heads * side.size.B,
        warpgroups=warpgroups + 1,
        scratch=(shared, barriers),
        out_shape=[jax.tree.map(lambda x: compat.result(x.shape, x.dtype, like=x), targets)],
        name="jax_flash_mosaic_backward_" + ("keys" if side.rows_are_keys else "queries"),
    )(rows, columns, lse, delta)[0]


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    keys_config: BackwardConfig,
    queries_config: BackwardConfig,
) -> Gradients:
    """Shapes as in `jax_flash.pallas.backward`; `keys_config` is for dK and dV, `queries_config` for dQ."""
    size = sizes(operands)
    d_out = d_out.astype(operands.query.dtype)
    # Rows that meet nothing, and those beyond the end: 2^(x - inf) = 0, whatever x is.
    met_nothing = lse == -jnp.inf
    lse_2 = jnp.where(met_nothing, jnp.inf, lse * LOG2_E)
    delta = jnp.einsum("btnv,btnv->bnt", out.astype(jnp.float32), d_out.astype(jnp.float32))
    if d_lse is not None:
        delta = delta - d_lse
    delta = jnp.where(met_nothing, 0.0, delta)
    missing = -size.T % 256  # whole blocks of any configuration
    beyond = ((0, 0), (0, 0), (0, missing))
    lse_2 = jnp.pad(lse_2, beyond, constant_values=jnp.inf)
    delta = jnp.pad(delta, beyond)

    query, key, value, d_out = map(compat.in_tiles, (operands.query, operands.key, operands.value, d_out))
    of_keys, of_queries = Operand(key, value), Operand(query, d_out)
    band = keys_of_queries(spec, size)
    keys_side = Side(size, band.transposed(), keys_config, rows_are_keys=True)
    queries_side = Side(size, band, queries_config, rows_are_keys=False)
    d_keys = _gradients(keys_side, spec.scale, of_keys, of_queries, lse_2, delta)
    d_queries = _gradients(queries_side, spec.scale, of_queries, of_keys, lse_2, delta)
    return Gradients(d_queries.first[:, : size.T], d_keys.first[:, : size.S], d_keys.second[:, : size.S])
