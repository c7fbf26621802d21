"""Backward by Mosaic GPU, for Hopper: the sums of `triton_backward`, a kernel for dK and dV, and one for dQ.

Above head dim 128 dK and dV have no room in a warpgroup's registers together, and get a kernel each.

In all of them, each computing warpgroup owns 64 rows of a gradient: keys, or queries. Their operands stay in
shared memory, and a loading warpgroup streams the blocks of columns past them that they meet, in rings as in
`mosaic_forward`. A step issues both products of rows and columns, takes the exponentials of the first beside
the second, and adds to the gradients from registers, to that of values beside what is left to do for that of
keys. Where rows are keys, scores are held transposed. Every sum has one owner and a fixed order: gradients
are bitwise equal from run to run.
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
from .mosaic_forward import ACCUMULATOR, div, drain, rem
from .mosaic_tiles import ROWS, BackwardConfig, BackwardConfigs
from .scores import LOG2_E

COLUMN = plgpu.Layout.WGMMA.reduce(0)
ROW = plgpu.Layout.WGMMA.reduce(1)


class Operand(NamedTuple):
    """The pair of arrays whose products with the other side's are scores and their gradients.

    Keys and values, or queries and the gradient of the output; or what there is of either of them.
    """

    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Side:
    """What one of the kernels does with rows and columns."""

    size: Sizes
    band: Band  # of rows
    config: BackwardConfig
    rows_are_keys: bool
    owns: Operand  # which gradients of the rows it sums

    @property
    def name(self) -> str:
        if not self.rows_are_keys:
            return "queries"
        return "keys" if self.owns.first else "values"

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


class Shared(NamedTuple):
    rows: Operand  # the second is room for its gradient where only that is computed, if there need be
    columns: Operand  # rings
    statistics: Operand  # lse, in base 2, and delta: of the rows, or in rings


class Barriers(NamedTuple):
    """`full` where TMA has filled a place, `free` where its readers are done with it."""

    rows_full: Any
    full: Operand
    free: Operand


def flash_backward(rows, columns, statistics, out, shared, barriers, *, scale: float, side: Side) -> None:
    """`rows` and `columns` are `Operand`s (B, length, heads, width); `statistics` lse and delta (B,N,T).

    `out` has the gradients of the rows that `side` owns.
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
        _load(rows, columns, statistics, shared, barriers, side=side)


