"""The kernels of `mosaic_backward`: which gradients each sums, and over which rows and columns it goes."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_flash._mask import BlockRange, PositionMask
from jax_flash._spec import Sizes

from .tile_scheduler import Walk, div, tile_lengths
from .tiles import ROWS, BackwardConfig


class Operand(NamedTuple):
    """The pair of arrays whose products with the other side's are scores and their gradients.

    Keys and values, or queries and the gradient of the output; or what there is of either of them.
    """

    first: Any
    second: Any


class Kernel(NamedTuple):
    """One of the kernels: whose rows it takes, and which gradients of theirs it sums."""

    rows_are_keys: bool
    owns: Operand
    adds: bool = False  # to the gradient of the first of the columns, too


KERNELS = {
    "all": Kernel(True, Operand(True, True), adds=True),
    "queries": Kernel(False, Operand(True, False)),
    "keys": Kernel(True, Operand(True, False)),
    "values": Kernel(True, Operand(False, True)),
    "keys_and_values": Kernel(True, Operand(True, True)),
}


@dataclasses.dataclass(frozen=True)
class Side:
    """What one of the kernels does with rows and columns."""

    size: Sizes
    mask: PositionMask  # of rows
    config: BackwardConfig
    kernel: Kernel
    multiprocessors: int

    @property
    def rows_are_keys(self) -> bool:
        return self.kernel.rows_are_keys

    @property
    def owns(self) -> Operand:
        return self.kernel.owns

    @property
    def heads(self) -> int:
        """Of the gradient."""
        return self.size.K if self.rows_are_keys else self.size.N

    @property
    def rows_of_tile(self) -> int:
        return ROWS * self.config.warpgroups

    @property
    def walk(self) -> Walk:
        """Over tiles of rows."""
        size, config = self.size, self.config
        rows, columns = (size.S, size.T) if self.rows_are_keys else (size.T, size.S)
        heads = size.group if self.rows_are_keys else 1 / size.group  # of columns that a head of rows meets
        return Walk(
            tiles=pl.cdiv(rows, self.rows_of_tile),
            heads=self.heads,
            batch=size.B,
            lengths=tile_lengths(self.mask, self.rows_of_tile, config.columns),
            blocks=self.multiprocessors if config.persistent else None,
            bytes_of_head=int(2 * columns * (size.H + size.V) * heads),
        )

    @property
    def passes(self) -> int:
        """Over the columns: one for each query head that shares the keys."""
        return self.size.group if self.rows_are_keys else 1

    def column_head(self, head, of_pass):
        return head * self.size.group + of_pass if self.rows_are_keys else div(head, self.size.group)

    def blocks(self, first) -> BlockRange:
        """Of columns that the tile meets."""
        return self.mask.block_range(first, self.rows_of_tile, self.config.columns)

    def blocks_of_warpgroup(self, first, tile: BlockRange) -> BlockRange:
        """Those of the tile that a warpgroup's rows meet; all of them where warpgroups work together."""
        own = self.mask.block_range(first, ROWS, self.config.columns)
        if not self.kernel.adds:
            return own.within(tile.first, tile.last)
        if self.masks_rows:
            all_there = (first + ROWS <= self.mask.rows).astype(jnp.int32)
            # Without the barrier LLVM sees where there can be two blocks at most, and ptxas 13.0 miscompiles
            # that loop: it finds the second's index by a condition that the first turn has changed.
            full_end = lax.optimization_barrier(own.full_end * all_there)
            own = dataclasses.replace(own, full_end=full_end)
        return own.full_within(tile)

    @property
    def masks_rows(self) -> bool:
        """Whether rows of the last tile that aren't there have to be told from the others: what is summed
        over rows must have nothing of them."""
        rows = self.size.S if self.rows_are_keys else self.size.T
        return self.kernel.adds and rows % self.rows_of_tile != 0
