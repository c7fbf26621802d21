"""Forward by Mosaic GPU, for Hopper: warpgroups that compute, and one that loads keys and values for them.

A block owns tiles of 64 queries a computing warpgroup. The loading warpgroup keeps rings of keys and values
in shared memory filled by TMA; one barrier a slot says that it is full, another that all warpgroups are done
with it. Each computing warpgroup walks over the tile's keys with the online softmax of `triton_forward`, its
scores, probabilities and output in registers.

A step issues the scores of a block, corrects the output beside them, and issues the product of the last
block's probabilities with its values. With `turns`, warpgroups issue one after the other, so that one's
softmax runs beside the other's products: ptxas puts it behind a warpgroup's own.
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

from jax_flash._mask import BlockRange, PositionMask, keys_of_queries
from jax_flash._spec import AttentionSpec, Operands, Sizes, sizes

from .. import compat
from ..loop import over_block_range
from ..scores import LN_2, LOG2_E
from .product import issued, landed
from .registers import ACCUMULATOR, FOLDED, ROW, folded, scaled_unless_one, where_between
from .roles import divide, drain
from .tile_scheduler import Walk, div, int32, rem, tile_lengths
from .tiles import ROWS, ForwardConfig

# How much a row's maximum may grow, in base 2, before what is subtracted does (FlashAttention-4). So few
# blocks have to correct the output, and probabilities stay below 2^8.
SLACK = 8.0


@dataclasses.dataclass(frozen=True)
class Side:
    """The queries of a call, and the keys that they meet.

    Blocks of keys go from the last to the first, so that the masked one of causal attention comes first,
    where nothing runs beside its softmax anyway.
    """

    size: Sizes
    mask: PositionMask
    config: ForwardConfig
    multiprocessors: int

    @property
    def walk(self) -> Walk:
        """Over tiles of queries."""
        size, config = self.size, self.config
        return Walk(
            tiles=pl.cdiv(size.T, config.queries),
            heads=size.N,
            batch=size.B,
            lengths=tile_lengths(self.mask, config.queries, config.keys),
            blocks=self.multiprocessors if config.persistent else None,
            bytes_of_head=2 * size.S * (size.H + size.V) // size.group,
        )

    def keys_of_tile(self, first) -> BlockRange:
        """The blocks of keys that a tile loads: at least one, also where its queries see none."""
        blocks = self.mask.block_range(first, self.config.queries, self.config.keys)
        if self.mask.unbounded:
            return blocks
        first_block = jnp.minimum(blocks.first, pl.cdiv(self.size.S, self.config.keys) - 1)
        return dataclasses.replace(blocks, first=first_block, last=jnp.maximum(blocks.last, first_block + 1))

    def keys_of_warpgroup(self, first, tile: BlockRange) -> BlockRange:
        """A tile's blocks, those that all queries of a warpgroup meet told from the others; backwards."""
        return self.mask.block_range(first, ROWS, self.config.keys).full_within(tile).reversed()


class Shared(NamedTuple):
    """Shared memory of a block."""

    query: Any
    key: Any
    value: Any
    out: Any  # None where output is staged over the queries
    lse: Any


class Rows(NamedTuple):
    """What the online softmax knows of a warpgroup's rows."""

    subtracted: Any  # from their logits: about the largest so far
    sums: Any  # of probabilities, (ROWS, FOLDED)
    correction: Any  # of what was summed before the last block


class Barriers(NamedTuple):
    """`full` where TMA has filled a place, `free` where its readers are done with it."""

    query_full: Any
    query_free: Any
    key_full: Any
    key_free: Any
    value_full: Any
    value_free: Any
    turn: Any


def flash_forward(query, key, value, out, lse, shared, barriers, *, scale: float, side: Side) -> None:
    """Refs: query (B,T,N,H), key (B,S,K,H), value (B,S,K,V) -> out (B,T,N,V), lse (B,N,T, in whole tiles)."""
    divide(
        side.config.warpgroups,
        compute=lambda warpgroup: _compute(warpgroup, out, lse, shared, barriers, scale=scale, side=side),
        load=lambda: _load(query, key, value, shared, barriers, side=side),
    )


