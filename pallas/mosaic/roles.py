"""The warpgroups of a block: one loads what the others compute with."""

import functools
from collections.abc import Callable

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Registers of a thread in the computing warpgroups and in the loading one, by the number of computing ones.
_REGISTERS = {1: (240, 40), 2: (232, 40), 3: (160, 32)}
# Where the loading one changes what it loads.
_REGISTERS_TO_CHANGE = {1: (240, 40), 2: (208, 88), 3: (152, 56)}


def divide(
    computing: int, compute: Callable[[jax.Array], None], load: Callable[[], None], changes: bool = False
) -> None:
    """Runs `compute(warpgroup)` in the first `computing` warpgroups of a block, and `load()` in the last.

    Args:
      changes: whether `load` changes what it loads.
    """
    warpgroup = lax.axis_index("warpgroup")
    more, fewer = (_REGISTERS_TO_CHANGE if changes else _REGISTERS)[computing]

    @pl.when(warpgroup < computing)
    def _():
        plgpu.set_max_registers(more, action="increase")
        compute(warpgroup)

    @pl.when(warpgroup == computing)
    def _():
        plgpu.set_max_registers(fewer, action="decrease")
        load()


def drain(filled: jax.Array, stages: int, *free) -> None:
    """Waits until the readers of rings are done with what was filled last."""
    for slot in range(stages):
        for barriers in free:
            pl.when(filled > slot)(functools.partial(plgpu.barrier_wait, barriers.at[slot]))