def _load(rows, columns, statistics, shared, barriers, *, side: Side) -> None:
    config = side.config
    first, head, batch = side.tile()
    for w in range(config.warpgroups):
        own = pl.ds(first + w * ROWS, ROWS)
        full = barriers.rows_full.at[w]
        for source, target in zip(rows, shared.rows, strict=True):
            if source is not None:
                plgpu.copy_gmem_to_smem(source.at[batch, own, head], target.at[w], full)
        if not side.rows_are_keys:
            for source, target in zip(statistics, shared.statistics, strict=True):
                plgpu.copy_gmem_to_smem(source.at[batch, head, own], target.at[w], full)

    blocks = side.blocks(first)
    streams = list(zip(columns, statistics, shared.columns, shared.statistics, strict=True))

    def one_pass(of_pass, done):
        column_head = side.column_head(head, of_pass)

        def block(i, done):
            own = pl.ds(i * config.columns, config.columns)
            for stream, stages, full, free in zip(
                streams, config.rings, barriers.full, barriers.free, strict=True
            ):
                source, statistic, ring, of_statistic = stream
                slot = rem(done, stages)
                pl.when(done >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
                plgpu.copy_gmem_to_smem(source.at[batch, own, column_head], ring.at[slot], full.at[slot])
                if side.rows_are_keys and statistic is not None:
                    source = statistic.at[batch, column_head, own]
                    plgpu.copy_gmem_to_smem(source, of_statistic.at[slot], full.at[slot])
            return done + 1

        return lax.fori_loop(*_int32(blocks.start, blocks.stop), block, done)

    filled = lax.fori_loop(*_int32(0, side.passes), one_pass, jnp.int32(0))
    for stages, free in zip(config.rings, barriers.free, strict=True):
        drain(filled, stages, free)


def _int32(*indices):
    """Indices of 32 bits, also where 64-bit types are on."""
    return [np.int32(x) if isinstance(x, int) else x for x in indices]


def _compute(warpgroup, out, shared, barriers, *, scale: float, side: Side) -> None:
    """One warpgroup's rows of the gradients."""
    config, size, band, owns = side.config, side.size, side.band, side.owns
    first, head, batch = side.tile()
    blocks = side.blocks(first)
    first += warpgroup * ROWS
    blocks = side.blocks_of_warpgroup(first, blocks)
    dtype = shared.rows.first.dtype
    shape = (ROWS, config.columns)
    tail = not side.rows_are_keys and size.S % config.columns != 0

    def packed(x):
        # Without the barrier LLVM carries x in float32, and converts it where it is used.
        return lax.optimization_barrier(x.astype(dtype))

    def statistic(ref, slot):
        """Of queries, which are the columns or the rows."""
        if side.rows_are_keys:
            return lax.broadcast_in_dim(compat.load_vector(ref.at[slot], COLUMN), shape, [1])
        return lax.broadcast_in_dim(compat.load_vector(ref.at[warpgroup], ROW), shape, [0])

    def step(edge: bool, i, carry):
        sums, done = carry
        # LLVM would keep what is the same for all blocks, dozens of matrix descriptors, in registers, and
        # ptxas would spill them: to both, this zero differs from block to block.
        zero = lax.shift_right_logical(lax.optimization_barrier(done), np.int32(31))
        rows = Operand(*(None if x is None else x.at[warpgroup + zero] for x in shared.rows))
        slots = Operand(*(rem(done, stages) if stages > 1 else zero for stages in config.rings))
        columns = Operand(*(ring.at[slot] for ring, slot in zip(shared.columns, slots, strict=True)))

        def filled(which: int):
            plgpu.barrier_wait(barriers.full[which].at[slots[which]])

        def probabilities(scores):
            p = jnp.exp2(scores * (scale * LOG2_E) - statistic(shared.statistics.first, slots.first))
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

        def add(totals, scores, gradients=None):
            filled(0)
            compat.wgmma(scores, rows.first, columns.first.transpose((1, 0)))
            filled(1)
            if owns.first:
                compat.wgmma(gradients, rows.second, columns.second.transpose((1, 0)))
            p = probabilities(compat.awaited(scores, in_flight=int(owns.first)))
            if owns.second:
                compat.wgmma(totals.second, packed(p), columns.second)
            if owns.first:
                d_p = compat.awaited(gradients, in_flight=int(owns.second))
                d_s = packed(p * (d_p - statistic(shared.statistics.second, slots.second)))
                compat.wgmma(totals.first, d_s, columns.first)

        def add_to(totals):
            compat.from_zero(functools.partial(add, totals), *[shape] * (1 + owns.first))

        sums, _ = compat.accumulate(add_to, sums)
        for free, slot in zip(barriers.free, slots, strict=True):
            plgpu.barrier_arrive(free.at[slot])
        return sums, done + 1

    def zeros(width: int):
        return plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), ACCUMULATOR)

    plgpu.barrier_wait(barriers.rows_full.at[warpgroup])
    widths = Operand(size.H, size.V)
    sums = Operand(*(zeros(width) if own else None for own, width in zip(owns, widths, strict=True)))
    carry = (sums, jnp.int32(0))
    if side.passes == 1:
        sums, _ = over_blocks(blocks, step, carry)
    else:
        one_pass = lambda _, carry: over_blocks(blocks, step, carry)  # noqa: E731
        sums, _ = lax.fori_loop(*_int32(0, side.passes), one_pass, carry)
    results = Operand(sums.first * scale if owns.first else None, sums.second)
    places = shared.rows if shared.rows.second is not None else Operand(shared.rows.first, shared.rows.first)
    own = pl.ds(first, ROWS)
    for values, place, target in zip(results, places, out, strict=True):
        if values is not None:
            staged = place.at[warpgroup]
            staged[...] = values.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged, target.at[batch, own, head])
    plgpu.wait_smem_to_gmem(0)


