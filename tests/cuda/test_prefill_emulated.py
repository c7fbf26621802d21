"""The forward kernel on key-value caches, run on a CPU and compared with the definition."""

import dataclasses

import numpy as np
import pytest
from cache_case import CacheCase, Draw, check
from exhaustive import thinned, thorough
from seeds import seed_of

from jax_flash._device import H100
from jax_flash._spec import shapes_of
from jax_flash.cuda import decoding
from jax_flash.cuda.sm90 import prefill_plan

# So few multiprocessors that CTAs have several tiles.
DEVICES = {count: dataclasses.replace(H100, sm_count=count) for count in (1, 2, 3, 7)}


def results_of(case, operands, emulator, multiprocessors, resident):
    spec = case.spec
    if spec.attention.score_mod is not None:
        keys = prefill_plan.keys_of_block(spec, shapes_of(operands))
        spec, operands = decoding.from_positions(spec, operands, keys)
    plan = prefill_plan.plan_prefill(spec, shapes_of(operands), DEVICES[multiprocessors])
    arrays = {name: np.asarray(x) for name, x in operands.present().items()}
    results = emulator.run(plan, arrays, seed_of((case, multiprocessors, resident)), resident)
    for name in ("key", "value"):
        results.setdefault(f"{name}_after", arrays.get(name))
    return results


def run(case, emulator, multiprocessors, resident, operands=None):
    """Runs a case by the forward kernel, and compares `(out, lse, key, value)` with the definition."""
    operands = Draw(case).operands if operands is None else operands
    results = results_of(case, operands, emulator, multiprocessors, resident)
    check(case, operands, tuple(results[name] for name in ("out", "lse", "key_after", "value_after")))
    return results


def traits(case: CacheCase) -> set:
    """What `make test` has at least once: every option, and every width of head."""
    sizes = ("T", "S", "B", "N", "K", "U", "left", "layers", "rotary", "num_splits")
    changed = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
    changed = {
        (name, name in sizes or x) for name, x in changed.items() if x != CacheCase.__dict__.get(name, None)
    }
    return changed | {("width", max(case.H, case.V or 0) > 192)}


