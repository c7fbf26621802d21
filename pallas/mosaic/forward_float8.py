"""Forward by Mosaic GPU on e4m3 numbers, with a scale for each block of rows (FlashAttention-3, section 3.3).

Roles, rings and the softmax are those of `forward_kernel.py`. What differs:

- wgmma sums e4m3 operands over the axis that is contiguous in memory. Probabilities and values are summed
  over keys, so values are transposed before the launch. And their keys are permuted, so that the
  accumulators of probabilities become an operand where they are (`product.as_operand`).
- Queries and keys have scales by blocks of 128 rows, which a block's scores are multiplied with. The sum of a
  block's values is multiplied with theirs as it is added to the output. So that sum has registers of its own,
  and is one of few terms: tensor cores keep 14 bits of a sum of e4m3 products (DeepSeek-V3, arXiv:2412.19437,
  section 3.3.2).
- The largest probability of a row lies between 2^6 and 2^8, as e4m3 goes from 2^-9 to 448.
- A value that isn't finite becomes 0 before the launch and its key NaN, so that it reaches the queries that
  see it and no others. These get NaN in all columns.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash import _float8
from jax_flash._isolation import with_finite_values
from jax_flash._mask import keys_of_queries
from jax_flash._spec import AttentionSpec, Operands, sizes
from jax_flash.transforms.varying import vary_over, varying_axes

from .. import compat
from ..constants import LOG2_E
from .forward import scratch
from .forward_kernel import Consumer, Place, Results, load_tiles, rescaled, zeros
from .forward_problem import ForwardProblem
from .head_dims import padded_to
from .product import as_operand, in_operand_order, issue_operand_product, wait_product
from .registers import scaled_unless_one
from .roles import divide
from .tile_scheduler import div
from .tiles import PART, ForwardConfig


class Arranged(NamedTuple):
    """What the kernel takes."""

    query: jax.Array  # (B, T, N, H)
    key: jax.Array  # (B, S, K, H)
    value: jax.Array  # (B, K, V, S), keys permuted and in whole tiles
    query_descale: jax.Array  # (B, K, blocks of T)
    key_descale: jax.Array  # (B, K, blocks of S)
    value_descale: jax.Array  # (B, K, blocks of S)


def forward(
    spec: AttentionSpec, operands: Operands, config: ForwardConfig, multiprocessors: int
) -> tuple[jax.Array, jax.Array]:
    """Arrays in e4m3 with descales `(B, K, blocks | 1)`, or 16-bit ones with `spec.quantization` -> out
    (B,T,N,V) in 16 bits, lse (B,N,T) float32."""
    if spec.quantization is not None:
        spec, operands = _float8.quantized(spec, operands)
    T, V = operands.query.shape[1], operands.value.shape[-1]
    operands = operands.replace(
        query=padded_to(operands.query, _SUMMED),
        key=padded_to(operands.key, _SUMMED),
        value=padded_to(operands.value, _SUMMED),
    )
    size = sizes(operands)
    mask = keys_of_queries(spec, size)
    problem = ForwardProblem(size, mask, config, multiprocessors, float8=True, soft_cap=spec.logits_soft_cap)
    given = arranged(operands, config.keys)
    rows = problem.scheduler.tiles * config.queries  # as in `forward.py`
    dtype = jnp.dtype(spec.out_dtype)
    (out, lse), _ = compat.mosaic_call(
        functools.partial(_flash_forward, scale=spec.scale, problem=problem),
        blocks=problem.scheduler.grid,
        warpgroups=config.warpgroups + 1,
        scratch=scratch(problem, operands.query.dtype, dtype),
        out_shape=[
            compat.result((*given.query.shape[:-1], size.V), dtype, like=operands.query),
            compat.result((size.B, size.N, rows), jnp.float32, like=operands.query),
        ],
        name="jax_flash_mosaic_forward_float8",
    )(*given, operands.sinks)
    return out[:, :T, :, :V], lse[:, :, :T]


_SUMMED = 32
"""Columns that one matrix instruction sums over. Head dims are padded to multiples of them."""


def arranged(operands: Operands, tile: int) -> Arranged:
    """The operands of a call on e4m3 numbers as the kernel takes them, whose blocks have `tile` keys."""
    size = sizes(operands)
    operands = with_finite_values(operands)
    value = jnp.pad(operands.value, ((0, 0), (0, -size.S % tile), (0, 0), (0, 0)))
    value = in_operand_order(value.transpose(0, 2, 3, 1))

    def by_block(descale: jax.Array | None, rows: int) -> jax.Array:
        shape = size.B, size.K, _float8.descales_of(rows)
        if descale is None:
            return vary_over(jnp.ones(shape, jnp.float32), varying_axes(operands.key))
        return jnp.broadcast_to(descale, shape)

    return Arranged(
        compat.in_tiles(operands.query),
        compat.in_tiles(operands.key),
        value,
        by_block(operands.query_descale, size.T),
        by_block(operands.key_descale, size.S),
        by_block(operands.value_descale, size.S),
    )


def _flash_forward(*refs: Any, scale: float, problem: ForwardProblem) -> None:
    """Refs of `Arranged`, sinks or None -> out (B,T,N,V), lse (B,N,T, in whole tiles); then shared memory and
    barriers."""
    *given, sinks, out, lse, shared, barriers = refs
    arrays = Arranged(*given)
    divide(
        problem.config.warpgroups,
        compute=lambda warpgroup: Float8Consumer(
            warpgroup, Results(out, lse), shared, barriers, scale, problem, sinks=sinks, arrays=arrays
        ).run(),
        load=lambda: load_tiles(*arrays[:3], shared, barriers, problem=problem),
    )


class Probabilities(NamedTuple):
    """Those of a block, as an operand of its values' product."""

    operand: Any
    descale: Any  # of the block's values


