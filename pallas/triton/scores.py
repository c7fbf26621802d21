"""Score modifications and masks of a tile, for all kernels by Triton.

A kernel gets the operands for them as a dict of refs, in whatever broadcast form they have, and asks
`Scores`. Queries may be the tile's rows or its columns: they are named by indices that broadcast.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jax_flash import _dropout, _gradients, _isolation
from jax_flash._axes import axes_of
from jax_flash._mask import (
    BlockRange,
    Index,
    PositionMask,
    blocks_sharing_segments,
    both,
    keys_of_queries,
    segment_id_ranges,
    window_of,
)
from jax_flash._spec import AttentionSpec, BlockMaskSpec, Operands, Sizes, captured_name, is_captured
from jax_flash.functions.derivative import Derivative
from jax_flash.functions.graph import Node

from .. import compat
from ..constants import LOG2_E
from ..features import OPERANDS
from ..loop import BlockList
from . import block_mask, functions
from .memory import indices
from .tiles import Tile

SEGMENT_BLOCKS = ("first_block", "last_block")
FUNCTION_OPERANDS = ("batch_indices", "head_indices", "block_kinds")
_AXES = {
    **{name: "B" + "".join(axes_of(name)) for name in (*OPERANDS, *FUNCTION_OPERANDS, "sinks")},
    **dict.fromkeys(SEGMENT_BLOCKS, "BR"),  # R blocks of the tiles' rows
    **dict.fromkeys(block_mask.LISTS, "BNRC"),  # C blocks of columns, or two counts
}


@dataclasses.dataclass(frozen=True)
class Place:
    """The position of a tile of scores.

    Queries from `queries_end` on, and keys from `keys_end` on, don't exist; with None, all of the tile do.
    Batch row and head are given where the refs have them as axes.
    """

    first_query: Index
    first_key: Index
    tile: Tile
    queries_end: int | None
    keys_end: int | None
    transposed: bool = False  # keys are the rows
    head: Index | None = None
    batch: Index | None = None

    @functools.cached_property
    def queries(self) -> jax.Array:
        """The indices of the tile's queries, along their axis."""
        return indices(self.first_query, self.tile.queries, int(self.transposed))

    @functools.cached_property
    def keys(self) -> jax.Array:
        return indices(self.first_key, self.tile.keys, int(not self.transposed))


