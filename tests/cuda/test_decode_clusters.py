"""The decode kernel with clusters of CTAs, which share a tile and combine its parts, run on a CPU."""

import dataclasses
import math
import re

import numpy as np
import pytest
from cache_case import CacheCase, Draw
from exhaustive import thinned
from kernel_emulator import KernelEmulator
from seeds import seed_of
from test_decode_emulated import run, traits
from test_decode_plan import call

from jax_flash._device import H100
from jax_flash._spec import shapes_of
from jax_flash.cuda import plan_check
from jax_flash.cuda.compile import compile_kernel
from jax_flash.cuda.sm90 import decode_plan
from jax_flash.cuda.sm90.decode_tiles import choose_tile

CASES = (
    CacheCase(S=1000, B=2, full=True, H=128),
    CacheCase(S=2100, B=1, H=128, U=3, T=3, right=0, rotary=64),  # of 16 CTAs
    CacheCase(S=256, B=70, N=2, K=1, U=1, H=128),  # pairs, more CTAs than multiprocessors
    CacheCase(S=1000, T=3, U=2, right=0, rotary=32, soft_cap=2.0),
    CacheCase(S=700, N=8, K=1, H=256, B=2, sinks=True, dtype="float16"),
    CacheCase(S=900, T=9, left=200, right=0, alibi="BN", V=80, H=72, left_padding=True),
    CacheCase(S=640, page=16, U=1, H=128),
    CacheCase(S=600, page=3, T=5, right=0, B=2, layers=2),
    CacheCase(S=1000, T=70, N=2, K=1, right=0, B=1, U=70),  # two tiles of a head
    CacheCase(S=900, num_splits=3, N=2, K=2, B=2),
    CacheCase(S=1100, float8=True, descales=True, U=1, B=2, H=128),
    CacheCase(S=900, B=1, N=40, K=1, H=64, V=256, U=3, T=2, batch_index=True),
    CacheCase(S=700, B=2, U=1, score_mod=True, sinks=True),
    CacheCase(S=1000, T=20, U=20, right=0, B=1, N=2, K=1, H=128),
)
PARTIALS_WITHIN = CASES[-1]  # where blocks were: they have no memory of their own
PARTS = "sm90/decode/cluster_parts.cuh"
MISTAKES = {
    "partials are read where not all are there": (
        CASES[0],
        """        mbarrier::wait(shared.partials_full(), 0);
#pragma unroll 1
        for (int index = threadIdx.x / 32; index < own; index += Traits::consumer_threads / 32) {
            RowSum sum = sum_of(index);
""",
        """#pragma unroll 1
        for (int index = threadIdx.x / 32; index < own; index += Traits::consumer_threads / 32) {
            RowSum sum = sum_of(index);
            mbarrier::wait(shared.partials_full(), 0);
""",
    ),
    "partials are stored where blocks are still read": (
        PARTIALS_WITHIN,
        """    meet_before_partials();
    partials.send(out, softmax);
""",
        """    partials.send(out, softmax);
    meet_before_partials();
""",
    ),
}


def device(multiprocessors):
    return dataclasses.replace(H100, sm_count=multiprocessors)


def planned(case, multiprocessors=132):
    """CTAs of a cluster, those of the call, and its launches."""
    shapes = shapes_of(Draw(case).operands)
    plan = decode_plan.plan_decode(case.spec, shapes, device(multiprocessors))
    plan_check.check(plan)
    (launch,) = (x for x in plan.launches if x.kernel.entry == "decode")
    return dict(launch.kernel.defines)["CLUSTER"], launch.grid[0], len(plan.launches)


@pytest.mark.parametrize("case", thinned(CASES, traits), ids=str)
def test_equals_the_definition(case, emulator):
    """With so few CTAs at once that not all clusters are among them."""
    cluster, *_ = planned(case)
    assert cluster > 1
    run(case, emulator, 132, 2 * cluster)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_races_are_found(mistake, tmp_path):
    case, text, other = MISTAKES[mistake]
    emulator = KernelEmulator(tmp_path, edits={(PARTS, text): other})
    with pytest.raises(AssertionError, match="races in"):
        run(case, emulator, 132, 16)


