"""What a block of the backward kernels by Mosaic GPU does: one warpgroup loads, the others compute.

`backward.py` says how they work together.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import compat
from ..constants import LOG2_E
from ..loop import over_block_range, over_blocks
from .backward_problem import BackwardProblem, LseAndDelta, Pair
from .d_query import DQueryAccumulator
from .nonfinite import MARKED_ROWS, SpoiledTiles, finite_or, mark
from .product import issue_accumulate, issue_product, wait_product
from .registers import ACCUMULATOR, COLUMN, ROW, store
from .roles import divide, drain
from .soft_cap import tanh
from .tile_scheduler import div, int32, rem
from .tiles import ROWS, BackwardConfig


class Shared(NamedTuple):
    """Shared memory of a block."""

    rows: Pair  # where only dV is computed, the second is room for it, unless it is staged over keys
    columns: Pair  # rings
    lse_and_delta: LseAndDelta  # lse in base 2; of queries, which are the rows or in the rings
    d_query: DQueryAccumulator | None


class Barriers(NamedTuple):
    """`full` where TMA has filled a place, `free` where its readers are done with it."""

    rows_full: Any
    rows_free: Any  # None where there is one tile; all warpgroups arrive where they compute dQ together
    full: Pair
    free: Pair


def flash_backward(rows, columns, lse_and_delta, data, *refs, scale: float, problem: BackwardProblem) -> None:
    """`rows` and `columns` are `Pair`s (B, length, heads, width); `lse_and_delta` are (B,N,T); `MaskData`.

    `refs` are the sum of dQ, if the kernel adds to it; the gradients of the rows, a `Pair`, where there are
    head shares (shares, B, rows of whole tiles, heads, width) float32; marks of them or None; shared memory;
    and barriers.
    """
    *d_query_accum, out, marks, shared, barriers = refs
    problem = dataclasses.replace(problem, data=data)
    results = Results(out, marks, d_query_accum)
    divide(
        problem.config.warpgroups,
        compute=lambda warpgroup: Consumer(warpgroup, results, shared, barriers, scale, problem).run(),
        load=lambda: _load(rows, columns, lse_and_delta, shared, barriers, problem=problem),
    )


def _load(rows, columns, lse_and_delta, shared, barriers, *, problem: BackwardProblem) -> None:
    """Fills the rows of each tile, and the rings of the columns that it visits."""
    config = problem.config
    streams = list(zip(columns, lse_and_delta, shared.columns, shared.lse_and_delta, strict=True))

    def tile(tile, head, batch, carry):
        tiles_done, done = carry
        first = tile * problem.rows_of_tile
        load_rows(rows, lse_and_delta, shared, barriers, tiles_done, (batch, head, first), problem)

        def one_pass(of_pass, done):
            column_head = problem.column_head(head, of_pass)

            def block(i, done):
                own = pl.ds(i * config.columns, config.columns)
                for stream, stages, full, free in zip(
                    streams, config.rings, barriers.full, barriers.free, strict=True
                ):
                    source, vector, ring, vector_ring = stream
                    slot = rem(done, stages)
                    pl.when(done >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
                    plgpu.copy_gmem_to_smem(source.at[batch, own, column_head], ring.at[slot], full.at[slot])
                    if problem.rows_are_keys and vector is not None:  # lse, or delta
                        source = vector.at[batch, column_head, own]
                        plgpu.copy_gmem_to_smem(source, vector_ring.at[slot], full.at[slot])
                return done + 1

            return lax.fori_loop(int32(blocks.first), int32(blocks.last), block, done)

        blocks = problem.in_row(batch).block_range(first)
        return tiles_done + 1, lax.fori_loop(np.int32(0), int32(problem.passes(head)), one_pass, done)

    start = jnp.int32(0), jnp.int32(0)
    tiles_done, done = problem.scheduler.over(tile, start, problem.data.order)
    # No barrier is left while others still arrive at it.
    for stages, free in zip(config.rings, barriers.free, strict=True):
        drain(done, stages, free)
    if config.persistent:
        drain_rows(tiles_done, barriers, config)


def load_rows(rows, lse_and_delta, shared, barriers, tiles_done, place, problem: BackwardProblem) -> None:
    """Fills the rows of the tile that is number `tiles_done`, from `place`: batch row, head, first row."""
    config, (batch, head, first) = problem.config, place
    head, _ = problem.head_and_share(head)
    for w in range(config.warpgroups):
        slot = rem(tiles_done, config.row_stages) * config.warpgroups + w
        if config.persistent:
            freed = functools.partial(plgpu.barrier_wait, barriers.rows_free.at[slot])
            pl.when(tiles_done >= config.row_stages)(freed)
        own = pl.ds(first + w * ROWS, ROWS)
        full = barriers.rows_full.at[slot]
        for source, target in zip(rows, shared.rows, strict=True):
            if source is not None:
                plgpu.copy_gmem_to_smem(source.at[batch, own, head], target.at[slot], full)
        if not problem.rows_are_keys:
            for source, target in zip(lse_and_delta, shared.lse_and_delta, strict=True):
                plgpu.copy_gmem_to_smem(source.at[batch, head, own], target.at[slot], full)


def drain_rows(tiles_done, barriers: Barriers, config: BackwardConfig) -> None:
    """Waits until the places of the rows loaded last are free."""
    for slot in range(config.row_stages * config.warpgroups):
        freed = functools.partial(plgpu.barrier_wait, barriers.rows_free.at[slot])
        pl.when(tiles_done > slot // config.warpgroups)(freed)


class Results(NamedTuple):
    """What a kernel writes."""

    gradients: Pair  # of the rows
    marks: Any = None  # of them; see `nonfinite.py`
    d_query_accum: Any = ()  # the one sum of dQ, or none


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One computing warpgroup: it owns 64 rows of each tile, and their gradients, and adds to dQ's sum."""

    warpgroup: Any  # its index
    results: Results
    shared: Shared
    barriers: Barriers
    scale: float
    problem: BackwardProblem
    spoiled: SpoiledTiles | None = None  # of the second kernel, the tiles that it computes again

    @property
    def config(self) -> BackwardConfig:
        return self.problem.config

    @property
    def owns(self) -> Pair:
        return self.problem.owns

    def run(self) -> None:
        """Computes the rows of all tiles of this block of the grid."""
        problem = self.problem
        in_order = functools.partial(problem.scheduler.over, order=problem.data.order)
        over = in_order if self.spoiled is None else self.spoiled.over
        over(self._tile, (jnp.int32(0), jnp.int32(0)))
        plgpu.wait_smem_to_gmem(0)

    def _tile(self, tile, head, batch, carry):
        in_row = dataclasses.replace(self, problem=self.problem.in_row(batch))
        return in_row._tile_of_row(tile, head, batch, carry)

    def _tile_of_row(self, tile, head, batch, carry):
        """One tile: passes over its blocks of columns, then its gradients."""
        config, problem, d_query = self.config, self.problem, self.shared.d_query
        tiles_done, done = carry
        first_row = tile * problem.rows_of_tile
        visited = problem.block_range(first_row)
        first_row += self.warpgroup * ROWS
        own = problem.block_range_of_warpgroup(first_row, visited)
        of_rows = dataclasses.replace(self, problem=problem.of_rows(first_row))
        slot = rem(tiles_done, config.row_stages) * config.warpgroups + self.warpgroup
        for one in self._row_slots(slot):
            plgpu.barrier_wait(self.barriers.rows_full.at[one])
        begun = done

        def one_pass(of_pass, carry):
            def target(i):
                """Where in dQ's sum this warpgroup's share of block `i` is added."""
                share = problem.size.H // config.warpgroups
                own, width = pl.ds(i * config.columns, config.columns), pl.ds(self.warpgroup * share, share)
                return self.results.d_query_accum[0].at[batch, own, problem.column_head(head, of_pass), width]

            sums, done = carry
            done = over_blocks(visited.first, own.first, self._skip, done)
            step = functools.partial(of_rows._step, first_row, slot, begun, target)
            sums, done = over_block_range(own, step, (sums, done))
            return sums, over_blocks(own.last, visited.last, self._skip, done)

        widths = Pair(problem.size.H, problem.size.V)
        sums = Pair(*(_zeros(width) if own else None for own, width in zip(self.owns, widths, strict=True)))
        passes = problem.passes(head)
        if isinstance(passes, int) and passes == 1:
            sums, done = one_pass(0, (sums, done))
        else:
            sums, done = lax.fori_loop(np.int32(0), int32(passes), one_pass, (sums, done))

        if d_query is not None:
            d_query.wait_for_readers(done > begun)
        self._store(sums, slot, (batch, head, first_row))
        return tiles_done + 1, done

    def _step(self, first_row, row_slot, begun, target, partial: bool, i, carry):
        """Adds what block `i` of columns gives to the gradients of the rows and to `target(i)`.

        `begun` blocks were done when the tile began.
        """
        (d_key_or_query, d_value), done = carry
        owns, d_query = self.owns, self.shared.d_query
        rows, slots, columns, full, free = self._operands(row_slot, done)

        plgpu.barrier_wait(full.key_or_query)
        scores = issue_product(rows.key_or_query, columns.key_or_query)
        plgpu.barrier_wait(full.value_or_d_out)
        d_p = issue_product(rows.value_or_d_out, columns.value_or_d_out) if owns.key_or_query else None
        scores = wait_product(scores, in_flight=int(owns.key_or_query))
        p, slope = self._probabilities(scores, slots, row_slot, free, first_row, i, partial)
        if owns.value_or_d_out:
            d_value = issue_accumulate(d_value, self._convert(p), columns.value_or_d_out)
        if owns.key_or_query:
            p = p if slope is None else p * slope
            d_p = wait_product(d_p, in_flight=int(owns.value_or_d_out))
            delta = self._per_score(self.shared.lse_and_delta.delta, slots.value_or_d_out, row_slot)
            if not owns.value_or_d_out:
                plgpu.barrier_arrive(free.value_or_d_out)
            d_scores = p * (d_p - delta)
            if self.spoiled is not None and partial:  # 0 times NaN
                d_scores = self._masked(d_scores, first_row, i)
            d_scores = self._convert(d_scores)
            d_key_or_query = issue_accumulate(d_key_or_query, d_scores, columns.key_or_query)
            if d_query is not None:
                d_query.put(d_scores, self.warpgroup, first=done == begun)
                keys = [self.shared.rows.key_or_query.at[one] for one in self._row_slots(row_slot)]
                d_block = d_query.issue(keys)
        sums = Pair(*(x if x is None else wait_product(x, in_flight=0) for x in (d_key_or_query, d_value)))
        for own, one in zip(owns, free, strict=True):
            if own:  # else it was read by the first products alone
                plgpu.barrier_arrive(one)
        if d_query is not None:
            d_query.add(wait_product(d_block, in_flight=0), self.warpgroup, target(i))
        return sums, done + 1

    def _operands(self, row_slot, done):
        """The rows and the columns of a step, the slots of those in their rings, and their barriers."""
        # LLVM would keep what is the same for all blocks, dozens of matrix descriptors, in registers, and
        # ptxas would spill them: to both, this zero differs from block to block.
        zero = lax.shift_right_logical(lax.optimization_barrier(done), np.int32(31))
        rows = Pair(*(None if x is None else x.at[row_slot + zero] for x in self.shared.rows))
        slots = Pair(*(rem(done, stages) if stages > 1 else zero for stages in self.config.rings))
        columns = Pair(*(ring.at[slot] for ring, slot in zip(self.shared.columns, slots, strict=True)))
        full, free = (
            Pair(*(x.at[slot] for x, slot in zip(of_rings, slots, strict=True)))
            for of_rings in (self.barriers.full, self.barriers.free)
        )
        return rows, slots, columns, full, free

    def _probabilities(self, scores, slots: Pair, row_slot, free: Pair, first_row, i, partial: bool):
        """A block's probabilities; and the derivatives of logits by scaled scores, None for 1."""
        lse = self._per_score(self.shared.lse_and_delta.lse, slots.key_or_query, row_slot)
        if not self.owns.key_or_query:
            plgpu.barrier_arrive(free.key_or_query)
        scale, slope = self.scale * LOG2_E, None
        if (cap := self.problem.soft_cap) is not None:
            scores, scale = tanh(scores * (self.scale / cap)), cap * LOG2_E
            slope = 1.0 - scores * scores
        p = jnp.exp2(scores * scale - lse)
        return self._masked(p, first_row, i) if partial else p, slope

    def _masked(self, p, first_row, i):
        config, problem = self.config, self.problem
        # Queries beyond the last have lse +inf, so that only keys need a comparison with their number. But
        # scores of a key that isn't finite are NaN there, too.
        of_columns = problem.size.T if problem.rows_are_keys else problem.size.S
        has_tail = problem.data.column_lengths is not None or of_columns % config.columns != 0
        has_tail &= self.spoiled is not None or not problem.rows_are_keys
        is_masked = dict(has_tail=has_tail, masks_rows=problem.masks_rows)
        return problem.data.masked(p, problem.mask, first_row, i * config.columns, 0.0, **is_masked)

    def _per_score(self, ref, slot, row_slot):
        """lse or delta for each score of a block: of queries, which are the columns or the rows."""
        shape = (ROWS, self.config.columns)
        if self.problem.rows_are_keys:
            return lax.broadcast_in_dim(compat.load(ref.at[slot], COLUMN), shape, [1])
        return lax.broadcast_in_dim(compat.load(ref.at[row_slot], ROW), shape, [0])

    def _skip(self, _, done):
        """A block that other warpgroups visit."""
        for stages, full, free in zip(self.config.rings, self.barriers.full, self.barriers.free, strict=True):
            plgpu.barrier_wait(full.at[rem(done, stages)])
            plgpu.barrier_arrive(free.at[rem(done, stages)])
        return done + 1

    def _store(self, sums: Pair, slot, place) -> None:
        """Writes the gradients of a tile to `place`: batch row, head, first row. They are staged over its
        rows, but for those of a head share, which are float32."""
        batch, head, first_row = place
        d_key_or_query = sums.key_or_query * self.scale if self.owns.key_or_query else None
        rooms = self.shared.rows
        if rooms.value_or_d_out is None:
            rooms = Pair(rooms.key_or_query, rooms.key_or_query)
        results = Pair(d_key_or_query, sums.value_or_d_out)
        if self.results.marks is not None:
            own = pl.ds(div(first_row, MARKED_ROWS), ROWS // MARKED_ROWS)
            mark(self.results.marks.at[batch, head, own], [x for x in results if x is not None])
        if self.config.head_shares > 1:
            self._store_share(results, slot, place)
            return
        for values, room, target in zip(results, rooms, self.results.gradients, strict=True):
            if values is not None:
                target = target.at[batch, pl.ds(first_row, ROWS), head]
                if self.spoiled is not None:
                    values = self.spoiled.unless_finite(target, room.at[slot], self.warpgroup, values)
                room[slot, :, :] = values.astype(self.shared.rows.key_or_query.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(room.at[slot], target)
        if self.config.persistent:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self._release_rows(slot)

    def _store_share(self, results: Pair, slot, place) -> None:
        """Writes the float32 gradients of a head share, straight from registers: the second kernel only those
        that weren't finite."""
        self._release_rows(slot)
        batch, head, first_row = place
        key_head, share = self.problem.head_and_share(head)
        for values, target in zip(results, self.results.gradients, strict=True):
            if values is not None:
                target = target.at[share, batch, pl.ds(first_row, ROWS), key_head]
                if self.spoiled is not None:
                    values = finite_or(compat.load(target, ACCUMULATOR, optimized=False), values)
                store(target, values)

    def _release_rows(self, slot) -> None:
        """Tells the loading warpgroup that this one has read its own rows, in `slot`, and those of other
        warpgroups that it reads."""
        if self.config.persistent:
            for one in self._row_slots(slot):
                plgpu.barrier_arrive(self.barriers.rows_free.at[one])

    def _row_slots(self, slot):
        """The places of the rows that this warpgroup reads: `slot`, which has its own, and those of the other
        warpgroups where they compute dQ together."""
        if self.shared.d_query is None:
            return [slot]
        return [slot - self.warpgroup + w for w in range(self.config.warpgroups)]

    def _convert(self, x):
        # Without the barrier LLVM carries x in float32, and converts it where it is used.
        return lax.optimization_barrier(x.astype(self.shared.rows.key_or_query.dtype))


def _zeros(width: int):
    return plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), ACCUMULATOR)
