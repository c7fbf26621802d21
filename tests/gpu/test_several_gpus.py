"""Batch, heads and sequences spread over GPUs: the same numbers, and nothing gathered that needn't be.

Everything runs on two GPUs, and sequences with keys of one head dim on four and eight too, where these are.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sanitize_several
from attention_case import Case
from compute_sanitizer import TOOLS, assert_finds_nothing, needs_sanitizer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from seeds import seed_of
from sharded_calls import AXIS, ShardedCalls, reorder, restore, sequence_mesh

import jax_flash

B, T, N, K, H = 4, 257, 8, 4, 64


def attend(query, key, value):
    return jax_flash.flash_attention(query, key, value, is_causal=True, implementation="cuda")


def loss(query, key, value, d_out):
    return jnp.sum(attend(query, key, value).astype(jnp.float32) * d_out)


gradients = jax.grad(loss, argnums=(0, 1, 2))


@pytest.fixture
def inputs():
    generator = np.random.default_rng(seed_of("two GPUs"))
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))
    return tuple(generator.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes)


@pytest.fixture
def expected(inputs):
    one = jax.device_put(inputs, jax.devices()[0])
    return jax.tree.map(np.asarray, (attend(*one[:3]), *gradients(*one)))


def mesh(axis, devices=2):
    return Mesh(np.array(jax.devices()[:devices]), (axis,))


def assert_equal(results, expected):
    """Within bfloat16's rounding: the order of sums may differ, and which roundings XLA leaves out."""
    for result, reference in zip(results, expected, strict=True):
        result, reference = (np.asarray(x, np.float64) for x in (result, reference))
        assert np.linalg.norm(result - reference) <= 1e-2 * np.linalg.norm(reference)


def test_pmap(inputs, expected):
    split = [x.reshape(2, B // 2, *x.shape[1:]) for x in inputs]
    devices = jax.devices()[:2]
    out = jax.pmap(attend, devices=devices)(*split[:3])
    results = (out, *jax.pmap(gradients, devices=devices)(*split))
    assert_equal([x.reshape(B, *x.shape[2:]) for x in results], expected)


@pytest.mark.parametrize("spec", (PartitionSpec("x"), PartitionSpec(None, None, "x")), ids=("batch", "heads"))
def test_shard_map(spec, inputs, expected):
    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh("x"), in_specs=spec, out_specs=spec)
    def run(*inputs):
        return attend(*inputs[:3]), *gradients(*inputs)

    assert_equal(run(*inputs), expected)


@pytest.mark.parametrize("spec", (PartitionSpec("x"), PartitionSpec(None, None, "x")), ids=("batch", "heads"))
def test_sharded_jit_gathers_nothing(spec, inputs, expected):
    sharding = NamedSharding(mesh("x"), spec)

    @jax.jit
    def run(*inputs):
        return attend(*inputs[:3]), *gradients(*inputs)

    sharded = jax.device_put(inputs, sharding)
    compiled = run.lower(*sharded).compile()
    text = compiled.as_text()
    assert "jax_flash_forward" in text and "jax_flash_backward" in text
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert collective not in text, collective
    results = compiled(*sharded)
    assert all(x.sharding.is_equivalent_to(sharding, x.ndim) for x in results)
    assert_equal(results, expected)


STRATEGIES = (
    *(("ring", order) for order in (None, "zigzag", "striped")),
    *(("all_gather", order) for order in (None, "zigzag")),
    ("ulysses", "zigzag"),
)
OPTIONS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "window": dict(is_causal=True, local_window_size=(100, 0)),
    "two_sides": dict(local_window_size=(90, 30), features=("sinks",)),
    "lengths": dict(is_causal=True, features=("seq_lengths",)),
    "segments": dict(features=("segment_ids", "sinks")),
    "dropout": dict(is_causal=True, features=("dropout", "logits_soft_cap")),
    "bias": dict(features=("bias:N1S", "mask:BNTS")),
    "alibi": dict(is_causal=True, features=("alibi_slopes",)),
    "deterministic": dict(is_causal=True, features=("deterministic",), residual="absent"),
    "longer_keys": dict(is_causal=True, S=768),
}


SHARDS = [n for n in (2, 4, 8) if n <= len(jax.devices())]


def check(shards, layout, option, head_dim, implementation="cuda"):
    fields = dict(T=512, S=512, N=8, K=2, H=head_dim) | OPTIONS[option]
    case = Case("sharded", "bfloat16", **fields)
    ShardedCalls(shards, *layout, options={"implementation": implementation}).check(case)


