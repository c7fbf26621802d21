"""The backward kernels in the emulator: NaN and infinities reach no query or key that doesn't see them.

Every run is compared with one of finite operands. The gradients of queries and keys that no visible pair
connects to what isn't finite are the same bits. Those of the others don't hide NaN.
"""

import dataclasses

import numpy as np
import pytest
from emulated_case import Case, arrays_of, draw, tile
from exhaustive import one_in, thinned
from kernel_emulator import KernelEmulator
from nonfinite_suite import Reached, with_value

from jax_flash import _reference
from jax_flash._device import H100
from jax_flash._spec import shapes_of
from jax_flash.cuda import score_mod
from jax_flash.cuda.sm90 import backward_plan

OF_QUERIES, OF_KEYS = ("query", "d_out", "d_lse"), ("key", "value")
CASES = (
    Case(H=64, T=150, S=260, right=0, return_residual=True),
    Case(H=64, T=300, S=140, left=40, right=20),
    Case(H=64, T=130, S=200, right=-30),  # the last keys are seen by none
    Case(H=64, T=200, S=300, B=2, lengths="qk", return_residual=True),
    Case(H=64, T=150, S=200, B=2, lengths="qk", dropout=0.3, right=0),
    Case(H=64, V=128, T=150, S=260, segments="mixed", dtype="float16"),
    Case(H=96, T=130, S=140, N=2, right=0, dropout=0.2, dtype="float16", return_residual=True),
    Case(H=80, T=100, S=260, packed=4, right=0),
    Case(H=128, T=150, S=260, N=2, K=2, right=0, return_residual=True),
    Case(H=128, T=200, S=300, left=30, right=9, dtype="float16"),
    Case(H=128, T=140, S=140, dropout=0.4, left=50),
    Case(H=128, T=150, S=260, N=2, B=2, lengths="k", right=0),
    Case(H=128, T=200, S=200, N=2, segments="sorted", right=0, return_residual=True),
    Case(H=128, V=64, T=200, S=260, packed=5),
    Case(H=64, T=100, S=140, N=2, right=0, soft_cap=2.0, return_residual=True),
    Case(H=64, T=100, S=140, N=2, B=2, mask="B11S", bias="BNTS", soft_cap=3.0),
    Case(H=128, T=130, S=140, N=2, mask="1NTS", return_residual=True),
    Case(H=128, T=100, S=140, N=2, right=-9, bias="BNTS", sinks="1N"),
    Case(H=32, T=100, S=130, N=2, right=0, alibi="1N", dropout=0.3, dtype="float16"),
    Case(H=96, T=100, S=140, N=2, B=2, lengths="qk", alibi="BN", soft_cap=2.0),
    Case(H=64, T=100, S=140, bias="1N1S", left=30, right=5, soft_cap=2.0),
    Case(H=192, T=130, S=260, N=2, K=1, right=0, return_residual=True),
    Case(H=192, V=128, T=150, S=200, packed=3, right=0),
    Case(H=192, T=100, S=140, N=2, mask="B1TS", bias="BNTS", soft_cap=3.0, dropout=0.3),
    Case(H=256, T=130, S=260, right=0, dtype="float16", return_residual=True),
    Case(H=256, T=150, S=200, left=30, right=20, dropout=0.2),
    Case(H=256, T=130, S=200, B=2, lengths="qk", right=0),
    Case(H=256, T=130, S=200, segments="sorted", soft_cap=2.0, alibi="1N"),
    Case(H=256, T=70, S=140, mask="1N1S", bias="BNTS", soft_cap=3.0, right=0),
    # As some above, with more heads: nothing that `make test` lacks.
    Case(H=64, T=150, S=260, right=0, N=2, return_residual=True),
    Case(H=128, T=150, S=260, N=4, K=2, right=0, return_residual=True),
    Case(H=256, T=130, S=260, right=0, N=2, dtype="float16", return_residual=True),
)


def hides_by(case):
    if case.mask:
        return "mask"
    return "metadata" if case.lengths or case.segments or case.packed else "window"


def traits(case_and_order):
    """Tile shapes, with how each knows what is hidden; and what else changes probabilities or dS."""
    case, *_ = case_and_order
    return {(*tile(case), hides_by(case)), bool(case.soft_cap), ("dropout", bool(case.dropout)), case.bias}


