"""Tiles of the decode kernel that CTAs share, in pairs and through global memory, run on a CPU."""

import dataclasses

import numpy as np
import pytest
from cache_case import CacheCase, Draw
from decode_schedule import Work, parts
from kernel_emulator import KernelEmulator
from seeds import seed_of
from test_decode_emulated import planned, run

from jax_flash._device import H100
from jax_flash._spec import shapes_of
from jax_flash.cuda.sm90 import decode_division, decode_plan
from jax_flash.cuda.sm90.decode_tiles import LEAST_SHARE, choose_tile

SHARED_TILE, PAIR = "sm90/decode/shared_tile.cuh", "sm90/decode/pair.cuh"
NO_ARRIVALS = 0xFFB5A7C3E19D0000  # in shared_tile.cuh
LEAST_FLOAT = np.finfo(np.float32).min  # the maximum of a row that has seen no key

SHARED = (
    CacheCase(S=2600, B=1, N=2, K=1, H=16, full=True),
    CacheCase(S=2600, B=2, N=3, K=1, H=16, T=25, right=0, U=25, alibi="1N"),
    CacheCase(S=2600, B=1, N=2, K=1, H=8, V=24, page=16, num_splits=10, full=True),
    CacheCase(S=2000, B=2, N=2, K=1, H=16, num_splits=11, sinks=True, full=True),
    CacheCase(S=10200, B=1, N=2, K=1, H=8, full=True),  # 40 CTAs
    CacheCase(
        S=8448, B=1, N=2, K=1, H=8, V=24, full=True, dtype="float16"
    ),  # 33: without pairs, a node has one
    CacheCase(
        S=1300, B=2, N=10, K=1, H=16, T=3, full=True
    ),  # 30 rows: two warps of a CTA give them to its partner
)
MANY = CacheCase(
    S=200, B=140, N=1, K=1, H=8, num_splits=2
)  # sequences, so that lanes count more than four each
TWO = CacheCase(S=1300, B=1, N=20, K=1, H=16, T=3, full=True)  # more than 32 rows, added up in registers


@pytest.fixture(autouse=True)
def no_clusters(monkeypatch):
    monkeypatch.setattr(decode_division, "CLUSTER_SIZES", ())


@pytest.fixture
def no_pairs(monkeypatch):
    monkeypatch.setattr(decode_division, "MOST_PAIR_ROWS", 0)


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_tiles_that_many_ctas_share(case, emulator):
    """Some have partials for several nodes."""
    for resident in (1, 20):
        run(case, emulator, 20, resident)


def test_many_sequences(emulator):
    run(MANY, emulator, 7, 14)


@pytest.mark.parametrize("case", (SHARED[0], SHARED[4], SHARED[5]), ids=str)
def test_tiles_that_many_ctas_share_without_pairs(case, emulator, no_pairs):
    test_tiles_that_many_ctas_share(case, emulator)


@pytest.mark.parametrize("multiprocessors", (3, 7))
def test_pairs_of_an_odd_number_of_teams(multiprocessors, emulator):
    """CTAs of the last team form no pairs."""
    case = CacheCase(B=3, S=900, N=4, K=2, H=16, left_padding=True)
    plan = planned(case, Draw(case).operands, multiprocessors)
    launch = plan.launches[-1]
    assert launch.cluster == 2 and launch.by_path["division.teams"] == multiprocessors
    run(case, emulator, multiprocessors, 3)


def test_two_ctas_share_a_tile_of_many_rows(emulator):
    for resident in (1, 2):
        run(TWO, emulator, 1, resident)


@pytest.mark.exhaustive
def test_three_levels_of_nodes(emulator, no_pairs):
    """All CTAs of a device share a tile."""
    case = CacheCase(S=264 * 256, B=1, N=1, K=1, H=8, full=True)
    assert "arrivals" in run(case, emulator, 132, 20)


@pytest.mark.parametrize("case, multiprocessors", [(SHARED[0], 20), (SHARED[4], 20), (TWO, 1)], ids=str)
def test_results_do_not_depend_on_who_is_last(case, multiprocessors, emulator):
    """And neither do they on what was in scratch memory."""
    operands = Draw(case).operands
    plan = planned(case, operands, multiprocessors)
    arrays = {name: np.asarray(x) for name, x in operands.present().items()}
    shape = next(buffer.shape for buffer in plan.results if buffer.name == "arrivals")
    random, found = np.random.default_rng(seed_of(case)), []
    memory = (np.zeros(shape), random.integers(-(2**31), 2**31, shape), np.full(shape, -1), None)
    for index, words in enumerate(memory):
        initial = {} if words is None else {"arrivals": words.astype(np.int32)}
        results = emulator.run(plan, arrays, seed_of((case, index)), 20, initial)
        found.append((results["out"].view(np.uint16), results["lse"]))
        counts = np.ascontiguousarray(results["arrivals"]).view(np.uint64)
        assert not np.any(counts >> 16 == NO_ARRIVALS >> 16), "the next call would go on counting"
    for out, lse in found[1:]:
        np.testing.assert_array_equal(out, found[0][0])
        np.testing.assert_array_equal(lse, found[0][1])


