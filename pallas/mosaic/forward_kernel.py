"""What a block of the forward kernel by Mosaic GPU does: one warpgroup loads, the others compute.

`forward.py` says how they work together.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash._mask import BlockRange
from jax_flash._spec import Sizes

from .. import compat
from ..constants import LN_2, LOG2_E
from ..loop import over_block_range
from .forward_problem import ForwardProblem
from .nonfinite import MARKED_ROWS, SpoiledTiles, mark
from .product import issue_product, wait_product
from .registers import ACCUMULATOR, FOLDED, ROW, folded, scaled_unless_one
from .roles import divide, drain
from .soft_cap import tanh
from .tile_scheduler import div, int32, rem
from .tiles import ROWS, ForwardConfig


class Place(NamedTuple):
    """Where a warpgroup's rows of a tile lie."""

    batch: Any
    head: Any
    first_row: Any


class Shared(NamedTuple):
    """Shared memory of a block."""

    query: Any
    key: Any
    value: Any
    out: Any  # None where output is staged over the queries
    lse: Any


class Rows(NamedTuple):
    """What the online softmax knows of a warpgroup's rows. Logits are in base 2."""

    row_max: Any  # what is subtracted from logits: about the largest so far, less `exponent_offset`
    row_sum: Any  # of probabilities, (ROWS, FOLDED)
    rescale: Any  # factor of what was summed before the last block


class Barriers(NamedTuple):
    """`full` where TMA has filled a place, `free` where its readers are done with it."""

    query_full: Any
    query_free: Any
    key_full: Any
    key_free: Any
    value_full: Any
    value_free: Any
    pingpong: Any  # of each warpgroup: it may issue its products


def flash_forward(
    query,
    key,
    value,
    data,
    sinks,
    out,
    lse,
    marks,
    shared,
    barriers,
    *,
    scale: float,
    problem: ForwardProblem,
) -> None:
    """Refs: query (B,T,N,H), key (B,S,K,H), value (B,S,K,V), data, sinks (B|1,N) or None -> out (B,T,N,V),
    lse (B,N,T) of whole tiles, and marks of out or None."""
    problem = dataclasses.replace(problem, data=data)
    results = Results(out, lse, marks)
    consumer = functools.partial(
        Consumer, results=results, shared=shared, barriers=barriers, scale=scale, problem=problem, sinks=sinks
    )
    divide(
        problem.config.warpgroups,
        compute=lambda warpgroup: consumer(warpgroup).run(),
        load=lambda: load_tiles(query, key, value, shared, barriers, problem=problem),
    )


def load_tiles(query, key, value, shared, barriers, *, problem: ForwardProblem) -> None:
    """Fills the queries of each tile, and the rings of its keys and values."""
    config, group = problem.config, problem.size.group

    def tile(tile, head, batch, carry):
        tiles_done, blocks_done = carry
        first = tile * config.queries
        keys = problem.in_row(batch).keys_of_tile(first)
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
            rows, key_head = pl.ds((start + stop - 1 - i) * config.keys, config.keys), div(head, group)
            transposed = problem.float8 and source is value
            own = source.at[batch, key_head, :, rows] if transposed else source.at[batch, rows, key_head]
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

    start = jnp.int32(0), jnp.int32(0)
    tiles_done, blocks_done = problem.scheduler.over(tile, start, problem.data.order)
    # No barrier is left while others still arrive at it.
    drain(blocks_done, config.stages, barriers.key_free, barriers.value_free)
    if config.persistent:
        for place in range(config.query_stages):
            for w in range(config.warpgroups):
                free = barriers.query_free.at[place * config.warpgroups + w]
                pl.when(tiles_done > place)(functools.partial(plgpu.barrier_wait, free))


