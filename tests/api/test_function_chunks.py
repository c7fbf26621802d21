"""Functions of users on chunks of sequences, and on packed ones: the same values at other indices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash._block_kinds import Kind
from jax_flash._spec import AttentionSpec, BlockMaskSpec, Operands
from jax_flash.context_parallel import functions
from jax_flash.context_parallel.load_balance import Chunk
from jax_flash.functions.chunks import on_chunks
from jax_flash.functions.graph import LOAD, reachable
from jax_flash.functions.scopes import Scope, scope
from jax_flash.functions.static import flat, static_mask_mod, static_score_mod
from jax_flash.functions.varlen import on_varlen_tokens

TABLE, IDS = jnp.linspace(-1, 1, 99), jnp.arange(40) // 7


def of_table(table):
    return lambda score, b, h, q, k: score * table[q] + table[k + h] * jnp.tanh(score)


def with_a_sort(table):
    """No graph of scalars, so JAX evaluates it."""
    return lambda score, b, h, q, k: jnp.sort(jnp.stack([score, table[q], table[k + h]]))[1]


def documents(ids):
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


FUNCTIONS = {
    "score": static_score_mod(of_table(TABLE)),
    "sort": static_score_mod(with_a_sort(TABLE)),
    "mask": static_mask_mod(documents(IDS)),
}


def indices(queries, keys):
    """Of all pairs: `(batch, query, key)` axes."""
    return {
        "score": jnp.linspace(-2, 2, len(queries) * len(keys)).reshape(1, len(queries), len(keys)),
        "batch": jnp.zeros((1, 1, 1), jnp.int32),
        "head": jnp.full((1, 1, 1), 3, jnp.int32),
        "query": jnp.asarray(queries, jnp.int32)[None, :, None],
        "key": jnp.asarray(keys, jnp.int32)[None, None],
    }


@pytest.mark.parametrize(("first_query", "first_key", "stride"), [(0, 0, 1), (20, 8, 1), (3, 1, 4)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name, first_query, first_key, stride):
    """By its graph and by its jaxpr; with the gradient of what it captures."""
    function, arrays = FUNCTIONS[name]
    own, captured = on_chunks(function, stride), [flat(x) for x in arrays]
    starts = jnp.array([[first_query, first_key]], jnp.int32)
    local = indices(range(6), range(9))
    whole = indices(first_query + stride * np.arange(6), first_key + stride * np.arange(9))
    expected = function(whole, captured)
    for call in (own, own.by_jax):
        np.testing.assert_allclose(call(local, [*captured, starts]), expected, rtol=1e-6)
    assert own.inputs >= function.inputs
    if name != "mask":
        arguments = jnp.cos(whole["score"]), lambda x: x
        results = own.pullback(local, [*captured, starts], *arguments)
        jax.tree.map(np.testing.assert_array_equal, results, function.pullback(whole, captured, *arguments))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_packed_tokens(name):
    """Of each token the function sees the sequence and the position there, by its graph and by its jaxpr."""
    function, arrays = FUNCTIONS[name]
    captured = [flat(x) for x in arrays]
    sequences, queries, keys = (jnp.asarray(x, jnp.int32) for x in ([0, 0, 2], [4, 5, 0], [3, 4, 0, 1]))
    own = on_varlen_tokens(function, 3, 4)
    whole = indices(queries, keys) | {"batch": sequences[None, :, None]}
    local, tokens = indices(range(3), range(4)), [x[None] for x in (sequences, queries, keys)]
    for call in (own, own.by_jax):
        np.testing.assert_allclose(call(local, [*captured, *tokens]), function(whole, captured), rtol=1e-6)
    if name != "mask":
        arguments = jnp.cos(whole["score"]), lambda x: x
        results = own.pullback(local, [*captured, *tokens], *arguments)
        jax.tree.map(np.testing.assert_array_equal, results, function.pullback(whole, captured, *arguments))
    assert own == on_varlen_tokens(function, 3, 4) != on_varlen_tokens(function, 4, 3)


def test_places_of_varlen_tokens_are_read_once_a_row():
    """Or a column: they don't make a function look an array up for each score."""
    function = on_varlen_tokens(static_score_mod(lambda score, b, h, q, k: score * b - (q - k))[0], 9, 9)
    loads = [node for node in reachable([function.value]) if node.operation == LOAD]
    assert sorted(scope(node).name for node in loads) == ["COLUMN", "ROW", "ROW"]
    assert not function.looks_up_each_score