@dataclasses.dataclass(frozen=True)
class Logits:
    """The logits of a tile; in base 2 unless `Scores.natural` holds."""

    x: jax.Array
    tanh: jax.Array | None = None  # of the soft cap
    score: Mapping[str, jax.Array] | None = None  # what score_mod took: the score and its indices
    distance: jax.Array | None = None  # |j - i - diagonal|, which ALiBi multiplies by -slope, float32


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a kernel does to scores. `refs` has those of `OPERANDS` that the call has."""

    spec: AttentionSpec
    size: Sizes
    refs: Mapping[str, Any]

    @property
    def natural(self) -> bool:
        """Whether logits are more than scaled scores. Such logits are not kept in base 2: there, the lowest
        finite bias, which is used as a mask, would be beyond float32."""
        of_scores = self.spec.logits_soft_cap is not None or self.spec.score_mod is not None
        return of_scores or "bias" in self.refs or "alibi_slopes" in self.refs

    @property
    def masked(self) -> bool:
        """Whether any block may have scores that don't count, one that is full by position too."""
        return "mask" in self.refs or "query_segment_ids" in self.refs

    @property
    def isolates(self) -> bool:
        """Whether queries and keys that don't see each other are kept apart if they aren't finite
        (nonfinite.py)."""
        has_lengths = "query_seq_lengths" in self.refs or "key_value_seq_lengths" in self.refs
        hides_pairs = self.masked or has_lengths or self.spec.block_mask is not None
        is_shifted = "diagonal" in self.refs
        hides_pairs = hides_pairs or not window_of(self.spec, self.size, is_shifted=is_shifted).unbounded
        return _isolation.KERNELS and hides_pairs

    @property
    def plain(self) -> bool:
        """Whether scores are only scaled, and masked by position alone."""
        return not (self.natural or self.masked or self.spec.dropout_rate)

    @property
    def unit(self) -> float:
        """A logit of 1 in the unit of `Logits`."""
        return 1.0 if self.natural else LOG2_E

    @property
    def dropout_scale(self) -> float:
        """What the probabilities that dropout keeps are multiplied with."""
        return 1 / _dropout.keep_probability(self.spec.dropout_rate)

    def exp(self, x: jax.Array) -> jax.Array:
        """The exponential of differences of logits."""
        return jnp.exp2(x * LOG2_E) if self.natural else jnp.exp2(x)

    def probability(self, x: jax.Array, lse: jax.Array) -> jax.Array:
        """Probabilities of logits. `lse`, in their unit, is +inf where a query sees no key."""
        # Among huge logits the rounding of lse is large enough for an overflow. The difference comes last, as
        # a GPU's minimum of a number and NaN is the number.
        return self.exp((jnp.minimum(x, lse) if self.natural else x) - lse)

    def position_mask(self, batch: Index | None = None) -> PositionMask:
        """The mask by position, with queries as rows."""
        queries = self._length("query", self.size.T, batch)
        keys = self._length("key_value", self.size.S, batch)
        return keys_of_queries(self.spec, self.size, queries, keys, self._shift(batch))

    def block_range(
        self, mask: PositionMask, block: Index, rows: int, columns: int, batch: Index | None = None
    ) -> BlockRange:
        """The blocks of `columns` that the tile of `rows` number `block` visits."""
        visited = mask.block_range(block * rows, rows, columns)
        if SEGMENT_BLOCKS[0] in self.refs:
            index = (block,) if batch is None else (batch, block)
            visited = visited.within(*(triton.load(self.refs[name].at[*index]) for name in SEGMENT_BLOCKS))
        return visited

    def blocks(
        self, mask: PositionMask, block: Index, rows: int, columns: int, head: Index = 0
    ) -> BlockRange | BlockList:
        """`block_range`, or the tile's list of blocks where the call has a block mask.

        Args:
          head: which of the refs' heads, where they have an axis for them.
        """
        if self.spec.block_mask is None:
            return self.block_range(mask, block, rows, columns)
        listed, counts = (self.refs[name] for name in block_mask.LISTS)
        of_head = (head if listed.shape[0] > 1 else np.int32(0),) if len(listed.shape) == 3 else ()

        def at(place: Index) -> jax.Array:
            return triton.load(listed.at[*of_head, block, place])

        full, visited = (triton.load(counts.at[*of_head, block, np.int32(i)]) for i in range(2))
        return BlockList(at, full, visited)

    def logits(self, products: jax.Array, place: Place, mask: PositionMask) -> Logits:
        """Logits of a tile from the products of its queries and keys. `mask` has queries as rows."""
        if not self.natural:
            return Logits(products * (self.spec.scale * LOG2_E))
        tanh = score = distance = None
        cap = self.spec.logits_soft_cap
        if cap is None:
            x = products * self.spec.scale
        else:
            tanh = accurate_tanh(products * (self.spec.scale / cap))
            x = cap * tanh
        if self.spec.score_mod is not None:
            score = self._indices(place) | {"score": x}
            assert self.spec.score_mod.value is not None  # or the call would be refused
            (x,) = self._computed([self.spec.score_mod.value], score, place)
            x = jnp.broadcast_to(x, products.shape)
        if "bias" in self.refs:
            x = x + self._load("bias", place).astype(jnp.float32)
        if "alibi_slopes" in self.refs:
            distance = jnp.abs(place.keys - place.queries - mask.diagonal).astype(jnp.float32)
            x = x - self._load("alibi_slopes", place) * distance
        return Logits(x, tanh, score, distance)

    def score_grad(
        self, gradient: jax.Array, logits: Logits, place: Place, visible: jax.Array | None
    ) -> jax.Array:
        """The gradient of the scaled scores, from that of the logits."""
        if logits.score is not None:
            (d_score,) = self._computed([self._derivative.d_score], logits.score, place)
            gradient = gradient * d_score
            # Of pairs that are hidden a derivative may be anything, NaN too.
            gradient = gradient if visible is None else jnp.where(visible, gradient, 0.0)
        return gradient if logits.tanh is None else gradient * (1.0 - logits.tanh * logits.tanh)

    def add_captured_gradients(
        self,
        sums: Mapping[str, Any],
        gradient: jax.Array,
        logits: Logits,
        place: Place,
        visible: jax.Array | None,
    ) -> None:
        """Adds a tile's share of the gradients of captured arrays, from the gradient of its logits.

        Args:
          sums: refs (elements,) by the names of those that have a gradient.
        """
        if not sums or logits.score is None:
            return
        gathers = self._derivative.gathers
        found = self._computed(self._derivative.outputs[1:], logits.score, place)
        for gather, index, factor in zip(gathers, found[::2], found[1::2], strict=True):
            share = gradient * factor
            share = share if visible is None else jnp.where(visible, share, 0.0)
            # Where scores share an element along an axis, they are summed before.
            share = _gradients.sum_to(share, index.shape)
            compat.atomic_add(sums[captured_name("score_mod", gather.operand)], index, share)

    def visible(self, place: Place, by_position: jax.Array | None, partial: bool) -> jax.Array | None:
        """Which scores of a tile count, of those that are visible `by_position`; None for all of them.

        Args:
          partial: whether the block mask may hide some of them.
        """
        visible = by_position
        if partial and self.spec.block_mask is not None:
            visible = both(visible, self._by_block_mask(place, self.spec.block_mask))
        if self.spec.score_mod is not None:
            # Beyond the end a function may be anything, NaN too.
            for positions, end in ((place.queries, place.queries_end), (place.keys, place.keys_end)):
                visible = visible if end is None else both(visible, positions < end)
        if "mask" in self.refs:
            visible = both(visible, self._load("mask", place))
        if "query_segment_ids" in self.refs:
            queries, keys = self._load("query_segment_ids", place), self._load("key_value_segment_ids", place)
            visible = both(visible, queries == keys)
        return visible

    def with_dropout(self, values: jax.Array, place: Place) -> jax.Array:
        """`values` of a tile, 0 where dropout drops the probability; not yet times `dropout_scale`."""
        if not self.spec.dropout_rate:
            return values
        rows, columns = self._load("dropout_rows", place), self._load("dropout_columns", place)
        kept = _dropout.keep_each(rows, columns, self.spec.dropout_rate)
        return jnp.where(kept, values, 0.0)

    @property
    def _derivative(self) -> Derivative:
        assert self.spec.score_mod is not None and self.spec.score_mod.derivative is not None
        return self.spec.score_mod.derivative

    def _indices(self, place: Place) -> dict[str, jax.Array]:
        """The arguments that functions share."""
        batch, head = (self._load(name, place).reshape(1, 1) for name in ("batch_indices", "head_indices"))
        return {"batch": batch, "head": head, "query": place.queries, "key": place.keys}

    def _computed(
        self, outputs: Sequence[Node], inputs: Mapping[str, jax.Array], place: Place, name: str = "score_mod"
    ) -> list[jax.Array]:
        """Nodes of a function, or of its derivative, for a tile."""

        def load(operand: Hashable, index: jax.Array) -> jax.Array:
            assert isinstance(operand, int)
            ref = self.refs[captured_name(name, operand)]
            if place.batch is None:
                return triton.load(ref.at[index])
            return triton.load(ref.at[place.batch if ref.shape[0] > 1 else np.int32(0), index])

        return functions.values(outputs, inputs, load)

    def _block_of(self, place: Place, axis: str) -> jax.Array:
        """The block of the block mask that each query ("I") or key ("J") is in. Positions beyond the end
        count as the last one."""
        assert self.spec.block_mask is not None
        side = "IJ".index(axis)
        positions, length = ((place.queries, self.size.T), (place.keys, self.size.S))[side]
        block = np.int32(self.spec.block_mask.block_size[side])
        return lax.div(jnp.minimum(positions, length - 1), block)

    def _by_block_mask(self, place: Place, mask: BlockMaskSpec) -> jax.Array:
        """Which pairs of a tile see each other by the block mask, in whatever block they are."""
        if mask.mask_mod is None:
            return block_mask.is_full(self._load("block_kinds", place))
        inputs = self._indices(place)
        for name, differs in (("batch", mask.differs_by_batch), ("head", mask.differs_by_head)):
            if not differs:
                inputs[name] = jnp.zeros((1, 1), jnp.int32)
        assert mask.mask_mod.value is not None  # or the call would be refused
        (visible,) = self._computed([mask.mask_mod.value], inputs, place, "mask_mod")
        return visible

    def _length(self, axis: str, longest: int, batch: Index | None) -> jax.Array | None:
        ref = self.refs.get(f"{axis}_seq_lengths")
        if ref is None:
            return None
        return jnp.clip(triton.load(ref if batch is None else ref.at[batch]), 0, longest)

    def _shift(self, batch: Index | None) -> jax.Array | None:
        """Of the diagonal, where an operand says so."""
        ref = self.refs.get("diagonal")
        if ref is None:
            return None
        row = () if batch is None else (batch if ref.shape[0] > 1 else np.int32(0),)
        return triton.load(ref.at[(*row, np.int32(0))])

    def _load(self, name: str, place: Place) -> jax.Array:
        """The tile of an operand, with axes of 1 where it broadcasts."""
        ref = self.refs[name]
        found: list[tuple[Any, int | None]] = []
        for axis in _AXES[name]:
            if axis == "T":
                found.append((place.queries, place.queries_end))
            elif axis == "S":
                found.append((place.keys, place.keys_end))
            elif axis in "IJ":
                found.append((self._block_of(place, axis), None))
            elif (position := place.head if axis == "N" else place.batch) is not None:
                found.append((position, None))
        index, inside = [], None
        for extent, (position, end) in zip(ref.shape, found, strict=True):
            index.append(position if extent > 1 else np.int32(0))
            if extent > 1 and end is not None:
                inside = both(inside, position < end)
        if not index:
            return triton.load(ref)
        if all(extent == 1 for extent in ref.shape):
            return triton.load(ref).reshape(1, 1)
        if inside is None:
            return triton.load(ref.at[tuple(index)])
        shape = jnp.broadcast_shapes(*(jnp.shape(position) for position in index))
        zero = np.zeros((), ref.dtype)
        return triton.load(ref.at[tuple(index)], mask=jnp.broadcast_to(inside, shape), other=zero)