class Results(NamedTuple):
    """What the kernel writes."""

    out: Any
    lse: Any = None
    marks: Any = None  # see `nonfinite.py`


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One computing warpgroup: it owns 64 rows of each tile."""

    warpgroup: Any  # its index
    results: Results
    shared: Shared
    barriers: Barriers
    scale: float
    problem: ForwardProblem
    spoiled: SpoiledTiles | None = None  # of the second kernel, the tiles that it computes again
    sinks: Any = None  # a ref (B|1, N)

    exponent_offset: ClassVar[float] = 0.0  # probabilities are multiplied by 2 to this

    @property
    def rescale_threshold(self) -> float:
        """How much a row's maximum may grow, in base 2, before `row_max` is raised and the output rescaled:
        few blocks do that, and probabilities stay below 2^8 (FlashAttention-4's conditional rescaling)."""
        return 8.0 - self.exponent_offset

    @property
    def config(self) -> ForwardConfig:
        return self.problem.config

    @property
    def size(self) -> Sizes:
        return self.problem.size

    @property
    def has_tail(self) -> bool:
        """Whether a block may have places without a key."""
        return self.problem.data.column_lengths is not None or self.size.S % self.config.keys != 0

    @property
    def has_partial_blocks(self) -> bool:
        return self.problem.hides_pairs or self.has_tail

    @property
    def stages_over_query(self) -> bool:
        """Whether the output is staged where the tile's queries were."""
        return self.shared.out is None

    @property
    def releases_later(self) -> bool:
        """Whether the output keeps the place of its tile's queries, one of two, until the next tile is under
        way."""
        return self.stages_over_query and self.config.persistent and self.config.query_stages > 1

    def run(self) -> None:
        """Computes the rows of all tiles of this block of the grid."""
        config, pingpong = self.config, self.barriers.pingpong
        if config.pingpong:  # the last warpgroup signals warpgroup 0, which goes first
            pl.when(self.warpgroup == config.warpgroups - 1)(lambda: plgpu.barrier_arrive(pingpong.at[0]))
        problem = self.problem
        in_order = functools.partial(problem.scheduler.over, order=problem.data.order)
        over = in_order if self.spoiled is None else self.spoiled.over
        tiles_done, _ = over(self._tile, (jnp.int32(0), jnp.int32(0)))
        if self.releases_later:
            self._release_query(tiles_done - 1)
        if config.pingpong:
            pl.when(self.warpgroup == 0)(lambda: plgpu.barrier_wait(pingpong.at[0]))
        plgpu.wait_smem_to_gmem(0)

    def _tile(self, tile, head, batch, carry):
        in_row = dataclasses.replace(self, problem=self.problem.in_row(batch))
        return in_row._tile_of_row(tile, head, batch, carry)

    def _tile_of_row(self, tile, head, batch, carry):
        """One tile: a loop over its blocks of keys, between the first scores and the last values."""
        tiles_done, blocks_done = carry
        first_row = tile * self.config.queries
        tile_keys = self.problem.keys_of_tile(first_row)
        slot = self._query_slot(tiles_done)
        query = self.shared.query.at[slot]
        place = Place(batch, head, first_row + self.warpgroup * ROWS)
        keys = self.problem.keys_of_warpgroup(place.first_row, tile_keys)
        count = keys.last - keys.first
        of_rows = dataclasses.replace(self, problem=self.problem.of_rows(place.first_row))

        plgpu.barrier_wait(self.barriers.query_full.at[slot])
        p, rows = of_rows._first_block(query, blocks_done, place, keys)
        if self.releases_later:
            pl.when(tiles_done > 0)(functools.partial(self._release_query, tiles_done - 1))

        step = functools.partial(of_rows._step, query, blocks_done, place, keys)
        rest = BlockRange(keys.first + 1, keys.last, _after(keys, "full_begin"), _after(keys, "full_end"))
        acc, p, rows = over_block_range(rest, step, (self._no_output(), p, rows))
        if not self.stages_over_query and self.config.persistent:
            plgpu.barrier_arrive(self.barriers.query_free.at[slot])
        acc, lse, normaliser = self._last_values(acc, p, rows, blocks_done + count - 1, place)
        self._store(acc, lse, normaliser, query, place)
        if self.stages_over_query and self.config.persistent and not self.releases_later:
            self._release_query(tiles_done)
        return tiles_done + 1, blocks_done + count

    def _first_block(self, query, index, place: Place, keys: BlockRange):
        """Softmax of a tile's first block, which has no values of an earlier one to run beside."""
        block = keys.last - 1
        scale = self._scale_of(place, block)
        scores = self._issue_scores(query, index)
        self._pingpong_signal()
        scores = self._wait_scores(scores, index, in_flight=0)
        nothing = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW)
        rows = Rows(nothing, zeros(FOLDED), nothing)
        p, rows = self._softmax(scores, scale, rows, self.has_partial_blocks, place.first_row, block)
        return self._convert(p, place, block), rows

    def _step(self, query, blocks_done, place: Place, keys: BlockRange, partial, i, carry):
        """Scores and softmax of a block, beside the product of the last one's probabilities and values."""
        acc, p, rows = carry
        index = blocks_done + (i - keys.first)
        block = keys.first + keys.last - 1 - i
        scale = self._scale_of(place, block)

        scores = self._issue_scores(query, index)

        def softmax():
            self._pingpong_signal()
            done = self._wait_scores(scores, index, in_flight=1)
            return self._softmax(done, scale, rows, partial, place.first_row, block)

        like = (zeros(self.config.keys), rows)
        acc, (p, rows) = self._add_values(acc, p, rows.rescale, index - 1, softmax, like)
        return acc, self._convert(p, place, block), rows

    def _last_values(self, acc, p, rows: Rows, index, place: Place):
        """The unnormalised output, lse, and what the output is to be multiplied with."""

        def normalise():
            row_sum, row_max, rescale = rows.row_sum.sum(axis=1), rows.row_max, 1.0
            sees_nothing = row_sum == 0.0
            if self.sinks is not None:
                sink = self._sink(place) * LOG2_E
                row_max = jnp.maximum(row_max, sink)
                rescale = jnp.where(sees_nothing, 1.0, jnp.exp2(rows.row_max - row_max))
                row_sum = row_sum * rescale + jnp.exp2(sink - row_max)
            row_sum = jnp.where(sees_nothing, 1.0, row_sum)
            lse = jnp.where(sees_nothing, -jnp.inf, row_max * LN_2 + jnp.log(row_sum))
            return lse, rescale / row_sum

        like = (rows.row_max, rows.row_max)
        acc, (lse, normaliser) = self._add_values(acc, p, rows.rescale, index, normalise, like)
        return acc, lse, normaliser

    def _sink(self, place: Place):
        """The logit of the head's sink."""
        return self.sinks[place.batch if self.sinks.shape[0] > 1 else np.int32(0), place.head]

    def _no_output(self):
        """The sum of no values."""
        return zeros(self.size.V)

    def _add_values(self, acc, p, rescale, index, beside: Callable[[], Any], like):
        """The rescaled `acc` plus a block's probabilities times its values; and the result of `beside()`,
        which is computed beside that product.

        Args:
          like: has the types of `beside()`'s result.
        """

        def product_beside(acc):
            slot = self._slot(index)
            plgpu.barrier_wait(self.barriers.value_full.at[slot])
            compat.wgmma(acc, p, self.shared.value.at[slot])
            return beside()

        acc, results = compat.accumulate(product_beside, scaled_unless_one(acc, rescale), like)
        self._release_values(index)
        return acc, results

    def _store(self, acc, lse, normaliser, query, place: Place) -> None:
        """Stages the rows of a tile in shared memory, and copies them to their place."""
        batch, head, first_row = place
        own = pl.ds(first_row, ROWS)
        out = self.results.out.at[batch, own, head]
        if not self.stages_over_query:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's output
        staged = query if self.stages_over_query else self.shared.out.at[self.warpgroup]
        staged_lse = self.shared.lse.at[self.warpgroup]
        if self.results.lse is not None:
            staged_lse[...] = lse
        self._stage(acc, normaliser, staged, place)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, out)
        if self.results.lse is not None:
            plgpu.copy_smem_to_gmem(staged_lse, self.results.lse.at[batch, head, own])

    def _stage(self, acc, normaliser, staged, place: Place) -> None:
        """Writes the normalised output to shared memory, and marks of it."""
        batch, head, first_row = place
        values = rescaled(acc, normaliser)
        if self.results.marks is not None:
            marks = pl.ds(div(first_row, MARKED_ROWS), ROWS // MARKED_ROWS)
            mark(self.results.marks.at[batch, head, marks], [values])
        if self.spoiled is not None:
            out = self.results.out.at[batch, pl.ds(first_row, ROWS), head]
            values = self.spoiled.unless_finite(out, staged, self.warpgroup, values)
        staged[...] = values.astype(staged.dtype)

    def _scale_of(self, place: Place, block) -> Any:
        """What scores of a block are to be multiplied with to be logits in base 2."""
        return self.scale * LOG2_E

    def _softmax(self, scores, scale, rows: Rows, partial: bool, first_row, block):
        """A block's probabilities, and what is known of the rows with it."""
        scores, scale = self._masked_scores(scores, scale, partial, first_row, block)
        highest = folded(jnp.maximum, scores).max(axis=1) * scale
        if self.exponent_offset:
            highest -= self.exponent_offset
        highest = jnp.maximum(rows.row_max, highest)
        row_max = jnp.where(highest > rows.row_max + self.rescale_threshold, highest, rows.row_max)
        # A row that has seen no key has the maximum -inf. 0 is subtracted instead: 2^(-inf - 0) is 0.
        shift = jnp.where(row_max == -jnp.inf, 0.0, row_max) if self.has_partial_blocks else row_max
        p = jnp.exp2(scores * scale - lax.broadcast_in_dim(shift, scores.shape, [0]))
        rescale = jnp.exp2(rows.row_max - shift)
        return p, Rows(row_max, rescaled(rows.row_sum, rescale) + folded(jnp.add, p), rescale)

    def _masked_scores(self, scores, scale, partial: bool, first_row, block):
        """Masked scores, and the scale that they are yet to be multiplied with to be logits in base 2."""
        if (cap := self.problem.soft_cap) is not None:
            scores, scale = tanh(scores * (scale / (cap * LOG2_E))), cap * LOG2_E
        # If it isn't positive, the largest score is not the largest logit, and -inf would not stay that.
        if not isinstance(scale, float) or scale <= 0:
            scores, scale = scores * scale, 1.0
        if not partial:
            return scores, scale
        data, mask, first_column = self.problem.data, self.problem.mask, block * self.config.keys
        masks_rows = data.row_lengths is not None
        is_masked = dict(has_tail=self.has_tail, masks_rows=masks_rows)
        return data.masked(scores, mask, first_row, first_column, -jnp.inf, **is_masked), scale

    def _issue_scores(self, query, index):
        slot = self._slot(index)
        plgpu.barrier_wait(self.barriers.key_full.at[slot])
        self._pingpong_wait()
        return issue_product(query, self.shared.key.at[slot])

    def _wait_scores(self, scores, index, in_flight: int):
        result = wait_product(scores, in_flight)
        plgpu.barrier_arrive(self.barriers.key_free.at[self._slot(index)])
        return result

    def _release_values(self, index) -> None:
        plgpu.barrier_arrive(self.barriers.value_free.at[self._slot(index)])

    def _pingpong_wait(self) -> None:
        """Waits until this warpgroup may issue its products."""
        if self.config.pingpong:
            plgpu.barrier_wait(self.barriers.pingpong.at[self.warpgroup])

    def _pingpong_signal(self) -> None:
        """Lets the next warpgroup issue its products."""
        if self.config.pingpong:
            plgpu.barrier_arrive(self.barriers.pingpong.at[rem(self.warpgroup + 1, self.config.warpgroups)])

    def _release_query(self, tile_number) -> None:
        """Gives the place of a tile's queries back, once the output that was staged there is read."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.barriers.query_free.at[self._query_slot(tile_number)])

    def _slot(self, index):
        """The place in the rings of the block that is number `index` of this warpgroup's."""
        return rem(index, self.config.stages)

    def _query_slot(self, tile_number):
        return rem(tile_number, self.config.query_stages) * self.config.warpgroups + self.warpgroup

    def _convert(self, p, place: Place, block):
        """The probabilities of a block as an operand of `_add_values`."""
        # Without the barrier LLVM carries probabilities in float32, and converts them where they are used.
        return lax.optimization_barrier(p.astype(self.shared.query.dtype))


def zeros(columns: int):
    return plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), ACCUMULATOR)


def rescaled(x, factors):
    return x * lax.broadcast_in_dim(factors, x.shape, [0])


def _after(keys: BlockRange, bound: str):
    """A bound of the blocks behind the first."""
    first, value = keys.first, getattr(keys, bound)
    if isinstance(first, int) and isinstance(value, int):
        return max(value, first + 1)
    return jnp.maximum(value, first + 1)
