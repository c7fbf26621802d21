"""Forward by Mosaic GPU, for Hopper: warpgroups that compute, and one that loads keys and values for them.

A block owns tiles of 64 queries a computing warpgroup. The loading warpgroup keeps rings of keys and values
in shared memory filled by TMA; one barrier a slot says that it is full, another that all warpgroups are done
with it. Each computing warpgroup walks over the tile's keys with the online softmax of `triton_forward`, its
scores, probabilities and output in registers.

A step issues the scores of block j, corrects the output beside them, and issues the product of block j - 1's
probabilities with its values, beside which the softmax of block j runs. With `turns`, warpgroups issue one
after the other, so that one's softmax runs beside the other's products.
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

from jax_flash._spec import AttentionSpec, Operands, Sizes, sizes

from . import compat
from .band import Band, Blocks, keys_of_queries
from .loop import over_blocks
from .mosaic_tiles import ROWS, ForwardConfig, output_shares_query
from .scores import LN_2, LOG2_E

ACCUMULATOR = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)


def div(index: jax.Array, by: int) -> jax.Array:
    return lax.div(index, np.int32(by))


def rem(index: jax.Array, by: int) -> jax.Array:
    return lax.rem(index, np.int32(by))


@dataclasses.dataclass(frozen=True)
class Walk:
    """The order in which blocks of the grid take tiles, and the keys that each tile meets."""

    size: Sizes
    band: Band
    config: ForwardConfig
    multiprocessors: int

    @property
    def tiles_of_head(self) -> int:
        return pl.cdiv(self.size.T, self.config.queries)

    @property
    def uneven(self) -> bool:
        """Whether late tiles see more keys than early ones."""
        return self.band.high is not None and self.band.low is None and self.tiles_of_head > 1

    @property
    def paired(self) -> bool:
        """Whether long tiles are taken together with short ones, so that all pairs weigh the same."""
        return self.config.persistent and self.uneven

    @property
    def items_of_head(self) -> int:
        return pl.cdiv(self.tiles_of_head, 2) if self.paired else self.tiles_of_head

    @property
    def items(self) -> int:
        return self.items_of_head * self.size.N * self.size.B

    @property
    def blocks(self) -> int:
        return min(self.items, self.multiprocessors) if self.config.persistent else self.items

    def over_tiles(self, body, carry):
        """`body(first_query, head, batch, keys, carry)` over the tiles of this block of the grid."""
        block = lax.axis_index("block")
        if not self.config.persistent:
            return self._tile(block, 0, body, carry)
        turns = div(self.items - 1 - block, self.blocks) + 1
        tiles = 2 if self.paired else 1

        def step(i, carry):
            item = block + div(i, tiles) * self.blocks
            return self._tile(item, rem(i, tiles), body, carry)

        return lax.fori_loop(np.int32(0), turns * tiles, step, carry)

    def _tile(self, item, of_pair, body, carry):
        in_head, others = rem(item, self.items_of_head), div(item, self.items_of_head)
        last = self.tiles_of_head - 1
        tile = last - in_head if self.uneven else in_head
        if self.paired:
            tile = lax.select(of_pair == 0, tile, last - tile)
        head, batch = rem(others, self.size.N), div(others, self.size.N)
        first = tile * self.config.queries
        return body(first, head, batch, self._keys(first, self.config.queries), carry)

    def _keys(self, first, rows: int) -> Blocks:
        """The blocks of keys that a tile loads: at least one, also where its queries see none."""
        blocks = self.band.blocks(first, rows, self.config.keys)
        if self.band.low is None and self.band.high is None:
            return blocks
        start = jnp.minimum(blocks.start, pl.cdiv(self.size.S, self.config.keys) - 1)
        return dataclasses.replace(blocks, start=start, stop=jnp.maximum(blocks.stop, start + 1))

    def keys_of_warpgroup(self, first, tile: Blocks) -> Blocks:
        """The tile's blocks of keys, those that all queries of a warpgroup meet told from the others."""
        own = self.band.blocks(first, ROWS, self.config.keys)
        full_start = _clip(own.full_start, tile.start, tile.stop)
        return dataclasses.replace(
            tile, full_start=full_start, full_stop=_clip(own.full_stop, full_start, tile.stop)
        )