def _gradients(side: Side, scale: float, rows: Operand, columns: Operand, statistics: Operand) -> Operand:
    """The gradients of `rows`, whose lengths are in whole tiles of 8."""
    config, owns, dtype = side.config, side.owns, rows.first.dtype
    widths = (side.size.H, side.size.V)
    warpgroups = config.warpgroups
    out = Operand(*(x if own else None for x, own in zip(rows, owns, strict=True)))
    if not owns.first:  # nor is there a product of the second of the rows, nor anything of delta
        rows, statistics = rows._replace(second=None), statistics._replace(second=None)
    room = Operand(True, owns.first or side.size.H != side.size.V)
    shared = Shared(
        rows=Operand(
            *(
                compat.tiled_shared_memory((warpgroups, ROWS, width), dtype) if wanted else None
                for width, wanted in zip(widths, room, strict=True)
            )
        ),
        columns=Operand(
            *(
                compat.tiled_shared_memory((stages, config.columns, width), dtype)
                for stages, width in zip(config.rings, widths, strict=True)
            )
        ),
        statistics=Operand(
            *(
                None
                if x is None
                else plgpu.SMEM(
                    (stages, config.columns) if side.rows_are_keys else (warpgroups, ROWS), jnp.float32
                )
                for x, stages in zip(statistics, config.rings, strict=True)
            )
        ),
    )
    copies = [1 if x is None or not side.rows_are_keys else 2 for x in statistics]
    of_rows = len(jax.tree.leaves(rows if side.rows_are_keys else (rows, statistics)))
    barriers = Barriers(
        rows_full=plgpu.Barrier(num_barriers=warpgroups, num_arrivals=of_rows),
        full=Operand(
            *(
                plgpu.Barrier(num_barriers=stages, num_arrivals=count)
                for stages, count in zip(config.rings, copies, strict=True)
            )
        ),
        free=Operand(
            *(plgpu.Barrier(num_barriers=stages, num_arrivals=warpgroups) for stages in config.rings)
        ),
    )
    return compat.mosaic_call(
        functools.partial(flash_backward, scale=scale, side=side),
        blocks=side.tiles * side.heads * side.size.B,
        warpgroups=warpgroups + 1,
        scratch=(shared, barriers),
        out_shape=[jax.tree.map(lambda x: compat.result(x.shape, x.dtype, like=x), out)],
        name=f"jax_flash_mosaic_backward_{side.name}",
    )(rows, columns, statistics)[0]


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    configs: BackwardConfigs,
) -> Gradients:
    """Shapes as in `jax_flash.pallas.backward`."""
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
    of_keys, of_queries, statistics = Operand(key, value), Operand(query, d_out), Operand(lse_2, delta)
    band = keys_of_queries(spec, size)

    def of(rows_are_keys: bool, config: BackwardConfig, first: bool, second: bool) -> Operand:
        rows, columns = (of_keys, of_queries) if rows_are_keys else (of_queries, of_keys)
        band_of_rows = band.transposed() if rows_are_keys else band
        side = Side(size, band_of_rows, config, rows_are_keys, Operand(first, second))
        return _gradients(side, spec.scale, rows, columns, statistics)

    d_query = of(False, configs.queries, True, False).first
    d_key, d_value = of(True, configs.keys, True, configs.values is None)
    if configs.values is not None:
        d_value = of(True, configs.values, False, True).second
    return Gradients(d_query[:, : size.T], d_key[:, : size.S], d_value[:, : size.S])