def accurate_tanh(x: jax.Array) -> jax.Array:
    """tanh, with an error of about 1e-7, relative near 0. A GPU's own instruction for it is far coarser."""
    near_zero = x * (1.0 - x * x * (1.0 / 3))
    far = 1.0 - 2.0 / (jnp.exp2(x * (2.0 * LOG2_E)) + 1.0)
    return jnp.where(jnp.abs(x) < 0.03, near_zero, far)


def operands_of(
    spec: AttentionSpec, operands: Operands, rows: int, columns: int, transposed: bool = False
) -> dict[str, jax.Array]:
    """The arrays that a kernel gets for `Scores.refs`.

    Args:
      rows: how many queries a tile has, or keys where they are its rows.
      columns: how many of the others it has.
      transposed: whether keys are rows.
    """
    arrays = {name: x for name, x in operands.present().items() if _is_of_scores(name)}
    if operands.query_segment_ids is not None:
        ids = operands.query_segment_ids, operands.key_value_segment_ids
        blocks = _segment_blocks(*(reversed(ids) if transposed else ids), rows, columns)
        arrays |= zip(SEGMENT_BLOCKS, blocks, strict=True)
    if spec.block_mask is not None:
        of_segments = tuple(arrays[name] for name in SEGMENT_BLOCKS if name in arrays)
        arrays |= block_mask.lists(spec, operands, (rows, columns), transposed, of_segments or None)
    return arrays