CASES = (
    CacheCase(T=150, S=400),
    CacheCase(T=130, U=130, right=0, N=4, K=1, S=500),
    CacheCase(T=200, U=200, right=0, N=7, K=1, S=333, H=128, rotary=128),
    CacheCase(T=70, U=70, right=0, N=2, K=2, S=300, H=256, dtype="float16"),
    CacheCase(T=100, U=40, right=0, left=90, S=400, H=72, V=48, alibi="1N", soft_cap=3.0),
    CacheCase(T=140, U=140, right=0, S=450, H=128, layers=3, batch_index=True, sinks=True),
    CacheCase(T=90, U=90, right=0, S=400, left_padding=True, alibi="BN", rotary=32, rotary_interleaved=True),
    CacheCase(T=130, right=0, S=300, H=64, V=256, B=2, N=2, K=1, left=50, left_padding=True),
    CacheCase(
        T=300, U=300, right=0, S=200, N=2, K=1
    ),  # more queries than keys, and more keys than there is room
    CacheCase(T=130, U=130, right=0, S=130, B=2, N=14, K=2, H=128, dtype="float16"),
    CacheCase(T=80, U=20, S=300, query_positions="first", rotary=16),
    CacheCase(T=80, U=100, S=500, query_positions="appended", rotary=64, right=0, left=200, sinks=True),
    CacheCase(T=129, S=500, left=20, right=-7, U=3, N=2, K=1),
    CacheCase(T=65, U=65, S=600, right=5, H=192, N=2, K=1, soft_cap=2.0, full=True),
    CacheCase(T=9, U=9, right=0, S=300, N=8, K=1, H=128, B=5),  # whose heads share a tile
    CacheCase(T=6, S=200, N=16, K=2, left=40, right=0, left_padding=True, num_splits=2),
    CacheCase(T=200, U=200, right=0, S=4000, N=1, K=1, H=16, B=2),
    CacheCase(T=1, S=1, B=2, U=1),
    CacheCase(T=130, U=130, right=0, S=300, score_mod=True, rotary=32, layers=2, batch_index=True),
    CacheCase(T=1, U=1, right=0, N=6, K=2, S=200, H=128, score_mod=True, left=150, left_padding=True),
    CacheCase(T=3, S=150, score_mod=True, soft_cap=2.0, alibi="BN", sinks=True, dtype="float16"),
    CacheCase(T=130, U=130, right=0, S=300, mask_mod=True, alibi="1N", left_padding=True),
    CacheCase(T=70, U=70, S=200, score_mod=True, mask_mod=True, soft_cap=2.0, sinks=True, layers=2),
    CacheCase(T=150, U=150, right=0, S=400, page=16, N=4, K=1, H=128),
    CacheCase(T=130, S=700, page=8, shares_pages=True, H=64),
    CacheCase(T=200, U=200, right=0, S=600, page=64, B=2, N=2, K=2, H=72, V=48, layers=3, dtype="float16"),
    CacheCase(T=130, U=30, right=0, left=150, S=900, page=24, H=96, left_padding=True, soft_cap=3.0),
    CacheCase(T=90, U=90, right=0, S=800, page=256, H=256, N=2, K=1, rotary=64, sinks=True),
    CacheCase(T=100, U=100, right=0, S=500, page=32, interleaved=True, H=64, V=64, alibi="1N"),
    CacheCase(T=129, S=500, page=16, left=20, right=-7, U=3, N=2, K=1, H=192),
    CacheCase(T=100, U=100, right=0, S=500, page=16, score_mod=True, H=128, left=300, layers=2),
    CacheCase(T=65, U=65, S=300, page=512, mask_mod=True, left_padding=True),
    CacheCase(T=600, B=5, S=400, packed=True, page=16, interleaved=True, right=0, N=8, K=2, H=128),
    CacheCase(T=500, B=40, S=300, packed=True, right=0, N=2, K=1, H=64, sinks=True, left=100),
    CacheCase(T=700, B=3, S=500, packed=True, page=64, layers=2, N=6, K=2, H=72, alibi="1N", dtype="float16"),
    CacheCase(T=300, B=2, S=200, packed=True, page=8, right=0, N=4, K=1, H=256, left_padding=True),
    CacheCase(T=90, B=1, S=300, packed=True, page=16, right=0, N=7, K=1, H=64, soft_cap=3.0),
    CacheCase(T=400, B=4, S=300, packed=True, batch_index=True, right=0, N=16, K=1, H=64),
)


@pytest.mark.parametrize("case", thinned(CASES, traits), ids=str)
def test_equals_the_definition(case, emulator):
    for multiprocessors, resident in ((3, 2), (7, 7)):
        run(case, emulator, multiprocessors, resident)


@pytest.mark.parametrize("length", (0, 1, 63, 127, 128, 129, 255, 256, 300))
def test_lengths(length, emulator):
    """Blocks end where a sequence does, wherever that is."""
    case = CacheCase(T=130, U=20, right=0, S=320, B=2, N=2, K=1, H=128)
    operands = Draw(case).operands
    operands.lengths[:] = length, 320 - length
    for x in (operands.key, operands.value):
        x[np.isnan(x)] = 1
        x[0, length:] = x[1, 320 - length :] = np.nan
    run(case, emulator, 3, 2, operands)