def _int32(x) -> jax.Array | np.int32:
    """An index of 32 bits, also where 64-bit types are on."""
    return np.int32(x) if isinstance(x, int) else x


def _clip(x, low, high):
    if all(isinstance(value, int) for value in (x, low, high)):
        return min(max(x, low), high)
    return jnp.clip(x, low, high)


class Shared(NamedTuple):
    """Shared memory of a block."""

    query: Any
    key: Any
    value: Any
    out: Any  # None where output is staged over the queries
    lse: Any
    row_sum: Any  # written, and never read: see `held`


class Barriers(NamedTuple):
    """`full` where TMA has filled a place, `free` where its readers are done with it."""

    query_full: Any
    query_free: Any
    key_full: Any
    key_free: Any
    value_full: Any
    value_free: Any
    turn: Any


def flash_forward(query, key, value, out, lse, shared, barriers, *, scale: float, walk: Walk) -> None:
    """Refs: query (B,T,N,H), key (B,S,K,H), value (B,S,K,V) -> out (B,T,N,V), lse (B,N,T, in whole tiles)."""
    config = walk.config
    warpgroup = lax.axis_index("warpgroup")
    more, fewer = compat.registers(config.warpgroups)

    @pl.when(warpgroup < config.warpgroups)
    def _():
        plgpu.set_max_registers(more, action="increase")
        _compute(warpgroup, out, lse, shared, barriers, scale=scale, walk=walk)

    @pl.when(warpgroup == config.warpgroups)
    def _():
        plgpu.set_max_registers(fewer, action="decrease")
        _load(query, key, value, shared, barriers, walk=walk)


