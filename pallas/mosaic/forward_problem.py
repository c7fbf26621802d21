"""What the forward kernel by Mosaic GPU computes, its order, and which blocks of keys its tiles visit."""

import dataclasses

import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_flash._mask import BlockRange, PositionMask
from jax_flash._spec import Sizes

from .mask_data import BY_POSITION, MaskData
from .tile_scheduler import TileScheduler, tile_lengths
from .tiles import ROWS, ForwardConfig


@dataclasses.dataclass(frozen=True)
class ForwardProblem:
    """The queries of a call, and the keys that they meet.

    Blocks of keys go from the last to the first. So the masked one of causal attention comes first, where no
    product runs beside the softmax anyway.
    """

    size: Sizes
    mask: PositionMask  # in a kernel, of the batch row at hand
    config: ForwardConfig
    multiprocessors: int
    float8: bool = False  # of e4m3 numbers, values transposed (`forward_float8.py`)
    soft_cap: float | None = None
    data: MaskData = BY_POSITION

    @property
    def scheduler(self) -> TileScheduler:
        """The order of tiles of queries."""
        size, config = self.size, self.config
        return TileScheduler(
            tiles=pl.cdiv(size.T, config.queries),
            heads=size.N,
            batch=size.B,
            lengths=tile_lengths(self.mask, config.queries, config.keys),
            blocks=self.multiprocessors if config.persistent else None,
            by_data=self.data.order is not None,
            bytes_of_head=(1 if self.float8 else 2) * size.S * (size.H + size.V) // size.group,
        )

    def in_row(self, batch) -> "ForwardProblem":
        """The same in a batch row."""
        return dataclasses.replace(self, mask=self.data.mask(self.mask, batch), data=self.data.in_row(batch))

    def of_rows(self, first_row) -> "ForwardProblem":
        """The same for a warpgroup's rows of a tile: mask data of these rows is in registers."""
        return dataclasses.replace(self, data=self.data.of_rows(first_row))

    @property
    def hides_pairs(self) -> bool:
        """Whether there are pairs of a query and a key that don't see each other."""
        return self.data.is_given or not self.mask.unbounded

    def again(self) -> "ForwardProblem":
        """The same for the kernel that computes tiles again (`forward_again.py`): a block of the grid goes
        through all its tiles, and passes over those that need nothing."""
        return dataclasses.replace(
            self, config=dataclasses.replace(self.config, persistent=True, query_stages=1)
        )

    def keys_of_tile(self, first) -> BlockRange:
        """The blocks of keys that a tile loads: at least one, also where its queries see none."""
        config = self.config
        blocks = self.mask.block_range(first, config.queries, config.keys)
        blocks = self.data.narrowed(blocks, first, config.warpgroups)
        if not self.hides_pairs:
            return blocks
        first_block = jnp.minimum(blocks.first, pl.cdiv(self.size.S, config.keys) - 1)
        return dataclasses.replace(blocks, first=first_block, last=jnp.maximum(blocks.last, first_block + 1))

    def keys_of_warpgroup(self, first, tile: BlockRange) -> BlockRange:
        """A tile's blocks, from the last to the first. Full are those that a warpgroup sees all of."""
        blocks = self.mask.block_range(first, ROWS, self.config.keys)
        return self.data.narrowed(blocks, first, 1).full_within(tile).reversed()