MISTAKES = {
    "a CTA is last too early": (
        SHARED_TILE,
        SHARED[0],
        """compare_and_swap(count, no_arrivals + others, 0);
            is_last = found == no_arrivals + others;""",
        """compare_and_swap(count, no_arrivals + others - 1, 0);
            is_last = found == no_arrivals + others - 1;""",
    ),
    "a count keeps its tag": (SHARED_TILE, SHARED[4], "if (is_last) *count = 0;", ""),
    "a node that has not all writes results": (
        SHARED_TILE,
        SHARED[4],
        "if (node.has_all()) {",
        "if (true) {",
    ),
    "a sum is not where the next level looks": (
        SHARED_TILE,
        SHARED[4],
        "row_statistics(first, row, node.level + 1) =",
        "row_statistics(first, row, node.level) =",
    ),
    "what is given is not rescaled": (
        PAIR,
        SHARED[0],
        "values[1] * own_factor + four.y * factor",
        "values[1] + four.y",
    ),
    "a sum lacks what is given": (PAIR, SHARED[6], " * own_factor + other.y * factor;", " * own_factor;"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake, tmp_path):
    """By what the tests above compare."""
    source, case, text, other = MISTAKES[mistake]
    emulator = KernelEmulator(tmp_path, edits={(source, text): other})
    emulator._sources()  # which has the text
    with pytest.raises(AssertionError):
        for resident in (20, 5, 2, 3, 8, 1):
            test_results_do_not_depend_on_who_is_last(case, 20, emulator)
            run(case, emulator, 20, resident)


# 66 and 132 blocks for each tile; 17 teams. Shares of 32 blocks become 33.
HALVES = CacheCase(B=8, S=66 * 128, N=2, K=2, H=16, full=True)
QUARTERS = CacheCase(B=4, S=132 * 128, N=2, K=2, H=16, full=True)
UNEQUAL = CacheCase(B=5, S=900, N=2, K=2, H=16, left_padding=True, right=0)


@pytest.mark.parametrize(
    "case, multiprocessors, paired",
    [
        (UNEQUAL, 7, False),
        (UNEQUAL, 7, True),
        (dataclasses.replace(UNEQUAL, num_splits=2), 7, False),
        (dataclasses.replace(UNEQUAL, num_splits=2), 7, True),
        (HALVES, 17, False),  # in pairs, no partial would go through global memory
        (QUARTERS, 17, False),
        (QUARTERS, 17, True),
    ],
    ids=str,
)
def test_kernel_has_this_schedule(case, multiprocessors, paired, emulator, monkeypatch):
    """A query of zeros has as many keys in a part as its exponentials add up to."""
    monkeypatch.setattr(decode_division, "MOST_WHOLE_BLOCKS", 1)
    if not paired:
        monkeypatch.setattr(decode_division, "MOST_PAIR_ROWS", 0)
    draw = Draw(case)
    operands = draw.operands
    device = dataclasses.replace(H100, sm_count=multiprocessors)
    made = decode_plan.plan_decode(case.spec, shapes_of(operands), device)
    arrays = {name: np.asarray(x) for name, x in operands.present().items()}
    arrays["query"] = np.zeros_like(arrays["query"])
    statistics = emulator.run(made, arrays, seed_of(case), 3)["partial_statistics"]
    first_keys = np.zeros(case.B, int) if operands.left_padding is None else operands.left_padding
    keys = choose_tile(shapes_of(operands)).keys
    work = Work(
        *(x.tolist() for x in (draw.lengths, np.ones(case.B, int), first_keys)),
        *(case.K, case.N // case.K, keys),
        right=0,
        packed=False,
    )
    ctas = 2 * multiprocessors
    team = decode_division.team_size(case.K, ctas)
    expected = np.full((len(statistics), 2), np.nan)
    for _, part in parts(work, ctas, case.num_splits, LEAST_SHARE, team, paired):
        if part.sharers > 1:
            first, last = int(first_keys[part.batch]), int(draw.lengths[part.batch])
            start = first // keys
            seen = min(last, (start + part.end) * keys) - max(first, (start + part.begin) * keys)
            here = expected[part.partial]  # of a pair, both CTAs'
            most, before = (LEAST_FLOAT, 0) if np.isnan(here[0]) else here
            expected[part.partial] = (0, before + seen) if part.begin < part.end else (most, before)
            if case in (HALVES, QUARTERS):
                sharers = 4 if case == QUARTERS and not paired else 2
                assert (part.sharers, part.end - part.begin) == (sharers, 33)
    assert np.isfinite(expected).any()
    np.testing.assert_array_equal(statistics[:, 0, 0], expected)  # of the first row
