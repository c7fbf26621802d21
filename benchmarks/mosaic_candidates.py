"""The configurations of the Mosaic GPU kernels that tune_mosaic.py times."""

import dataclasses
import itertools
from collections.abc import Iterator

from jax_flash._spec import Sizes
from jax_flash.pallas.mosaic import backward_problem as mosaic_backward_problem
from jax_flash.pallas.mosaic import tiles as mosaic_tiles
from jax_flash.pallas.mosaic.tiles import BackwardConfig, ForwardConfig

FORWARD_KEYS = (64, 128, 192)
FORWARD_SWITCHES = ("pingpong", "persistent")
QUERY_STAGES = (1, 2)
COLUMNS = (64, 128)
STAGES = (2, 3)


def forward(size: Sizes) -> Iterator[ForwardConfig]:
    """The table's, with its switches in every position; and the other tiles that fit, with the table's."""
    table = mosaic_tiles.forward(size)
    if table is None:
        return
    for values in itertools.product((True, False), repeat=len(FORWARD_SWITCHES)):
        yield dataclasses.replace(table, **dict(zip(FORWARD_SWITCHES, values, strict=True)))
    for warpgroups, keys, stages, query_stages in itertools.product(
        (2, 3), FORWARD_KEYS, STAGES, QUERY_STAGES
    ):
        other = dataclasses.replace(
            table, warpgroups=warpgroups, keys=keys, stages=stages, query_stages=query_stages
        )
        # Three warpgroups have 160 registers a thread: too few for a wider output.
        registers = (max(size.H, size.V) + keys) // 2 + keys // 4
        enough = registers <= (128 if warpgroups == 3 else 208)
        if other != table and enough and mosaic_tiles.forward_fits(size, other):
            yield other


def backward_kernels(size: Sizes) -> dict[str, BackwardConfig]:
    """All kernels for such calls, as the table has them, by their names in `backward_problem.KERNELS`."""
    return {
        name: config
        for together in (True, False)
        for name, config in mosaic_tiles.backward(size, together).kernels.items()
    }


def backward(size: Sizes, kernel: str) -> Iterator[BackwardConfig]:
    """The table's for a kernel first, then all others that fit shared memory and registers."""
    table = backward_kernels(size)[kernel]
    yield table
    owns = mosaic_backward_problem.KERNELS[kernel].owns
    sums = size.H * owns.key_or_query + size.V * owns.value_or_d_out
    tiles = ((False, 1), (True, 1), (True, 2))  # persistent, and whether two tiles' rows are there
    for warpgroups, columns, first, second, (persistent, row_stages) in itertools.product(
        (2, 3), COLUMNS, STAGES, (None, 1), tiles
    ):
        other = BackwardConfig(warpgroups, columns, first, second, persistent, row_stages)
        # A second operand that is read by the first products alone is done with soon, others are not.
        staged = second is None or (owns.key_or_query and not owns.value_or_d_out)
        registers = (sums + columns * (1 + owns.key_or_query)) // 2
        enough = registers <= (128 if warpgroups == 3 else 192)
        if staged and enough and other != table and mosaic_tiles.backward_kernel_fits(size, kernel, other):
            yield other
