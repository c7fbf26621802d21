"""The shape and schedule of each Mosaic GPU kernel, as a value that can be printed.

The tables hold the fastest configurations on an H200, or others within 1% of them, in the mean of full and
causal attention, by `benchmarks/tune_mosaic.py` and earlier searches (in benchmarks/results:
mosaic_steps_forward_h200.json, tune_mosaic_backward_h200.json, and for the one kernel for all gradients
mosaic_together_backward_h200.json), at head dims 64, 128 and 256. Backward above 128 they are what fits and
doesn't spill.
"""

import dataclasses
import functools
from typing import NamedTuple

from jax_flash._spec import Sizes

SHARED_MEMORY = 227 * 1024  # of a Hopper multiprocessor, for one block
_RESERVED = 3 * 1024 + 256  # bytes for barriers, alignment and Mosaic GPU's own
_ALIGNMENT = 1024  # of each array in shared memory; barriers of a kernel that reduces nothing take as much

ROWS = 64  # of a warpgroup's matrix instruction


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """How a block of the forward kernel works: `warpgroups` of 64 queries each, and one that loads."""

    warpgroups: int  # that compute
    keys: int  # of a block
    stages: int  # blocks of keys and of values in shared memory
    query_stages: int  # tiles of queries there
    pingpong: bool = True  # computing warpgroups alternate on the tensor cores
    persistent: bool = True  # a block takes one tile after another, and loads ahead of their ends

    @property
    def queries(self) -> int:
        """Of a tile."""
        return ROWS * self.warpgroups

    def __str__(self) -> str:
        switches = [name for name in ("pingpong", "persistent") if getattr(self, name)]
        schedule = f", {' + '.join(switches)}" if switches else ""
        stages = f"{self.stages} stages, {self.query_stages} of queries"
        return f"{self.queries} queries x {self.keys} keys, {stages}{schedule}"


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """How a block of a backward kernel works: each of `warpgroups` owns 64 rows of its gradients.

    It loops over blocks of columns: of query and d_out where the rows are keys, else of key and value.
    """

    warpgroups: int  # that compute
    columns: int  # of a block: a multiple of 64, for the products that sum over them
    stages: int  # blocks in shared memory
    second_stages: int | None = None  # of d_out or value, where not as many
    persistent: bool = False  # a block takes one tile after another, and loads ahead of their ends
    row_stages: int = 1  # tiles whose rows are in shared memory
    head_shares: int = 1  # blocks that have a tile of keys, each with some of its query heads

    @property
    def rings(self) -> tuple[int, int]:
        """Blocks in shared memory of either operand of the columns."""
        return self.stages, self.stages if self.second_stages is None else self.second_stages

    def __str__(self) -> str:
        first, second = self.rings
        stages = f"{first}" if first == second else f"{first} and {second}"
        text = f"{ROWS * self.warpgroups} rows x {self.columns} columns, {stages} stages"
        if self.persistent:
            text += ", persistent" if self.row_stages == 1 else f", persistent over {self.row_stages} tiles"
        if self.head_shares > 1:
            text += f", {self.head_shares} head shares"
        return text


class BackwardConfigs(NamedTuple):
    """The configurations of a backward pass's kernels."""

    keys: BackwardConfig  # for dK; and for dV and dQ, where there are no kernels for them
    queries: BackwardConfig | None = None
    values: BackwardConfig | None = None

    @property
    def kernels(self) -> dict[str, BackwardConfig]:
        """By their names in `backward_problem.KERNELS`."""
        if self.queries is None:
            return {"all": self.keys}
        if self.values is None:
            return {"queries": self.queries, "keys_and_values": self.keys}
        return {"queries": self.queries, "keys": self.keys, "values": self.values}

    def __str__(self) -> str:
        if self.queries is None:
            return f"of keys, values and queries ({self.keys})"
        if self.values is None:
            return f"of keys and values ({self.keys}) and of queries ({self.queries})"
        return f"of keys ({self.keys}), of values ({self.values}) and of queries ({self.queries})"


def backward_fits(size: Sizes, configs: BackwardConfigs) -> bool:
    return all(backward_kernel_fits(size, *kernel) for kernel in configs.kernels.items())