@pytest.mark.parametrize("length", [15, 128, 200, *thorough(1, 16, 256, 319)])
def test_lengths_in_pages(length, emulator):
    """Blocks begin where pages do. What lies behind the sequence on its last page may be NaN."""
    case = CacheCase(T=130, right=0, S=320, page=16, B=2, N=2, K=1, H=128, shares_pages=True)
    operands = Draw(case).operands
    table = np.random.default_rng(seed_of(length)).permutation(20)
    operands.lengths[:] = length, length // 2  # the second one is a prefix of the first
    operands.page_table[:] = np.where(np.arange(20) < -(-length // 16), table, -7)
    for x in (operands.key, operands.value):
        x[:] = np.nan
        keys = np.random.default_rng(seed_of((length, x is operands.key))).normal(size=(length, *x.shape[2:]))
        for key, row in enumerate(keys):
            x[table[key // 16], key % 16] = row
    run(case, emulator, 3, 2, operands)


@pytest.mark.parametrize(
    "queries",
    (
        (64,) * 8,  # all by the forward kernel, in slots that are partly empty
        (63,) * 8,  # all by the decode kernel
        (0, 200, 1, 63, 64, 0, 129, 55),
        (512, 0, 0, 0, 0, 0, 0, 0),
        (1, 0, 300, 0, 0, 211, 0, 0),
    ),
    ids=lambda queries: "-".join(map(str, queries)),
)
@pytest.mark.parametrize("group", [4, *thorough(1)])
def test_packed_queries(queries, group, emulator):
    """Each sequence is one kernel's, however many queries it has."""
    case = CacheCase(T=515, B=8, S=160, packed=True, page=16, right=0, N=group, K=1, H=64)
    operands = Draw(case).operands
    operands.query_offsets[:] = 2 + np.cumsum((0, *queries))
    run(case, emulator, 3, 2, operands)


@pytest.mark.parametrize("right", (None, 0))
def test_missing_pages(right, emulator):
    """Keys on pages that the cache lacks are hidden from all rows, wherever they are."""
    case = CacheCase(T=130, right=right, S=640, page=16, B=3, N=2, K=1, H=64, shares_pages=True, full=True)
    operands = Draw(case).operands
    pages = len(operands.key)
    operands.page_table[0] = np.arange(40) % pages
    operands.page_table[0, [0, 7, 8, 21, 39]] = -1, pages, 2**31 - 1, -(2**31), pages
    operands.page_table[1] = -1
    operands.page_table[2] = np.arange(40) % pages
    for x in (operands.key, operands.value):
        x[np.isnan(x)] = 1
    results = run(case, emulator, 3, 2, operands)
    assert np.isfinite(results["lse"][[0, 2]]).all()
    assert not results["out"][1].any() and np.isneginf(results["lse"][1]).all()


def place_of(operands, sequence, key):
    """Where a key is in the cache."""
    if operands.page_table is None:
        return sequence, key
    page = operands.key.shape[1]
    return operands.page_table[sequence, key // page], key % page


@pytest.mark.parametrize("page", (None, 16))
def test_nan_of_a_value_reaches_its_queries_of_packed_sequences(page, emulator):
    """It makes tiles be computed again, whose queries and keys are found by their slots."""
    case = CacheCase(T=300, S=320, B=3, right=0, N=2, K=1, packed=True, full=True, page=page)
    operands = Draw(case).operands
    operands.query_offsets[:] = 3, 93, 95, 295
    for x in (operands.key, operands.value):
        x[np.isnan(x)] = 1
    operands.value[place_of(operands, 0, 300)] = np.nan
    operands.value[place_of(operands, 2, 310)] = np.inf
    results = results_of(case, operands, emulator, 2, 2)
    spoiled = ~np.isfinite(results["out"].astype(np.float32)).all((2, 3))[0]
    query = np.arange(300)
    # Of 320 keys, the last query of a sequence sees all, and the one before it all but the last.
    expected = ((query >= 93 - 20) & (query < 93)) | ((query >= 295 - 10) & (query < 295))
    np.testing.assert_array_equal(spoiled, expected)


def spoil_hidden_keys(case, operands):
    """Makes NaN what lies to the left of all queries' windows, and behind left padding."""
    spoiled = 0
    for b, length in enumerate(np.clip(operands.lengths, 0, case.S)):
        hidden = min(int(length) + case.U, case.S) - case.T - case.left
        if operands.left_padding is not None:
            hidden = max(hidden, int(operands.left_padding[b]))
        hidden = min(max(hidden, 0), int(length))
        operands.key[b, :hidden] = operands.value[b, :hidden] = np.nan
        spoiled += hidden
    assert spoiled > 0


@pytest.mark.parametrize("is_padded", (False, True))
@pytest.mark.parametrize("size", [(60, 64), *thorough((200, 128), (60, 256), (0, 40))])
def test_unused_memory_does_not_matter(size, is_padded, emulator):
    """Keys behind left padding, and those to the left of all windows, may be NaN."""
    left, head_dim = size
    case = CacheCase(130, 480, 130, 3, 2, 1, head_dim, left=left, right=0, left_padding=is_padded)
    operands = Draw(case).operands
    clean = run(case, emulator, 3, 2, operands)
    spoil_hidden_keys(case, operands)
    poisoned = results_of(case, operands, emulator, 3, 2)
    for name in ("out", "lse"):
        np.testing.assert_array_equal(poisoned[name], clean[name])


@pytest.mark.parametrize("page", (None, 16))
@pytest.mark.parametrize("layer", (-1, 2))
def test_a_layer_that_is_not_there(layer, page, emulator):
    case = CacheCase(T=70, U=2, S=144, layers=2, page=page)
    operands = Draw(case).operands.replace(layer=np.int32(layer))
    results = run(case, emulator, 2, 2, operands)
    assert not results["out"].any() and np.isneginf(results["lse"]).all()


@pytest.mark.parametrize("page", (None, 16))
def test_nan_of_a_key_reaches_its_queries(page, emulator):
    """A key that isn't finite makes the rows NaN that see it, and no others."""
    case = CacheCase(T=70, S=300, B=2, right=0, N=2, K=1, full=True, page=page)
    operands = Draw(case).operands
    operands.key[place_of(operands, 0, 295)] = np.nan
    results = results_of(case, operands, emulator, 3, 3)
    is_nan = np.isnan(results["out"].astype(np.float32)).any((2, 3))
    np.testing.assert_array_equal(is_nan[0], np.arange(70) >= 65)
    assert not is_nan[1].any()
    np.testing.assert_array_equal(np.isnan(results["lse"]).any(1), is_nan)


def drawn_packed(index: int) -> CacheCase:
    """A case of packed queries, with options at random."""
    random = np.random.default_rng(seed_of(f"drawn packed prefill {index}"))

    def one_of(*values):
        return values[random.integers(len(values))]

    group, key_heads = one_of(1, 2, 4, 7, 8), one_of(1, 1, 2)
    page = one_of(None, 8, 16, 16, 64)
    return CacheCase(
        T=one_of(100, 300, 500, 700),
        S=int(random.integers(130, 500)),
        B=one_of(1, 3, 6, 40),
        N=group * key_heads,
        K=key_heads,
        H=one_of(8, 64, 64, 72, 128, 128, 256),
        dtype=one_of("bfloat16", "float16"),
        packed=True,
        page=page,
        interleaved=page is not None and bool(random.integers(2)),
        layers=one_of(None, None, 2),
        left_padding=bool(random.integers(3) == 0),
        left=one_of(None, None, 0, 30, 200),
        right=one_of(None, 0, 0, 5, -2),
        soft_cap=one_of(None, None, 2.0),
        alibi=one_of(None, None, "1N"),
        sinks=bool(random.integers(3) == 0),
    )


def drawn(index: int) -> CacheCase:
    """A case with options at random."""
    random = np.random.default_rng(seed_of(f"drawn prefill {index}"))

    def one_of(*values):
        return values[random.integers(len(values))]

    group, key_heads = one_of(1, 2, 4, 7, 8), one_of(1, 1, 2)
    rotary = one_of(None, None, 16, "all", 8)
    head_dim = one_of(8, 64, 64, 72, 96, 128, 128, 256)
    positions = one_of("own", "own", "appended", "first")
    queries = one_of(64, 70, 128, 150, 200)
    page = one_of(None, 8, 16, 24, 64, 256)
    # Queries before the first key are rotated by NaN, and must see nothing.
    right = 0 if rotary and positions == "own" else one_of(None, 0, 0, 5, -2)
    return CacheCase(
        T=queries,
        S=int(random.integers(130, 700)),
        U=one_of(0, queries, queries, 20, 250),
        B=one_of(1, 2, 3),
        N=group * key_heads,
        K=key_heads,
        H=head_dim,
        V=one_of(None, None, None, 24, 256),
        dtype=one_of("bfloat16", "float16"),
        layers=one_of(None, None, 2),
        page=page,
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
    )


@pytest.mark.parametrize("index", [*range(2), *thorough(*range(2, 40))])
def test_drawn_cases(index, emulator):
    random = np.random.default_rng(seed_of(f"prefill devices {index}"))
    run(drawn(index), emulator, int(random.choice([1, 2, 3, 7])), int(random.choice([1, 2, 7])))


@pytest.mark.parametrize("index", [*range(2), *thorough(*range(2, 40))])
def test_drawn_cases_of_packed_queries(index, emulator):
    random = np.random.default_rng(seed_of(f"packed prefill devices {index}"))
    run(drawn_packed(index), emulator, int(random.choice([1, 2, 3, 7])), int(random.choice([1, 2, 7])))
