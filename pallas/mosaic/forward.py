"""Forward by Mosaic GPU, for Hopper: warpgroups that compute, and one that loads keys and values for them.

A block owns tiles of queries, 64 for each computing warpgroup. The loading warpgroup keeps rings of keys and
values in shared memory filled by TMA; one barrier a slot says that it is full, another that all warpgroups
are done with it. Each computing warpgroup loops over the tile's keys with the online softmax of
`triton/forward.py`, its scores, probabilities and output in registers.

A step issues the scores of a block, rescales the output beside them, and issues the product of the last
block's probabilities with its values. With ping-pong, warpgroups issue their products one after the other, so
that the softmax of one runs beside the products of another. It doesn't run beside those of its own
warpgroup: ptxas moves it behind them.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash._spec import AttentionSpec, Operands, sizes

from .. import compat
from .forward_again import flash_forward_again
from .forward_kernel import Barriers, Shared, flash_forward
from .forward_problem import ForwardProblem
from .mask_data import mask_of
from .nonfinite import isolates, marks_of
from .tiles import ROWS, ForwardConfig


def forward(
    spec: AttentionSpec, operands: Operands, config: ForwardConfig, multiprocessors: int
) -> tuple[jax.Array, jax.Array]:
    """Operands as in `jax_flash.pallas.forward` -> out (B,T,N,V) in query's dtype, lse (B,N,T) float32."""
    size = sizes(operands)
    mask, data = mask_of(spec, operands, config.queries, config.keys)
    problem = ForwardProblem(size, mask, config, multiprocessors, soft_cap=spec.logits_soft_cap, data=data)
    dtype = operands.query.dtype
    rows = problem.scheduler.tiles * config.queries  # TMA wants strides of 16 bytes: whole tiles, then cut
    query, key, value = map(compat.in_tiles, (operands.query, operands.key, operands.value))
    is_isolated = isolates(mask, data)
    (out, lse, marks), _ = compat.mosaic_call(
        functools.partial(flash_forward, scale=spec.scale, problem=problem),
        blocks=problem.scheduler.grid,
        warpgroups=config.warpgroups + 1,
        scratch=scratch(problem, dtype, dtype),
        out_shape=[
            compat.result((*query.shape[:-1], size.V), dtype, like=query),
            compat.result((size.B, size.N, rows), jnp.float32, like=query),
            marks_of(size.B, size.N, rows, like=query) if is_isolated else None,
        ],
        name="jax_flash_mosaic_forward",
    )(query, key, value, data, operands.sinks)
    if is_isolated:
        problem = problem.again()
        config = problem.config
        landed = plgpu.Barrier(num_barriers=1, num_arrivals=2)  # keys and values
        first_full = plgpu.Barrier(num_barriers=config.warpgroups)
        _, out = compat.mosaic_call(
            functools.partial(flash_forward_again, scale=spec.scale, problem=problem),
            blocks=problem.scheduler.grid,
            warpgroups=config.warpgroups + 1,
            scratch=(*scratch(problem, dtype, dtype), landed, first_full),
            out_shape=[],
            changes=compat.result(out.shape, out.dtype, like=out),
            name="jax_flash_mosaic_forward_again",
        )(query, key, value, data, operands.sinks, marks, out)
    return out[:, : size.T], lse[:, :, : size.T]


def scratch(problem: ForwardProblem, dtype: jnp.dtype, out_dtype: jnp.dtype) -> tuple[Shared, Barriers]:
    """A block's shared memory and barriers.

    Args:
      dtype: of queries, keys and values.
    """
    size, config = problem.size, problem.config
    own_out = size.H != size.V or dtype != out_dtype

    def tiles(count: int, tile_rows: int, width: int, dtype: jnp.dtype = dtype):
        return compat.tiled_shared_memory((count, tile_rows, width), dtype)

    values = (size.V, config.keys) if problem.float8 else (config.keys, size.V)

    shared = Shared(
        query=tiles(config.query_stages * config.warpgroups, ROWS, size.H),
        key=tiles(config.stages, config.keys, size.H),
        value=tiles(config.stages, *values),
        out=tiles(config.warpgroups, ROWS, size.V, out_dtype) if own_out else None,
        lse=plgpu.SMEM((config.warpgroups, ROWS), jnp.float32),
    )
    of_warpgroups = plgpu.Barrier(num_barriers=config.warpgroups)
    of_queries = plgpu.Barrier(num_barriers=config.query_stages * config.warpgroups)
    full = plgpu.Barrier(num_barriers=config.stages)
    free = plgpu.Barrier(num_barriers=config.stages, num_arrivals=config.warpgroups)
    return shared, Barriers(of_queries, of_queries, full, free, full, free, of_warpgroups)