def _is_of_scores(name: str) -> bool:
    return name in (*OPERANDS, *FUNCTION_OPERANDS) or is_captured(name)


def specs_of(arrays: Mapping[str, jax.Array], group: int | None = None) -> dict[str, pl.BlockSpec]:
    """Block specs for a grid of (block, head, batch row).

    A block has one head; or, with `group`, the query heads that share the grid's key head.
    """
    return {name: spec_of(name, x, group) for name, x in arrays.items()}


def spec_of(name: str, x: Any, group: int | None = None) -> Any:
    """The block spec of one array, None for None."""
    if x is None:
        return None
    shared = [extent == 1 for extent in x.shape]
    block = [None, *x.shape[1:]]
    head_axis = -1 if is_captured(name) else _AXES[name].find("N")
    if head_axis > 0:
        block[head_axis] = None if group is None else 1 if shared[head_axis] else group

    def index(_, head, batch):
        first = [0] * x.ndim
        first[0] = 0 if shared[0] else batch
        if head_axis > 0 and not shared[head_axis]:
            first[head_axis] = head
        return tuple(first)

    return pl.BlockSpec(tuple(block), index)


def whole(arrays: Any) -> Any:
    """Specs with which every program sees whole arrays."""
    return jax.tree.map(lambda x: pl.BlockSpec(x.shape, lambda *_, rank=x.ndim: (0,) * rank), arrays)


def _segment_blocks(
    rows: jax.Array, columns: jax.Array, row_block: int, column_block: int
) -> tuple[jax.Array, jax.Array]:
    """For each block of rows, the blocks of columns `[first, last)` that may share a segment with it, int32
    `(B, blocks of rows)` each."""
    least, greatest = segment_id_ranges(columns, column_block)
    return blocks_sharing_segments(*segment_id_ranges(rows, row_block), least[:, None], greatest[:, None])
