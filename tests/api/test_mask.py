"""The mask description against its definition over whole matrices, for ints, NumPy arrays and tracers."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import _mask
from jax_flash._mask import BlockRange, PositionMask, Window
from jax_flash._spec import AttentionSpec, Sizes

SHAPES = [(1, 1), (10, 10), (7, 23), (23, 7), (1, 30), (30, 1)]
SIDES = (None, -40, -4, -1, 0, 2, 5, 40)
NON_NEGATIVE_SIDES = (None, 0, 2, 5, 40)
TILE, BLOCK = 4, 3


def size_of(T, S):
    return Sizes(B=1, T=T, S=S, N=1, K=1, H=8, V=8)


def defined(T, S, left=None, right=None, queries=None, keys=None):
    """Which keys each query sees, as `flash_attention`'s docstring has it: bool `(T, S)`."""
    queries, keys = T if queries is None else queries, S if keys is None else keys
    i, j = np.arange(T)[:, None], np.arange(S)[None]
    seen = (i < queries) & (j < keys)
    if left is not None:
        seen &= i + keys - queries - left <= j
    if right is not None:
        seen &= j <= i + keys - queries + right
    return seen


def mask_of(T, S, left=None, right=None, queries=None, keys=None) -> PositionMask:
    return _mask.keys_of_queries(AttentionSpec(1.0, left, right), size_of(T, S), queries, keys)


def both_ways(T, S, left, right):
    """The mask and what it is to show: with queries as rows, and with keys."""
    mask, seen = mask_of(T, S, left, right), defined(T, S, left, right)
    return (mask, seen), (mask.transposed(), seen.T)