def test_where_partials_lie():
    """Cases have both: partials with memory of their own, and, for want of room, where blocks were."""

    def are_apart(case):
        shapes = shapes_of(Draw(case).operands)
        launch = decode_plan.plan_decode(case.spec, shapes, H100).launches[-1]
        return dict(launch.kernel.defines)["PARTIALS_APART"]

    assert are_apart(CASES[0]) and not are_apart(PARTIALS_WITHIN)


def test_what_is_split_by_clusters():
    """Calls of so few tiles that CTAs are left over, and of few blocks for each."""
    usual = CacheCase(B=1, S=1024, N=32, K=8, H=128)
    assert planned(usual) == (8, 64, 1)
    assert planned(dataclasses.replace(usual, U=1)) == (8, 64, 1)  # it appends itself
    assert planned(dataclasses.replace(usual, U=17)) == (8, 64, 2)
    assert planned(dataclasses.replace(usual, S=2048)) == (16, 128, 1)
    assert planned(dataclasses.replace(usual, S=16384)) == (16, 128, 1)
    assert planned(dataclasses.replace(usual, B=4)) == (4, 128, 1)
    assert planned(dataclasses.replace(usual, B=16, S=4096)) == (2, 256, 1)
    assert planned(dataclasses.replace(usual, S=4096, H=256)) == (8, 64, 1)  # a CTA on a multiprocessor
    assert planned(dataclasses.replace(usual, S=200)) == (2, 16, 1)
    assert planned(dataclasses.replace(usual, num_splits=1))[0] == 1
    for more in ({"B": 17}, {"S": 16448}, {"B": 9, "S": 4160}, {"packed": True, "T": 4}):
        cluster, _, launches = planned(dataclasses.replace(usual, **more))
        assert cluster == 1 and launches == 1
    assert planned(usual, 32)[0] == 4


@pytest.mark.parametrize("multiprocessors", (16, 78, 114, 132))
@pytest.mark.parametrize("cache_dtype", (None, "float8_e4m3fn"))
def test_there_is_room_for_clusters(multiprocessors, cache_dtype):
    """Each tile has a cluster of its own, whatever the device has, and no CTA more than 32 blocks."""
    random = np.random.default_rng(seed_of((multiprocessors, cache_dtype)))
    sizes = set()
    for _ in range(300):
        H, B, K, T = (
            random.choice(x) for x in ((16, 64, 128, 192, 256), (1, 2, 5, 33), (1, 2, 8), (1, 9, 70))
        )
        S = int(2 ** random.uniform(4, 15))
        splits = random.choice((None, None, 1, 2, 3, 9))
        options = {"H": int(H), "B": int(B), "K": int(K), "N": 4 * int(K), "T": int(T), "S": S}
        spec, shapes = call(**options, cache_dtype=cache_dtype, num_splits=splits)
        made = decode_plan.plan_decode(spec, shapes, device(multiprocessors))
        plan_check.check(made)
        launch, tile = made.launches[0], choose_tile(shapes)
        cluster = dict(launch.kernel.defines)["CLUSTER"]
        sizes.add(cluster)
        if cluster > 1:
            tiles = B * K * math.ceil(4 * T / 64)
            places = multiprocessors * (tile.ctas_of_sm if cluster == 2 else 1)
            assert launch.cluster == cluster
            assert launch.grid[0] == tiles * cluster <= places
            assert cluster <= 8 or tile.ctas_of_sm == 2
            parts = min(cluster, splits or cluster)
            assert math.ceil(S / tile.keys) <= 32 * parts and cluster < 2 * parts
    assert {1, 2, 4, 8} <= sizes


@pytest.mark.every_turn
@pytest.mark.parametrize("case", [case for case in CASES if not case.score_mod], ids=str)
def test_compiles_without_spills_or_warnings(case):
    pytest.importorskip("cuda.bindings.nvrtc")
    plan = decode_plan.plan_decode(case.spec, shapes_of(Draw(case).operands), H100)
    (launch,) = (x for x in plan.launches if x.kernel.entry == "decode")
    log = compile_kernel(launch.kernel).log
    assert not re.search(r"warning|C75\d\d|serializ", log, re.IGNORECASE), log
    assert re.findall(r"(\d+) bytes (?:stack|spill)", log) == ["0"] * 3, log
