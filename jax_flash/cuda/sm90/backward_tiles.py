"""Tile shapes of the backward pass on Hopper, as a table, and the shared memory that each takes."""

import dataclasses

from jax_flash.cuda.score_mod import Modification
from jax_flash.cuda.sm90.tensor_maps import PANEL, tile_row_bytes

MAX_SCORE_GRAD_HEAD_DIM = 192
"""Up to this head dim the derivative by scores has shared memory of its own. Beyond, it takes P's place."""

SPAN = 4
"""Key tiles count this many blocks of queries together as done: each count waits for additions."""

_BARRIER_BYTES = 8
_DQ_PIECE_BYTES = 4096
"""A piece of a finished sum of dQ: 64 rows × 16 columns of float32."""


@dataclasses.dataclass(frozen=True)
class BackwardTile:
    """Tile shape of one variant of the kernels.

    Two consumer warpgroups share a block. They split its keys: each has dK and dV of 64 keys in registers,
    and a third warpgroup computes dQ. Or they split its products, where registers hold only one gradient.
    """

    queries: int  # in a block
    cta_keys: int  # of each CTA that shares the tile
    split_products: bool
    stages: int  # blocks of Q, and of dO, in flight
    # CTAs that share a tile. With split products two halve the additions to dQ, and are needed above 192.
    cluster: int = 1
    dq_stages: int = 1  # tiles of dQ on their way to the sum, where a warpgroup of its own computes dQ
    writer_stages: int = 0  # pieces of finished sums on their way to each of two warps that write dQ
    semaphore_stages: int = 0  # blocks whose semaphores are acquired ahead, in deterministic kernels
    mask_metadata: bool = False
    block_lists: bool = False  # a list of a block mask says which blocks a tile visits
    score_grad: bool = False  # one consumer hands the derivative by scores to the other, beside P
    dropout: bool = False
    isolates: bool = False  # blocks may be cleaned of what isn't finite between their load and their use

    def without_writers(self) -> "BackwardTile":
        """The same tile where no warps of the main kernel write dQ.

        More tiles of dQ on their way take the memory of those warps.
        """
        dq_stages = self.dq_stages if self.split_products else self.writer_stages
        return dataclasses.replace(self, dq_stages=dq_stages, writer_stages=0)

    def deterministic(self) -> "BackwardTile":
        """The same tile where additions to dQ have a fixed order."""
        return dataclasses.replace(self.without_writers(), semaphore_stages=2)

    @property
    def per_query_values(self) -> int:
        """What the main kernel loads for each query besides its row: lse, delta, and dropout's hash."""
        return 2 + self.dropout

    @property
    def threads(self) -> int:
        return 384 if self.split_products else 512

    @property
    def keys(self) -> int:
        return self.cta_keys * self.cluster

    @property
    def least_head_dim(self) -> int:
        """With split products both consumers have columns of dQ, and dP may be computed in two parts."""
        return 32 if self.split_products else 16

    def gradients_in_value_place(self, larger_dim: int) -> bool:
        """Whether dK and dV are staged where V lay, which leaves room for K of the next tile."""
        return not self.split_products and larger_dim <= 96

    def value_rows(self, larger_dim: int) -> int:
        """Rows of V that are loaded at a time."""
        return 64 if self.gradients_in_value_place(larger_dim) else self.cta_keys

    def shared_bytes(self, head_dim: int, value_dim: int, element_bytes: int) -> int:
        """Dynamic shared memory, in the order of `SharedMemory` in cuda/kernels/sm90/backward/traits.cuh.

        Args:
          head_dim: of queries and keys.
          value_dim: of values.
          element_bytes: of an element of the operands.
        """
        larger_dim = max(head_dim, value_dim)
        key_row, value_row, larger_row = (
            tile_row_bytes(columns, element_bytes) for columns in (head_dim, value_dim, larger_dim)
        )
        # Either K of the next tile has a place, and V's has room for each gradient; or gradients have one.
        in_value_place = self.gradients_in_value_place(larger_dim)
        key_stages = 2 if in_value_place else 1
        keys = self.cta_keys * key_stages * key_row
        values = self.cta_keys * (larger_row if in_value_place else value_row)
        gradients = 0 if self.split_products or in_value_place else self.cta_keys * larger_row
        blocks = self.stages * self.queries * (key_row + value_row)
        d_scores_buffers = 1 if self.split_products else 2
        d_scores = d_scores_buffers * self.queries * self.cta_keys * element_bytes
        score_grad = d_scores if self.score_grad else 0
        peer = (self.queries + 2 * PANEL) * self.cta_keys * element_bytes if self.cluster > 1 else 0
        if self.split_products:
            dq_columns = head_dim // self.cluster if larger_dim <= 192 else 0
        else:
            dq_columns = head_dim if larger_dim <= 96 else PANEL
        dq = self.dq_stages * 64 * dq_columns * 4 + 2 * self.writer_stages * _DQ_PIECE_BYTES
        lse_delta = self.stages * self.per_query_values * self.queries * 4
        barriers = 2 * key_stages + self.cta_keys // self.value_rows(larger_dim) + 3
        barriers += 2 * d_scores_buffers + 4 * self.stages
        barriers += 2 * self.dq_stages + 2 * self.writer_stages + 3 * self.semaphore_stages
        barriers += 2 * self.stages * self.isolates
        # The loading thread tells what a tile's work is, or the tile's index alone.
        tells_work = in_value_place or (self.mask_metadata and not self.split_products)
        work = key_stages * (3 + 2 * self.mask_metadata) * 8 if tells_work else 8
        # So it does of each block, where a list says.
        work += 8 * self.stages if self.block_lists and not self.split_products else 0
        tiles = keys + values + blocks + d_scores + score_grad + peer + dq + gradients
        return tiles + lse_delta + barriers * _BARRIER_BYTES + work


