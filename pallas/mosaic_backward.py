"""Backward by Mosaic GPU, for Hopper: the sums of `triton_backward`.

One kernel for dK and dV adds to dQ as well, where that may be summed in any order; else there is one for dQ.
Above head dim 128 dK and dV have no room in a warpgroup's registers together, and get a kernel each.

In all of them, each computing warpgroup owns 64 rows of a gradient: keys, or queries. Their operands stay in
shared memory, and a loading warpgroup streams the blocks of columns past them that they meet, in rings as in
`mosaic_forward`. A step issues both products of rows and columns, takes the exponentials of the first beside
the second, and adds to the gradients from registers, to that of values beside what is left to do for that of
keys. Where rows are keys, scores are held transposed. The sums of rows have one owner and a fixed order each,
and are bitwise equal from run to run.
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
from .loop import over, over_blocks
from .mosaic_column_gradient import ColumnGradient
from .mosaic_forward import drain
from .mosaic_product import added, issued, landed
from .mosaic_registers import ACCUMULATOR, ROW, where_between
from .mosaic_tiles import ROWS, BackwardConfig, BackwardConfigs
from .mosaic_walk import Walk, div, int32, rem
from .scores import LOG2_E

COLUMN = plgpu.Layout.WGMMA.reduce(0)


class Operand(NamedTuple):
    """The pair of arrays whose products with the other side's are scores and their gradients.

    Keys and values, or queries and the gradient of the output; or what there is of either of them.
    """

    first: Any
    second: Any


class Kernel(NamedTuple):
    """One of the kernels: whose rows it takes, and which gradients of theirs it sums."""

    rows_are_keys: bool
    owns: Operand
    adds: bool = False  # to the gradient of the first of the columns, too


KERNELS = {
    "all": Kernel(True, Operand(True, True), adds=True),
    "queries": Kernel(False, Operand(True, False)),
    "keys": Kernel(True, Operand(True, False)),
    "values": Kernel(True, Operand(False, True)),
    "keys_and_values": Kernel(True, Operand(True, True)),
}


@dataclasses.dataclass(frozen=True)
class Side:
    """What one of the kernels does with rows and columns."""

    size: Sizes
    band: Band  # of rows
    config: BackwardConfig
    kernel: Kernel
    multiprocessors: int

    @property
    def rows_are_keys(self) -> bool:
        return self.kernel.rows_are_keys

    @property
    def owns(self) -> Operand:
        return self.kernel.owns

    @property
    def heads(self) -> int:
        """Of the gradient."""
        return self.size.K if self.rows_are_keys else self.size.N

    @property
    def rows_of_tile(self) -> int:
        return ROWS * self.config.warpgroups

    @property
    def walk(self) -> Walk:
        """Over tiles of rows."""
        size, config = self.size, self.config
        rows, columns = (size.S, size.T) if self.rows_are_keys else (size.T, size.S)
        heads = size.group if self.rows_are_keys else 1 / size.group  # of columns that a head of rows meets
        return Walk(
            tiles=pl.cdiv(rows, self.rows_of_tile),
            heads=self.heads,
            batch=size.B,
            lengths=self.band.lengths(self.rows_of_tile, config.columns),
            blocks=self.multiprocessors if config.persistent else None,
            bytes_of_head=int(2 * columns * (size.H + size.V) * heads),
        )

    @property
    def passes(self) -> int:
        """Over the columns: one for each query head that shares the keys."""
        return self.size.group if self.rows_are_keys else 1

    def column_head(self, head, of_pass):
        return head * self.size.group + of_pass if self.rows_are_keys else div(head, self.size.group)

    def blocks(self, first) -> Blocks:
        """Of columns that the tile meets."""
        return self.band.blocks(first, self.rows_of_tile, self.config.columns)

    def blocks_of_warpgroup(self, first, tile: Blocks) -> Blocks:
        """Those of the tile that a warpgroup's rows meet; all of them where warpgroups work together."""
        own = self.band.blocks(first, ROWS, self.config.columns)
        if not self.kernel.adds:
            return own.within(tile.start, tile.stop)
        if self.rows_beyond:  # which have to be told from the others
            all_there = (first + ROWS <= self.band.rows).astype(jnp.int32)
            # Without the barrier LLVM sees where there can be two blocks at most, and ptxas 13.0 miscompiles
            # that loop: it finds the second's index by a condition that the first turn has changed.
            full_stop = lax.optimization_barrier(own.full_stop * all_there)
            own = dataclasses.replace(own, full_stop=full_stop)
        return own.whole_in(tile)

    @property
    def rows_beyond(self) -> bool:
        """Whether the last tile has rows that aren't there."""
        return (self.size.S if self.rows_are_keys else self.size.T) % self.rows_of_tile != 0


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
    config = side.config
    warpgroup = lax.axis_index("warpgroup")
    more, fewer = compat.registers(config.warpgroups)

    @pl.when(warpgroup < config.warpgroups)
    def _():
        plgpu.set_max_registers(more, action="increase")
        _compute(warpgroup, d_columns, out, shared, barriers, scale=scale, side=side)

    @pl.when(warpgroup == config.warpgroups)
    def _():
        plgpu.set_max_registers(fewer, action="decrease")
        _load(rows, columns, statistics, shared, barriers, side=side)


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

            return lax.fori_loop(int32(blocks.start), int32(blocks.stop), block, done)

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
    config, size, band, owns = side.config, side.size, side.band, side.owns
    column_gradient = shared.column_gradient
    dtype = shared.rows.first.dtype
    shape = (ROWS, config.columns)
    tail = not side.rows_are_keys and size.S % config.columns != 0

    def packed(x):
        # Without the barrier LLVM carries x in float32, and converts it where it is used.
        return lax.optimization_barrier(x.astype(dtype))

    def statistic(ref, slot, place):
        """Of queries, which are the columns or the rows."""
        if side.rows_are_keys:
            return lax.broadcast_in_dim(compat.load_vector(ref.at[slot], COLUMN), shape, [1])
        return lax.broadcast_in_dim(compat.load_vector(ref.at[place], ROW), shape, [0])

    def masked(p, first, i):
        rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) + first
        first_column = i * config.columns
        low, end = (None if x is None else x - first_column for x in band.columns_of(rows, tail))
        if column_gradient is not None and side.rows_beyond:
            end = jnp.where(rows < band.rows, config.columns if end is None else end, 0)
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
                of_tile = [place - warpgroup + w for w in range(config.warpgroups)]
                d_block = column_gradient.issued([shared.rows.first.at[one] for one in of_tile])
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
        places = [place]
        if column_gradient is not None:  # all are read
            places = [place - warpgroup + w for w in range(config.warpgroups)]
        for one in places:
            plgpu.barrier_wait(barriers.rows_full.at[one])
        begun = done

        def one_pass(of_pass, carry):
            def target(i):
                """Where in `d_columns` this warpgroup's share of block `i` is added."""
                share = size.H // config.warpgroups
                own, width = pl.ds(i * config.columns, config.columns), pl.ds(warpgroup * share, share)
                return d_columns[0].at[batch, own, side.column_head(head, of_pass), width]

            sums, done = carry
            done = over(blocks.start, own.start, skip, done)
            sums, done = over_blocks(own, functools.partial(step, first, place, begun, target), (sums, done))
            return sums, over(own.stop, blocks.stop, skip, done)

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


