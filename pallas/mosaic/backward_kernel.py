"""What a block of the kernels in `mosaic_backward` does: one warpgroup loads, the others compute."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import compat
from ..loop import over_block_range, over_blocks
from ..scores import LOG2_E
from .backward_side import Operand, Side
from .column_gradient import ColumnGradient
from .product import added, issued, landed
from .registers import ACCUMULATOR, ROW, where_between
from .roles import divide, drain
from .tile_scheduler import int32, rem
from .tiles import ROWS

COLUMN = plgpu.Layout.WGMMA.reduce(0)


class Shared(NamedTuple):
    rows: Operand  # the second is room for its gradient where only that is computed, if there need be
    columns: Operand  # rings
    statistics: Operand  # lse, in base 2, and delta: of the rows, or in rings
    column_gradient: ColumnGradient | None


class Barriers(NamedTuple):
    """`full` where TMA has filled a place, `free` where its readers are done with it."""

    rows_full: Any
    rows_free: Any  # None where there is one tile
    full: Operand
    free: Operand


def flash_backward(rows, columns, statistics, *refs, scale: float, side: Side) -> None:
    """`rows` and `columns` are `Operand`s (B, length, heads, width); `statistics` lse and delta (B,N,T).

    The others are the sum that columns' gradients are added to, if they are; the gradients of the rows that
    `side` owns; shared memory; and barriers.
    """
    *d_columns, out, shared, barriers = refs
    divide(
        side.config.warpgroups,
        compute=lambda warpgroup: _compute(
            warpgroup, d_columns, out, shared, barriers, scale=scale, side=side
        ),
        load=lambda: _load(rows, columns, statistics, shared, barriers, side=side),
    )


def _load(rows, columns, statistics, shared, barriers, *, side: Side) -> None:
    config = side.config
    streams = list(zip(columns, statistics, shared.columns, shared.statistics, strict=True))

    def tile(tile, head, batch, carry):
        tiles_done, done = carry
        first = tile * side.rows_of_tile
        for w in range(config.warpgroups):
            place = rem(tiles_done, config.row_stages) * config.warpgroups + w
            if config.persistent:
                freed = functools.partial(plgpu.barrier_wait, barriers.rows_free.at[place])
                pl.when(tiles_done >= config.row_stages)(freed)
            own = pl.ds(first + w * ROWS, ROWS)
            full = barriers.rows_full.at[place]
            for source, target in zip(rows, shared.rows, strict=True):
                if source is not None:
                    plgpu.copy_gmem_to_smem(source.at[batch, own, head], target.at[place], full)
            if not side.rows_are_keys:
                for source, target in zip(statistics, shared.statistics, strict=True):
                    plgpu.copy_gmem_to_smem(source.at[batch, head, own], target.at[place], full)

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

            return lax.fori_loop(int32(blocks.first), int32(blocks.last), block, done)

        blocks = side.blocks(first)
        return tiles_done + 1, lax.fori_loop(np.int32(0), np.int32(side.passes), one_pass, done)

    tiles_done, done = side.walk.over(tile, (jnp.int32(0), jnp.int32(0)))
    # No barrier is left while others still arrive at it.
    for stages, free in zip(config.rings, barriers.free, strict=True):
        drain(done, stages, free)
    if config.persistent:
        for place in range(config.row_stages * config.warpgroups):
            freed = functools.partial(plgpu.barrier_wait, barriers.rows_free.at[place])
            pl.when(tiles_done > place // config.warpgroups)(freed)


def _compute(warpgroup, d_columns, out, shared, barriers, *, scale: float, side: Side) -> None:
    """One warpgroup's rows of the gradients, and its share of what is added to `d_columns`."""
    config, size, mask, owns = side.config, side.size, side.mask, side.owns
    column_gradient = shared.column_gradient
    dtype = shared.rows.first.dtype
    shape = (ROWS, config.columns)
    tail = not side.rows_are_keys and size.S % config.columns != 0

    def packed(x):
        # Without the barrier LLVM carries x in float32, and converts it where it is used.
        return lax.optimization_barrier(x.astype(dtype))

    def of_tile(place):
        """The places of all warpgroups' rows, where this one's are in `place`."""
        return [place - warpgroup + w for w in range(config.warpgroups)]

    def statistic(ref, slot, place):
        """Of queries, which are the columns or the rows."""
        if side.rows_are_keys:
            return lax.broadcast_in_dim(compat.load_vector(ref.at[slot], COLUMN), shape, [1])
        return lax.broadcast_in_dim(compat.load_vector(ref.at[place], ROW), shape, [0])

    def masked(p, first, i):
        rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) + first
        first_column = i * config.columns
        low, end = (None if x is None else x - first_column for x in mask.visible_columns(rows, tail))
        if side.masks_rows:
            end = jnp.where(rows < mask.rows, config.columns if end is None else end, 0)
        return p if low is None and end is None else where_between(p, low, end, 0.0)

    def step(first, place, begun, target, edge: bool, i, carry):
        """Adds what block `i` of columns gives to the sums of the rows from `first` on and to `target(i)`.

        `begun` blocks were done when the tile began.
        """
        (d_first, d_second), done = carry
        # LLVM would keep what is the same for all blocks, dozens of matrix descriptors, in registers, and
        # ptxas would spill them: to both, this zero differs from block to block.
        zero = lax.shift_right_logical(lax.optimization_barrier(done), np.int32(31))
        rows = Operand(*(None if x is None else x.at[place + zero] for x in shared.rows))
        slots = Operand(*(rem(done, stages) if stages > 1 else zero for stages in config.rings))
        columns = Operand(*(ring.at[slot] for ring, slot in zip(shared.columns, slots, strict=True)))
        full, free = (
            Operand(*(x.at[slot] for x, slot in zip(of_rings, slots, strict=True)))
            for of_rings in (barriers.full, barriers.free)
        )

        plgpu.barrier_wait(full.first)
        scores = issued(rows.first, columns.first)
        plgpu.barrier_wait(full.second)
        gradients = issued(rows.second, columns.second) if owns.first else None
        scores = landed(scores, in_flight=int(owns.first))
        lse = statistic(shared.statistics.first, slots.first, place)
        if not owns.first:
            plgpu.barrier_arrive(free.first)
        p = jnp.exp2(scores * (scale * LOG2_E) - lse)
        p = masked(p, first, i) if edge else p
        if owns.second:
            d_second = added(d_second, packed(p), columns.second)
        if owns.first:
            d_p = landed(gradients, in_flight=int(owns.second))
            delta = statistic(shared.statistics.second, slots.second, place)
            if not owns.second:
                plgpu.barrier_arrive(free.second)
            d_scores = packed(p * (d_p - delta))
            d_first = added(d_first, d_scores, columns.first)
            if column_gradient is not None:
                column_gradient.put(d_scores, warpgroup, first=done == begun)
                d_block = column_gradient.issued([shared.rows.first.at[one] for one in of_tile(place)])
        sums = Operand(*(x if x is None else landed(x, in_flight=0) for x in (d_first, d_second)))
        for own, one in zip(owns, free, strict=True):
            if own:  # else it was read by the first products alone
                plgpu.barrier_arrive(one)
        if column_gradient is not None:
            column_gradient.add(landed(d_block, in_flight=0), warpgroup, target(i))
        return sums, done + 1

    def skip(_, done):
        """A block that other warpgroups meet."""
        for stages, full, free in zip(config.rings, barriers.full, barriers.free, strict=True):
            plgpu.barrier_wait(full.at[rem(done, stages)])
            plgpu.barrier_arrive(free.at[rem(done, stages)])
        return done + 1

    def zeros(width: int):
        return plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), ACCUMULATOR)

    def tile(tile, head, batch, carry):
        tiles_done, done = carry
        first = tile * side.rows_of_tile
        blocks = side.blocks(first)
        first += warpgroup * ROWS
        own = side.blocks_of_warpgroup(first, blocks)
        place = rem(tiles_done, config.row_stages) * config.warpgroups + warpgroup
        for one in [place] if column_gradient is None else of_tile(place):
            plgpu.barrier_wait(barriers.rows_full.at[one])
        begun = done

        def one_pass(of_pass, carry):
            def target(i):
                """Where in `d_columns` this warpgroup's share of block `i` is added."""
                share = size.H // config.warpgroups
                own, width = pl.ds(i * config.columns, config.columns), pl.ds(warpgroup * share, share)
                return d_columns[0].at[batch, own, side.column_head(head, of_pass), width]

            sums, done = carry
            done = over_blocks(blocks.first, own.first, skip, done)
            sums, done = over_block_range(
                own, functools.partial(step, first, place, begun, target), (sums, done)
            )
            return sums, over_blocks(own.last, blocks.last, skip, done)

        widths = Operand(size.H, size.V)
        sums = Operand(*(zeros(width) if own else None for own, width in zip(owns, widths, strict=True)))
        if side.passes == 1:
            sums, done = one_pass(0, (sums, done))
        else:
            sums, done = lax.fori_loop(np.int32(0), np.int32(side.passes), one_pass, (sums, done))

        if column_gradient is not None:
            column_gradient.wait_for_readers(done > begun)
        results = Operand(sums.first * scale if owns.first else None, sums.second)
        rooms = shared.rows
        if rooms.second is None:
            rooms = Operand(rooms.first, rooms.first)
        for values, room, target in zip(results, rooms, out, strict=True):
            if values is not None:
                room[place, :, :] = values.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(room.at[place], target.at[batch, pl.ds(first, ROWS), head])
        if config.persistent:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(barriers.rows_free.at[place])
        return tiles_done + 1, done

    side.walk.over(tile, (jnp.int32(0), jnp.int32(0)))
    plgpu.wait_smem_to_gmem(0)
