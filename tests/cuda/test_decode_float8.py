"""The decode kernel on caches in e4m3, run on a CPU and compared with the definition; which calls it takes.

tests/cuda/test_decode_plan.py has its plans, and what its compiler says.
"""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cache_case import CacheCase, Draw
from exhaustive import thinned
from seeds import seed_of
from test_decode_emulated import DEVICES, run, traits

from jax_flash import _dispatch, _float8
from jax_flash._device import H100
from jax_flash._spec import shapes_of
from jax_flash.cuda import decoding
from jax_flash.cuda.sm90 import decode_plan, prefill_plan

CASES = (
    CacheCase(U=1),
    CacheCase(descales=True, U=2, T=2, right=0, soft_cap=2.0, H=128, rotary=64),
    CacheCase(descales=True, U=3, T=3, H=64, V=128, alibi="BN", dtype="float16", S=300),
    CacheCase(descales=True, S=700, B=2, N=8, K=1, H=256, right=0, sinks=True),
    CacheCase(descales=True, H=48, V=16, T=5, left=40, layers=2, U=1, left_padding=True),
    CacheCase(descales=True, H=96, V=192, batch_index=True, N=2, U=2, S=300),
    CacheCase(descales=True, page=16, U=1, rotary=64, S=640, H=128),
    CacheCase(descales=True, page=3, T=5, U=4, S=300, right=0, left=90, H=80, V=32),
    CacheCase(descales=True, page=8, T=33, packed=True, right=0, left=30, B=5, S=96),
    CacheCase(descales=True, page=128, T=2, S=512, U=2, N=6, K=1, H=64, dtype="float16"),
    CacheCase(descales=True, page=7, S=350, U=3, T=3, H=160, rotary=16, layers=2),
    CacheCase(descales=True, T=70, U=70, right=0, S=300),
    CacheCase(page=16, T=20, packed=True, interleaved=True, right=0, B=4, S=128, N=2, K=1),
    CacheCase(page=5, T=20, packed=True, interleaved=True, right=0, B=4, S=130, H=32),
    CacheCase(descales=True, page=16, S=600, B=2, T=2, U=2, right=0, score_mod=True),
    CacheCase(S=400, T=9, N=4, K=1, right=0, H=128, score_mod=True, soft_cap=2.0),
    CacheCase(descales=True, page=16, S=400, T=3, U=3, right=0, mask_mod=True, alibi="BN"),
)
CASES = tuple(dataclasses.replace(case, float8=True) for case in CASES)
E4M3 = ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize("case", thinned(CASES, traits), ids=str)
def test_equals_the_definition(case, emulator):
    for multiprocessors, resident in ((3, 2), (7, 7)):
        run(case, emulator, multiprocessors, resident)


def emulated(case, operands, emulator):
    plan = decode_plan.plan_decode(case.spec, shapes_of(operands), DEVICES[3])
    arrays = {name: np.asarray(x) for name, x in operands.present().items()}
    return emulator.run(plan, arrays, seed_of(case), 3)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("page", (None, 3))
def test_every_number_is_widened(dtype, page, emulator):
    """A sequence of one key has its value as output: all finite e4m3 numbers, in every column."""
    finite = np.arange(256, dtype=np.uint8).view(E4M3)
    finite = finite[np.isfinite(finite.astype(np.float32))]
    case = CacheCase(B=len(finite), S=12, N=1, K=1, H=16, V=64, float8=True, dtype=dtype, page=page)
    operands = Draw(case).operands
    operands = operands.replace(lengths=np.ones(case.B, np.int32))
    if page is None:
        operands.key[:, 0], operands.value[:, 0] = E4M3(1), finite[:, None, None]
    else:
        operands = operands.replace(page_table=np.arange(case.B * 4, dtype=np.int32).reshape(case.B, 4))
        operands.key[: 4 * case.B : 4, 0] = E4M3(1)
        operands.value[: 4 * case.B : 4, 0] = finite[:, None, None]
    out = emulated(case, operands, emulator)["out"]
    expected = np.broadcast_to(finite.astype(np.float32)[:, None, None, None], out.shape)
    np.testing.assert_array_equal(out.astype(np.float32), expected)


