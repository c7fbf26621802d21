"""The forward kernel, run on a CPU, keeps what isn't finite from queries that don't see it.

NaN and infinities are put into one sequence, or into padding, or behind a mask, a window or the diagonal.
What doesn't depend on them must be the same bits as without them, and what does must not hide them.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from emulated_case import DEVICE, Case, arrays_of, draw, tile, traits
from exhaustive import one_in, thinned
from nonfinite_suite import Reached, with_value

from jax_flash import _reference
from jax_flash._device import H100
from jax_flash._spec import shapes_of
from jax_flash.cuda import dropout
from jax_flash.cuda.sm90 import forward_plan

CASES = (
    Case(H=128, T=300, S=300, N=2, right=0),
    Case(H=64, T=400, S=500, N=4, K=2, right=0, dtype="float16"),  # several tiles a CTA
    Case(H=96, T=200, S=200, N=2, right=0),
    Case(H=192, T=150, S=200, right=0, dtype="float16"),
    Case(H=256, T=150, S=200, N=2, right=0),
    Case(H=256, T=200, S=130, right=0),  # 70 queries see no key
    Case(H=128, T=500, S=130, right=0, N=2, B=2),  # whole tiles of queries see no key
    Case(H=64, T=300, S=400, N=2, left=60, right=20),
    Case(H=128, T=300, S=500, left=40, right=0, B=2, dtype="float16"),
    Case(H=192, V=128, T=200, S=300, N=2, left=60),
    Case(H=64, V=128, T=200, S=130, N=4, K=1, right=3, dtype="float16"),
    Case(H=40, V=24, T=65, S=129, N=2, B=2, right=0),
    Case(H=64, V=256, T=70, S=140, N=2, K=2, left=50),
    Case(H=80, V=208, T=70, S=140, right=0),  # the last panel of V is in part beyond its columns
    Case(H=128, T=10, S=300, right=0, N=8, B=2),  # query heads of one key head share a tile
    Case(H=64, T=65, S=300, left=90, right=3, N=16, K=2),
    # Score modifications. Calls with a mask alone may split tiles; these don't.
    Case(H=64, T=140, S=140, N=2, mask="BNTS", B=2, dtype="float16"),
    Case(H=128, T=70, S=300, N=4, K=1, mask="B11S", B=2, right=0),
    Case(H=256, T=100, S=130, mask="1NTS"),
    Case(H=128, T=130, S=200, right=0, N=2, soft_cap=2.0),
    Case(H=64, T=130, S=200, right=0, N=2, bias="1NTS", soft_cap=3.0),
    Case(H=192, T=100, S=130, N=2, right=0, bias="1N1S", mask="11TS", alibi="1N", sinks="BN", soft_cap=2.0),
    # Mask metadata.
    Case(H=64, T=200, S=300, N=2, B=3, lengths="qk"),
    Case(H=128, T=300, S=200, N=4, K=2, B=3, lengths="qk", right=0, dtype="float16"),
    Case(H=128, T=10, S=300, N=8, K=2, B=4, lengths="k", right=0),  # whose heads share a tile
    Case(H=256, T=150, S=300, N=2, B=3, lengths="qk", left=60, right=20),
    Case(H=128, T=300, S=400, N=2, segments="sorted", right=0, B=2),
    Case(H=64, T=300, S=200, N=4, K=2, segments="mixed", B=2, dtype="float16"),
    Case(H=96, T=200, S=260, segments="sorted"),
    Case(H=128, T=500, S=600, N=4, K=2, packed=5, right=0),
    Case(H=64, T=300, S=300, N=2, packed=9, B=2, left=70, right=-3),
    Case(H=256, T=200, S=300, N=2, packed=3),
    Case(H=96, T=200, S=100, N=2, packed=4, right=0, alibi="BN"),
    # Dropout, whose hashes come with the keys.
    Case(H=128, T=300, S=300, N=2, B=2, right=0, dropout=0.2),
    Case(H=64, T=200, S=300, N=2, B=3, lengths="qk", dropout=0.3, right=0),
    Case(H=192, T=130, S=70, N=2, mask="1N1S", bias="BNTS", sinks="BN", dropout=0.15),
    Case(H=256, T=150, S=200, N=2, packed=3, dropout=0.4, soft_cap=2.0),
)
# Calls whose tiles have their keys split, the CTAs, and how many of them share.
SPLIT = (
    (Case(H=128, T=100, S=700, N=3, B=2, mask="BNTS"), 4, 4),
    (Case(H=128, T=100, S=700, N=3, B=2, mask="BNTS"), 4, 3),  # shares of several tiles, and a CTA with none
    (Case(H=64, T=200, S=900, N=5, K=1, mask="B11S", dtype="float16"), 3, 2),
    (Case(H=128, T=3, S=1500, N=8, K=1, mask="11TS"), 5, 5),  # few queries and many keys
    (Case(H=96, T=65, S=500, N=3, mask="1NTS", dropout=0.3), 2, 2),
    (Case(H=192, V=128, T=100, S=700, N=3, mask="B11S", soft_cap=3.0), 2, 2),
)
VALUES = (np.nan, np.inf, -np.inf)


@pytest.mark.parametrize("case", thinned(CASES, traits), ids=str)
def test_what_is_not_finite_reaches_no_further_than_by_definition(case, emulator):
    check(case, emulator, DEVICE)


@pytest.mark.parametrize("case,ctas,sharers", one_in(2, thinned(SPLIT, lambda x: tile(x) | {x[2]})), ids=str)
def test_split_tiles(case, ctas, sharers, emulator, monkeypatch):
    """Warps of a tile are combined by different CTAs, of which each repeats its own."""
    monkeypatch.setattr(
        forward_plan, "split_last_wave", lambda tiles, ctas, blocks: (tiles - tiles % ctas, sharers)
    )
    device = dataclasses.replace(H100, sm_count=ctas)
    assert "arrived" in check(case, emulator, device, resident=(1, ctas, ctas))


def test_a_sequence_of_nan_beside_others(emulator):
    """Sequences that share blocks of keys and tiles of queries."""
    case = Case(H=128, T=300, S=300, N=2, packed=3, right=0)
    spec, operands, *_, seed = draw(case)
    offsets = jnp.asarray([[0, 100, 200, 300]], jnp.int32)
    operands = operands.replace(query_offsets=offsets, key_value_offsets=offsets)
    clean = run(spec, operands, {}, emulator, DEVICE, seed)
    value = np.array(operands.value)
    value[:, 100:200] = np.nan
    got = run(spec, operands, {"value": value}, emulator, DEVICE, seed)
    for others in (slice(0, 100), slice(200, 300)):
        np.testing.assert_array_equal(got["out"][:, others], clean["out"][:, others])
    assert np.isnan(got["out"][:, 100:200]).all()
    np.testing.assert_array_equal(got["lse"], clean["lse"])


@pytest.mark.parametrize("value", (np.inf, -np.inf))
def test_a_soft_cap_hides_no_infinite_score(value, emulator):
    """The tangent of an infinity is finite. The log-sum-exp tells the backward pass which queries see one."""
    case = Case(H=64, T=70, S=140, N=2, right=0, soft_cap=2.0)
    spec, operands, *_, seed = draw(case)
    query = np.array(operands.query)
    query[:, 33, :, 5] = value
    got = run(spec, operands, {"query": query}, emulator, DEVICE, seed)
    is_spoiled = np.arange(case.T) == 33
    assert np.isnan(got["lse"][..., is_spoiled]).all() and np.isfinite(got["lse"][..., ~is_spoiled]).all()


def check(case, emulator, device, resident=(1, 2, 1)):
    """Compares runs with a clean one; returns its results."""
    spec, operands, *_, seed = draw(case)
    queries, keys = spoiled(case, operands)
    clean = run(spec, operands, {}, emulator, device, seed)
    arrays = {name: np.asarray(getattr(operands, name)) for name in ("query", "key", "value")}
    is_key = {"query": queries, "key": keys, "value": keys}
    everywhere = {name: (x, is_key[name]) for name, x in arrays.items()}
    for value, count in zip(VALUES, resident, strict=True):
        # Into one column of V; then into all of the query, key and value at these positions.
        column = np.where(np.arange(arrays["value"].shape[-1]) == case.H % 7, value, 0)
        in_value = np.where(keys[:, :, None, None], arrays["value"] + column, arrays["value"])
        of_value = {"value": in_value.astype(arrays["value"].dtype)}
        got = run(spec, operands, of_value, emulator, device, seed, count)
        reached = Reached.by(np.zeros_like(queries), keys, spec, operands)
        compare(got, clean, reached)
        assert not np.isfinite(got["out"].astype(np.float32)[reached.queries]).all(-1).any(), "hides it"
        np.testing.assert_array_equal(got["lse"], clean["lse"])
        put = {name: with_value(value, *of_name) for name, of_name in everywhere.items()}
        got = run(spec, operands, put, emulator, device, seed + 1, count)
        reached = Reached.by(queries, keys, spec, operands)
        compare(got, clean, reached)
        if np.isnan(value):
            assert np.isnan(got["out"].astype(np.float32)[reached.queries]).all(), "out hides NaN"
            assert np.isnan(got["lse"].transpose(0, 2, 1)[reached.queries]).all(), "lse hides NaN"
    return clean


def compare(got, clean, reached):
    """What is not reached is the same, and queries that see no key have nothing."""
    lse, clean_lse = (x["lse"].transpose(0, 2, 1) for x in (got, clean))
    assert not reached.queries.all()
    apart = ~reached.queries
    np.testing.assert_array_equal(got["out"][apart], clean["out"][apart])
    np.testing.assert_array_equal(lse[apart], clean_lse[apart])
    assert np.isfinite(got["out"].astype(np.float32)[apart]).all()
    assert (got["out"][reached.lonely & apart] == 0).all()


def run(spec, operands, spoiled, emulator, device, seed, resident=1):
    """The results, by name, where arrays `spoiled` take the place of operands."""
    plan = forward_plan.plan_forward(spec, shapes_of(operands), device)
    metadata = forward_plan.plan_forward_metadata(spec, shapes_of(operands), device)
    arrays = arrays_of(operands, metadata, emulator, seed) | spoiled
    return emulator.run(plan, dropout.arranged(plan, arrays), seed, resident)


def spoiled(case, operands):
    """The queries `(B, T)` and the keys `(B, S)` that are not finite: never all that there are."""
    i, j = np.arange(case.T)[None], np.arange(case.S)[None]
    if case.lengths:  # the padding
        q, k = (operands.query_seq_lengths, operands.key_value_seq_lengths)
        queries = i >= (np.full(case.B, case.T) if q is None else np.asarray(q))[:, None]
        return queries, j >= (np.full(case.B, case.S) if k is None else np.asarray(k))[:, None]
    if case.segments:
        return np.asarray(operands.query_segment_ids) == 1, np.asarray(operands.key_value_segment_ids) == 1
    if case.packed:
        of_queries, of_keys = np.asarray(operands.query_offsets), np.asarray(operands.key_value_offsets)
        queries, keys = (
            (x[:, 1, None] <= at) & (at < x[:, 2, None]) for x, at in ((of_queries, i), (of_keys, j))
        )
        return queries, keys
    if case.mask == "B11S":  # the keys that it hides
        return np.repeat(i == 1, case.B, 0), ~np.asarray(operands.mask)[:, 0, 0]
    allowed = np.asarray(_reference._allowed(*draw(case)[:2]))
    # A key, near the diagonal, that some queries see and others of the same tiles don't.
    seen = allowed.any(1)  # (B, T, S)
    keys = np.zeros((case.B, case.S), bool)
    for b in range(case.B):
        some = np.flatnonzero(seen[b].any(0) & ~allowed[b].all((0, 1)))
        keys[b, some[len(some) * 2 // 3]] = True
    return np.repeat(i == min(case.T // 2, 33), case.B, 0), keys