@dataclasses.dataclass(frozen=True)
class Float8Consumer(Consumer):
    """One computing warpgroup. Its output is a list of parts, each of some columns."""

    arrays: Arranged = dataclasses.field(kw_only=True)  # in global memory

    exponent_offset: ClassVar[float] = 6.0

    @property
    def parts(self) -> list[slice]:
        """Columns of values that are summed at once."""
        width = self.size.V if self.size.V <= 2 * PART else PART
        return [slice(first, min(first + width, self.size.V)) for first in range(0, self.size.V, width)]

    def _scale_of(self, place: Place, block) -> jax.Array:
        rows = div(place.first_row, _float8.ROWS_PER_DESCALE)
        of_queries = self.arrays.query_descale[place.batch, self._key_head(place), rows]
        return of_queries * self._of_block(self.arrays.key_descale, place, block) * (self.scale * LOG2_E)

    def _of_block(self, descales, place: Place, block) -> jax.Array:
        """The descale of a block of keys."""
        blocks = _float8.ROWS_PER_DESCALE // self.config.keys
        return descales[place.batch, self._key_head(place), div(block, blocks)]

    def _key_head(self, place: Place) -> jax.Array:
        return div(place.head, self.size.group)

    def _convert(self, p, place: Place, block) -> Probabilities:
        return Probabilities(as_operand(p), self._of_block(self.arrays.value_descale, place, block))

    def _no_output(self) -> list[jax.Array]:
        return [zeros(part.stop - part.start) for part in self.parts]

    def _add_values(self, acc, p: Probabilities, rescale, index, beside: Callable[[], Any], like):
        """Issues the product of the first part before `beside()`: for others, registers have no room."""
        values = self.shared.value.at[self._slot(index)]
        plgpu.barrier_wait(self.barriers.value_full.at[self._slot(index)])
        acc = [scaled_unless_one(part, rescale) for part in acc]
        product, results = None, None
        for i, part in enumerate(self.parts):
            product = issue_operand_product(p.operand, values, part)
            results = beside() if i == 0 else results
            acc[i] += wait_product(product, in_flight=0) * p.descale
        self._release_values(index)
        return acc, results

    def _stage(self, acc, normaliser, staged, place: Place) -> None:
        for values, part in zip(acc, self.parts, strict=True):
            columns = staged.at[:, pl.ds(part.start, part.stop - part.start)]
            columns[...] = rescaled(values, normaliser).astype(staged.dtype)