def test_nan_of_a_key_reaches_its_queries(emulator):
    case = CacheCase(T=2, S=300, B=2, right=0, N=2, K=1, full=True, float8=True)
    operands = Draw(case).operands
    operands.key[0, -1] = np.nan
    out = emulated(case, operands, emulator)["out"].astype(np.float32)
    np.testing.assert_array_equal(np.isnan(out).any((2, 3)), [[False, True], [False, False]])


def test_what_is_appended_is_rounded(emulator):
    """What exceeds 448 becomes that; infinities, and what a descale of 0 makes of numbers, become NaN."""
    special = [0, -0.0, 2.0**-10, 3 * 2.0**-10, 449, -1e4, np.inf, -np.inf, np.nan, 1.0625, 1.1875, 239.9]
    descales = np.array([1, 0.3, 0], np.float32)
    for dtype in ("bfloat16", "float16"):
        case = CacheCase(B=1, S=8, U=1, N=3, K=3, H=16, float8=True, descales=True, dtype=dtype)
        operands = Draw(case).operands.replace(key_descale=descales, value_descale=descales)
        operands.lengths[:] = 2
        for x in (operands.new_key, operands.new_value):
            x[..., : len(special)] = special
        results = emulated(case, operands, emulator)
        for name, new in (("key", operands.new_key), ("value", operands.new_value)):
            expected = _float8.converted(jnp.asarray(new, jnp.float32) / descales[:, None])
            found = results[f"{name}_after"][:, 2]
            np.testing.assert_array_equal(found.astype(np.float32), np.asarray(expected[:, 0], np.float32))


@pytest.mark.parametrize("T", (1, 3))
def test_queries_of_any_magnitude(T, emulator):
    """Beyond float16's range, by which warps compute; descales bring the logits back. A row of zeros, too."""
    case = CacheCase(T=T, S=333, B=2, H=80, V=48, float8=True, descales=True, right=0)
    operands = Draw(case).operands
    factors = np.array([2.0**60, 2.0**-60], np.float32)
    of_heads = np.repeat(factors, case.N // case.K)[:, None]
    query = np.asarray(operands.query, np.float32) * of_heads
    query[0, 0, 1] = 0
    operands = operands.replace(
        query=query.astype(operands.query.dtype), key_descale=operands.key_descale / factors
    )
    run(case, emulator, 3, 2, operands)


def reason(case, **changes):
    operands = Draw(dataclasses.replace(case, float8=True)).operands.replace(**changes)
    return _dispatch.reason("cuda", case.spec, shapes_of(operands), H100)


def test_which_calls_it_takes():
    usual = CacheCase(B=20, S=200, N=4, H=64, T=128, U=20, right=0)
    assert reason(usual) is None
    wrong = np.zeros((20, 20, 2, 64), np.float16)
    assert reason(usual, new_key=wrong) == "new_key's dtype is float16; it must be query's, bfloat16"
    for changes, operand in (({"H": 72, "V": 64}, "key"), ({"V": 8}, "value")):
        why_not = reason(dataclasses.replace(usual, **changes))
        head_dim = changes.get("H", 8)
        assert why_not == (
            f"{operand}'s head dim is {head_dim}; it may be a multiple of 16 up to 256 of a cache in "
            "float8_e4m3fn"
        )


def test_the_decode_kernel_runs_chunks_of_prompts():
    case = CacheCase(B=20, S=200, N=4, K=2, H=64, T=128, U=20, right=0)
    of_16_bits, of_8_bits = (
        shapes_of(Draw(dataclasses.replace(case, float8=float8)).operands) for float8 in (False, True)
    )
    assert prefill_plan.suits(case.spec, of_16_bits, H100)
    assert not prefill_plan.suits(case.spec, of_8_bits, H100)
    assert decoding.describe(case.spec, of_8_bits, H100).startswith("sm_90 decode kernel for head dim 64")
