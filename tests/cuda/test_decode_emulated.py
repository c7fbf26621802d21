"""The kernels of attention on key-value caches, run on a CPU and compared with the definition."""

import dataclasses
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
from cache_case import DTYPES, CacheCase, Draw, check
from exhaustive import thinned, thorough
from seeds import seed_of

from jax_flash import _reference_cache
from jax_flash._cache_spec import CacheOperands
from jax_flash._device import H100
from jax_flash._spec import shapes_of
from jax_flash.cuda.sm90 import decode_division, decode_plan

# So few multiprocessors that CTAs have several tiles, and share them.
DEVICES = {count: dataclasses.replace(H100, sm_count=count) for count in (1, 2, 3, 7, 20, 132)}


def planned(case, operands, multiprocessors, most_whole_blocks=1):
    """A case's plan. CTAs may share tiles of more blocks than `most_whole_blocks`."""
    with mock.patch.object(decode_division, "MOST_WHOLE_BLOCKS", most_whole_blocks):
        return decode_plan.plan_decode(case.spec, shapes_of(operands), DEVICES[multiprocessors])


def run(case, emulator, multiprocessors, resident, operands=None, most_whole_blocks=1):
    """Runs a case's plan and compares `(out, lse, key, value)` with the definition."""
    operands = Draw(case).operands if operands is None else operands
    plan = planned(case, operands, multiprocessors, most_whole_blocks)
    arrays = {name: np.asarray(x) for name, x in operands.present().items()}
    results = emulator.run(plan, arrays, seed_of((case, multiprocessors, resident)), resident)
    key, value = (results.get(f"{name}_after", arrays.get(name)) for name in ("key", "value"))
    check(case, operands, (results["out"], results["lse"], key, value))
    return results


def traits(case: CacheCase) -> set:
    """What `make test` has at least once: every option, every way to load pages, and every width of head."""
    sizes = ("T", "S", "B", "N", "K", "U", "H", "V", "left", "page", "layers", "rotary", "num_splits")
    changed = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
    changed = {
        (name, name in sizes or x) for name, x in changed.items() if x != CacheCase.__dict__.get(name, None)
    }
    return changed | {("page", case.page), ("width", max(case.H, case.V or 0) > 192)}


CONTIGUOUS = (
    CacheCase(),
    CacheCase(T=5, right=0, S=500),
    CacheCase(T=3, U=2, right=0, left=40, rotary=32, rotary_interleaved=True, soft_cap=2.0),
    CacheCase(T=1, S=700, B=2, N=8, K=1, H=128, U=1, rotary=128, dtype="float16"),
    CacheCase(T=70, U=70, right=0, N=4, K=2, S=300),
    CacheCase(T=16, U=3, N=6, K=2, right=0, left=100, S=400, H=80, V=48),
    CacheCase(T=4, U=2, query_positions="first", rotary=16, alibi="BN", left_padding=True),
    CacheCase(T=4, U=6, query_positions="appended", rotary=16, right=0, batch_index=True, sinks=True),
    CacheCase(T=2, U=3, layers=3, B=2, H=40, V=24, alibi="1N", soft_cap=3.0),
    CacheCase(T=1, S=400, N=16, K=1, H=256, B=2, right=0),
    CacheCase(T=2, S=300, N=2, K=2, H=64, V=256, B=2, dtype="float16", U=1),
    CacheCase(T=9, U=2, B=2, right=0, S=12),  # more queries than keys
    CacheCase(T=40, packed=True, right=0, B=4, S=128, V=32, alibi="BN"),
    CacheCase(T=61, packed=True, right=0, left=70, B=5, S=300, N=8, K=1, sinks=True),
    CacheCase(S=600, full=True, U=3, H=16, N=7, K=1),
    CacheCase(S=600, B=2, N=2, K=1, num_splits=1),
    CacheCase(S=900, B=2, N=2, K=1, num_splits=2, U=1),
    CacheCase(S=900, B=2, N=2, K=1, num_splits=3, T=40, right=0, left=300),
    CacheCase(S=1, B=2, U=1),
    CacheCase(S=900, T=3, left=20, right=-7, B=3, U=3),
    CacheCase(S=1300, B=40, N=1, K=1, H=16),
    CacheCase(S=300, B=70, N=1, K=1, H=8, U=1),
    CacheCase(T=2, U=2, right=0, S=500, score_mod=True, rotary=32, N=6, batch_index=True),
    CacheCase(T=30, packed=True, right=0, B=4, S=300, score_mod=True, soft_cap=2.0, alibi="BN", sinks=True),
    CacheCase(T=5, U=5, S=500, B=4, score_mod=True, mask_mod=True, soft_cap=2.0, alibi="1N", sinks=True),
)


