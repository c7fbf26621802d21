"""The kernels of attention on key-value caches, run on a CPU and compared with the definition."""

import dataclasses

import numpy as np
import pytest
from cache_case import CacheCase, Draw, check
from exhaustive import thinned
from seeds import seed_of

from jax_flash._device import H100
from jax_flash._spec import shapes_of
from jax_flash.cuda.sm90 import decode_plan

# So few multiprocessors that CTAs have several tiles, and share them.
DEVICES = {count: dataclasses.replace(H100, sm_count=count) for count in (1, 2, 3, 7)}


def run(case, emulator, multiprocessors, resident, operands=None):
    """Runs a case's plan and compares `(out, lse, key, value)` with the definition."""
    operands = Draw(case).operands if operands is None else operands
    plan = decode_plan.plan_decode(case.spec, shapes_of(operands), DEVICES[multiprocessors])
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
    CacheCase(page=5, T=20, packed=True, interleaved=True, right=0, B=4, S=130, N=2, K=1, alibi="1N"),
    CacheCase(page=7, S=350, interleaved=True, U=3, T=3, right=0, rotary=16, layers=2, left_padding=True),
    CacheCase(page=16, S=600, B=2, N=2, K=1, num_splits=2, U=1, left_padding=True),
    CacheCase(page=96, S=960, B=2, N=4, K=2, T=2, right=0),
)


@pytest.mark.parametrize("case", thinned(PAGED, traits), ids=str)
def test_paged_caches(case, emulator):
    for multiprocessors, resident in ((3, 2), (7, 7)):
        run(case, emulator, multiprocessors, resident)
