"""Attention on key-value caches by kernels on the GPU, against the definition.

Rows of the cache that no sequence has are NaN in all cases, and so is memory that nothing wrote yet.
"""

import dataclasses
import functools
import importlib.util
import itertools
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits import bits
from cache_case import CacheCase, Draw, as_jax, check
from gpu_memory import poison

import jax_flash
from jax_flash import _device, _dispatch, _reference_cache
from jax_flash._spec import shapes_of
from jax_flash.cuda.sm90 import decode_division, prefill_plan
from jax_flash.transforms import decoding

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

IMPLEMENTATIONS = ("cuda", "pallas")
DTYPES = ("bfloat16", "float16")
TESTS = Path(__file__).parents[1]
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def module_of(pattern: str):
    """The test module of another folder, by its path. It may import its neighbours."""
    (path,) = TESTS.glob(pattern)
    spec = importlib.util.spec_from_file_location(f"cases_of_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [*sys.path, str(path.parent)]):
        spec.loader.exec_module(module)
    return module


EMULATED = module_of("cuda/test_decode_emulated.py")
EMULATED_SHARED = module_of("cuda/test_decode_shared_tiles.py")
EMULATED_PREFILL = module_of("cuda/test_prefill_emulated.py")
EMULATED_CLUSTERS = module_of("cuda/test_decode_clusters.py")
CASES = dict.fromkeys(  # without those that both files have
    dataclasses.replace(case, dtype=dtype)
    for case in (
        *EMULATED.CONTIGUOUS,
        *EMULATED.PAGED,
        *EMULATED_SHARED.SHARED,
        *module_of("cuda/test_decode_float8.py").CASES,
        *module_of("xla/test_*decoding.py").CASES,
    )
    for dtype in DTYPES
)
DRAWN = [EMULATED.drawn(index) for index in range(60)]

PAGES = (1, 3, 16, 24, 40, 64, 96, 128, 192, 256)  # loaded row by row, page by page, and in blocks
LARGE = {
    "one sequence": CacheCase(B=1, S=8192, N=8, K=1, H=128, U=1, full=True),
    "one sequence of odd length": CacheCase(B=1, S=8191, N=32, K=8, H=128, U=2, T=2, right=0, full=True),
    "two sequences": CacheCase(B=2, S=8192, N=8, K=8, H=64, U=1, rotary=64),
    "16 sequences": CacheCase(B=16, S=4096, N=16, K=2, H=128, U=1, rotary=128),
    "64 sequences": CacheCase(B=64, S=1024, N=8, K=2, H=64, U=1),
    "full": CacheCase(B=32, S=2000, N=8, K=1, H=64, full=True),
    "wide heads": CacheCase(B=4, S=4000, N=16, K=2, H=256, U=1),
    "wide values": CacheCase(B=4, S=4000, N=16, K=2, H=64, V=256, U=1),
    "speculative": CacheCase(B=8, S=4096, N=32, K=8, H=128, T=8, U=8, right=0, rotary=128),
    "speculative, in pairs": CacheCase(B=8, S=4096, N=32, K=8, H=128, T=8, U=8, right=0, full=True),
    "window": CacheCase(B=8, S=8192, N=8, K=2, H=128, U=1, left=1000, right=0),
    "8 bits": CacheCase(B=8, S=8192, N=32, K=8, H=128, U=1, rotary=128, float8=True, descales=True),
    "8 bits in pages": CacheCase(B=12, S=4096, N=8, K=1, H=64, U=1, page=16, float8=True, descales=True),
    "8 bits, many queries": CacheCase(
        B=2, S=3000, N=8, K=2, H=128, T=300, U=300, right=0, float8=True, descales=True
    ),
    "chunk of a prompt": CacheCase(B=2, S=3000, N=8, K=2, H=128, T=300, U=300, right=0, rotary=64),
    "prompts and steps": CacheCase(B=12, S=1024, N=8, K=2, H=128, T=300, page=16, packed=True, right=0),
    "interleaved": CacheCase(
        B=5, S=2048, N=8, K=2, H=128, T=200, page=64, packed=True, interleaved=True, right=0
    ),
    **{
        f"pages of {page}": CacheCase(B=12, S=4096 // page * page, N=8, K=2, H=128, U=1, page=page)
        for page in PAGES
    },
}
# Chunks of prompts, which the forward kernel takes.
CHUNKS = {
    "usual": CacheCase(B=4, S=3000, N=8, K=2, H=128, T=512, U=512, right=0, rotary=128),
    "one sequence": CacheCase(B=1, S=4100, N=32, K=8, H=128, T=512, U=512, right=0, full=True),
    "layers": CacheCase(B=3, S=2000, N=16, K=2, H=128, T=520, U=520, right=0, layers=2, batch_index=True),
    "narrow heads": CacheCase(B=5, S=2000, N=14, K=2, H=64, T=400, U=400, right=0, rotary=64, sinks=True),
    "wide heads": CacheCase(B=5, S=2000, N=8, K=1, H=256, T=300, U=300, right=0, soft_cap=3.0),
    "odd heads": CacheCase(B=5, S=1999, N=7, K=1, H=72, T=301, U=301, right=0, alibi="BN"),
    "wide values": CacheCase(B=5, S=2000, N=8, K=4, H=64, V=256, T=300, U=7, right=0),
    "window": CacheCase(B=4, S=3000, N=8, K=2, H=128, T=512, U=512, right=0, left=700, rotary=128),
    "window and left padding": CacheCase(
        B=4, S=2500, N=8, K=2, H=128, T=512, U=512, right=0, left=333, left_padding=True
    ),
    "no mask": CacheCase(B=4, S=2500, N=8, K=2, H=128, T=512),
    "many short sequences": CacheCase(B=64, S=300, N=8, K=2, H=64, T=70, U=70, right=0),
    "pages of 16": CacheCase(B=4, S=3008, N=8, K=2, H=128, T=512, U=512, right=0, rotary=128, page=16),
    "pages of 8, layers": CacheCase(
        B=3, S=2000, N=16, K=2, H=128, T=520, U=520, right=0, layers=2, page=8, soft_cap=3.0
    ),
    "pages of 24 and a window": CacheCase(
        B=5, S=2400, N=14, K=2, H=64, T=400, U=400, right=0, left=333, page=24, left_padding=True, sinks=True
    ),
    "pages of 64, one sequence": CacheCase(
        B=1, S=4096, N=32, K=8, H=128, T=512, U=512, right=0, full=True, page=64
    ),
    "pages of 256": CacheCase(B=5, S=2048, N=8, K=1, H=256, T=300, U=300, right=0, page=256, alibi="1N"),
    "shared pages": CacheCase(
        B=6, S=2000, N=8, K=2, H=192, V=128, T=300, right=0, page=16, shares_pages=True
    ),
    "pages of both": CacheCase(B=9, S=2048, N=8, K=2, H=64, T=200, U=200, page=32, interleaved=True, right=0),
    "packed": CacheCase(B=12, S=2048, N=8, K=2, H=128, T=2000, page=16, packed=True, right=0),
    "packed, pages of both": CacheCase(
        B=64, S=1024, N=8, K=1, H=64, T=2000, page=64, packed=True, interleaved=True, right=0, left=300
    ),
    "packed, without pages": CacheCase(
        B=5, S=2000, N=16, K=2, H=256, T=1100, packed=True, right=0, layers=2, batch_index=True, sinks=True
    ),
    "packed, few heads": CacheCase(B=2, S=3000, N=7, K=1, H=128, T=3000, page=8, packed=True, alibi="1N"),
}
LONG_AND_SHORT = {
    "contiguous": CacheCase(B=64, S=8192, N=4, K=1, H=64, U=1),
    "pages of 16": CacheCase(B=64, S=8192, N=4, K=1, H=64, U=1, page=16),
    "pages of 256, 4 queries": CacheCase(B=64, S=8192, N=4, K=1, H=64, U=4, T=4, right=0, page=256),
    "one split": CacheCase(B=32, S=8192, N=8, K=2, H=64, num_splits=1),
    "layers": CacheCase(B=33, S=4096, N=4, K=1, H=64, U=1, layers=2),
}


def program(implementation, case, operands):
    """A jitted call, on its arrays."""
    refusal = _dispatch.reason(implementation, case.spec, shapes_of(operands), _device.current())
    assert refusal is None
    forward = jax.jit(functools.partial(decoding.attend, case.spec, (implementation,)))
    arrays = as_jax(operands)
    written = 2 * (operands.query.nbytes + operands.key.nbytes)

    def run():
        poison(written)
        return jax.tree.map(np.asarray, forward(arrays))

    return run


def run(implementation, case, operands=None):
    """Runs a case, and compares `(out, lse, key, value)` with the definition."""
    operands = Draw(case).operands if operands is None else operands
    results = program(implementation, case, operands)()
    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # it compiles the definition sooner
        check(case, operands, results)
    return results


@implementations
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_definition(case, implementation):
    run(implementation, case)


@implementations
@pytest.mark.parametrize("case", DRAWN, ids=[f"drawn {index}" for index in range(len(DRAWN))])
def test_drawn_cases(case, implementation):
    run(implementation, case)


@implementations
@pytest.mark.parametrize("name,dtype", list(zip(LARGE, itertools.cycle(DTYPES), strict=False)))
def test_large_caches(name, dtype, implementation):
    run(implementation, dataclasses.replace(LARGE[name], dtype=dtype))


@implementations
@pytest.mark.parametrize("name,dtype", list(zip(CHUNKS, itertools.cycle(DTYPES), strict=False)))
def test_chunks_of_prompts(name, dtype, implementation):
    case = dataclasses.replace(CHUNKS[name], dtype=dtype)
    operands = Draw(case).operands
    assert prefill_plan.suits(case.spec, shapes_of(operands), _device.current())
    run(implementation, case, operands)


@pytest.fixture
def by_the_forward_kernel(monkeypatch):
    """It runs all calls that it can, however few queries they have."""
    monkeypatch.setattr(
        prefill_plan, "suits", lambda spec, shapes, device: prefill_plan.can_run(spec, shapes)
    )
    jax.clear_caches()  # of what was traced with other plans
    yield
    jax.clear_caches()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", (*EMULATED_PREFILL.CASES, *EMULATED.CONTIGUOUS, *EMULATED.PAGED), ids=str)
def test_forward_kernel_on_caches(case, dtype, by_the_forward_kernel):
    run("cuda", dataclasses.replace(case, dtype=dtype))


@pytest.mark.parametrize("draw", (EMULATED_PREFILL.drawn, EMULATED_PREFILL.drawn_packed))
@pytest.mark.parametrize("index", range(40))
def test_drawn_cases_by_the_forward_kernel(draw, index, by_the_forward_kernel):
    run("cuda", draw(index))


@pytest.fixture
def through_global_memory(monkeypatch):
    """CTAs share tiles of any size, and the last one combines what they leave."""
    monkeypatch.setattr(decode_division, "CLUSTER_SIZES", ())
    monkeypatch.setattr(decode_division, "MOST_WHOLE_BLOCKS", 1)
    jax.clear_caches()  # of what was traced with other plans
    yield
    jax.clear_caches()


@pytest.mark.parametrize("index", range(40))
def test_drawn_cases_whose_tiles_are_shared(index, through_global_memory):
    run("cuda", EMULATED.drawn(index))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", (*EMULATED_CLUSTERS.CASES, LARGE["one sequence"]), ids=str)
def test_clusters_that_share_tiles(case, dtype):
    run("cuda", dataclasses.replace(case, dtype=dtype))


@pytest.mark.parametrize("layer", (-1, 2))
def test_a_chunk_and_a_layer_that_is_not_there(layer, by_the_forward_kernel):
    case = CacheCase(T=70, U=2, S=144, layers=2)
    out, lse, *_ = run("cuda", case, Draw(case).operands.replace(layer=np.int32(layer)))
    assert not out.any() and np.isneginf(lse).all()


@pytest.mark.parametrize("left", (60, 200))
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_hidden_keys_do_not_matter_to_chunks(head_dim, left, by_the_forward_kernel):
    case = CacheCase(130, 480, 130, 3, 2, 1, head_dim, left=left, right=0, left_padding=True)
    operands = Draw(case).operands
    clean = run("cuda", case, operands)
    EMULATED_PREFILL.spoil_hidden_keys(case, operands)
    poisoned = program("cuda", case, operands)()
    for x, y in zip(clean[:2], poisoned[:2], strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))


def long_and_short(case) -> Draw:
    """One sequence fills the cache but for what is appended, all others have few keys."""
    draw = Draw(case)
    draw.lengths = draw.random.integers(0, 130, case.B).astype(np.int32)
    draw.lengths[case.B // 3] = case.S - case.U
    return draw


@implementations
@pytest.mark.parametrize("name", LONG_AND_SHORT)
def test_a_long_sequence_beside_many_short_ones(name, implementation):
    case = LONG_AND_SHORT[name]
    run(implementation, case, long_and_short(case).operands)


@implementations
@pytest.mark.parametrize("num_splits", (1, None))
@pytest.mark.parametrize(
    "case",
    [
        CacheCase(B=3, S=5000, N=8, K=2, H=128, U=1),
        CacheCase(B=40, S=1000, N=8, K=1, H=64, page=16, U=1),
        CacheCase(B=2, S=3000, N=4, K=2, H=64, page=3),
        CacheCase(B=48, S=2048, N=8, K=2, H=128, T=16, full=True),  # many rows, and few sharers
        CacheCase(B=8, S=2048, N=8, K=2, H=128, T=400, page=128, packed=True, right=0),
        CacheCase(B=4, S=2000, N=8, K=2, H=128, T=512, U=512, right=0, rotary=128),
    ],
    ids=str,
)
def test_runs_give_the_same_bits(case, num_splits, implementation):
    case = dataclasses.replace(case, num_splits=num_splits)
    repeat = program(implementation, case, Draw(case).operands)
    first = [bits(x) for x in repeat()]
    for _ in range(9):
        for x, y in zip(first, repeat(), strict=True):
            np.testing.assert_array_equal(x, bits(y))


@implementations
@pytest.mark.parametrize("page", (None, 16, 3))
@pytest.mark.parametrize("layer", (-1, 2))
def test_a_layer_that_is_not_there(layer, page, implementation):
    case = CacheCase(T=2, U=2, S=144, layers=2, page=page)
    out, lse, *_ = run(implementation, case, Draw(case).operands.replace(layer=np.int32(layer)))
    assert not out.any() and np.isneginf(lse).all()


@pytest.mark.parametrize("page", (None, 16, 3))
def test_hidden_keys_do_not_matter(page):
    """Keys behind left padding, and those to the left of all windows, may be NaN."""
    case = CacheCase(T=3, U=3, S=1440, B=5, right=0, left=60, left_padding=True, page=page)
    operands = Draw(case).operands
    clean = run("cuda", case, operands)
    places = _reference_cache.Cache(operands)
    for b, length in enumerate(np.clip(operands.lengths, 0, case.S)):
        first_seen = min(int(length) + case.U, case.S) - case.T - case.left
        hidden = max(first_seen, int(operands.left_padding[b]), 0)
        for position in range(min(hidden, int(length))):
            if (place := places.place(b, position)) is not None:
                operands.key[place] = operands.value[place] = np.nan
    poisoned = program("cuda", case, operands)()
    for x, y in zip(clean[:2], poisoned[:2], strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))


@implementations
def test_nan_of_a_key_reaches_its_queries(implementation):
    """A key that isn't finite makes the rows NaN that see it, and no others."""
    case = CacheCase(T=2, S=3000, B=2, right=0, N=2, K=1, full=True)
    operands = Draw(case).operands
    operands.key[0, -1] = np.nan
    out, lse, *_ = program(implementation, case, operands)()
    is_nan = np.isnan(out.astype(np.float32)).any((2, 3))
    np.testing.assert_array_equal(is_nan, [[False, True], [False, False]])
    np.testing.assert_array_equal(np.isnan(lse).any(1), is_nan)


@implementations
def test_flash_attn_with_kvcache(implementation, monkeypatch):
    """It takes no implementation: the automatic choice is made to be this one."""
    operands = as_jax(Draw(CacheCase(B=4, S=512, page=32, U=1, H=128, rotary=64, right=0)).operands)

    def call():
        return jax_flash.flash_attn.flash_attn_with_kvcache(
            operands.query,
            operands.key,
            operands.value,
            operands.new_key,
            operands.new_value,
            operands.rotary_cos,
            operands.rotary_sin,
            operands.lengths,
            block_table=operands.page_table,
            causal=True,
        )

    def by(name):
        monkeypatch.setattr(_dispatch, "IMPLEMENTATIONS", (name,))
        return [np.asarray(x, np.float32) for x in call()]

    for got, right in zip(by(implementation), by("xla"), strict=True):
        np.testing.assert_allclose(got, right, rtol=0.02, atol=0.02)


@implementations
def test_ragged_paged_attention(implementation):
    case = CacheCase(page=16, T=90, packed=True, interleaved=True, right=0, B=6, S=640, N=8, H=128)
    operands = as_jax(Draw(case).operands)
    offsets = operands.query_offsets.at[0].set(0)  # which says where the first sequence starts
    arguments = (operands.lengths, operands.page_table, offsets, jnp.asarray([5]))
    got, right = (
        np.asarray(
            jax_flash.ragged_paged_attention(
                operands.query[0], operands.key, *arguments, sm_scale=0.1, implementation=name
            ),
            np.float32,
        )
        for name in (implementation, "xla")
    )
    np.testing.assert_allclose(got, right, rtol=0.02, atol=0.02)
