"""The shape and schedule of each Mosaic GPU kernel, as a value that can be printed.

The table holds what fits shared memory, and compiles for sm_90a without a spill in the loop of whole blocks,
but for two registers at head dim 256 forward; no timing has gone into it yet.
"""

import dataclasses

from jax_flash._spec import Sizes

SHARED_MEMORY = 227 * 1024  # of a Hopper multiprocessor, for one block
_RESERVED = 3 * 1024 + 256  # bytes for barriers, alignment and Mosaic GPU's own

ROWS = 64  # of a warpgroup's matrix instruction


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """How a block of `mosaic_forward` works: `warpgroups` of 64 queries each, and one that loads for them."""

    warpgroups: int  # that compute
    keys: int  # of a block
    stages: int  # blocks of keys and of values in shared memory
    query_stages: int  # tiles of queries there
    turns: bool = True  # warpgroups issue their products one after the other
    persistent: bool = True  # a block takes one tile after another, and loads ahead of their ends

    @property
    def queries(self) -> int:
        """Of a tile."""
        return ROWS * self.warpgroups

    def __str__(self) -> str:
        switches = [name for name in ("turns", "persistent") if getattr(self, name)]
        schedule = f", {' + '.join(switches)}" if switches else ""
        stages = f"{self.stages} stages, {self.query_stages} of queries"
        return f"{self.queries} queries x {self.keys} keys, {stages}{schedule}"


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """How a block of a kernel of `mosaic_backward` works: `warpgroups` own 64 rows each of its gradient."""

    warpgroups: int  # that compute
    columns: int  # of a block that streams past them: queries for dK and dV, keys for dQ
    stages: int  # blocks in shared memory

    def __str__(self) -> str:
        return f"{ROWS * self.warpgroups} rows x {self.columns} columns, {self.stages} stages"


def backward_fits(size: Sizes, config: BackwardConfig) -> bool:
    of_column = 2 * (size.H + size.V) + 8
    return (
        ROWS * config.warpgroups + config.stages * config.columns
    ) * of_column + _RESERVED <= SHARED_MEMORY


def forward_fits(size: Sizes, config: ForwardConfig) -> bool:
    """The output is staged where queries were, or in a place of its own where it has another head dim."""
    rows = config.query_stages * size.H + (size.V if size.V != size.H else 0)
    rings = config.stages * config.keys * (size.H + size.V)
    lse = 4 * config.queries
    return 2 * (config.queries * rows + rings) + lse + _RESERVED <= SHARED_MEMORY


# By head dim: that one and smaller ones.
_FORWARD = {
    64: ForwardConfig(3, 128, 2, 2),
    128: ForwardConfig(2, 128, 2, 2),
    192: ForwardConfig(2, 64, 2, 2),
    256: ForwardConfig(2, 64, 2, 1),
}


# Of the kernel for dK and dV, whose two sums have no room in registers beyond that, and of the one for dQ.
_BACKWARD_KEYS = {64: BackwardConfig(2, 64, 3), 128: BackwardConfig(2, 64, 2)}
_BACKWARD_QUERIES = {64: BackwardConfig(2, 128, 2), 128: BackwardConfig(2, 64, 3)}


def backward(size: Sizes) -> tuple[BackwardConfig, BackwardConfig] | None:
    """The configurations for dK and dV, and for dQ; None where nothing fits."""
    head_dim = max(size.H, size.V)
    limit = next((limit for limit in _BACKWARD_KEYS if head_dim <= limit), None)
    return None if limit is None else (_BACKWARD_KEYS[limit], _BACKWARD_QUERIES[limit])


def forward(size: Sizes) -> ForwardConfig | None:
    """The configuration for such a call; None where nothing fits."""
    head_dim = max(size.H, size.V)
    config = next((config for limit, config in _FORWARD.items() if head_dim <= limit), None)
    return config if config is not None and forward_fits(size, config) else None
