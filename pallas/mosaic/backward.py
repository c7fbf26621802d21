"""Backward by Mosaic GPU, for Hopper: the sums of `triton/backward.py`.

One kernel for dK and dV adds to dQ as well, where that may be summed in any order; else there is one for dQ.
Above head dim 128 dK and dV have no room in a warpgroup's registers together, and get a kernel each.

In all of them, each computing warpgroup owns 64 rows of a gradient: keys, or queries. Their operands stay in
shared memory. A loading warpgroup streams the blocks of columns that they visit through rings, as in
`forward.py`. A step issues both products of rows and columns, scores and dP. It takes the exponentials of the
scores while dP is under way, and adds to dV while it computes the gradients of the scores for dK. Where rows
are keys, scores are held transposed. The gradients of rows have one owner and a fixed order of summation, so
they are bitwise equal from run to run.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash import _gradients
from jax_flash._spec import AttentionSpec, Gradients, Operands, Sizes, sizes

from .. import compat
from ..constants import LOG2_E
from . import tiles as mosaic_tiles
from .backward_again import flash_backward_again
from .backward_kernel import Barriers, Shared, flash_backward
from .backward_problem import KERNELS, BackwardProblem, LseAndDelta, Pair
from .d_query import DQueryAccumulator
from .mask_data import mask_of
from .nonfinite import isolates, marks_of, marks_of_rows
from .tiles import ROWS, BackwardConfig, BackwardConfigs


class Prepared(NamedTuple):
    """What the kernels read, arrays of whole tiles of 8 rows, lse and delta of whole blocks; and the call."""

    keys: Pair
    queries: Pair
    lse_and_delta: LseAndDelta
    operands: Operands
    d_sinks: jax.Array | None


def prepare(
    operands: Operands, out: jax.Array, lse: jax.Array, d_out: jax.Array, d_lse: jax.Array | None
) -> Prepared:
    """Shapes as in `jax_flash.pallas.backward`."""
    T = operands.query.shape[1]
    d_out = d_out.astype(operands.query.dtype)
    lse, delta = _gradients.lse_and_delta(out, lse, d_out, d_lse)
    d_sinks = None if operands.sinks is None else _gradients.of_sinks(operands.sinks, lse, delta)
    lse_2 = lse * LOG2_E
    beyond = ((0, 0), (0, 0), (0, -T % 256))  # whole blocks of any configuration
    lse_and_delta = LseAndDelta(jnp.pad(lse_2, beyond, constant_values=jnp.inf), jnp.pad(delta, beyond))
    query, key, value, d_out = map(compat.in_tiles, (operands.query, operands.key, operands.value, d_out))
    return Prepared(Pair(key, value), Pair(query, d_out), lse_and_delta, operands, d_sinks)


def _scratch(
    problem: BackwardProblem, rows: Pair, lse_and_delta: LseAndDelta, hands_over: bool = False
) -> tuple[Shared, Barriers]:
    """A block's shared memory and barriers.

    Args:
      rows, lse_and_delta: hold what the kernel reads, or None.
      hands_over: whether the loading warpgroup says that columns are there, and not their copies.
    """
    config, dtype = problem.config, rows.key_or_query.dtype
    H, V = problem.size.H, problem.size.V
    places = config.row_stages * config.warpgroups

    def tiles(count: int, tile_rows: int, width: int):
        return compat.tiled_shared_memory((count, tile_rows, width), dtype)

    def vector(x, stages: int):
        per_query = (stages, config.columns) if problem.rows_are_keys else (places, ROWS)
        return None if x is None else plgpu.SMEM(per_query, jnp.float32)

    def barrier(count: int, arrivals: int = 1):
        return plgpu.Barrier(num_barriers=count, num_arrivals=arrivals)

    room_for_second = problem.owns.key_or_query or H != V
    shared = Shared(
        rows=Pair(tiles(places, ROWS, H), tiles(places, ROWS, V) if room_for_second else None),
        columns=Pair(*map(tiles, config.rings, [config.columns] * 2, (H, V))),
        lse_and_delta=LseAndDelta(*map(vector, lse_and_delta, config.rings)),
        d_query=(
            DQueryAccumulator.scratch(config.warpgroups, ROWS, config.columns, H, dtype)
            if problem.kernel.adds_d_query
            else None
        ),
    )
    copies = [1 if x is None or not problem.rows_are_keys else 2 for x in lse_and_delta]
    if hands_over:
        copies = [1, 1]
    readers_of_rows = config.warpgroups if problem.kernel.adds_d_query else 1
    copies_of_rows = len(jax.tree.leaves(rows if problem.rows_are_keys else (rows, lse_and_delta)))
    barriers = Barriers(
        rows_full=barrier(places, copies_of_rows),
        rows_free=barrier(places, readers_of_rows) if config.persistent else None,
        full=Pair(*map(barrier, config.rings, copies)),
        free=Pair(*map(barrier, config.rings, [config.warpgroups] * 2)),
    )
    return shared, barriers


class _Call(NamedTuple):
    """What one of the kernels reads, and how."""

    problem: BackwardProblem
    scale: float
    rows: Pair
    columns: Pair
    lse_and_delta: LseAndDelta

    @classmethod
    def of(
        cls,
        kernel: str,
        spec: AttentionSpec,
        size: Sizes,
        prepared: Prepared,
        config: BackwardConfig,
        multiprocessors: int,
    ) -> "_Call":
        keys, queries, lse_and_delta, operands, _ = prepared
        transposed = KERNELS[kernel].rows_are_keys
        rows, columns = (keys, queries) if transposed else (queries, keys)
        tile = ROWS * config.warpgroups
        mask, data = mask_of(spec, operands, tile, config.columns, transposed=transposed)
        problem = BackwardProblem(
            size, mask, config, KERNELS[kernel], multiprocessors, spec.logits_soft_cap, data
        )
        if not problem.owns.key_or_query:  # and so needs neither dP nor delta
            rows, lse_and_delta = rows._replace(value_or_d_out=None), lse_and_delta._replace(delta=None)
        return cls(problem, spec.scale, rows, columns, lse_and_delta)


def gradients(
    kernel: str,
    spec: AttentionSpec,
    size: Sizes,
    prepared: Prepared,
    config: BackwardConfig,
    multiprocessors: int,
) -> tuple[Pair, jax.Array | None]:
    """Runs the kernel of this name in `KERNELS`, and the one that computes tiles of it again, if the call
    keeps apart what isn't finite.

    Returns:
      the gradients of its rows, with at least as many of these; and the float32 sum of dQ that it adds to,
      yet to be scaled, or None.
    """
    call = _Call.of(kernel, spec, size, prepared, config, multiprocessors)
    problem, rows, columns = call.problem, call.rows, call.columns
    of_rows = prepared.keys if problem.rows_are_keys else prepared.queries
    scheduler, shares = problem.scheduler, config.head_shares
    rows_of_tiles = scheduler.tiles * problem.rows_of_tile

    def result(x: jax.Array) -> jax.ShapeDtypeStruct:
        if shares == 1:
            return compat.result(x.shape, x.dtype, like=x)
        B, _, heads, width = x.shape
        return compat.result((shares, B, rows_of_tiles, heads, width), jnp.float32, like=x)

    out = Pair(*(result(x) if own else None for x, own in zip(of_rows, problem.owns, strict=True)))
    summed = None
    if problem.kernel.adds_d_query:
        B, length, heads, H = columns.key_or_query.shape
        shape = B, pl.cdiv(length, config.columns) * config.columns, heads, H
        summed = compat.result(shape, jnp.float32, like=columns.key_or_query)
    is_isolated = isolates(problem.mask, problem.data)
    marks = marks_of(size.B, problem.heads, rows_of_tiles, like=columns.key_or_query) if is_isolated else None
    (found, marks), of_columns = compat.mosaic_call(
        functools.partial(flash_backward, scale=spec.scale, problem=problem),
        blocks=scheduler.grid,
        warpgroups=config.warpgroups + 1,
        scratch=_scratch(problem, rows, call.lse_and_delta),
        out_shape=[out, marks],
        name=f"jax_flash_mosaic_backward_{kernel}",
        sums=summed,
    )(rows, columns, call.lse_and_delta, problem.data)
    if is_isolated:
        found = _again(call, marks, found, f"jax_flash_mosaic_backward_{kernel}_again")
    if shares > 1:
        found = jax.tree.map(functools.partial(_sum_over_shares, dtype=rows.key_or_query.dtype), found)
    return found, of_columns


def _sum_over_shares(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Of gradients (shares, B, rows, heads, width), in a fixed order and by one loop of XLA's."""
    return functools.reduce(jnp.add, [x[i] for i in range(x.shape[0])]).astype(dtype)


