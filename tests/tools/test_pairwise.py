"""The rows hold every pair, and a fault where two features meet fails the suite that runs them."""

import types

import call_factors
import pairwise_suite
import pytest
from flawed import add_flawed_implementation
from pairwise import allowed_pairs, covering_rows, pairs
from refusals import count_refused

FACTORS = call_factors.factors(("float32", "bfloat16"), ((12, 12), (9, 14)), (16, 8), 24)


def every_pair(rows):
    return {frozenset(pair) for row in rows for pair in pairs(row)}


def test_every_pair_that_may_meet_does_and_no_other():
    allowed = allowed_pairs(FACTORS, call_factors.may_meet)
    rows = covering_rows(FACTORS, call_factors.may_meet)
    assert every_pair(rows) == {frozenset(pair) for pair in allowed}
    never = {frozenset(pair) for pair in call_factors.NEVER_MEET}
    assert never and never <= every_pair([dict(pair) for pair in allowed_pairs(FACTORS, lambda *_: True)])
    assert not never & every_pair(rows)


def test_rows_are_few_and_always_the_same():
    rows = covering_rows(FACTORS, call_factors.may_meet)
    assert rows == covering_rows(FACTORS, call_factors.may_meet)
    sizes = {name: len(values) for name, values in FACTORS.items()}
    # No fewer hold the pairs of mask and bias; varlen sequences go with neither, and have rows of their own.
    assert len(rows) <= 1.1 * sizes["mask"] * sizes["bias"] + sizes["packed"] * sizes["window"]


def test_two_factors_have_a_row_for_each_pair():
    rows = covering_rows({"a": "xyz", "b": "uv"}, lambda *_: True)
    assert [(row["a"], row["b"]) for row in rows] == [(x, y) for x in "xyz" for y in "uv"]


class Flawed(pairwise_suite.PairwiseSuite):
    implementation = "flawed"
    dtypes = ("float32", "bfloat16")
    lengths = ((12, 12), (9, 14))
    head_dims = (16,)


@pytest.fixture(name="flawed")
def with_flawed(monkeypatch):
    add_flawed_implementation(monkeypatch)
    return Flawed()


def ignore(name, value):
    """In the place of `record_property`."""


def test_a_fault_of_two_features_together_is_found(flawed):
    runs, _ = pairwise_suite.cases(flawed, flawed.factors())
    faulty = [case for case in runs if {"logits_soft_cap", "sinks"} <= set(case.features)]
    # In float32: bounds of a bias's gradient know what rounding the output does to delta, and plain attention
    # finds delta before it rounds.
    sound = [x for x in runs if x not in faulty and len(x.features) > 5 and x.dtype == "float32"]
    with pytest.raises(AssertionError, match=r"lse: error .* over"):
        flawed.test_matches_the_definition_or_is_refused(faulty[0], ignore)
    flawed.test_matches_the_definition_or_is_refused(sound[0], ignore)


def test_what_is_refused_is_checked_to_be(flawed):
    runs, refused = pairwise_suite.cases(flawed, flawed.factors())
    alone, together = refused
    assert alone.features == ("segment_ids",)
    assert (together.dtype, together.features) == ("bfloat16", ("dropout",))
    assert not any(flawed.refusal(case) for case in runs)
    reports = []
    for case in refused:
        properties = {}
        flawed.test_matches_the_definition_or_is_refused(case, properties.__setitem__)
        reports.append(types.SimpleNamespace(passed=True, user_properties=properties.items()))
    counts = count_refused([*reports, types.SimpleNamespace(passed=True, user_properties=[])])
    assert counts == {"flawed": {"no segments": 1, "no dropout of bfloat16": 1}}
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        flawed.check_refused(runs[0], "no segments")