def _gradients(
    name: str, side: Side, scale: float, rows: Operand, columns: Operand, statistics: Operand
) -> tuple[Operand, jax.Array | None]:
    """The gradients of `rows`, whose lengths are in whole tiles of 8, and that of the first of `columns` in
    float32, yet to be scaled, if the kernel adds to it."""
    config, owns, dtype = side.config, side.owns, rows.first.dtype
    out = Operand(*(x if own else None for x, own in zip(rows, owns, strict=True)))
    if not owns.first:  # nor is there a product of the second of the rows, nor anything of delta
        rows, statistics = rows._replace(second=None), statistics._replace(second=None)
    places = config.row_stages * config.warpgroups

    def tiles(count: int, tile_rows: int, width: int):
        return compat.tiled_shared_memory((count, tile_rows, width), dtype)

    def of_statistic(x, stages: int):
        per_query = (stages, config.columns) if side.rows_are_keys else (places, ROWS)
        return None if x is None else plgpu.SMEM(per_query, jnp.float32)

    H, V = side.size.H, side.size.V
    room_for_second = owns.first or H != V
    shared = Shared(
        rows=Operand(tiles(places, ROWS, H), tiles(places, ROWS, V) if room_for_second else None),
        columns=Operand(*map(tiles, config.rings, [config.columns] * 2, (H, V))),
        statistics=Operand(*map(of_statistic, statistics, config.rings)),
        column_gradient=(
            ColumnGradient.scratch(config.warpgroups, ROWS, config.columns, H, dtype)
            if side.kernel.adds
            else None
        ),
    )
    copies = [1 if x is None or not side.rows_are_keys else 2 for x in statistics]
    copies_of_rows = len(jax.tree.leaves(rows if side.rows_are_keys else (rows, statistics)))

    def barrier(count: int, arrivals: int = 1):
        return plgpu.Barrier(num_barriers=count, num_arrivals=arrivals)

    barriers = Barriers(
        rows_full=barrier(places, copies_of_rows),
        rows_free=barrier(places) if config.persistent else None,
        full=Operand(*map(barrier, config.rings, copies)),
        free=Operand(*map(barrier, config.rings, [config.warpgroups] * 2)),
    )
    summed = None
    if side.kernel.adds:
        B, length, heads, _ = columns.first.shape
        shape = B, pl.cdiv(length, config.columns) * config.columns, heads, H
        summed = compat.result(shape, jnp.float32, like=columns.first)
    (gradients,), d_columns = compat.mosaic_call(
        functools.partial(flash_backward, scale=scale, side=side),
        blocks=side.walk.grid,
        warpgroups=config.warpgroups + 1,
        scratch=(shared, barriers),
        out_shape=[jax.tree.map(lambda x: compat.result(x.shape, x.dtype, like=x), out)],
        name=f"jax_flash_mosaic_backward_{name}",
        sums=summed,
    )(rows, columns, statistics)
    return gradients, d_columns


