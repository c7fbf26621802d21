"""The backward kernels end with any number of resident CTAs, started in any order.

Plans are made for a whole device, and run by the emulator where few CTAs are resident.
"""

import dataclasses

import numpy as np
import pytest
from emulated_case import Case, check_backward, tile
from exhaustive import one_in, thinned, thorough

from jax_flash.cuda.sm90 import backward_scheduler

RESIDENT = (1, 2, 5)
CASES = (
    Case(H=64, T=260, S=500),
    Case(H=64, T=200, S=300, N=2, right=0),
    Case(H=96, T=129, S=300, N=2, K=1, left=90, right=10),
    Case(H=128, T=140, S=500, N=2),
    Case(H=128, T=200, S=300, N=2, K=1, right=0),
    Case(H=128, T=130, S=300, B=2, lengths="qk"),
    Case(H=128, T=130, S=200, alibi="1N"),  # split products without clusters
    Case(H=192, T=150, S=400),
    Case(H=192, T=130, S=300, N=2, K=1, right=0),
    Case(H=256, T=130, S=400),
    Case(H=256, T=130, S=260, left=60, right=20),
)
# Calls, and the multiprocessors that plans are for: more than there are tiles, so that persistent kernels
# start a CTA a tile; and fewer.
DEVICES = [*((case, 132) for case in CASES), *((case, 3) for case in CASES[:4])]


def tile_and_way_to_add(case_and_multiprocessors):
    case, _ = case_and_multiprocessors
    return {*tile(case), case.alibi}


@pytest.mark.parametrize("case,multiprocessors", one_in(2, thinned(DEVICES, tile)), ids=str)
def test_any_number_of_resident_ctas(case, multiprocessors, emulator):
    check_backward(case, emulator, multiprocessors, resident=RESIDENT)


@pytest.mark.parametrize("case,multiprocessors", one_in(2, thinned(DEVICES, tile_and_way_to_add)), ids=str)
def test_deterministic_gradients_are_the_same_bits_however_many_ctas_are_resident(
    case, multiprocessors, emulator
):
    case = dataclasses.replace(case, deterministic=True)
    first, *others = check_backward(case, emulator, multiprocessors, resident=RESIDENT)
    for other in others:
        for name in ("dq_accum", "d_query", "d_key", "d_value"):
            np.testing.assert_array_equal(other[name], first[name], err_msg=name)


# Calls with several sums of dQ: each way to add, order of blocks and form of a mask. Some blocks have fewer
# tiles than sums, or none.
SEVERAL_SUMS = (
    Case(H=64, T=260, S=900),
    Case(H=96, T=129, S=700, N=2, K=1, left=200, right=140),
    Case(H=128, T=140, S=700, N=2),
    Case(H=128, T=300, S=600, right=0, N=3),  # the last of two head groups visits blocks from the last one
    Case(H=64, T=500, S=300, right=0),  # queries that see no key
    Case(H=128, T=130, S=600, B=2, lengths="qk"),
    Case(H=128, T=300, S=600, packed=5, right=0),
    Case(H=64, T=300, S=600, segments="mixed"),
    Case(H=128, T=130, S=300, alibi="1N"),  # split products without clusters
    Case(H=192, T=150, S=700),
    Case(H=192, T=130, S=600, right=0, packed=3),
    Case(H=256, T=130, S=600, N=2, right=0),
    Case(H=256, T=70, S=500, lengths="qk"),
)


def tile_and_form(case):
    return {
        *tile(case),
        bool(case.lengths),
        case.packed is not None,
        case.segments is not None,
        case.right == 0,
    }


@pytest.mark.parametrize("sums", (4, *thorough(1, 2)))
@pytest.mark.parametrize("case", one_in(2, thinned(SEVERAL_SUMS, tile_and_form)), ids=str)
def test_several_sums_of_dq_are_the_same_bits_in_any_order_of_ctas(case, sums, emulator, monkeypatch):
    monkeypatch.setattr(backward_scheduler, "dq_sums", lambda *_: sums)
    case = dataclasses.replace(case, deterministic=True)
    first, *others = check_backward(case, emulator, multiprocessors=132, resident=RESIDENT)
    assert first["dq_semaphore"].size % sums == 0
    for other in others:
        for name in ("dq_accum", "dq_semaphore", "d_query", "d_key", "d_value"):
            np.testing.assert_array_equal(other[name], first[name], err_msg=name)