def _load(query, key, value, shared, barriers, *, walk: Walk) -> None:
    """Fills the queries of each tile, and the rings of its keys and values."""
    config, group = walk.config, walk.size.group

    def tile(first, head, batch, keys: Blocks, carry):
        tiles_done, blocks_done = carry
        for w in range(config.warpgroups):
            if config.persistent:
                pl.when(tiles_done > 0)(functools.partial(plgpu.barrier_wait, barriers.query_free.at[w]))
            rows = pl.ds(first + w * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(
                query.at[batch, rows, head], shared.query.at[w], barriers.query_full.at[w]
            )

        def block(j, blocks_done):
            slot = rem(blocks_done, config.stages)
            rows = pl.ds(j * config.keys, config.keys)
            key_head = div(head, group)
            for source, ring, full, free in (
                (key, shared.key, barriers.key_full, barriers.key_free),
                (value, shared.value, barriers.value_full, barriers.value_free),
            ):
                refilled = functools.partial(plgpu.barrier_wait, free.at[slot])
                pl.when(blocks_done >= config.stages)(refilled)
                plgpu.copy_gmem_to_smem(source.at[batch, rows, key_head], ring.at[slot], full.at[slot])
            return blocks_done + 1

        start, stop = _int32(keys.start), _int32(keys.stop)
        return tiles_done + 1, lax.fori_loop(start, stop, block, blocks_done)

    _, blocks_done = walk.over_tiles(tile, (jnp.int32(0), jnp.int32(0)))
    # No barrier is left while others still arrive at it.
    drain(blocks_done, config.stages, barriers.key_free, barriers.value_free)
    if config.persistent:
        for w in range(config.warpgroups):
            plgpu.barrier_wait(barriers.query_free.at[w])


def drain(filled: jax.Array, stages: int, *free) -> None:
    """Waits until the readers of rings are done with what was filled last."""
    for slot in range(stages):
        for barriers in free:
            pl.when(filled > slot)(functools.partial(plgpu.barrier_wait, barriers.at[slot]))


def _compute(warpgroup, out, lse, shared, barriers, *, scale: float, walk: Walk) -> None:
    """One warpgroup's part of the tiles."""
    config, size, band = walk.config, walk.size, walk.band
    scale_2 = scale * LOG2_E
    S_tail = size.S % config.keys != 0
    masked = band.low is not None or band.high is not None or S_tail
    shares_query = shared.out is None
    query, staged_lse = shared.query.at[warpgroup], shared.lse.at[warpgroup]
    staged = query if shares_query else shared.out.at[warpgroup]
    dtype = query.dtype

    def turn(action, of):
        if config.turns:
            action(barriers.turn.at[of])

    def slot_of(block_index):
        return rem(block_index, config.stages)

    def probabilities(scores, row_max, row_sum, edge: bool, first, j):
        """Online softmax: -> the block's probabilities, new maximum and sum, and the output's correction."""
        if edge:
            rows, columns = (
                plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=ACCUMULATOR) for axis in (0, 1)
            )
            columns += j * config.keys
            met = band.meets(rows + first, columns)
            if S_tail:
                met = columns < size.S if met is None else met & (columns < size.S)
            scores = jnp.where(met, scores * scale_2, -jnp.inf)
            new_max = jnp.maximum(row_max, scores.max(axis=1))
            # A row that has met nothing yet has no maximum to subtract: 2^(-inf - 0) is the 0 it wants.
            shift = jnp.where(new_max == -jnp.inf, 0.0, new_max)
        elif scale_2 >= 0:
            new_max = shift = jnp.maximum(row_max, scores.max(axis=1) * scale_2)
            scores = scores * scale_2
        else:
            scores = scores * scale_2
            new_max = shift = jnp.maximum(row_max, scores.max(axis=1))
        p = jnp.exp2(scores - lax.broadcast_in_dim(shift, scores.shape, [0]))
        correction = jnp.exp2(row_max - shift)
        return p, new_max, row_sum * correction + p.sum(axis=1), correction

    def issue_scores(scores, index):
        slot = slot_of(index)
        plgpu.barrier_wait(barriers.key_full.at[slot])
        turn(plgpu.barrier_wait, warpgroup)
        compat.wgmma(scores, query, shared.key.at[slot].transpose((1, 0)))

    def pass_turn():
        turn(plgpu.barrier_arrive, rem(warpgroup + 1, config.warpgroups))

    def finished(scores, index, in_flight: int):
        result = compat.awaited(scores, in_flight)
        plgpu.barrier_arrive(barriers.key_free.at[slot_of(index)])
        return result

    def add_values(acc, p, index):
        slot = slot_of(index)
        plgpu.barrier_wait(barriers.value_full.at[slot])
        compat.wgmma(acc, p, shared.value.at[slot])

    def added_values(index):
        plgpu.barrier_arrive(barriers.value_free.at[slot_of(index)])

    def packed(p):
        # Without the barrier LLVM carries probabilities in float32, and converts them where they are used.
        return lax.optimization_barrier(p.astype(dtype))

    def held(of_block):
        """A block's softmax, to be computed before the product under way is waited for.

        ptxas moves that wait up past all arithmetic, so that the softmax would run after the product instead
        of beside it; but not past a store.
        """
        if config.hold:
            _, _, row_sum, _ = of_block
            compat.store_unsynchronised(shared.row_sum.at[warpgroup], row_sum, ROW)
        return of_block

    def scores_like():
        return plgpu.layout_cast(jnp.zeros((ROWS, config.keys), jnp.float32), ACCUMULATOR)

    def rescaled(acc, correction):
        return acc * lax.broadcast_in_dim(correction, acc.shape, [0])

    def tile(first, head, batch, tile_keys: Blocks, blocks_done):
        first += warpgroup * ROWS
        keys = walk.keys_of_warpgroup(first, tile_keys)
        row_max = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW)
        row_sum = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
        acc = plgpu.layout_cast(jnp.zeros((ROWS, size.V), jnp.float32), ACCUMULATOR)
        plgpu.barrier_wait(barriers.query_full.at[warpgroup])

        # The first block has no values of an earlier one to run beside.
        def first_scores(scores):
            issue_scores(scores, blocks_done)
            pass_turn()
            return finished(scores, blocks_done, in_flight=0)

        scores = compat.from_zero(first_scores, (ROWS, config.keys))
        p, *of_rows = probabilities(scores, row_max, row_sum, masked, first, keys.start)

        def step(edge, j, carry):
            acc, p, (row_max, row_sum, correction) = carry
            index = blocks_done + (j - keys.start)

            def softmax_beside(scores, acc):
                add_values(acc, p, index - 1)
                pass_turn()
                of_block = finished(scores, index, in_flight=1)
                return held(probabilities(of_block, row_max, row_sum, edge, first, j))

            acc, (p, *of_rows) = compat.from_zero_and_from(
                lambda scores: issue_scores(scores, index),
                softmax_beside,
                (ROWS, config.keys),
                lambda: rescaled(acc, correction),
                (scores_like(), row_max, row_sum, correction),
            )
            added_values(index - 1)
            return acc, packed(p), tuple(of_rows)

        rest = Blocks(keys.start + 1, _after(keys, "full_start"), _after(keys, "full_stop"), keys.stop)
        acc, p, (row_max, row_sum, correction) = over_blocks(rest, step, (acc, packed(p), tuple(of_rows)))
        count = keys.stop - keys.start
        last = blocks_done + count - 1
        acc, _ = compat.accumulate(lambda acc: add_values(acc, p, last), rescaled(acc, correction), None)
        added_values(last)

        if not shares_query and config.persistent:
            plgpu.barrier_arrive(barriers.query_free.at[warpgroup])

        met_nothing = row_sum == 0.0
        row_sum = jnp.where(met_nothing, 1.0, row_sum)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's output
        staged_lse[...] = jnp.where(met_nothing, -jnp.inf, row_max * LN_2 + jnp.log(row_sum))
        staged[...] = (acc * lax.broadcast_in_dim(1.0 / row_sum, acc.shape, [0])).astype(dtype)
        plgpu.commit_smem()
        rows = pl.ds(first, ROWS)
        plgpu.copy_smem_to_gmem(staged, out.at[batch, rows, head])
        plgpu.copy_smem_to_gmem(staged_lse, lse.at[batch, head, rows])
        if shares_query and config.persistent:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(barriers.query_free.at[warpgroup])
        return blocks_done + count

    if config.turns:
        pl.when(warpgroup == config.warpgroups - 1)(lambda: plgpu.barrier_arrive(barriers.turn.at[0]))
    walk.over_tiles(tile, jnp.int32(0))
    if config.turns:
        pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(barriers.turn.at[0]))
    plgpu.wait_smem_to_gmem(0)