@pytest.mark.parametrize(
    "case,deterministic,turn",
    one_in(
        2,
        thinned(
            # Either order first in turn, as the first of a case is what `make test` runs.
            [
                (case, order, turn)
                for i, case in enumerate(CASES)
                for order in ((False, True), (True, False))[i % 2]
                for turn in (0, 1)
            ],
            traits,
        ),
    ),
    ids=str,
)
def test_what_is_not_finite_reaches_no_further_than_by_definition(case, deterministic, turn, emulator):
    """A turn has every second pair of what is put and where: each spoil, and each place."""
    case = dataclasses.replace(case, deterministic=deterministic)
    if deterministic and case.bias == "1N1S":
        pytest.skip("the whole gradient is NaN by fixed_point.factor")
    run = Run(case, emulator)
    clean = run()
    checked = 0
    for place, (queries, keys) in enumerate(spoiled(case, run.operands)):
        for names, value, columns in SPOILS[(place + turn) % 2 :: 2]:
            names = [name for name in names if name != "d_lse" or case.return_residual]
            of_queries = queries & any(name in OF_QUERIES for name in names)
            of_keys = keys & any(name in OF_KEYS for name in names)
            reached = Reached.by(of_queries, of_keys, run.spec, run.operands)
            put = {
                name: with_value_in(run.arrays[name], queries if name in OF_QUERIES else keys, value, columns)
                for name in names
            }
            check(case, run(put, reached), clean, reached, run, np.isnan(value), f"{value} in {names}")
            checked += (~reached.queries).sum() + (~reached.keys).sum()
    assert checked


@pytest.mark.parametrize("case", one_in(2, [x for x in CASES if x.bias == "BNTS"]), ids=str)
def test_biases_of_hidden_pairs_may_be_anything(case, emulator):
    run = Run(case, emulator)
    sees = np.asarray(_reference._allowed(run.spec, run.operands))
    for value in (np.nan, np.inf, -np.inf):
        bias = np.where(sees, run.arrays["bias"], run.arrays["bias"].dtype.type(value))
        got, clean = run({"bias": bias}), run()
        for name, x in clean.items():
            np.testing.assert_array_equal(got[name], x, f"{name}, {value}")


def test_the_emulator_finds_a_phase_that_nobody_waits_for(tmp_path):
    """As synccheck, of Compute Sanitizer, does: here one that is completed for its parity alone."""
    wait = ("sm90/backward/isolation.cuh", "mbarrier::wait(landed, 1);")
    case = Case(H=64, T=300, S=300, right=0)
    run = Run(case, KernelEmulator(tmp_path, edits={wait: ""}))
    with pytest.raises(AssertionError, match="arrivals at mbarriers whose last phase no thread has found"):
        run({name: np.full_like(run.arrays[name], np.nan) for name in ("query", "out", "lse")})


# What is put where: arrays, a value, and in how many columns, or in all.
SPOILS = (
    *(((name,), np.nan, None) for name in (*OF_QUERIES, *OF_KEYS)),
    ((*OF_QUERIES, *OF_KEYS), np.nan, None),
    ((*OF_QUERIES, *OF_KEYS), np.inf, None),
    ((*OF_QUERIES, *OF_KEYS), -np.inf, 1),
    (("query",), np.inf, 1),
    (("key",), -np.inf, 1),
)


