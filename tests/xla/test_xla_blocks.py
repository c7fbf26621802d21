"""How the portable implementation cuts a call into blocks, and which of them it visits."""

import itertools

import jax
import numpy as np
import pytest
from exhaustive import in_turn
from xla_calls import check, cotangents, qkv, run

from jax_flash import _reference, xla
from jax_flash._device import CPU, H100
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.xla import blocks


def plan(B, T, S, N, right=None, device=CPU):
    query, key = (jax.ShapeDtypeStruct((B, length, N, 64), np.float32) for length in (T, S))
    return blocks.plan(AttentionSpec(1.0, right=right), Operands(query, key, key), device)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 2048, 2049, 5000])
def test_blocks_cover_an_axis_once(length):
    axis = plan(1, length, length, 1, right=0).keys
    assert axis.size <= max(blocks.KEYS_PER_BLOCK, 256**2 // length)
    fresh = []
    for index in range(axis.count):
        positions = np.asarray(axis.positions(index))
        mask = axis.fresh(index)
        fresh.extend(positions if mask is None else positions[np.asarray(mask)])
        assert positions.min() >= 0
    np.testing.assert_array_equal(fresh, np.arange(length))


@pytest.mark.parametrize(("T", "S"), [(1, 10_000), (10_000, 1)])
def test_a_short_sequence_gets_long_blocks_of_the_other(T, S):
    cut = plan(1, T, S, 4)
    assert (cut.queries.count, cut.keys.count) == (1, 1)


@pytest.mark.parametrize("right", [None, 0], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("B", "N", "device", "in_parts"),
    [
        (1, 8, CPU, False),
        (64, 8, CPU, True),
        (17, 2, CPU, True),
        (16, 8, H100, False),
    ],
)
def test_a_large_batch_is_taken_in_parts(B, N, device, in_parts, right):
    cut = plan(B, 4096, 4096, N, right, device)
    assert B % cut.batch.size == 0
    assert (cut.batch.count > 1) == in_parts
    if device == CPU:
        at_once = cut.batch.size * N * cut.queries.size * cut.keys.size
        assert at_once <= 2 * blocks.LOGITS_PER_BLOCK["cpu"]


SEGMENTS = ("sorted", "descending", "interleaved", "shuffled", "nothing in common")


def with_segments(operands, how):
    """Ids of segments of uneven length; of two batch rows the second has fewer."""
    draw = np.random.default_rng(1)

    def ids(tokens):
        rows = [np.sort(draw.integers(0, count, tokens)) for count in (7, 3)]
        rows = np.array(rows, np.int32)
        match how:
            case "descending":
                rows = rows[:, ::-1]
            case "interleaved":
                rows = np.stack([np.arange(tokens) % 3, 5 - rows[1]]).astype(np.int32)
            case "shuffled":
                rows = draw.permuted(rows, axis=1)
        return rows

    apart = 100 * (how == "nothing in common")
    T, S = operands.query.shape[1], operands.key.shape[1]
    return operands.replace(query_segment_ids=ids(T) - apart, key_value_segment_ids=ids(S))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("diagonal", "window", "has_lengths"),
    in_turn(itertools.product([(0, 64), (-130, 40), (31,)], [(None, 0), (5, 20), (40, None)]), [False, True]),
)
def test_a_diagonal_of_each_batch_row(draw, diagonal, window, has_lengths):
    operands = qkv(draw, T=97, S=130).replace(diagonal=np.array(diagonal, np.int32)[:, None])
    operands = operands.replace(alibi_slopes=draw.uniform(0.01, 0.5, (1, 4)).astype(np.float32))
    if has_lengths:
        lengths = {name: np.array(x, np.int32) for name, x in (("query", (97, 60)), ("key_value", (90, 130)))}
        operands = operands.replace(**{f"{name}_seq_lengths": x for name, x in lengths.items()})
    check(AttentionSpec(0.3, *window, return_residual=True), operands, *cotangents(draw, operands))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("window", [(None, 0), (30, 10)])
