"""`explain` of sharded sequences: each strategy, whether it runs and what it sends, and which is picked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash.context_parallel.strategy import STRATEGIES


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), ("data", "tokens"), axis_types=(kind, kind))


BY_BATCH_AND_TOKENS = P("data", "tokens")


def shapes(N=32, K=8, tokens=4096, spec=BY_BATCH_AND_TOKENS):
    sharding = NamedSharding(mesh(), spec)

    def shape(heads):
        return jax.ShapeDtypeStruct((4, tokens, heads, 128), jnp.bfloat16, sharding=sharding)

    return shape(N), shape(K), shape(K)


def explained(*arrays, **options):
    with jax_flash.planned_for("sm_90a"):
        return jax_flash.explain(*arrays, **options)


def test_each_strategy_with_its_cost():
    found = explained(*shapes(tokens=8192), is_causal=True)
    assert [choice.name for choice in found.sequences.choices] == list(STRATEGIES)
    costs = {choice.name: choice.exposed_bytes for choice in found.sequences.choices}
    # Half of the batch: 2 rows; 2048 of the tokens. Keys and values of three others, there, there and back.
    assert costs["all_gather"] == 3 * 2 * 2048 * 8 * 256 * (2 * 2 + 4)
    # The last of four devices has 3.5 shards of the pairs, of 2 in the mean. Ulysses lets none wait.
    assert [choice.busiest for choice in found.sequences.choices] == [1.75, 1, 1.75]
    assert found.sequences.picked == "ulysses" != min(costs, key=costs.get)
    assert "the sequence is sharded" in str(found) and "context_parallel picks ulysses" in str(found)
    assert "and one computes 1.75 times the mean" in str(found)
    full = explained(*shapes())
    costs = {x.name: x.exposed_bytes + x.combined_bytes for x in full.sequences.choices}
    assert full.sequences.picked == min(costs, key=costs.get) == "ulysses"
    assert "times the mean" not in str(full)
    # Three steps after the first.
    assert costs["ring"] == 3 * 4 * 2 * 1024 * 32 * 256
    assert "adds up results of steps for as long as 201 MB take" in str(full)


def test_a_narrow_window_sends_what_it_reaches():
    """With lengths too, if these are of queries and of keys."""
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32)
    for names, keys in (("", 512), ("query_seq key_value_seq", 512), ("key_value_seq", 3 * 1024)):
        options = {f"{name}_lengths": lengths for name in names.split()}
        found = explained(*shapes(), is_causal=True, local_window_size=(512, 0), **options)
        (cost,) = (x.exposed_bytes for x in found.sequences.choices if x.name == "all_gather")
        assert cost == 2 * keys * 8 * 256 * (2 * 2 + 4)


def test_what_is_picked_runs():
    """As a sharded `jit` compiles it: keys go round, and nothing is gathered."""
    query, key, value = shapes(N=4, K=2, tokens=64)
    named = jax_flash.explain(query, key, value, is_causal=True, context_parallel="ring")
    assert named.sequences.picked == "ring" and named.sequences.refusal is None
    text = (
        jax.jit(lambda *x: jax_flash.flash_attention(*x, is_causal=True, context_parallel="ring"))
        .lower(query, key, value)
        .compile()
        .as_text()
    )
    assert "collective-permute" in text and "all-gather" not in text


def test_reasons_of_those_that_do_not_run():
    found = explained(*shapes(N=6, K=6), context_parallel="ulysses")
    reasons = {choice.name: choice.reason for choice in found.sequences.choices}
    assert reasons == {
        "ring": None,
        "ulysses": "the 6 query heads must be divisible by the 4 devices of the sequence",
        "all_gather": None,
    }
    assert found.sequences.picked is None
    assert found.sequences.refusal == (
        'context_parallel="ulysses" can\'t run this call: ' + (reasons["ulysses"] or "")
    )
    assert str(found).endswith(found.sequences.refusal)


def test_functions_and_block_masks():
    """Each strategy runs them, but a mask without a mask function needs chunks of whole blocks."""
    mask = jax_flash.create_block_mask(lambda b, h, q, k: q >= k, None, None, 4096, 4096, block_size=96)
    found = explained(*shapes(), score_mod=lambda score, *_: 2 * score, block_mask=mask)
    assert all(choice.reason is None for choice in found.sequences.choices)
    layout = jnp.ones((1, 1, 43, 43), bool)
    blocks = jax_flash.BlockMask.from_blocks(layout, lengths=(4096, 4096), block_size=96)
    found = explained(*shapes(), block_mask=blocks)
    reasons = {choice.name: choice.reason or "" for choice in found.sequences.choices}
    assert [name for name, reason in reasons.items() if not reason] == ["ulysses"]
    assert "a chunk of 1024 queries is not of whole blocks of 96" in reasons["ring"]
    assert found.sequences.picked == "ulysses"


def test_sequences_that_do_not_divide_are_gathered():
    sharding = NamedSharding(mesh(), P(None, "tokens"))
    query = jax.ShapeDtypeStruct((1, 4096, 4, 128), jnp.bfloat16, sharding=sharding)
    key = jax.ShapeDtypeStruct((1, 90, 4, 128), jnp.bfloat16, sharding=NamedSharding(mesh(), P(None, "data")))
    found = explained(query, key, key)
    assert found.sequences.picked == "all_gather"  # of keys, which are sharded otherwise
    assert "the same devices" in {choice.name: choice.reason for choice in found.sequences.choices}["ring"]


def test_keys_that_each_device_has():
    """Nothing is gathered, and their gradients are added up: an all-reduce of float32."""
    query, *_ = shapes()
    _, key, value = shapes(spec=P("data"))
    found = explained(query, key, value, is_causal=True)
    (cost,) = (x.exposed_bytes for x in found.sequences.choices if x.name == "all_gather")
    assert cost == 2 * 2 * 4096 * 8 * 256 * 4 * 3 / 4
    assert found.sequences.picked == "all_gather"


@pytest.mark.parametrize("named", ("auto", *STRATEGIES))
def test_whole_queries_and_sharded_keys(named):
    """Keys are gathered, which "all_gather" says; the others are refused."""
    query, *_ = shapes(spec=P("data"))
    _, key, value = shapes()
    found = explained(query, key, value, context_parallel=named)
    assert found.sequences.picked is None
    assert (found.sequences.refusal is None) == (named in ("auto", "all_gather"))
    assert not any(choice.reason is None for choice in found.sequences.choices)
    assert str(found)


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
@pytest.mark.parametrize("batch", ((), (2,)))
def test_arrays_and_any_kind_of_mesh(batch, kind):
    spec = P(*(None for _ in batch), "tokens")
    x = jax.device_put(jnp.zeros((*batch, 64, 4, 16)), NamedSharding(mesh(kind), spec))
    assert jax_flash.explain(x, x, x).sequences.picked in STRATEGIES


@pytest.mark.parametrize("spec", (P(), P("data"), P("data", None, "tokens")))
def test_whole_sequences(spec):
    found = explained(*shapes(spec=spec))
    assert found.sequences is None and "sequence is sharded" not in str(found)
    assert explained(*(np.zeros((1, 8, 2, 16), np.float32),) * 3).sequences is None
