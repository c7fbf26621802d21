"""All-gathers for narrow windows: exact, and sending what the window reaches, in zigzag order too."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
import transform_cases as cases
from attention_case import Case
from exhaustive import one_in, thorough
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sharded_calls import (
    AXIS,
    ShardedCalls,
    arrays,
    count,
    reorder,
    restore,
    sequence_mesh,
    sharded_call,
    with_gradients,
)

import jax_flash
from jax_flash.context_parallel import gather


def rows_sent(program):
    """How many keys each transfer to a neighbour has. Keys and values are (*, 2 rows, keys, 2 heads, 8)."""
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* collective-permute(?:-start)?\(", program)
    return {int(shape.split(",")[-3]) for shape in shapes}


@pytest.mark.parametrize("window", [(5, 0), (12, 4), *thorough((0, 0), (0, 12), (12, 12), (3, 1))])
@pytest.mark.parametrize("shards", [4, *thorough(2, 8)])
def test_all_gather_sends_what_a_window_reaches(window, shards):
    """48 tokens: no keys but the neighbours', and of those no more rows than the window has."""
    call = sharded_call(shards, local_window_size=window, strategy="all_gather")
    whole = functools.partial(jax_flash.flash_attention, local_window_size=window)
    compiled = jax.jit(with_gradients(call)).lower(*arrays(T=48)).compile()
    cases.assert_close(compiled(*arrays(T=48)), with_gradients(whole)(*arrays(T=48)))
    own, reach = 48 // shards, [max(side, 0) for side in window]
    is_narrow = max(reach) <= own and own + sum(reach) < 48
    assert bool(count(compiled.as_text(), "all-gather")) != is_narrow
    if is_narrow:
        assert rows_sent(compiled.as_text()) == {side for side in reach if side > 0}


@pytest.mark.parametrize("window", [(5, 2), *thorough((0, 0), (0, 3), (4, 0), (6, 6), (7, 0))])
@pytest.mark.parametrize("shards", [4, *thorough(2, 3)])
def test_what_a_window_reaches_of_zigzags_chunks(window, shards):
    """Chunks of 6 tokens. The last device has two that are neighbours."""
    T = 12 * shards
    inputs = [reorder(x, 1, shards, "zigzag") for x in arrays(T=T)]
    call = sharded_call(shards, local_window_size=window, strategy="all_gather", load_balance="zigzag")
    whole = functools.partial(jax_flash.flash_attention, local_window_size=window)
    compiled = jax.jit(with_gradients(call)).lower(*inputs).compile()
    results = jax.tree.map(lambda x: restore(x, 1, shards, "zigzag"), compiled(*inputs))
    cases.assert_close(results, with_gradients(whole)(*arrays(T=T)))
    reach = [max(side, 0) for side in window]
    is_narrow = max(reach) <= 6 and sum(reach) < 6 * (shards - 1)
    assert bool(count(compiled.as_text(), "all-gather")) != is_narrow
    if is_narrow:
        assert rows_sent(compiled.as_text()) == {side for side in reach if side > 0}


@pytest.mark.parametrize(
    ("sizes", "left", "is_narrow"),
    one_in(
        2,
        [
            ((48, 56), 5, True),
            ((48, 40), 4, True),
            ((48, 40), 5, False),
            ((40, 48), 5, True),
            ((56, 48), 5, True),
        ],
    ),
)
def test_a_narrow_window_with_a_few_more_keys_or_queries(sizes, left, is_narrow):
    """From device to device the diagonal moves by two keys, so it reaches further into a neighbour's.

    Of 48 queries and 40 keys, the first query of the second device lies 6 keys before those of its device:
    with 5 to its left it sees 11 of other devices, and a neighbour has 10.
    """
    (query, *_), (_, key, value) = (arrays(T=size) for size in sizes)
    window = dict(local_window_size=(left, 2))
    call = sharded_call(4, strategy="all_gather", **window)
    compiled = jax.jit(with_gradients(call)).lower(query, key, value).compile()
    expected = with_gradients(functools.partial(jax_flash.flash_attention, **window))(query, key, value)
    cases.assert_close(compiled(query, key, value), expected)
    assert bool(count(compiled.as_text(), "all-gather")) != is_narrow