@pytest.mark.parametrize("case", thinned(CONTIGUOUS, traits), ids=str)
def test_contiguous_caches(case, emulator):
    for multiprocessors, resident in ((3, 2), (7, 7)):
        run(case, emulator, multiprocessors, resident)


PAGED = (
    CacheCase(page=16, U=1, rotary=64),
    CacheCase(page=1, U=2, B=2, S=160),
    CacheCase(page=3, T=5, U=4, S=300, right=0, left=90),
    CacheCase(page=8, T=33, packed=True, interleaved=True, right=0, left=30, soft_cap=3.0, B=5, S=96),
    CacheCase(page=17, T=2, S=340, H=128, V=64, N=6, K=2, U=1, dtype="float16"),
    CacheCase(page=64, T=1, S=640, H=256, N=8, K=1, B=2, U=1),
    CacheCase(page=128, T=2, S=512, layers=2, U=2, right=0, N=6, K=1),
    CacheCase(page=256, T=1, S=1024, U=1, H=128, N=4, K=1, sinks=True),
    CacheCase(page=192, T=4, S=384, U=4, B=2, N=2, rotary=64),
    CacheCase(page=40, T=1, S=400, H=72, V=24, U=1, N=2, K=2),
    CacheCase(page=32, S=160, shares_pages=True, left=50),
    CacheCase(page=16, T=40, packed=True, interleaved=True, right=0, B=4, S=128),
    CacheCase(page=16, T=40, packed=True, right=0, B=4, S=128, V=32, alibi="BN"),
    CacheCase(page=5, T=20, packed=True, interleaved=True, right=0, B=4, S=130, N=2, K=1, alibi="1N"),
    CacheCase(page=7, S=350, interleaved=True, U=3, T=3, right=0, rotary=16, layers=2, left_padding=True),
    CacheCase(page=16, S=600, B=2, N=2, K=1, num_splits=2, U=1, left_padding=True),
    CacheCase(page=96, S=960, B=2, N=4, K=2, T=2, right=0),
    CacheCase(page=16, S=800, B=2, U=1, H=128, score_mod=True, left_padding=True, left=300),
    CacheCase(page=24, S=480, B=3, T=2, U=2, right=0, mask_mod=True, layers=2),
)


@pytest.mark.parametrize("case", thinned(PAGED, traits), ids=str)
def test_paged_caches(case, emulator):
    for multiprocessors, resident in ((3, 2), (7, 7)):
        run(case, emulator, multiprocessors, resident)


@pytest.mark.parametrize(
    "case",
    (
        CacheCase(S=500, B=4, N=4, K=2, T=3, right=0, U=3),
        CacheCase(S=512, B=70, N=1, K=1, H=8, full=True),  # 4 blocks each
        CacheCase(page=16, S=480, N=6, K=2, H=16, T=5, packed=True, left=40, right=0),
    ),
    ids=str,
)
def test_short_tiles_are_whole(case, emulator, monkeypatch):
    """So that nobody combines parts."""
    monkeypatch.setattr(decode_division, "CLUSTER_SIZES", ())
    for multiprocessors, resident in ((2, 3), (20, 40)):
        assert "arrivals" not in run(case, emulator, multiprocessors, resident, most_whole_blocks=8)
        assert "arrivals" in run(case, emulator, multiprocessors, resident)


@pytest.mark.parametrize("sizes", ((16, 8, 4, 2), ()), ids=("by clusters", "through global memory"))
@pytest.mark.parametrize("options", ({"right": 0}, {"left": 9, "right": -9}), ids=str)
def test_new_keys_on_both_sides_of_a_boundary(options, sizes, emulator, monkeypatch):
    """Of blocks, and of parts of a tile, whose CTAs append them; and ahead of all blocks and behind."""
    monkeypatch.setattr(decode_division, "CLUSTER_SIZES", sizes)
    case = CacheCase(S=640, B=6, N=2, K=1, H=128, T=3, U=16, **options)
    draw = Draw(case)
    draw.lengths = np.array([0, 120, 248, 376, 630, 640], np.int32)
    for resident in (2, 20):
        run(case, emulator, 132 if sizes else 7, resident, draw.operands)


@pytest.mark.parametrize("page", (None, 16, 3))
def test_unused_memory_does_not_matter(page, emulator):
    """Keys behind left padding, and those to the left of all windows, may be NaN.

    So may be rows beyond the lengths, and pages that nobody has: they are in all draws.
    """
    case = CacheCase(T=3, U=3, S=480, B=3, right=0, left=60, left_padding=True, page=page)
    operands = Draw(case).operands
    clean = run(case, emulator, 3, 2, operands)
    places = _reference_cache.Cache(operands)
    for b, length in enumerate(np.clip(operands.lengths, 0, case.S)):
        first_seen = min(int(length) + case.U, case.S) - case.T - case.left
        hidden = max(first_seen, int(operands.left_padding[b]), 0)
        for position in range(min(hidden, int(length))):
            if (place := places.place(b, position)) is not None:
                operands.key[place] = operands.value[place] = np.nan
    plan = planned(case, operands, 3)
    arrays = {name: np.asarray(x) for name, x in operands.present().items()}
    poisoned = emulator.run(plan, arrays, seed_of(case), 3)
    for name in ("out", "lse"):
        np.testing.assert_array_equal(poisoned[name], clean[name])