def _load(query, key, value, shared, barriers, *, side: Side) -> None:
    """Fills the queries of each tile, and the rings of its keys and values."""
    config, group = side.config, side.size.group

    def tile(tile, head, batch, carry):
        tiles_done, blocks_done = carry
        first = tile * config.queries
        keys = side.keys_of_tile(first)
        start, stop = int32(keys.first), int32(keys.last)

        def load_queries():
            for w in range(config.warpgroups):
                own = rem(tiles_done, config.query_stages) * config.warpgroups + w
                refilled = functools.partial(plgpu.barrier_wait, barriers.query_free.at[own])
                pl.when(tiles_done >= config.query_stages)(refilled)
                rows = pl.ds(first + w * ROWS, ROWS)
                full = barriers.query_full.at[own]
                plgpu.copy_gmem_to_smem(query.at[batch, rows, head], shared.query.at[own], full)

        def load_block(i, source, ring, full, free):
            """Block `i` of the tile's keys or values."""
            index = blocks_done + (i - start)
            slot = rem(index, config.stages)
            pl.when(index >= config.stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
            rows = pl.ds((start + stop - 1 - i) * config.keys, config.keys)
            own = source.at[batch, rows, div(head, group)]
            plgpu.copy_gmem_to_smem(own, ring.at[slot], full.at[slot])

        def step(i, carry):
            # In the order in which they are read: values come a block behind keys.
            if config.query_stages > 1:
                pl.when(i == start)(load_queries)
            load_keys = functools.partial(
                load_block, i, key, shared.key, barriers.key_full, barriers.key_free
            )
            pl.when(i < stop)(load_keys)
            load_values = functools.partial(
                load_block, i - 1, value, shared.value, barriers.value_full, barriers.value_free
            )
            pl.when(i > start)(load_values)
            if config.query_stages == 1:
                # Behind the blocks that there is room for while the tile before still needs their place.
                pl.when(i == jnp.minimum(start + config.stages, stop) - 1)(load_queries)
            return carry

        lax.fori_loop(start, stop + np.int32(1), step, 0)
        return tiles_done + 1, blocks_done + (stop - start)

    tiles_done, blocks_done = side.walk.over(tile, (jnp.int32(0), jnp.int32(0)))
    # No barrier is left while others still arrive at it.
    drain(blocks_done, config.stages, barriers.key_free, barriers.value_free)
    if config.persistent:
        for place in range(config.query_stages):
            for w in range(config.warpgroups):
                free = barriers.query_free.at[place * config.warpgroups + w]
                pl.when(tiles_done > place)(functools.partial(plgpu.barrier_wait, free))


def _compute(warpgroup, out, lse, shared, barriers, *, scale: float, side: Side) -> None:
    """One warpgroup's part of the tiles."""
    config, size, mask = side.config, side.size, side.mask
    scale_2 = scale * LOG2_E
    S_tail = size.S % config.keys != 0
    masked = not mask.unbounded or S_tail
    dtype = shared.query.dtype
    shares_query = shared.out is None
    # Of two places for queries, one is left to the output until the next tile is well under way.
    releases_later = shares_query and config.persistent and config.query_stages > 1

    def zeros(columns: int):
        return plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), ACCUMULATOR)

    def rescaled(x, factors):
        return x * lax.broadcast_in_dim(factors, x.shape, [0])

    def packed(p):
        # Without the barrier LLVM carries probabilities in float32, and converts them where they are used.
        return lax.optimization_barrier(p.astype(dtype))

    def slot_of(index):
        return rem(index, config.stages)

    def place_of(tile_number):
        return rem(tile_number, config.query_stages) * config.warpgroups + warpgroup

    def release(tile_number):
        """Gives the place of a tile's queries back, once the output that was staged there is read."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(barriers.query_free.at[place_of(tile_number)])

    def turn(action, of):
        if config.turns:
            action(barriers.turn.at[of])

    def pass_turn():
        turn(plgpu.barrier_arrive, rem(warpgroup + 1, config.warpgroups))

    def issue_scores(query, index):
        slot = slot_of(index)
        plgpu.barrier_wait(barriers.key_full.at[slot])
        turn(plgpu.barrier_wait, warpgroup)
        return issued(query, shared.key.at[slot])

    def finished(scores, index, in_flight: int):
        result = landed(scores, in_flight)
        plgpu.barrier_arrive(barriers.key_free.at[slot_of(index)])
        return result

    def issue_values(acc, p, index):
        slot = slot_of(index)
        plgpu.barrier_wait(barriers.value_full.at[slot])
        compat.wgmma(acc, p, shared.value.at[slot])

    def added_values(index):
        plgpu.barrier_arrive(barriers.value_free.at[slot_of(index)])

    def logits(scores, edge: bool, first_row, block):
        """Masked scores, and the scale that they are yet to be multiplied with to be logits in base 2."""
        scale = scale_2
        if scale_2 <= 0:  # the largest score is not the largest logit, and -inf would not stay that
            scores, scale = scores * scale_2, 1.0
        if not edge:
            return scores, scale
        rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) + first_row
        first_column = block * config.keys
        bounds = (None if x is None else x - first_column for x in mask.visible_columns(rows, S_tail))
        return where_between(scores, *bounds, -jnp.inf), scale

    def softmax(scores, rows: Rows, edge: bool, first_row, block):
        """A block's probabilities, and what is known of the rows with it."""
        scores, scale = logits(scores, edge, first_row, block)
        highest = jnp.maximum(rows.subtracted, folded(jnp.maximum, scores).max(axis=1) * scale)
        subtracted = jnp.where(highest > rows.subtracted + SLACK, highest, rows.subtracted)
        # A row that has met nothing yet has no maximum to subtract: 2^(-inf - 0) is the 0 it wants.
        shift = jnp.where(subtracted == -jnp.inf, 0.0, subtracted) if masked else subtracted
        p = jnp.exp2(scores * scale - lax.broadcast_in_dim(shift, scores.shape, [0]))
        correction = jnp.exp2(rows.subtracted - shift)
        return p, Rows(subtracted, rescaled(rows.sums, correction) + folded(jnp.add, p), correction)

    def tile(tile, head, batch, carry):
        tiles_done, blocks_done = carry
        first = tile * config.queries
        tile_keys = side.keys_of_tile(first)
        own = place_of(tiles_done)
        query = shared.query.at[own]
        first += warpgroup * ROWS
        keys = side.keys_of_warpgroup(first, tile_keys)
        count = keys.last - keys.first

        # The first block has no values of an earlier one to run beside.
        plgpu.barrier_wait(barriers.query_full.at[own])
        scores = issue_scores(query, blocks_done)
        pass_turn()
        scores = finished(scores, blocks_done, in_flight=0)
        nothing = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW)
        p, rows = softmax(scores, Rows(nothing, zeros(FOLDED), nothing), masked, first, keys.last - 1)
        if releases_later:
            pl.when(tiles_done > 0)(functools.partial(release, tiles_done - 1))

        def step(edge, i, carry):
            acc, p, rows = carry
            index = blocks_done + (i - keys.first)

            scores = issue_scores(query, index)

            def softmax_beside(acc):
                issue_values(acc, p, index - 1)
                pass_turn()
                block = keys.first + keys.last - 1 - i
                return softmax(finished(scores, index, in_flight=1), rows, edge, first, block)

            acc = scaled_unless_one(acc, rows.correction)
            acc, (p, rows) = compat.accumulate(softmax_beside, acc, (zeros(config.keys), rows))
            added_values(index - 1)
            return acc, packed(p), rows

        rest = BlockRange(keys.first + 1, keys.last, _after(keys, "full_begin"), _after(keys, "full_end"))
        acc, p, rows = over_block_range(rest, step, (zeros(size.V), packed(p), rows))
        if not shares_query and config.persistent:
            plgpu.barrier_arrive(barriers.query_free.at[own])
        last = blocks_done + count - 1

        def last_values(acc):
            issue_values(acc, p, last)
            sums = rows.sums.sum(axis=1)
            met_nothing = sums == 0.0
            sums = jnp.where(met_nothing, 1.0, sums)
            of_lse = jnp.where(met_nothing, -jnp.inf, rows.subtracted * LN_2 + jnp.log(sums))
            return of_lse, 1.0 / sums

        acc, (of_lse, normaliser) = compat.accumulate(
            last_values, scaled_unless_one(acc, rows.correction), (rows.subtracted, rows.subtracted)
        )
        added_values(last)

        if not shares_query:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's output
        staged = query if shares_query else shared.out.at[warpgroup]
        staged_lse = shared.lse.at[warpgroup]
        staged_lse[...] = of_lse
        staged[...] = rescaled(acc, normaliser).astype(dtype)
        plgpu.commit_smem()
        place = pl.ds(first, ROWS)
        plgpu.copy_smem_to_gmem(staged, out.at[batch, place, head])
        plgpu.copy_smem_to_gmem(staged_lse, lse.at[batch, head, place])
        if shares_query and config.persistent and not releases_later:
            release(tiles_done)
        return tiles_done + 1, blocks_done + count

    if config.turns:
        pl.when(warpgroup == config.warpgroups - 1)(lambda: plgpu.barrier_arrive(barriers.turn.at[0]))
    tiles_done, _ = side.walk.over(tile, (jnp.int32(0), jnp.int32(0)))
    if releases_later:
        release(tiles_done - 1)
    if config.turns:
        pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(barriers.turn.at[0]))
    plgpu.wait_smem_to_gmem(0)