@pytest.mark.parametrize("kind", ["zigzag", *thorough(None)])
def test_lengths_decide_whether_a_narrow_window_gathers_all_keys(monkeypatch, kind):
    """Not if each sequence has as many keys as queries. It shows, as what is gathered is spoiled."""
    args, window = arrays(), dict(local_window_size=(4, 2))

    def both(attend, queries, keys):
        attend = functools.partial(attend, query_seq_lengths=queries, key_value_seq_lengths=keys, **window)
        return with_gradients(attend)(*args)

    def on_shards(*args, query_seq_lengths, key_value_seq_lengths, **options):
        attend = functools.partial(
            jax_flash.context_parallel_attention,
            axis_name=AXIS, strategy="all_gather", load_balance=kind, **options,
        )  # fmt: skip
        lengths = dict(query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths)
        mapped = jax.shard_map(
            lambda args, lengths: attend(*args, **lengths),
            mesh=sequence_mesh(4), in_specs=(P(None, AXIS), P()), out_specs=P(None, AXIS),
        )  # fmt: skip
        args = [reorder(x, 1, 4, kind) for x in args]
        return restore(mapped(args, lengths), 1, 4, kind)

    alike, others = jnp.array([30, 11]), jnp.array([30, 19])
    exact = jax.jit(functools.partial(both, jax_flash.flash_attention))
    sharded = jax.jit(functools.partial(both, on_shards))
    for queries, keys in ((alike, alike), (alike, others), (others, alike)):
        cases.assert_close(sharded(queries, keys), exact(queries, keys))
    gathered = gather.gathered

    def spoiled(of, axis, x):
        found = gathered(of, axis, x)
        return jnp.full_like(found, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else found

    monkeypatch.setattr(gather, "gathered", spoiled)
    sharded = jax.jit(lambda *lengths: both(on_shards, *lengths))
    cases.assert_close(sharded(alike, alike), exact(alike, alike))
    assert all(jnp.isnan(x).any() for x in jax.tree.leaves(sharded(alike, others)))


@pytest.mark.parametrize("kind", [None, "zigzag"])
def test_lengths_and_a_narrow_window_beside_an_automatic_axis(kind):
    """Devices of other batch rows could take another branch, and the compiler communicates in branches."""
    query, key, value = arrays(T=32, N=1, K=1)
    lengths = dict(query_seq_lengths=jnp.array([30, 30]), key_value_seq_lengths=jnp.array([30, 19]))
    window = dict(local_window_size=(4, 2))
    attend = functools.partial(
        jax_flash.context_parallel_attention,
        axis_name=AXIS, strategy="all_gather", load_balance=kind, **window,
    )  # fmt: skip
    mapped = jax.shard_map(
        lambda args, lengths: attend(*args, **lengths),
        mesh=jax.make_mesh((2, 2, 2), ("batch", AXIS, "model"), axis_types=(AxisType.Auto,) * 3),
        in_specs=(P("batch", AXIS), P("batch")),
        out_specs=P("batch", AXIS),
        axis_names={"batch", AXIS},
    )
    inputs = [reorder(x, 1, 2, kind) for x in (query, key, value)]
    compiled = jax.jit(mapped).lower(inputs, lengths).compile()
    branches = [line for line in compiled.as_text().splitlines() if " conditional(" in line]
    assert all("jax_flash_forward" in line for line in branches)  # those of a device's own call alone
    assert count(compiled.as_text(), "all-gather")
    exact = jax_flash.flash_attention(query, key, value, **lengths, **window)
    cases.assert_close(restore(compiled(inputs, lengths), 1, 2, kind), exact)


@pytest.mark.parametrize("kind", ["zigzag", *thorough(None)])
@pytest.mark.parametrize("shards", [4, *thorough(2)])
def test_every_option_with_a_narrow_window(shards, kind):
    features = "logits_soft_cap alibi_slopes sinks dropout segment_ids bias mask:BNTS deterministic".split()
    T = 96 if kind else 48
    for dtype, more, options in (
        ("float32", "seq_lengths:alike", dict(S=T, is_causal=True, local_window_size=(6, 0))),
        ("bfloat16", "score_mod", dict(S=T + 8, local_window_size=(6, 3))),
    ):
        case = Case("sharded", dtype, T=T, N=8, K=2, H=8, features=(*features, more), **options)
        ShardedCalls(shards, "all_gather", kind).check(case)


@pytest.mark.parametrize(("kind", "chunk"), [(None, 8), ("zigzag", 4)])
def test_queries_that_see_keys_of_a_neighbour_alone(kind, chunk):
    """Sinks count in each row that sees a key, whoever has it."""
    query, key, value = arrays(T=32)
    place = jnp.arange(32)
    is_own = place[:, None] // chunk == place // chunk
    mask = ~(is_own & (place[:, None] % chunk < 3))
    sinks = jnp.array([0.5, -1.0, 2.0, 0.0])

    def both(attend):
        def loss(*args):
            out, lse = attend(*args)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(jnp.where(jnp.isinf(lse), 0, lse)))

        return jax.jit(lambda *args: (attend(*args), jax.grad(loss, (0, 1, 2, 3))(*args)))

    options = dict(local_window_size=(chunk - 2, 0), return_residual=True)
    attend = functools.partial(
        jax_flash.context_parallel_attention,
        axis_name=AXIS, strategy="all_gather", load_balance=kind, **options,
    )  # fmt: skip
    shards = P(None, AXIS)
    mapped = jax.shard_map(
        lambda query, key, value, sinks, mask: attend(query, key, value, mask=mask, sinks=sinks),
        mesh=sequence_mesh(4),
        in_specs=(*(shards,) * 3, P(), P(AXIS)),
        out_specs=(shards, shards),
    )

    def on_shards(query, key, value, sinks):
        query, key, value = (reorder(x, 1, 4, kind) for x in (query, key, value))
        rows = reorder(reorder(mask, 0, 4, kind), 1, 4, kind)
        return jax.tree.map(lambda x: restore(x, 1, 4, kind), mapped(query, key, value, sinks, rows))

    whole = both(lambda *args: jax_flash.flash_attention(*args[:3], mask=mask, sinks=args[3], **options))
    cases.assert_close(both(on_shards)(query, key, value, sinks), whole(query, key, value, sinks))
