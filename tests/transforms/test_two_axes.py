"""Sequences over two mesh axes: Ulysses over the second, a ring or an all-gather over the first."""

import re

import jax
import pytest
from attention_case import Case
from exhaustive import thorough
from sharded_calls import ShardedCalls, arrays, attend, drawn_call

EVERYTHING = (
    "logits_soft_cap alibi_slopes sinks dropout segment_ids seq_lengths bias mask:BNTS deterministic".split()
)
LAYOUTS = [(strategy, kind) for strategy in ("ring", "all_gather") for kind in (None, "zigzag")]


@pytest.mark.parametrize(
    "calls",
    [
        ((2, 2), LAYOUTS[0], "float32"),
        ((2, 4), LAYOUTS[1], "float32"),
        *thorough(
            ((4, 2), LAYOUTS[1], "float32"),
            ((4, 2), LAYOUTS[2], "float32"),
            ((2, 4), LAYOUTS[3], "bfloat16"),
            ((1, 4), LAYOUTS[1], "float32"),
            ((4, 1), LAYOUTS[3], "float32"),
        ),
    ],
    ids=str,
)
def test_every_option_at_once(calls):
    shards, layout, dtype = calls
    case = Case(
        "two axes", dtype, T=48, S=48, N=8, K=2, H=8, features=tuple(EVERYTHING), is_causal=True,
        local_window_size=(20, None),
    )  # fmt: skip
    ShardedCalls(shards, *layout).check(case)


@pytest.mark.parametrize("seed", (*range(2), *thorough(*range(2, 40))))
def test_drawn(seed):
    case, calls = drawn_call(seed)
    if calls.strategy == "ulysses":
        calls.strategy = "ring"
    if calls.kind == "striped":
        calls.kind = "zigzag"
    calls.shards = ((2, 2), (2, 4), (4, 2))[seed % 3]
    try:
        calls.check(case)
    except NotImplementedError as refused:
        assert re.search("query heads must be divisible|must have an axis of", str(refused))


def test_exchanges_over_one_axis_and_passes_on_over_the_other():
    query, key, value = arrays(T=32, N=4, K=2)
    program = jax.jit(
        lambda *x: attend(dict(zip(("query", "key", "value"), x, strict=True)), (2, 2), "ring", None)
    )
    text = program.lower(query, key, value).compile().as_text()
    assert "all-to-all" in text
    assert "collective-permute" in text
    assert "all-gather" not in text


@pytest.mark.parametrize(
    ("message", "layout", "heads"),
    [
        ("over two mesh axes it goes over the second", ("ulysses", None), 4),
        ('load_balance "striped" goes with one mesh axis', ("ring", "striped"), 4),
        ("the 3 query heads must be divisible by the 2 devices", ("ring", None), 3),
    ],
)
def test_what_is_refused(message, layout, heads):
    query, key, value = arrays(N=heads, K=1)
    with pytest.raises(NotImplementedError, match=message):
        attend({"query": query, "key": key, "value": value}, (2, 2), *layout)