def _again(call: _Call, marks: jax.Array, found: Pair, name: str) -> Pair:
    """The gradients of rows, or of head shares, with the tiles computed again that have marks."""
    problem = call.problem.again()
    config, rows, lse_and_delta = problem.config, call.rows, call.lse_and_delta
    copies = 2 + problem.rows_are_keys * len(jax.tree.leaves(lse_and_delta))
    _, found = compat.mosaic_call(
        functools.partial(flash_backward_again, scale=call.scale, problem=problem),
        blocks=problem.scheduler.grid,
        warpgroups=config.warpgroups + 1,
        scratch=(
            *_scratch(problem, rows, lse_and_delta, hands_over=True),
            plgpu.Barrier(num_barriers=1, num_arrivals=copies),
            plgpu.Barrier(num_barriers=config.warpgroups),
        ),
        out_shape=[],
        changes=jax.tree.map(lambda x: compat.result(x.shape, x.dtype, like=x), found),
        name=name,
    )(rows, call.columns, lse_and_delta, problem.data, marks, found)
    return found


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

    def run(kernel: str, config: BackwardConfig) -> tuple[Pair, jax.Array | None]:
        return gradients(kernel, spec, size, prepared, config, multiprocessors)

    if configs.queries is None:
        (d_key, d_value), d_query = run("all", configs.keys)
        assert d_query is not None
        d_query = (d_query * spec.scale).astype(operands.query.dtype)
        config = mosaic_tiles.backward(size, together=False).queries
        assert config is not None
        call = _Call.of("queries", spec, size, prepared, config, multiprocessors)
        if isolates(call.problem.mask, call.problem.data):
            # No tile of the sum has an owner who could mark it, or compute it again.
            marks = marks_of_rows(d_query, call.problem.rows_of_tile)
            found = Pair(d_query, None)
            d_query, _ = _again(call, marks, found, "jax_flash_mosaic_backward_queries_again")
    else:
        (d_query, _), _ = run("queries", configs.queries)
        if configs.values is None:
            (d_key, d_value), _ = run("keys_and_values", configs.keys)
        else:
            ((d_key, _), _), ((_, d_value), _) = run("keys", configs.keys), run("values", configs.values)
    d_query, d_key, d_value = d_query[:, : size.T], d_key[:, : size.S], d_value[:, : size.S]
    return Gradients(d_query, d_key, d_value, sinks=prepared.d_sinks)