@pytest.mark.parametrize("options", ({}, {"page": 16}, {"page": 3}, {"float8": True, "N": 2}), ids=str)
def test_a_window_that_hides_all_reads_nothing(options, emulator):
    """Its sides cross, so no row sees a key, though the last row's window ends behind the first's begin."""
    case = CacheCase(T=10, S=200, left=2, right=-5, full=True, **options)
    operands = Draw(case).operands
    operands.key[...] = operands.value[...] = np.nan
    plan = planned(case, operands, 3)
    arrays = {name: np.asarray(x) for name, x in operands.present().items()}
    results = emulator.run(plan, arrays, seed_of(case), 2)
    assert not results["out"].any() and np.isneginf(results["lse"]).all()


def run_idle_sequences(page, emulator, orders=8):
    case = CacheCase(page=page, S=96, B=40, N=2, K=1, H=16)
    operands = Draw(case).operands
    busy = np.arange(case.B) % 8 == 7
    operands = operands.replace(lengths=np.where(busy, operands.lengths, 0).astype(np.int32))
    for resident in range(1, 1 + orders):
        run(case, emulator, 2, resident, operands)


@pytest.mark.parametrize("page", (None, 16, 3))
def test_idle_sequences(page, emulator):
    """Most have no keys, so consumers give their tiles back at once."""
    run_idle_sequences(page, emulator)


def test_a_producer_that_does_not_come_together_is_found(tmp_path):
    """A late warp would wait forever. The emulator ends the process that finds such a deadlock."""
    sync = "if constexpr (Traits::query_by_tma) sync_producer();"
    program = f"""if True:
        import sys
        from pathlib import Path
        sys.path[:] = {sys.path!r}
        from kernel_emulator import KernelEmulator
        from test_decode_emulated import run_idle_sequences
        emulator = KernelEmulator(Path({str(tmp_path)!r}), edits={{("sm90/decode/load.cuh", {sync!r}): ""}})
        run_idle_sequences(3, emulator, 40)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "kernel emulator: deadlock" in done.stderr, done.stderr


@pytest.mark.parametrize("page", (None, 16, 3))
@pytest.mark.parametrize("layer", (-1, 2, -(2**31), 2**31 - 1))
def test_a_layer_that_is_not_there(page, layer, emulator):
    case = CacheCase(T=2, U=2, S=144, layers=2, page=page)
    operands = Draw(case).operands.replace(layer=np.int32(layer))
    results = run(case, emulator, 2, 2, operands)
    assert not results["out"].any() and np.isneginf(results["lse"]).all()


def test_alibi_where_floats_do_not_count_keys(emulator):
    """Positions beyond 2^24 have no float32 of their own. Distances from a query are small, and exact."""
    case = CacheCase(T=1, S=2**24 + 256, B=1, N=2, K=1, H=16, page=256, left=60, right=0, alibi="1N")
    length, random = 2**24 + 101, np.random.default_rng(seed_of(case))
    shape = (2, case.page, case.K, case.H)
    query, key, value = (
        random.normal(size=shape).astype(DTYPES[case.dtype]) for shape in ((1, 1, 2, 16), shape, shape)
    )
    slopes = np.array([[0.5, 0.3]], np.float32)
    table = np.full((1, case.S // case.page), -1, np.int32)
    table[0, -2:] = 1, 0  # no other page is visited
    operands = CacheOperands(
        query, key, value, np.array([length], np.int32), page_table=table, alibi_slopes=slopes
    )
    plan = decode_plan.plan_decode(case.spec, shapes_of(operands), DEVICES[1])
    arrays = {name: np.asarray(x) for name, x in operands.present().items()}
    results = emulator.run(plan, arrays, seed_of(case), 2)
    distance = np.arange(case.left, -1, -1)
    rows = (length - 1 - distance) % case.page
    query, key, value = (x.astype(np.float64) for x in (query[0, 0], key[0, rows, 0], value[0, rows, 0]))
    logits = case.spec.attention.scale * query @ key.T - slopes.T * distance
    lse = np.log(np.exp(logits).sum(1))
    np.testing.assert_allclose(results["lse"][0, :, 0], lse, rtol=1e-5)
    out = np.exp(logits - lse[:, None]) @ value
    np.testing.assert_allclose(results["out"][0, 0].astype(np.float64), out, atol=2**-8 * np.abs(value).max())


def test_nan_of_a_key_reaches_its_queries(emulator):
    """A key that isn't finite makes the rows NaN that see it, and no others."""
    case = CacheCase(T=2, S=300, B=2, right=0, N=2, K=1, full=True)
    operands = Draw(case).operands
    operands.key[0, -1] = np.nan
    plan = planned(case, operands, 3)
    arrays = {name: np.asarray(x) for name, x in operands.present().items()}
    results = emulator.run(plan, arrays, seed_of(case), 3)
    is_nan = np.isnan(results["out"].astype(np.float32)).any((2, 3))
    np.testing.assert_array_equal(is_nan, [[False, True], [False, False]])
    np.testing.assert_array_equal(np.isnan(results["lse"]).any(1), is_nan)