def _after(keys: BlockRange, bound: str):
    """A bound of the blocks behind the first."""
    start, value = keys.first, getattr(keys, bound)
    if isinstance(start, int) and isinstance(value, int):
        return max(value, start + 1)
    return jnp.maximum(value, start + 1)


def forward(
    spec: AttentionSpec, operands: Operands, config: ForwardConfig, multiprocessors: int
) -> tuple[jax.Array, jax.Array]:
    """Operands as in `jax_flash.pallas.forward` -> out (B,T,N,V) in query's dtype, lse (B,N,T) float32."""
    size = sizes(operands)
    side = Side(size, keys_of_queries(spec, size), config, multiprocessors)
    dtype = operands.query.dtype
    rows = side.walk.tiles * config.queries  # TMA wants strides of 16 bytes: whole tiles, then cut

    def tiles(count: int, tile_rows: int, width: int):
        return compat.tiled_shared_memory((count, tile_rows, width), dtype)

    shared = Shared(
        query=tiles(config.query_stages * config.warpgroups, ROWS, size.H),
        key=tiles(config.stages, config.keys, size.H),
        value=tiles(config.stages, config.keys, size.V),
        out=None if size.H == size.V else tiles(config.warpgroups, ROWS, size.V),
        lse=plgpu.SMEM((config.warpgroups, ROWS), jnp.float32),
    )
    of_warpgroups = plgpu.Barrier(num_barriers=config.warpgroups)
    of_queries = plgpu.Barrier(num_barriers=config.query_stages * config.warpgroups)
    full = plgpu.Barrier(num_barriers=config.stages)
    free = plgpu.Barrier(num_barriers=config.stages, num_arrivals=config.warpgroups)
    barriers = Barriers(of_queries, of_queries, full, free, full, free, of_warpgroups)
    query, key, value = map(compat.in_tiles, (operands.query, operands.key, operands.value))
    (out, lse), _ = compat.mosaic_call(
        functools.partial(flash_forward, scale=spec.scale, side=side),
        blocks=side.walk.grid,
        warpgroups=config.warpgroups + 1,
        scratch=(shared, barriers),
        out_shape=[
            compat.result((*query.shape[:-1], size.V), dtype, like=query),
            compat.result((size.B, size.N, rows), jnp.float32, like=query),
        ],
        name="jax_flash_mosaic_forward",
    )(query, key, value)
    return out[:, : size.T], lse[:, :, : size.T]
