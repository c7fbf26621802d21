import heapq
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash._device import H100
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.cuda.sm90 import l2
from jax_flash.cuda.sm90.backward_plan import plan_backward
from jax_flash.cuda.sm90.backward_scheduler import (
    dq_accum_slots,
    dq_sums,
    dq_sums_that_fit,
    l2_head_group,
    l2_head_group_in_order,
)
from jax_flash.cuda.sm90.backward_units import Tiles, makespan

MIB = 1 << 20
L2_BYTES = l2.backward_bytes(H100)


def call(T, S, left=None, right=None, B=1, N=1, K=1):
    query = jax.ShapeDtypeStruct((B, T, N, 128), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((B, S, K, 128), jnp.bfloat16)
    return AttentionSpec(0.1, left, right), Operands(query, key, key)


def test_equal_tiles_go_head_by_head():
    assert l2_head_group(Tiles((64,) * 32, 64, 1, 132), 4 * MIB, L2_BYTES) == 1


def test_unequal_tiles_of_so_many_heads_go_together_that_the_last_wave_is_even():
    blocks = tuple(range(64, 0, -2))
    for heads, group in ((64, 1), (32, 4)):
        tiles = Tiles(blocks, heads, group, 132)
        width = l2_head_group(tiles, 4 * MIB, L2_BYTES)
        even = heads * (sum(blocks) * group + len(blocks) * 2) / 132
        assert 1 < width <= 9  # what L2 holds
        assert makespan(tiles, width) < 1.01 * even
        assert makespan(tiles, 1) > 1.05 * even


def test_no_more_heads_go_together_than_there_are_or_than_l2_holds():
    blocks = tuple(range(16, 0, -2))
    assert l2_head_group(Tiles(blocks, 2, 1, 132), MIB, L2_BYTES) <= 2
    assert l2_head_group(Tiles(tuple(range(1 << 14, 0, -2)), 16, 1, 132), 1024 * MIB, L2_BYTES) == 1


def test_heads_have_a_slot_until_they_are_written():
    blocks = (64,) * 32
    at_work = 132 / 32  # heads
    assert at_work + 1 < dq_accum_slots(Tiles(blocks, 1000, 1, 132), 1) < 3 * at_work
    assert dq_accum_slots(Tiles(blocks, 3, 1, 132), 1) == 3
    assert dq_accum_slots(Tiles(blocks, 1000, 4, 132), 1) % 4 == 0
    assert dq_accum_slots(Tiles((0, 0), 7, 1, 132), 1) == 7  # nobody attends to anything
    # A causal head's longest tile takes as long as those of several heads after it.
    causal = tuple(range(64, 0, -2))
    assert dq_accum_slots(Tiles(causal, 1000, 1, 132), 1) > dq_accum_slots(Tiles(blocks, 1000, 1, 132), 1)


@pytest.mark.parametrize("blocks", [(64,) * 32, tuple(range(64, 0, -2)), (1,), (0, 3)])
@pytest.mark.parametrize("width", (1, 4, 16))
def test_a_slot_goes_to_a_later_head_group_or_to_nobody(blocks, width):
    for heads in (1, 7, 100, 5000):
        count = dq_accum_slots(Tiles(blocks, heads, 2, 132), width) // 2
        assert count == heads or count >= 2 * width


def test_the_plan_has_the_slots():
    spec, shapes = call(4096, 4096, right=0, B=8, N=16, K=16)
    plan = plan_backward(spec, shapes, H100)
    (sums,) = (buffer for buffer in plan.results if buffer.name == "dq_accum")
    blocks = tuple(range(64, 0, -2))
    width = l2_head_group(Tiles(blocks, 128, 1, 132), 4096 * 128 * 8, L2_BYTES)
    assert sums.shape == (dq_accum_slots(Tiles(blocks, 128, 1, 132), width), 64, 64 * 128)


def makespan_in_order(heads, tiles, blocks, width, workers, lag=1.0, sums=1):
    """When the last worker ends, in blocks' times, if tiles that all see all blocks add to dQ in the order in
    which they are handed out: at each block a tile is `lag` behind the one before it of its sum."""
    free, before, count = [0.0] * workers, {}, np.arange(1, blocks + 1)
    for first in range(0, heads, width):
        for tile in range(tiles):
            for head in range(first, min(first + width, heads)):
                start, sum_ = free[0] + 1, (head, tile % sums)
                waits = np.maximum(start, before[sum_] + lag - count) if sum_ in before else start
                before[sum_] = count + np.maximum.accumulate(np.broadcast_to(waits, blocks))
                heapq.heapreplace(free, before[sum_][-1] + 1)
    return max(free)


@pytest.mark.parametrize(
    "B,S,K,group,most",
    [(4, 4096, 16, 1, 0.01), (1, 16384, 16, 1, 0.01), (4, 4096, 8, 4, 0.03), (1, 4096, 8, 1, 0.12)],
)
def test_a_fixed_order_costs_little_where_heads_are_many(B, S, K, group, most):
    """Beside tiles that start evenly spread over the blocks and never wait: those all have to be resident."""
    heads, tiles, blocks = B * K, S // 128, S // 64 * group
    width = l2_head_group_in_order(heads, group * S * 128 * 8, tiles_alike=True, l2_bytes=L2_BYTES)
    spread = math.ceil(heads * tiles / 132) * (blocks + 2)
    assert makespan_in_order(heads, tiles, blocks, width, 132) <= (1 + most) * spread
    assert makespan_in_order(heads, tiles, blocks, width, 132, lag=0) <= spread


@pytest.mark.parametrize(
    "heads,S,sums,before,after",
    [(8, 4096, 2, 1.16, 1.08), (2, 4096, 8, 1.64, 1.07), (1, 16384, 4, 1.67, 1.17), (64, 4096, 1, 1.02, 1)],
)
def test_several_sums_divide_the_waiting(heads, S, sums, before, after):
    """The simulated run, relative to one in which no tile waits."""
    tiles, blocks = S // 128, S // 64
    width = l2_head_group_in_order(heads, S * 128 * 8, tiles_alike=True, l2_bytes=L2_BYTES)
    fit = dq_sums_that_fit(heads * S * 128 * 4, 3 * heads * S * 128 * 4)
    assert dq_sums(Tiles((blocks,) * tiles, heads, 1, 132), tiles, width, fit) == sums

    def makespan(lag, sums=1):
        return makespan_in_order(heads, tiles, blocks, width, 132, lag, sums)

    assert makespan(4 / 3) / makespan(0) <= before
    assert sums == 1 or makespan(4 / 3, sums) / makespan(0) <= after


def test_sums_are_several_only_where_tiles_wait_for_much_of_the_run():
    blocks = (64,) * 32
    assert dq_sums(Tiles(blocks, 2, 1, 132), 32, 2, 8) == 8
    assert dq_sums(Tiles(blocks, 2, 1, 132), 1, 2, 8) == 1  # tiles start blocks apart
    assert dq_sums(Tiles(blocks, 64, 1, 132), 32, 8, 8) == 1  # heads are many,
    assert dq_sums(Tiles(blocks, 2, 32, 132), 32, 2, 8) == 1  # or query heads of each
    assert dq_sums(Tiles((512,) * 4, 1, 1, 132), 4, 1, 8) == 1  # tiles are few
    assert dq_sums(Tiles((1,) * 1000, 1, 1, 132), 1000, 1, 100) == 8
    assert dq_sums(Tiles((0, 0), 1, 1, 132), 2, 1, 8) in (1, 2)  # nobody attends to anything


@pytest.mark.parametrize("most", (1, 2, 3, 7, 8))
def test_no_more_sums_than_fit(most):
    assert dq_sums(Tiles((64,) * 32, 2, 1, 132), 32, 2, most) == 1 << (most.bit_length() - 1)


def test_sums_take_no_more_than_gradients_or_32_mib():
    assert dq_sums_that_fit(MIB, 3 * MIB) == 32
    assert dq_sums_that_fit(20 * MIB, 60 * MIB) == 3
    assert dq_sums_that_fit(1000 * MIB, 1500 * MIB) == 1


def test_shares_of_l2_are_those_that_were_timed():
    """The plans of an H100 and an H200 stay as they were timed."""
    assert l2.forward_bytes(H100) == 32 * MIB
    assert l2.backward_bytes(H100) == 36 * MIB
