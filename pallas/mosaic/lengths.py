"""Batch rows of different lengths in Mosaic GPU kernels, and which columns of a block rows see."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_flash._mask import PositionMask
from jax_flash._spec import Operands


class Lengths(NamedTuple):
    """How many rows and columns of scores each batch row has, arrays or refs `(B,)`; None for all of them.

    Numbers beyond what there is are clipped.
    """

    rows: Any = None
    columns: Any = None

    @classmethod
    def of_queries(cls, operands: Operands) -> "Lengths":
        """Those of a call, with queries as rows."""
        return cls(operands.query_seq_lengths, operands.key_value_seq_lengths)

    def transposed(self) -> "Lengths":
        return Lengths(self.columns, self.rows)

    @property
    def are_given(self) -> bool:
        return self.rows is not None or self.columns is not None

    def mask(self, longest: PositionMask, batch: jax.Array) -> PositionMask:
        """The mask of a batch row, from that of the longest possible one."""
        if not self.are_given:
            return longest
        counts = (
            most if ref is None else jnp.minimum(jnp.maximum(ref[batch], 0), most)
            for ref, most in zip(self, (longest.rows, longest.columns), strict=True)
        )
        return longest.of_lengths(*counts)


def seen_of_block(
    mask: PositionMask, rows: jax.Array, first_column: Any, columns: int, has_tail: bool, masks_rows: bool
) -> tuple[jax.Array | None, jax.Array | None]:
    """The columns `[begin, end)` of a block, counted from its first, that each row sees; None: no bound.

    Args:
      rows: numbers of rows.
      columns: of the block.
      has_tail: whether the block may have columns beyond the last one.
      masks_rows: whether rows beyond the last one see nothing; else they may see anything.
    """
    begin, end = (None if x is None else x - first_column for x in mask.visible_columns(rows, has_tail))
    if masks_rows:
        end = jnp.where(rows < mask.rows, columns if end is None else end, 0)
    return begin, end