# The larger of the two head dims, rounded up to a multiple of 16, at most → tile. Registers decide: 208 a
# consumer thread, 240 above head dim 128. At once it holds gradients, and the larger of two sets: scores or
# dP with converted P; or converted P, dS and dQ. Timed where both head dims are the same.
#
#   head dim   gradients           S or dP, P   P or dS, and dQ   shared KB
#   64         2 x 32              64 + 32      32 + 32           210
#   96         2 x 48              32 + 16      16 + 16           225
#   128        2 x 64              32 + 16      16 + 16           225
#   192        96 (dK or dV)       32           16 + 32 (dQ)      201
#   256        128 (dK or dV)      32           16 + 32 (dQ)      225
_TILES = {
    64: BackwardTile(128, 128, split_products=False, stages=2, writer_stages=2),
    96: BackwardTile(64, 128, split_products=False, stages=2, writer_stages=1),
    128: BackwardTile(64, 128, split_products=False, stages=2, writer_stages=2),
    192: BackwardTile(64, 64, split_products=True, stages=2, cluster=2),
    256: BackwardTile(64, 64, split_products=True, stages=2, cluster=2),
}

# With a light modification: another P takes registers, which are there in blocks of 64 queries.
_LIGHT_TILES = {**_TILES, 64: BackwardTile(64, 128, split_products=False, stages=2, writer_stages=2)}
# With a heavy one: one gradient a consumer leaves registers for it.
_HEAVY_TILES = {128: BackwardTile(64, 64, split_products=True, stages=2), 192: _TILES[192], 256: _TILES[256]}
_OF_MODIFICATION = {
    Modification.NONE: _TILES,
    Modification.LIGHT: _LIGHT_TILES,
    Modification.HEAVY: _HEAVY_TILES,
}


def tile(larger_dim: int, modification: Modification = Modification.NONE) -> BackwardTile:
    """The tile for a call's larger head dim, of keys or of values, and what becomes of its scores."""
    tiles = _OF_MODIFICATION[modification]
    return next(shape for limit, shape in tiles.items() if larger_dim <= limit)
