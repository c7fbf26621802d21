"""The backward kernels by Mosaic GPU: which gradients each computes, and which rows and columns it visits."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jax_flash._mask import BlockRange, PositionMask
from jax_flash._spec import Sizes

from .mask_data import BY_POSITION, MaskData
from .tile_scheduler import TileScheduler, div, rem, tile_lengths
from .tiles import ROWS, BackwardConfig


class Pair(NamedTuple):
    """Key and value, or query and d_out: of the rows of the scores, or of their columns.

    The product of key and query gives scores, and that of value and d_out gives dP. A pair may also hold
    something about each of the two, such as its gradient or its barriers.
    """

    key_or_query: Any
    value_or_d_out: Any


class LseAndDelta(NamedTuple):
    """What the kernels know of each query's row of probabilities (`_gradients.py`); lse in base 2."""

    lse: Any
    delta: Any


class Kernel(NamedTuple):
    """One of the kernels: whether its rows are keys or queries, and which of their gradients it computes."""

    rows_are_keys: bool
    owns: Pair  # whether it computes the gradient of either operand; nobody owns that of d_out
    adds_d_query: bool = False  # rows are keys, and it adds to dQ too


KERNELS = {
    "all": Kernel(True, Pair(True, True), adds_d_query=True),
    "queries": Kernel(False, Pair(True, False)),
    "keys": Kernel(True, Pair(True, False)),
    "values": Kernel(True, Pair(False, True)),
    "keys_and_values": Kernel(True, Pair(True, True)),
}


@dataclasses.dataclass(frozen=True)
class BackwardProblem:
    """What one of the kernels computes, and its configuration."""

    size: Sizes
    mask: PositionMask  # of rows; in a kernel, of the batch row at hand
    config: BackwardConfig
    kernel: Kernel
    multiprocessors: int
    soft_cap: float | None = None
    data: MaskData = BY_POSITION

    def in_row(self, batch) -> "BackwardProblem":
        """The same in a batch row."""
        return dataclasses.replace(self, mask=self.data.mask(self.mask, batch), data=self.data.in_row(batch))

    def of_rows(self, first_row) -> "BackwardProblem":
        """The same for a warpgroup's rows of a tile: mask data of these rows is in registers."""
        return dataclasses.replace(self, data=self.data.of_rows(first_row))

    def again(self) -> "BackwardProblem":
        """The same for the kernel that computes tiles again (`backward_again.py`): a block of the grid goes
        through all its tiles, and passes over those that need nothing. It adds nothing to dQ.

        It loads nothing ahead, which leaves it shared memory for its reductions. Head shares stay apart, so
        that sums are in the same order.
        """
        config = dataclasses.replace(self.config, stages=1, second_stages=1, persistent=True, row_stages=1)
        kernel = self.kernel._replace(adds_d_query=False)
        return dataclasses.replace(self, config=config, kernel=kernel)

    @property
    def rows_are_keys(self) -> bool:
        return self.kernel.rows_are_keys

    @property
    def owns(self) -> Pair:
        return self.kernel.owns

    @property
    def heads(self) -> int:
        """Of the gradient; where several head shares have a key head, as many for it."""
        return self.size.K * self.config.head_shares if self.rows_are_keys else self.size.N

    def head_and_share(self, head) -> tuple[Any, Any]:
        """The head of the rows, and the head share."""
        shares = self.config.head_shares
        return (head, np.int32(0)) if shares == 1 else (div(head, shares), rem(head, shares))

    @property
    def rows_of_tile(self) -> int:
        return ROWS * self.config.warpgroups

    @property
    def scheduler(self) -> TileScheduler:
        """The order of tiles of rows."""
        size, config = self.size, self.config
        rows, columns = (size.S, size.T) if self.rows_are_keys else (size.T, size.S)
        heads = max(self._passes) if self.rows_are_keys else 1 / size.group  # of columns that a head meets
        return TileScheduler(
            tiles=pl.cdiv(rows, self.rows_of_tile),
            heads=self.heads,
            batch=size.B,
            lengths=tile_lengths(self.mask, self.rows_of_tile, config.columns),
            blocks=self.multiprocessors if config.persistent else None,
            by_data=self.data.order is not None,
            bytes_of_head=int(2 * columns * (size.H + size.V) * heads),
            passes=self._passes,
        )

    @property
    def _passes(self) -> tuple[int, ...]:
        """Of each head share."""
        if not self.rows_are_keys:
            return (1,)
        least, more = divmod(self.size.group, self.config.head_shares)
        return (least + 1,) * more + (least,) * (self.config.head_shares - more)

    def passes(self, head) -> Any:
        """How often a tile passes over the columns: once for each query head of its head share. A Python int
        where shares are alike."""
        least, most = min(self._passes), max(self._passes)
        if least == most:
            return most
        _, share = self.head_and_share(head)
        return jnp.where(share < self._passes.count(most), np.int32(most), np.int32(least))

    def column_head(self, head, of_pass):
        if not self.rows_are_keys:
            return div(head, self.size.group)
        key_head, share = self.head_and_share(head)
        least, more = divmod(self.size.group, self.config.head_shares)
        first = share * np.int32(least)
        if more:
            first += jnp.minimum(share, np.int32(more))
        return key_head * self.size.group + first + of_pass

    def block_range(self, first_row) -> BlockRange:
        """The blocks of columns that a tile visits."""
        blocks = self.mask.block_range(first_row, self.rows_of_tile, self.config.columns)
        return self.data.narrowed(blocks, first_row, self.config.warpgroups)

    def block_range_of_warpgroup(self, first_row, tile: BlockRange) -> BlockRange:
        """The tile's blocks that a warpgroup's rows see; all of them where warpgroups compute dQ together."""
        own = self.mask.block_range(first_row, ROWS, self.config.columns)
        own = self.data.narrowed(own, first_row, 1)
        if not self.kernel.adds_d_query:
            return own.within(tile.first, tile.last)
        if self.masks_rows:
            all_there = (first_row + ROWS <= self.mask.rows).astype(jnp.int32)
            # Without the barrier LLVM sees where there can be two blocks at most, and ptxas 13.0 miscompiles
            # that loop: it computes the second's index by a condition that the first iteration has changed.
            full_end = lax.optimization_barrier(own.full_end * all_there)
            own = dataclasses.replace(own, full_end=full_end)
        return own.full_within(tile)

    @property
    def masks_rows(self) -> bool:
        """Whether rows of the last tile that aren't there have to be told from the others: what is summed
        over rows must have nothing of them. With lengths, such rows lie within the arrays."""
        if self.data.row_lengths is not None:
            return True
        rows = self.size.S if self.rows_are_keys else self.size.T
        return self.kernel.adds_d_query and rows % self.rows_of_tile != 0