def _after(keys: Blocks, bound: str):
    """A bound of the blocks behind the first."""
    start, value = keys.start, getattr(keys, bound)
    if isinstance(start, int) and isinstance(value, int):
        return max(value, start + 1)
    return jnp.maximum(value, start + 1)


def forward(
    spec: AttentionSpec, operands: Operands, config: ForwardConfig, multiprocessors: int
) -> tuple[jax.Array, jax.Array]:
    """Operands as in `jax_flash.pallas.forward` -> out (B,T,N,V) in query's dtype, lse (B,N,T) float32."""
    size = sizes(operands)
    walk = Walk(size, keys_of_queries(spec, size), config, multiprocessors)
    dtype = operands.query.dtype
    rows = walk.tiles_of_head * config.queries  # TMA wants strides of 16 bytes: whole tiles, then cut

    def tiles(count: int, tile_rows: int, width: int):
        return compat.tiled_shared_memory((count, tile_rows, width), dtype)

    shared = Shared(
        query=tiles(config.warpgroups, ROWS, size.H),
        key=tiles(config.stages, config.keys, size.H),
        value=tiles(config.stages, config.keys, size.V),
        out=None if output_shares_query(size, config) else tiles(config.warpgroups, ROWS, size.V),
        lse=plgpu.SMEM((config.warpgroups, ROWS), jnp.float32),
        row_sum=plgpu.SMEM((config.warpgroups, ROWS), jnp.float32),
    )
    of_warpgroups = plgpu.Barrier(num_barriers=config.warpgroups)
    full = plgpu.Barrier(num_barriers=config.stages)
    free = plgpu.Barrier(num_barriers=config.stages, num_arrivals=config.warpgroups)
    barriers = Barriers(of_warpgroups, of_warpgroups, full, free, full, free, of_warpgroups)
    query, key, value = map(compat.in_tiles, (operands.query, operands.key, operands.value))
    out, lse = compat.mosaic_call(
        functools.partial(flash_forward, scale=spec.scale, walk=walk),
        blocks=walk.blocks,
        warpgroups=config.warpgroups + 1,
        scratch=(shared, barriers),
        out_shape=[
            compat.result((*query.shape[:-1], size.V), dtype, like=query),
            compat.result((size.B, size.N, rows), jnp.float32, like=query),
        ],
        name="jax_flash_mosaic_forward",
    )(query, key, value)
    return out[:, : size.T], lse[:, :, : size.T]
