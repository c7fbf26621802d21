"""Forward by the Triton lowering: a program owns a block of queries of one head, and loops over its keys.

Online softmax in base 2: with c = scale * log2(e) and m the running maximum of c * q.k over the keys so far,
it keeps l = sum 2^(c q.k - m) and acc = sum 2^(c q.k - m) v. At the end out = acc / l and the natural
log-sum-exp is m * ln(2) + ln(l). Logits that are more than scaled scores stay in natural units (scores.py).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jax_flash._mask import PositionMask
from jax_flash._spec import AttentionSpec, Operands, Sizes, sizes

from ..compat import result, triton_call
from ..constants import LN_2, LOG2_E
from ..loop import over_visited_blocks
from . import scores
from .memory import dot, dot_transposed, load, store, store_vector
from .nonfinite import count_seen, finite, over_spoiled_tiles, programs, spoiled_rows
from .scores import Place, Scores
from .tiles import Tile, padded


@dataclasses.dataclass(frozen=True)
class _Head:
    """What a program has of its head, as refs, and how it attends."""

    query: Any  # (T, H), head dims padded
    key: Any  # (S, H)
    value: Any  # (S, V)
    sink: Any
    of: Scores
    mask: PositionMask
    tile: Tile

    @property
    def size(self) -> Sizes:
        return self.of.size

    @property
    def query_rows(self) -> int | None:
        """T, if the last tile has rows beyond it."""
        return self.size.T if self.size.T % self.tile.queries else None

    @property
    def key_rows(self) -> int | None:
        return self.size.S if self.size.S % self.tile.keys else None

    def attend(self, block, isolate: bool):
        """A tile's row maxima, row sums and unnormalised output. Where what isn't finite is kept apart, also
        how many such values each element of the output sees in partial blocks, which it leaves out."""
        tile = self.tile
        first = block * tile.queries
        q = load(self.query, first, tile.queries, width=self.size.H, rows=self.query_rows)
        zeros = jnp.zeros((tile.queries, padded(self.size.V)), jnp.float32)
        return over_visited_blocks(
            self.of.blocks(self.mask, block, tile.queries, tile.keys),
            functools.partial(self._visit, first, q, isolate),
            (
                jnp.full((tile.queries,), -jnp.inf, jnp.float32),
                jnp.zeros((tile.queries,), jnp.float32),
                zeros,
                zeros if isolate else None,
            ),
        )

    def _visit(self, first, q, isolate: bool, partial: bool, j, carry):
        """`carry` of `attend` after block `j` of keys."""
        row_max, row_sum, acc, seen = carry
        of, tile = self.of, self.tile
        start = j * tile.keys
        end = self.key_rows if partial else None
        k = load(self.key, start, tile.keys, width=self.size.H, rows=end)
        products = dot_transposed(q, k)
        place = Place(first, start, tile, self.query_rows, end)
        visible = None
        if partial or not of.plain:
            by_position = self.mask.visible(place.queries, place.keys, end) if partial else None
            visible = of.visible(place, by_position, partial)
            x = of.logits(products, place, self.mask).x
            x = x if visible is None else jnp.where(visible, x, -jnp.inf)
            new_max = jnp.maximum(row_max, jnp.max(x, axis=1))
            # A row that has seen no key has the maximum -inf. 0 is subtracted instead: 2^(-inf - 0) is 0.
            shift = jnp.where(new_max == -jnp.inf, 0.0, new_max)
            p = of.exp(x - shift[:, None])
        else:
            scale_2 = of.spec.scale * LOG2_E
            extreme = jnp.max if scale_2 >= 0 else jnp.min
            new_max = jnp.maximum(row_max, extreme(products, axis=1) * scale_2)
            shift = new_max
            p = jnp.exp2(products * scale_2 - shift[:, None])
        rescale = of.exp(row_max - shift)
        v = load(self.value, start, tile.keys, width=self.size.V, rows=end)
        if isolate and visible is not None:
            seen = seen + count_seen(jnp.broadcast_to(visible, products.shape), v)
            v = finite(v)
        acc = acc * rescale[:, None] + dot(of.with_dropout(p, place).astype(v.dtype), v)
        return new_max, row_sum * rescale + jnp.sum(p, axis=1), acc, seen

    def normalised(self, row_max, row_sum, acc):
        """The output and lse."""
        of = self.of
        sees_nothing = row_sum == 0.0
        if self.sink is not None:
            sink = triton.load(self.sink) * of.unit
            top = jnp.maximum(row_max, sink)
            rescale = of.exp(row_max - top)
            row_sum = row_sum * rescale + of.exp(sink - top)
            acc = acc * rescale[:, None]
            row_max = top
        row_sum = jnp.where(sees_nothing, 1.0, row_sum)
        if of.spec.dropout_rate:
            acc = acc * of.dropout_scale
        natural_max = row_max if of.natural else row_max * LN_2
        return acc / row_sum[:, None], jnp.where(sees_nothing, -jnp.inf, natural_max + jnp.log(row_sum))


def flash_forward(
    query,
    key,
    value,
    score_operands: dict[str, Any],
    sinks,
    *results,
    spec: AttentionSpec,
    size: Sizes,
    tile: Tile,
    again: bool,
) -> None:
    """Refs: query (T,H), key (S,H), value (S,V) -> out (T,V), lse (T,); head dims padded. If the call hides
    pairs, also `spoiled_rows` (T,) of out.

    Besides, where they are there, the head's part of what `Scores` takes, and its sink.

    With `again`, a program computes the tiles of out once more in which there are spoiled rows, without the
    values that aren't finite. Refs in place of the results: spoiled rows, and out twice, as it is and to be
    changed.
    """
    of = Scores(spec, size, score_operands)
    mask = of.position_mask()
    head = _Head(query, key, value, sinks, of, mask, tile)

    def attend_again(block):
        *sums, seen = head.attend(block, isolate=True)
        # What sees values that aren't finite stays as it is.
        values, is_clean = head.normalised(*sums)[0], seen == 0.0
        store(out, block * tile.queries, values, width=size.V, rows=head.query_rows, where=is_clean)

    if again:
        spoiled, _, out = results
        over_spoiled_tiles(spoiled, size.T, tile.queries, attend_again)
        return
    out, lse, spoiled = results
    block = pl.program_id(0)
    if mask.high is not None:
        # The last queries see the most keys: start those first, so that none of them ends alone.
        block = pl.cdiv(size.T, tile.queries) - 1 - block
    first = block * tile.queries
    *row_sums, acc, _ = head.attend(block, isolate=False)
    values, log_sums = head.normalised(*row_sums, acc)
    store(out, first, values, width=size.V, rows=head.query_rows)
    store_vector(lse, first, log_sums, rows=head.query_rows)
    if spoiled is not None:
        store_vector(spoiled, first, spoiled_rows(values), rows=head.query_rows)


def forward(spec: AttentionSpec, operands: Operands, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Operands as in `jax_flash.pallas.forward` -> out (B,T,N,V) and lse (B,N,T), as there."""
    size = sizes(operands)
    kernel = functools.partial(flash_forward, spec=spec, size=size, tile=tile)
    score_operands = scores.operands_of(spec, operands, tile.queries, tile.keys)
    isolates = Scores(spec, size, score_operands).isolates

    def of_queries(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, size.T, None, width), lambda _, n, b: (b, 0, n, 0))

    def of_keys(width: int) -> pl.BlockSpec:
        group = np.int32(size.group)
        return pl.BlockSpec((None, size.S, None, width), lambda _, n, b: (b, 0, lax.div(n, group), 0))

    of_rows = pl.BlockSpec((None, None, size.T), lambda _, n, b: (b, n, 0))
    row_shape = result((size.B, size.N, size.T), jnp.float32, like=operands.query)
    arguments = (operands.query, operands.key, operands.value, score_operands, operands.sinks)
    in_specs = [
        of_queries(padded(size.H)),
        of_keys(padded(size.H)),
        of_keys(padded(size.V)),
        scores.specs_of(score_operands),
        scores.spec_of("sinks", operands.sinks),
    ]
    out, lse, spoiled = triton_call(
        functools.partial(kernel, again=False),
        grid=(pl.cdiv(size.T, tile.queries), size.N, size.B),
        in_specs=in_specs,
        out_specs=[of_queries(padded(size.V)), of_rows, of_rows if isolates else None],
        out_shape=[
            result(
                (size.B, size.T, size.N, size.V),
                spec.result_dtype("out", operands.query.dtype),
                like=operands.query,
            ),
            row_shape,
            row_shape if isolates else None,
        ],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        name="jax_flash_pallas_forward",
    )(*arguments)
    if isolates:
        (out,) = triton_call(
            functools.partial(kernel, again=True),
            grid=(programs(size.T), size.N, size.B),
            in_specs=[*in_specs, of_rows, of_queries(padded(size.V))],
            out_specs=[of_queries(padded(size.V))],
            out_shape=[result(out.shape, out.dtype, like=out)],
            changes_last=1,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            name="jax_flash_pallas_forward_again",
        )(*arguments, spoiled, out)
    return out, lse