def spoiled(case, operands):
    """Queries `(B, T)` and keys `(B, S)` to put it into: of a sequence, of padding, or behind a mask."""
    i, j = np.arange(case.T)[None], np.arange(case.S)[None]
    rows = np.zeros((case.B, 1), bool)
    if case.segments:
        yield operands.query_segment_ids == 1, operands.key_value_segment_ids == 1
    elif case.packed:
        offsets, key_offsets = np.asarray(operands.query_offsets), np.asarray(operands.key_value_offsets)
        (starts, ends), (key_starts, key_ends) = offsets[:, 1:3].T, key_offsets[:, 1:3].T
        yield (
            (starts[:, None] <= i) & (i < ends[:, None]),
            (key_starts[:, None] <= j) & (j < key_ends[:, None]),
        )
        # What belongs to no sequence.
        yield (
            (i < offsets[:, :1]) | (i >= offsets[:, -1:]),
            (j < key_offsets[:, :1]) | (j >= key_offsets[:, -1:]),
        )
    elif case.lengths:
        lengths = np.full((case.B, 1), case.T), np.full((case.B, 1), case.S)
        if "q" in case.lengths:
            lengths = np.asarray(operands.query_seq_lengths)[:, None], lengths[1]
        lengths = lengths[0], np.asarray(operands.key_value_seq_lengths)[:, None]
        yield i >= lengths[0], j >= lengths[1]
    elif case.mask == "B11S":
        yield rows | (i == 33), ~np.asarray(operands.mask)[:, 0, 0]
    else:
        # Early, and in the last rows of a block and tile; late.
        yield rows | (i == 3) | (i == 63), rows | (j == case.S * 2 // 3)
        yield rows | (i == case.T - 1), rows | (j == 127) | (j == case.S - 1)


def with_value_in(x, positions, value, columns):
    """`x (B, positions, heads, columns)`, or `d_lse (B, N, T)`, with the value in columns of positions."""
    if x.ndim == 3:
        return with_value(value, x.transpose(0, 2, 1), positions).transpose(0, 2, 1)
    put = x.copy()
    put[..., :columns] = with_value(value, x[..., :columns], positions)
    return put


class Run:
    """Runs a call, of which some arrays may be others: what the forward pass gives for them comes with it."""

    def __init__(self, case, emulator):
        device = dataclasses.replace(H100, sm_count=2)
        self.case, self.emulator = case, emulator
        self.spec, self.operands, d_out, d_lse, self.seed = draw(case)
        out, lse, _ = _reference.reference_with_gradients(self.spec, self.operands, d_out, d_lse)
        shapes = shapes_of(self.operands)
        metadata = backward_plan.plan_backward_metadata(self.spec, shapes, device)
        self.plan = backward_plan.plan_backward(self.spec, shapes, device)
        self.arrays = arrays_of(self.operands, metadata, emulator, self.seed)
        self.arrays |= dict(out=out, lse=lse, d_out=d_out, d_lse=d_lse)
        self.sees = np.asarray(_reference._allowed(self.spec, self.operands))

    def __call__(self, put=None, reached=None):
        put = dict(put or {})
        if reached is not None:
            put |= self.forward(put, reached)
        # One CTA, or cluster, at a time, so that sums have an order in the default mode, too.
        results = self.emulator.run(self.plan, self.arrays | put, self.seed)
        names = ("d_query", "d_key", "d_value")
        found = {name: results[name].astype(np.float32) for name in names}
        of_scores = score_mod.gradients(self.spec, self.operands, results, None)
        return found | {f"d_{name}": np.asarray(x) for name, x in of_scores.items()}

    def forward(self, put, reached):
        """`out` and `lse` of those rows that see what isn't finite."""
        rows = reached.queries.transpose(0, 2, 1)
        out, lse = self.arrays["out"].copy(), self.arrays["lse"].copy()
        if "query" in put or "key" in put:
            query, key = (put.get(name, self.arrays[name]).astype(np.float64) for name in ("query", "key"))
            key = np.repeat(key, query.shape[2] // key.shape[2], 2)
            with np.errstate(invalid="ignore"):
                scores = np.where(self.sees, np.einsum("btnh,bsnh->bnts", query, key), -1.0)
            bad = np.isnan(scores) | (scores == np.inf)
            if self.case.soft_cap:
                bad |= np.isinf(scores)
            bad = bad.any(-1)
            hidden = ~bad & (np.where(self.sees, scores, -np.inf) == -np.inf).all(-1)
            lse[rows & bad] = np.nan
            lse[rows & hidden] = -np.inf
            by_query = (rows & bad).transpose(0, 2, 1), (rows & hidden).transpose(0, 2, 1)
            out[by_query[0]] = np.nan
            out[by_query[1]] = 0
        if "value" in put:
            value = put["value"].astype(np.float64)
            of_keys = ~np.isfinite(value).all((-1, -2))[:, None, None]
            out[(self.sees & of_keys).any(-1).transpose(0, 2, 1)] = np.nan
        return {"out": out, "lse": lse}


def check(case, got, clean, reached, run, is_nan, what):
    """Compares a run with the clean one."""
    places = {"d_query": reached.queries, "d_key": reached.keys, "d_value": reached.keys}
    for name, is_reached in places.items():
        assert np.isfinite(clean[name]).all()
        np.testing.assert_array_equal(got[name][~is_reached], clean[name][~is_reached], f"{name}, {what}")
        if is_nan and is_reached.any():
            assert np.isnan(got[name][is_reached]).any(-1).all(), f"{name} hides {what}"
    rows = reached.queries.transpose(0, 2, 1)
    if case.bias == "BNTS":
        hidden = ~rows[..., None] | ~run.sees
        np.testing.assert_array_equal(got["d_bias"][hidden], clean["d_bias"][hidden], what)
    if case.bias == "1N1S":
        columns = ~reached.keys.any(0).T  # K = N
        got_bias, clean_bias = (x["d_bias"][0, :, 0] for x in (got, clean))
        np.testing.assert_array_equal(got_bias[columns], clean_bias[columns], what)
    if case.alibi:
        heads = ~rows.any(-1)
        got_slopes, clean_slopes = (np.broadcast_to(x["d_alibi_slopes"], heads.shape) for x in (got, clean))
        heads = heads if case.alibi == "BN" else np.broadcast_to(heads.all(0), heads.shape)
        np.testing.assert_array_equal(got_slopes[heads], clean_slopes[heads], what)