def test_equal_functions_on_chunks_are_equal():
    """Closures over other arrays are one; another stride, and another function, is another."""
    first, second = (on_chunks(static_score_mod(of_table(x))[0], 1) for x in (TABLE, TABLE + 1))
    assert first == second and hash(first) == hash(second) and repr(first) == repr(second)
    sort, _ = FUNCTIONS["sort"]
    assert on_chunks(sort, 1) == on_chunks(sort, 1)
    assert (
        len({first, on_chunks(FUNCTIONS["score"][0], 2), on_chunks(sort, 1), sort, FUNCTIONS["score"][0]})
        == 5
    )


def test_starts_are_read_once_a_tile():
    """They don't make a function look an array up for each score."""
    function = on_chunks(static_score_mod(lambda score, b, h, q, k: score - (q - k))[0], 4)
    loads = [node for node in reachable([function.value]) if node.operation == LOAD]
    assert {scope(node) for node in loads} == {Scope.TILE} and len(loads) == 2
    assert not function.looks_up_each_score


@pytest.mark.parametrize("block_size", [(4, 4), (6, 8), (40, 3)])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        (Chunk(8, 1, 8), Chunk(16, 1, 8)),
        (Chunk(15, 1, 15), Chunk(0, 1, 40)),
        (Chunk(2, 4, 10), Chunk(1, 4, 10)),
    ],
)  # fmt: skip
def test_kinds_of_the_blocks_of_chunks(queries, keys, block_size):
    """Those of all their pairs, or partial."""
    sizes = -(-40 // block_size[0]), -(-40 // block_size[1])
    kinds = jnp.asarray(np.random.default_rng(0).integers(0, 3, (2, 3, *sizes)), jnp.int8)
    mask_mod, captured = FUNCTIONS["mask"]
    spec = AttentionSpec(1.0, block_mask=BlockMaskSpec(block_size, mask_mod))
    own = functions.placed(spec, operands(kinds, captured), queries, keys)
    np.testing.assert_array_equal(own.captured["mask_mod_1"], [[queries.first, keys.first]])
    assert own.block_kinds is not None and own.block_kinds.dtype == jnp.int8
    of_pairs = np.repeat(np.repeat(kinds, block_size[0], 2), block_size[1], 3)
    of_pairs = of_pairs[:, :, np.asarray(queries.positions)][..., np.asarray(keys.positions)]
    rows, columns = (
        range(0, chunk.length, size) for chunk, size in zip((queries, keys), block_size, strict=True)
    )
    assert own.block_kinds.shape == (2, 3, len(rows), len(columns))
    is_whole = functions.refusal(
        AttentionSpec(1.0, block_mask=BlockMaskSpec(block_size, None)), queries, keys
    )
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            block = of_pairs[:, :, row : row + block_size[0], column : column + block_size[1]]
            for kind in (Kind.HIDDEN, Kind.FULL):
                found, right = own.block_kinds[:, :, i, j] == kind, (block == kind).all((2, 3))
                # A stripe may leave out blocks between its tokens, which count.
                assert (found <= right).all() if queries.stride > 1 else (found == right).all()
            if is_whole is None:
                np.testing.assert_array_equal(own.block_kinds[:, :, i, j], block[:, :, 0, 0])


def operands(kinds, captured):
    x = jnp.zeros((2, 1, 1, 1))
    return Operands(x, x, x, block_kinds=kinds, captured={"mask_mod_0": flat(captured[0])})