def test_positions_that_tables_lack(emulator):
    """What is rotated there becomes NaN."""
    case = CacheCase(T=2, U=2, S=100, B=2, rotary=32, right=0)
    operands = Draw(case).operands
    operands.lengths[:] = 50, 97
    for x in (operands.key, operands.value):
        x[np.isnan(x)] = 1
    few = {name: getattr(operands, name)[:98] for name in ("rotary_cos", "rotary_sin")}
    operands = operands.replace(**few)
    plan = decode_plan.plan_decode(case.spec, shapes_of(operands), DEVICES[2])
    arrays = {name: np.asarray(x) for name, x in operands.present().items()}
    results = emulator.run(plan, arrays, seed_of(case), 2)
    is_nan = np.isnan(results["key_after"].astype(np.float32))
    assert is_nan[1, 98, :, :32].all() and not is_nan[1, 98, :, 32:].any() and not is_nan[1, 97].any()
    np.testing.assert_array_equal(
        np.isnan(results["out"].astype(np.float32)).any((2, 3)), [[False, False], [False, True]]
    )


def test_results_do_not_depend_on_who_comes_last(emulator):
    case = CacheCase(S=2600, B=1, N=2, K=1, H=16, full=True)
    operands = Draw(case).operands
    plan = decode_plan.plan_decode(case.spec, shapes_of(operands), DEVICES[20])
    arrays = {name: np.asarray(x) for name, x in operands.present().items()}
    first, *others = (
        emulator.run(plan, arrays, seed, resident) for seed, resident in ((1, 1), (2, 7), (3, 20))
    )
    for name in ("out", "lse"):
        for other in others:
            np.testing.assert_array_equal(first[name], other[name])


def drawn(index: int) -> CacheCase:
    """A case with options at random."""
    random = np.random.default_rng(seed_of(f"drawn {index}"))

    def one_of(*values):
        return values[random.integers(len(values))]

    page = one_of(None, None, 1, 3, 8, 16, 24, 64, 128, 256)
    group, key_heads = one_of(1, 2, 3, 5, 8, 16), one_of(1, 1, 2)
    packed = bool(random.integers(4) == 0)
    capacity = page * int(random.integers(1, max(600 // page, 3))) if page else int(random.integers(1, 700))
    rotary = one_of(None, 16, "all", 8)
    head_dim = one_of(8, 16, 64, 64, 72, 128, 256)
    positions = one_of("own", "own", "appended", "first")
    # Queries before the first key are rotated by NaN, and must see nothing.
    right = 0 if rotary and positions == "own" else one_of(None, 0, 0, 5, -2)
    interleaved = page is not None and bool(random.integers(2))
    appended = 0 if packed else one_of(0, 0, 1, 4, 20)
    return CacheCase(
        T=one_of(1, 1, 2, 7, 30, 70),
        S=capacity,
        U=appended,
        B=one_of(1, 2, 5),
        N=group * key_heads,
        K=key_heads,
        H=head_dim,
        V=None if interleaved else one_of(None, None, 24, 256),
        dtype=one_of("bfloat16", "float16"),
        page=page,
        interleaved=interleaved,
        layers=one_of(None, None, 2),
        batch_index=page is None and bool(random.integers(3) == 0),
        left_padding=bool(random.integers(3) == 0),
        rotary=head_dim if rotary == "all" else rotary and min(rotary, head_dim),
        rotary_interleaved=bool(random.integers(2)),
        query_positions=positions,
        left=one_of(None, None, 0, 30, 200),
        right=right,
        soft_cap=one_of(None, None, 2.0),
        alibi=one_of(None, None, "1N", "BN"),
        sinks=bool(random.integers(3) == 0),
        packed=packed,
        num_splits=one_of(None, None, None, 1, 2, 3),
    )


@pytest.mark.parametrize("index", [*range(2), *thorough(*range(2, 60))])
def test_drawn_cases(index, emulator):
    random = np.random.default_rng(seed_of(f"devices {index}"))
    run(drawn(index), emulator, int(random.choice([1, 2, 3, 7, 20])), int(random.choice([1, 2, 7])))