class Prepared(NamedTuple):
    """What the kernels read, with lengths in whole tiles of 8: keys and values, queries and the output's
    gradient, and lse and delta (B,N,T in whole blocks)."""

    keys: Operand
    queries: Operand
    statistics: Operand


def prepare(
    operands: Operands, out: jax.Array, lse: jax.Array, d_out: jax.Array, d_lse: jax.Array | None
) -> Prepared:
    """Shapes as in `jax_flash.pallas.backward`."""
    T = operands.query.shape[1]
    d_out = d_out.astype(operands.query.dtype)
    # Rows that meet nothing, and those beyond the end: 2^(x - inf) = 0, whatever x is.
    met_nothing = lse == -jnp.inf
    lse_2 = jnp.where(met_nothing, jnp.inf, lse * LOG2_E)
    delta = jnp.einsum("btnv,btnv->bnt", out.astype(jnp.float32), d_out.astype(jnp.float32))
    if d_lse is not None:
        delta = delta - d_lse
    delta = jnp.where(met_nothing, 0.0, delta)
    beyond = ((0, 0), (0, 0), (0, -T % 256))  # whole blocks of any configuration
    statistics = Operand(jnp.pad(lse_2, beyond, constant_values=jnp.inf), jnp.pad(delta, beyond))
    query, key, value, d_out = map(compat.in_tiles, (operands.query, operands.key, operands.value, d_out))
    return Prepared(Operand(key, value), Operand(query, d_out), statistics)


def gradients(
    kernel: str,
    spec: AttentionSpec,
    size: Sizes,
    prepared: Prepared,
    config: BackwardConfig,
    multiprocessors: int,
) -> tuple[Operand, jax.Array | None]:
    """Those that the kernel of this name owns, in whole tiles of 8; and that which it adds to, in float32 and
    yet to be scaled, or None."""
    keys, queries, statistics = prepared
    band = keys_of_queries(spec, size)
    side = Side(size, band, config, KERNELS[kernel], multiprocessors)
    rows, columns = (keys, queries) if side.rows_are_keys else (queries, keys)
    if side.rows_are_keys:
        side = dataclasses.replace(side, band=band.transposed())
    return _gradients(kernel, side, spec.scale, rows, columns, statistics)


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    configs: BackwardConfigs,
    multiprocessors: int,
) -> Gradients:
    """Shapes as in `jax_flash.pallas.backward`."""
    size = sizes(operands)
    prepared = prepare(operands, out, lse, d_out, d_lse)

    def run(kernel: str, config: BackwardConfig) -> tuple[Operand, jax.Array | None]:
        return gradients(kernel, spec, size, prepared, config, multiprocessors)

    if configs.queries is None:
        (d_key, d_value), d_query = run("all", configs.keys)
        assert d_query is not None
        d_query = (d_query * spec.scale).astype(operands.query.dtype)
    else:
        (d_query, _), _ = run("queries", configs.queries)
        if configs.values is None:
            (d_key, d_value), _ = run("keys_and_values", configs.keys)
        else:
            ((d_key, _), _), ((_, d_value), _) = run("keys", configs.keys), run("values", configs.values)
    return Gradients(d_query[:, : size.T], d_key[:, : size.S], d_value[:, : size.S])
