"""Attention on key-value caches in plain JAX, against the definition."""

import functools
from unittest import mock

import jax
import pytest
from cache_case import CacheCase, Draw, as_jax, check

from jax_flash.xla import decoding

CASES = (
    CacheCase(),
    CacheCase(U=1, dtype="float32"),
    CacheCase(T=5, U=5, right=0, dtype="float16", rotary=64),
    CacheCase(T=3, U=2, right=0, left=40, rotary=32, rotary_interleaved=True, soft_cap=2.0),
    CacheCase(T=70, U=70, right=0, dtype="float32", N=2, S=300),
    CacheCase(T=4, U=2, query_positions="first", rotary=16, alibi="BN", left_padding=True),
    CacheCase(T=4, U=6, query_positions="appended", rotary=16, right=0, batch_index=True, sinks=True),
    CacheCase(U=3, layers=3, B=2, H=40, V=24, alibi="1N"),
    CacheCase(page=16, U=1, rotary=64),
    CacheCase(page=1, U=2, B=2, S=60, dtype="float32"),
    CacheCase(page=3, T=5, U=4, S=50, right=0, left=20),
    CacheCase(page=128, T=2, S=500, layers=2, U=2, right=0, N=6, K=1),
    CacheCase(page=384, S=384, dtype="float32", U=4, B=2, N=2),
    CacheCase(page=32, S=160, shares_pages=True, left=50),
    CacheCase(page=16, T=40, packed=True, interleaved=True, right=0, B=4, S=128, dtype="float32"),
    CacheCase(page=8, T=33, packed=True, interleaved=True, right=0, left=30, soft_cap=3.0, B=5, S=96),
    CacheCase(T=40, packed=True, right=0, B=4, S=128, V=32, alibi="BN"),
    CacheCase(S=600, full=True, U=3, dtype="float32", H=16),
    CacheCase(T=9, U=2, B=2, right=0, S=12),  # more queries than keys
    CacheCase(dtype="float64", U=1, rotary=32, page=16),
    CacheCase(U=3, float8=True, descales=True, T=2, right=0),
    CacheCase(U=2, float8=True, rotary=32, dtype="float16", layers=2, sinks=True),
    CacheCase(page=16, float8=True, descales=True, U=1, left=60, right=0, dtype="float32"),
    CacheCase(T=40, packed=True, right=0, B=4, S=128, V=32, float8=True, descales=True),
    CacheCase(U=1, right=0, score_mod=True, dtype="float32"),
    CacheCase(T=5, U=5, right=0, left=30, score_mod=True, soft_cap=2.0, alibi="BN", sinks=True, rotary=32),
    CacheCase(page=8, T=33, packed=True, right=0, B=5, S=96, score_mod=True),
    CacheCase(T=9, U=2, B=2, S=12, score_mod=True, batch_index=True, dtype="float16"),
    CacheCase(T=5, U=5, right=0, mask_mod=True, dtype="float32", sinks=True, layers=2),
    CacheCase(page=8, T=33, packed=True, right=0, left=30, S=96, score_mod=True, mask_mod=True, alibi="BN"),
    CacheCase(T=3, U=3, mask_mod=True, float8=True, descales=True, soft_cap=2.0, left_padding=True),
)


@functools.partial(jax.jit, static_argnums=0)
def forward(spec, operands):
    return decoding.forward(spec, operands)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_definition(case):
    with jax.enable_x64(case.dtype == "float64"):
        operands = Draw(case).operands
        check(case, operands, forward(case.spec, as_jax(operands)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_many_blocks(case):
    """Blocks so small that each case has many, and tiles that are not all computed at once."""
    small = {"KEYS_PER_BLOCK": 24, "QUERIES_PER_TILE": 4, "PACKED_QUERIES_PER_TILE": 3, "LOGITS_AT_ONCE": 500}
    with jax.enable_x64(case.dtype == "float64"), mock.patch.multiple(decoding, **small):
        operands = Draw(case).operands
        check(case, operands, jax.jit(functools.partial(decoding.forward, case.spec))(as_jax(operands)))