def backward_kernel_fits(size: Sizes, kernel: str, config: BackwardConfig) -> bool:
    """Whether shared memory has room for the rows, the rings, lse and delta, and what is added to dQ."""
    row_bytes = 2 * (size.H + size.V)
    if kernel == "values" and size.H == size.V:  # which needs no values, and stages dV over keys
        row_bytes = 2 * size.H
    rows = ROWS * config.warpgroups * config.row_stages
    columns = [config.columns * stages for stages in config.rings]
    tiles = rows * row_bytes + sum(2 * n * width for n, width in zip(columns, (size.H, size.V), strict=True))
    queries = [rows, rows] if kernel == "queries" else columns
    lse_and_delta = sum(-(-4 * n // _ALIGNMENT) * _ALIGNMENT for n in queries)
    added = 0
    if kernel == "all":
        if size.H % (64 * config.warpgroups):
            return False  # a warpgroup's share of the width is made of whole tiles in shared memory
        added = config.columns * (2 * ROWS * config.warpgroups + 4 * size.H)
    return tiles + lse_and_delta + added + _ALIGNMENT <= SHARED_MEMORY


def forward_fits(size: Sizes, config: ForwardConfig, itemsize: int = 2) -> bool:
    """The output, of 16 bits, is staged where queries were, or in a place of its own where these have another
    head dim or other numbers, of `itemsize` bytes."""
    own_out = size.V != size.H or itemsize != 2
    rows = itemsize * config.query_stages * size.H + (2 * size.V if own_out else 0)
    rings = itemsize * config.stages * config.keys * (size.H + size.V)
    lse = 4 * config.queries
    return config.queries * rows + rings + lse + _RESERVED <= SHARED_MEMORY


# By head dim: that one and smaller ones.
_FORWARD = {
    64: ForwardConfig(3, 128, 2, 2),
    128: ForwardConfig(2, 128, 2, 2),
    192: ForwardConfig(2, 64, 2, 2),
    256: ForwardConfig(2, 64, 2, 1),
}


PART = 64
"""Columns of values in one product of e4m3 numbers, where values have a head dim over 128."""

# On e4m3 numbers, by head dim too: tiles that leave registers for the output, for the sum of a part's values
# and for the scores.
_FORWARD_FLOAT8 = {
    64: ForwardConfig(2, 128, 2, 2),
    128: ForwardConfig(2, 64, 4, 2),
    256: ForwardConfig(2, 64, 3, 1),
}


# By head dim, that one and smaller ones: the first that fits and may be taken. Above 128, registers have no
# room for both sums of keys. There the second operand of the columns is read by one product of a step, the
# first mostly by two, and so for longer.
_WIDE = BackwardConfig(2, 64, 2, 1)
_ahead = functools.partial(BackwardConfig, persistent=True, row_stages=2)
_BACKWARD = (
    (64, BackwardConfigs(_ahead(2, 128, 2), _ahead(2, 128, 3))),
    (128, BackwardConfigs(BackwardConfig(2, 64, 2, persistent=True))),
    (128, BackwardConfigs(_ahead(2, 64, 3), BackwardConfig(2, 128, 2, 1, persistent=True))),
    (192, BackwardConfigs(BackwardConfig(2, 64, 2), BackwardConfig(2, 64, 2), BackwardConfig(2, 64, 2))),
    (256, BackwardConfigs(_WIDE, _WIDE, BackwardConfig(2, 64, 2))),
    (256, BackwardConfigs(_WIDE, _WIDE, BackwardConfig(2, 64, 1))),
)


# How many keys a query must see in the mean for one kernel to be faster, or as fast. With 768 it is 0.5 to 5%
# slower: to set the sum of dQ to zero, and to round it, takes longer than two products of seven
# (benchmarks/results/tune_mosaic_together_h200.json).
KEYS_TO_SUM_TOGETHER = 1024


def backward(size: Sizes, together: bool) -> BackwardConfigs:
    """The configurations for such a call, of head dims up to 256.

    Args:
      together: take one kernel for all gradients where there is one, which adds to dQ in any order.
    """
    head_dim = max(size.H, size.V)
    return next(
        found
        for limit, found in _BACKWARD
        if head_dim <= limit and (together or found.queries is not None) and backward_fits(size, found)
    )


def forward(size: Sizes, float8: bool = False) -> ForwardConfig | None:
    """The configuration for such a call; None where nothing fits."""
    head_dim = max(size.H, size.V)
    table = _FORWARD_FLOAT8 if float8 else _FORWARD
    config = next((config for limit, config in table.items() if head_dim <= limit), None)
    return config if config is not None and forward_fits(size, config, 1 if float8 else 2) else None