def check_block_range(found: BlockRange, seen_by_tile: np.ndarray, columns: int) -> None:
    """`seen_by_tile` is bool `(rows of the tile that are there, columns)`."""
    first, last, full_begin, full_end = (int(x) for x in dataclasses.astuple(found))
    assert 0 <= first <= full_begin <= full_end <= last <= -(-columns // BLOCK)
    assert not seen_by_tile[:, : first * BLOCK].any() and not seen_by_tile[:, last * BLOCK :].any()
    assert seen_by_tile[:, full_begin * BLOCK : full_end * BLOCK].all()
    assert full_begin == full_end or full_end * BLOCK <= columns


@pytest.mark.parametrize("T,S", SHAPES)
def test_a_window_is_normalised_to_the_sides_that_bind(T, S):
    sides = [None, -(2**40), -20, -4, -1, 0, 1, 2, 4, 7, 9, 2**40]
    for left, right in itertools.product(sides, sides):
        got = Window(left, right).normalised(T, S)
        np.testing.assert_array_equal(defined(T, S, got.left, got.right), defined(T, S, left, right))
        for side, alone in (("left", (left, None)), ("right", (None, right))):
            assert (getattr(got, side) is None) == defined(T, S, *alone).all()
            assert getattr(got, side) is None or abs(getattr(got, side)) <= max(T, S)


@pytest.mark.parametrize("left", SIDES)
@pytest.mark.parametrize("right", SIDES)
def test_a_normalised_window_means_the_same_for_shorter_sequences(left, right):
    T, S = 9, 11
    got = Window(left, right).normalised(T, S)
    for queries, keys in itertools.product((0, 1, 5, 9), (0, 1, 5, 11)):
        np.testing.assert_array_equal(
            defined(T, S, got.left, got.right, queries, keys), defined(T, S, left, right, queries, keys)
        )


@pytest.mark.parametrize("left", (None, -1, 0, 3))
@pytest.mark.parametrize("right", (None, -2, 0, 2))
@pytest.mark.parametrize("shift", (-20, -3, 0, 2, 20))
def test_a_shifted_diagonal_as_data(shift, left, right):
    """The shapes alone neither normalise the window nor say which rows see something."""
    T, S, queries, keys = 9, 11, 7, 10
    data = (jnp.int32(x) for x in (queries, keys, shift))
    of_queries = _mask.keys_of_queries(AttentionSpec(1.0, left, right), size_of(T, S), *data)
    moved = (None if left is None else left - shift, None if right is None else right + shift)
    seen = defined(T, S, *moved, queries, keys)
    for mask, wanted in ((of_queries, seen), (of_queries.transposed(), seen.T)):
        rows, columns = np.ix_(*map(np.arange, wanted.shape))
        np.testing.assert_array_equal(np.broadcast_to(mask.visible(rows, columns), wanted.shape), wanted)
        for first_row in range(0, wanted.shape[0], TILE):
            found = mask.block_range(jnp.int32(first_row), TILE, BLOCK)
            check_block_range(found, wanted[first_row : first_row + TILE], wanted.shape[1])
    assert int(of_queries.diagonal) == keys - queries + shift == -int(of_queries.transposed().diagonal)
    visited = of_queries.block_range(0, of_queries.rows, S)
    if not Window(left, right).hides_all:
        assert bool(visited.first < visited.last) == seen.any()


def test_causal_hides_keys_behind_the_diagonal_and_shows_no_more():
    assert Window(3, None).causal() == Window(3, 0)
    assert Window(None, 5).causal() == Window(None, 0)
    assert Window(None, -2).causal() == Window(None, -2)


@pytest.mark.parametrize("T,S", SHAPES)
@pytest.mark.parametrize("left,right", [(None, 0), (3, 1), (0, None), (-1, 4)])
def test_a_window_from_the_top_left(T, S, left, right):
    distance = np.arange(S) - np.arange(T)[:, None]
    expected = (distance >= (-np.inf if left is None else -left)) & (
        distance <= (np.inf if right is None else right)
    )
    moved = Window(left, right).from_top_left(T, S)
    np.testing.assert_array_equal(defined(T, S, moved.left, moved.right), expected)


@pytest.mark.parametrize("T,S", SHAPES)
@pytest.mark.parametrize("kind", ["python", "numpy", "traced"])
def test_block_ranges_hold_what_is_seen(T, S, kind):
    for left, right in itertools.product(SIDES, SIDES):
        for mask, seen in both_ways(T, S, left, right):
            first_rows = np.arange(0, mask.rows, TILE)
            if kind == "python":
                ranges = [mask.block_range(int(row), TILE, BLOCK) for row in first_rows]
                assert all(type(x) is int for found in ranges for x in dataclasses.astuple(found))
            else:
                rows = first_rows if kind == "numpy" else jnp.asarray(first_rows, jnp.int32)
                found = mask.block_range(rows, TILE, BLOCK)
                ranges = np.stack([np.broadcast_to(x, rows.shape) for x in dataclasses.astuple(found)], 1)
                ranges = [BlockRange(*found) for found in ranges]
            for row, found in zip(first_rows, ranges, strict=True):
                check_block_range(found, seen[row : row + TILE], mask.columns)


@pytest.mark.parametrize("T,S", SHAPES)
def test_block_counts_are_those_of_exact_ranges(T, S):
    for left, right in itertools.product(NON_NEGATIVE_SIDES, NON_NEGATIVE_SIDES):
        for mask, seen in both_ways(T, S, left, right):
            blocks = [seen[row : row + TILE].any(0) for row in range(0, mask.rows, TILE)]
            blocks = [{column // BLOCK for column in np.flatnonzero(columns)} for columns in blocks]
            expected = tuple(max(found) - min(found) + 1 if found else 0 for found in blocks)
            assert mask.block_counts(TILE, BLOCK) == expected


@pytest.mark.parametrize("left", (None, -1, 0, 3))
@pytest.mark.parametrize("right", (None, -2, 0, 2))
@pytest.mark.parametrize("queries,keys", [(7, 11), (0, 5), (9, 0), (3, 2), (9, 11)])
def test_lengths_as_data(queries, keys, left, right):
    T, S = 9, 11
    of_queries = mask_of(T, S, left, right, jnp.int32(queries), jnp.int32(keys))
    seen = defined(T, S, left, right, queries, keys)
    for mask, wanted in ((of_queries, seen), (of_queries.transposed(), seen.T)):
        rows, columns = np.ix_(*map(np.arange, wanted.shape))
        np.testing.assert_array_equal(np.broadcast_to(mask.visible(rows, columns), wanted.shape), wanted)
        for first_row in range(0, wanted.shape[0], TILE):
            found = mask.block_range(jnp.int32(first_row), TILE, BLOCK)
            tile = wanted[first_row : first_row + TILE]
            check_block_range(found, tile, wanted.shape[1])
            if min(left or 0, right or 0) >= 0:
                assert (found.first < found.last) == tile.any()


def test_block_counts_of_known_tiles():
    def counts(T, S, left, right, rows=128):
        return list(_mask.position_mask(Window(left, right), T, S).block_counts(rows, 128))

    assert counts(400, 400, None, None) == [4, 4, 4, 4]
    assert counts(400, 400, None, 0) == [1, 2, 3, 4]
    assert counts(400, 400, 100, 0) == [1, 2, 2, 2]
    assert counts(400, 400, None, 0, rows=32) == [1] * 4 + [2] * 4 + [3] * 4 + [4]
    assert counts(400, 100, None, 0) == [0, 0, 1, 1]


def test_lengths_of_every_batch_row_at_once():
    queries, keys = (jnp.array(x, jnp.int32) for x in ([9, 3, 0], [11, 4, 7]))
    mask = mask_of(9, 11, 2, 0, queries, keys)
    rows, columns = np.arange(9).reshape(1, 9, 1), np.arange(11).reshape(1, 1, 11)
    expected = np.stack([defined(9, 11, 2, 0, *lengths) for lengths in zip(queries, keys, strict=True)])
    np.testing.assert_array_equal(mask.with_axes(2).visible(rows, columns), expected)
    first, last = jax.jit(lambda row: mask.block_range(row, TILE, BLOCK).union())(jnp.int32(0))
    some = np.flatnonzero(expected[:, :TILE].any((0, 1)))
    assert (int(first), int(last)) == (some[0] // BLOCK, some[-1] // BLOCK + 1)


def test_the_union_of_nothing_is_empty():
    none = jnp.zeros(2, jnp.int32)
    assert tuple(map(int, BlockRange(none + 3, none, none, none).union())) == (0, 0)
    assert BlockRange(0, 5, 0, 5).union() == (0, 5)


def test_a_side_that_binds_nowhere_costs_nothing():
    mask = mask_of(257, 300, left=299, right=256)
    assert mask.unbounded
    assert mask.visible(np.arange(5), np.arange(5)) is None
    assert mask.visible_columns(np.arange(5)) == (None, None)
    assert mask.block_range(jnp.int32(0), 64, 100) == BlockRange(0, 3, 0, 3)


@pytest.mark.parametrize("T,S", SHAPES)
def test_counts_of_rows_and_columns(T, S):
    for left, right in itertools.product(SIDES, SIDES):
        mask, seen = mask_of(T, S, left, right), defined(T, S, left, right)
        assert mask.mean_visible_columns() == pytest.approx(seen.sum(axis=1).mean())
        assert mask.every_row_sees_a_column() == seen.any(axis=1).all()
        in_front = ~defined(T, S, None, right).any(axis=1)
        assert mask.rows_before_first_column() == in_front.sum() == np.argmin([*in_front, False])


def test_visible_columns_and_their_end():
    mask = mask_of(9, 11, left=3, right=1)
    rows = jnp.arange(9)
    begin, end = mask.visible_columns(rows, has_tail=True)
    seen = defined(9, 11, 3, 1)
    np.testing.assert_array_equal(np.maximum(begin, 0), seen.argmax(1))
    np.testing.assert_array_equal(end, 11 - seen[:, ::-1].argmax(1))
    _, end = mask_of(9, 11).visible_columns(rows, has_tail=True)
    np.testing.assert_array_equal(end, np.full(9, 11))


def test_ranges_of_one_tile_by_another():
    tile, own = BlockRange(2, 9, 4, 7), BlockRange(1, 8, 3, 8)
    assert own.full_within(tile) == BlockRange(2, 9, 3, 8)
    assert own.within(2, 5) == BlockRange(2, 5, 3, 5)
    assert own.within(9, 12) == BlockRange(9, 9, 9, 9)
    assert tile.reversed() == BlockRange(2, 9, 4, 7)
    assert BlockRange(2, 9, 2, 5).reversed() == BlockRange(2, 9, 6, 9)


def test_blocks_that_share_a_segment():
    queries = jnp.repeat(jnp.array([[0, 1, 2, 5]], jnp.int32), 4, axis=1)
    keys = jnp.array([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 3, 3]], jnp.int32)
    of_queries, of_keys = (_mask.segment_id_ranges(ids, 4) for ids in (queries, keys))
    found = _mask.blocks_sharing_segments(*of_queries, *(x[:, None] for x in of_keys))
    np.testing.assert_array_equal(np.stack(found), [[[0, 1, 2, 0]], [[1, 3, 3, 0]]])
    found = _mask.blocks_sharing_segments(*of_keys, *(x[:, None] for x in of_queries))
    np.testing.assert_array_equal(np.stack(found), [[[0, 1, 1, 0]], [[1, 2, 3, 0]]])


def test_a_window_that_hides_all_leaves_no_key_between_its_sides():
    for left, right in itertools.product(SIDES, SIDES):
        distance = np.arange(-100, 101)
        seen = (distance >= (-100 if left is None else -left)) & (
            distance <= (100 if right is None else right)
        )
        assert Window(left, right).hides_all == (not seen.any())