@pytest.mark.parametrize(
    ("shards", "head_dim"), [(n, h) for n in SHARDS for h in ((64, 128, 256) if n == 2 else (128,))]
)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", STRATEGIES, ids=str)
def test_sharded_sequences(layout, option, shards, head_dim):
    """Each strategy by the CUDA kernels, against the definition."""
    if layout == ("ring", "striped") and option in ("window", "two_sides", "alibi"):
        pytest.skip("a ring of stripes has neither")
    check(shards, layout, option, head_dim)


@needs_sanitizer
@pytest.mark.parametrize("group", sanitize_several.LAYOUTS)
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_finds_nothing(tool, group, record_property):
    """In our kernels. NCCL's are left out: its devices wait for each other."""
    without = ("--kernel-name-exclude", "kns=nccl")
    assert_finds_nothing(tool, sanitize_several.__file__, group, record_property, *without)


@pytest.mark.parametrize("option", ("causal", "two_sides", "alibi"))
@pytest.mark.parametrize("layout", STRATEGIES, ids=str)
def test_by_pallas(layout, option):
    if layout == ("ring", "striped") and option != "causal":
        pytest.skip("a ring of stripes has neither")
    check(2, layout, option, 64, "pallas")


@pytest.mark.parametrize("shards", [(n // 2, 2) for n in SHARDS if n > 2], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("strategy", ("ring", "all_gather"))
def test_sequences_over_two_mesh_axes(strategy, option, shards):
    check(shards, (strategy, "zigzag"), option, 128)


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("block_size", (128, 96))  # chunks are of whole blocks, and of others
@pytest.mark.parametrize("layout", STRATEGIES, ids=str)
def test_functions_of_sharded_sequences(layout, block_size, shards):
    """score_mod and a block mask go by positions in the whole sequences; a captured table has a gradient."""
    strategy, kind = layout
    generator = np.random.default_rng(seed_of("functions"))
    shapes = ((2, 512, N, H), (2, 512, K, H), (2, 512, K, H), (2, 512, N, H))
    *arrays, d_out = (generator.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes)
    table = generator.standard_normal((N, 65)).astype(np.float32)
    block_mask = jax_flash.create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < 200), None, None, 512, 512, block_size=block_size
    )

    def of_shards(query, key, value, **options):
        call = functools.partial(
            jax_flash.context_parallel_attention,
            axis_name=AXIS,
            strategy=strategy,
            load_balance=kind,
            **options,
        )
        spec = PartitionSpec(None, AXIS)
        mapped = jax.shard_map(call, mesh=sequence_mesh(shards), in_specs=spec, out_specs=spec)
        return restore(mapped(*(reorder(x, 1, shards, kind) for x in (query, key, value))), 1, shards, kind)

    def run(attend, table, *arrays):
        def score_mod(score, b, h, q, k):
            return score * (1 + b) + table[h, jnp.clip((q - k) // 8, -32, 32) + 32]

        return attend(*arrays, score_mod=score_mod, block_mask=block_mask, implementation="cuda")

    def results(attend):
        out, vjp = jax.vjp(functools.partial(run, attend), table, *arrays)
        return out, *vjp(jnp.asarray(d_out))

    expected = jax.jit(functools.partial(results, jax_flash.flash_attention))()
    assert_equal(jax.jit(functools.partial(results, of_shards))(), expected)


MOVES = {"ring": "collective-permute", "all_gather": "all-gather", "ulysses": "all-to-all"}


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("strategy", MOVES)
@pytest.mark.parametrize("is_causal", (False, True))
def test_sharded_jit_keeps_sequences(is_causal, strategy, shards):
    """By the CUDA kernels, and nothing moves but what the strategy moves."""
    generator = np.random.default_rng(seed_of("sequences"))
    shapes = ((2, 512, N, H), (2, 512, K, H), (2, 512, K, H), (2, 512, N, H))
    *arrays, d_out = (generator.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes)

    @jax.jit
    def run(*arrays):
        options = dict(is_causal=is_causal, context_parallel=strategy, implementation="cuda")
        call = functools.partial(jax_flash.flash_attention, **options)
        out, vjp = jax.vjp(call, *arrays[:3])
        return out, *vjp(arrays[3])

    expected = jax.tree.map(np.asarray, run(*jax.device_put((*arrays, d_out), jax.devices()[0])))
    sharding = NamedSharding(mesh("x", shards), PartitionSpec(None, "x"))
    sharded = jax.device_put((*arrays, d_out), sharding)
    compiled = run.lower(*sharded).compile()
    text = compiled.as_text()
    assert "jax_flash_forward" in text and "jax_flash_backward" in text
    assert {move for move in MOVES.values() if move in text} == {MOVES[strategy]}
    results = compiled(*sharded)
    assert all(x.sharding.is_equivalent_to(sharding, x.ndim) for x in results)
    assert_equal(results, expected)