@pytest.mark.parametrize("diagonals", [((-60, 70),), ((-60, -20, 10, 80), (0, 0, 0, 200))])
def test_a_diagonal_of_each_part_of_the_queries(draw, diagonals, window):
    operands = qkv(draw, T=96, S=130).replace(diagonal=np.array(diagonals, np.int32))
    operands = operands.replace(
        alibi_slopes=draw.uniform(0.01, 0.5, (1, 4)).astype(np.float32),
        bias=draw.standard_normal((1, 1, 96, 130)).astype(np.float32),
        query_segment_ids=draw.integers(0, 2, (2, 96)).astype(np.int32),
        key_value_segment_ids=draw.integers(0, 2, (2, 130)).astype(np.int32),
    )
    check(AttentionSpec(0.3, *window, return_residual=True), operands, *cotangents(draw, operands))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("window", [(None, 0), (20, 0), (0, 30), (None, None)])
@pytest.mark.parametrize("lengths", [None, ((70, 100), (90, 90)), ((10, 0), (0, 33)), *SEGMENTS])
@pytest.mark.parametrize(("T", "S"), [(97, 130), (130, 97)])
def test_visits_the_blocks_that_are_needed_and_no_others(window, lengths, T, S):
    operands = qkv(np.random.default_rng(0), T=T, S=S)
    exact = lengths is None
    if isinstance(lengths, str):
        operands = with_segments(operands, lengths)
        exact = lengths == "sorted" and window == (None, None)
    elif lengths is not None:
        queries, keys = (np.minimum(np.array(x, np.int32), n) for x, n in zip(lengths, (T, S), strict=True))
        operands = operands.replace(query_seq_lengths=queries, key_value_seq_lengths=keys)
    spec = AttentionSpec(1.0, *window)
    allowed = np.asarray(_reference._allowed(spec, operands)).any((0, 1))
    cut = blocks.plan(spec, operands, CPU)
    for query_block in range(cut.queries.count):
        rows = allowed[np.asarray(cut.queries.positions(query_block))]
        columns = [cut.keys.positions(key_block) for key_block in range(cut.keys.count)]
        fresh = [cut.keys.fresh(key_block) for key_block in range(cut.keys.count)]
        needed = [
            index
            for index in range(cut.keys.count)
            if rows[:, np.asarray(columns[index])][:, np.asarray(fresh[index])].any()
        ]
        first, end = map(int, blocks.key_blocks(spec, operands, cut, query_block))
        assert all(first <= index < end for index in needed)
        if needed and exact:
            assert (first, end) == (needed[0], needed[-1] + 1)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("how", "right"), in_turn(SEGMENTS, [None, 0]))
def test_segments_of_every_kind(draw, how, right):
    operands = with_segments(qkv(draw, T=130, S=150), how)
    check(AttentionSpec(0.3, right=right), operands, *cotangents(draw, operands))


@pytest.mark.usefixtures("small_blocks")
def test_key_blocks_of_other_segments_are_not_computed(draw):
    """Numbers that would spoil all they are multiplied with, be it by 0, have no effect."""
    operands = qkv(draw, T=64, S=4 * 48)
    query_ids = np.repeat([[2, 3], [2, 2]], 32, axis=1)
    key_ids = np.repeat([[1, 2, 3, 4], [1, 2, 2, 5]], 48, axis=1)
    poisoned = np.repeat([True, False, False, True], 48)[:, None, None]
    operands = operands.replace(query_segment_ids=query_ids, key_value_segment_ids=key_ids)
    spoilt = operands.replace(
        key=np.where(poisoned, np.nan, operands.key), value=np.where(poisoned, np.nan, operands.value)
    )
    d_out, d_lse = cotangents(draw, operands)
    run.clear_cache()
    spec = AttentionSpec(0.3)
    for result, expected in zip(
        jax.tree.leaves(run(spec, spoilt, d_out, d_lse)),
        jax.tree.leaves(run(spec, operands, d_out, d_lse)),
        strict=True,
    ):
        np.testing.assert_array_equal(result, expected)


def test_describes_its_blocks():
    operands = qkv(np.random.default_rng(0), T=1024, S=2048)
    assert xla.supports(AttentionSpec(1.0), operands, CPU) is None
    assert "256 queries by 256 keys" in xla.describe(AttentionSpec(1.0, right=0), operands, CPU)
