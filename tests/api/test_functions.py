"""score_mod and block_mask as arguments: what they may be, and what is said of others."""

import functools
import pickle
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import BlockMask, _function_arguments, create_block_mask, cuda, functions, masks
from jax_flash._block_kinds import Kind
from jax_flash._device import H100
from jax_flash._spec import AttentionSpec, BlockMaskSpec, Operands
from jax_flash.cuda.functions import cpp
from jax_flash.functions import static
from jax_flash.functions.graph import Graph

QUERY = jnp.ones((2, 6, 4, 8))
KEY = jnp.ones((2, 5, 2, 8))


def attend(**options):
    return jax_flash.flash_attention(QUERY, KEY, KEY, **options)


def causal(b, h, q, k):
    return q >= k


@pytest.mark.parametrize(
    ("options", "error", "said"),
    (
        ({"score_mod": 3}, TypeError, "score_mod must be None or a function of score, batch"),
        ({"score_mod": lambda s, b, h, q, k: q}, TypeError, "returns int32; it must return float32"),
        (
            {"score_mod": lambda s: s},
            TypeError,
            r"score_mod \(<lambda>\) must take \(score, batch, head, query, key\); it has \(s\): too many",
        ),
        ({"score_mod": lambda s, b, h, q, k: s > 0}, TypeError, "returns bool; it must return float32"),
        ({"score_mod": lambda s, b, h, q, k: s[None]}, ValueError, r"shape=\(1,\).*must return a scalar"),
        ({"score_mod": lambda s, b, h, q, k: (s, s)}, ValueError, "must return a scalar"),
        ({"score_mod": lambda s, b, h, q: s}, TypeError, "positional argument"),
        ({"block_mask": causal}, TypeError, "jax_flash.create_block_mask makes one of a mask function"),
        (
            {"block_mask": np.ones((6, 5), bool)},
            TypeError,
            "block_mask must be None or a jax_flash.BlockMask",
        ),
        (
            {"block_mask": create_block_mask(causal, None, None, 5, 6)},
            ValueError,
            r"T = 6 queries and S = 5 keys.*T, S = \(5, 6\)",
        ),
        (
            {"block_mask": BlockMask.from_dense(np.ones((3, 1, 6, 5), bool))},
            ValueError,
            "1 or 2 batch rows and 1 or 4 heads; got one of 3 batch rows and 1 heads",
        ),
        (
            {"block_mask": create_block_mask(lambda b, h, q, k: q > h, None, 1, 6, 5)},
            ValueError,
            "block_mask must be made for 4 heads, as its mask_mod depends on head; got one for 1",
        ),
        (
            {"block_mask": create_block_mask(lambda b, h, q, k: q > b, 1, None, 6, 5)},
            ValueError,
            "block_mask must be made for 2 batch rows, as its mask_mod depends on batch; got one for 1",
        ),
        (
            {"block_mask": BlockMask.from_dense(np.ones((1, 2, 6, 5), bool))},
            ValueError,
            "got one of 1 batch rows and 2 heads",
        ),
    ),
)
def test_malformed_arguments(options, error, said):
    with pytest.raises(error, match=said):
        attend(**options)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    (
        (lambda: create_block_mask(3, 1, 1, 4, 4), TypeError, "mask_mod must be a function of batch, head"),
        (lambda: create_block_mask(causal, -1, 1, 4, 4), ValueError, "B must be at least 0; got -1"),
        (lambda: create_block_mask(causal, 1.0, 1, 4, 4), TypeError, "B must be a Python integer"),
        (lambda: create_block_mask(causal, 1, 1, -1, 4), ValueError, "T must be at least 0; got -1"),
        (
            lambda: create_block_mask(causal, 1, 1, 4, 4, block_size=0),
            ValueError,
            "block_size must be at least",
        ),
        (lambda: create_block_mask(causal, 1, 1, 4, 4, block_size=(1, 2, 3)), ValueError, "an int or a pair"),
        (
            lambda: create_block_mask(causal, 1, 1, 4, 4, block_size=2**31),
            ValueError,
            "block_size must be at most 2147483647; got 2147483648",
        ),
        (
            lambda: BlockMask.from_blocks(np.ones((1, 1, 1, 1), bool), lengths=(4, 4), block_size=(4, 2**31)),
            ValueError,
            r"block_size must be at most 2147483647; got \(4, 2147483648\)",
        ),
        (lambda: create_block_mask(lambda b, h, q, k: q, 1, 1, 4, 4), TypeError, "must return bool"),
        (
            lambda: create_block_mask(lambda b, h, q, k: q > b, None, 1, 4, 4),
            ValueError,
            "B must be the number of them for which mask_mod differs, as it depends on batch",
        ),
        (
            lambda: create_block_mask(lambda b, h, q, k: q > h, 2, None, 4, 4),
            ValueError,
            "N must be the number of them for which mask_mod differs, as it depends on head",
        ),
        (
            lambda: create_block_mask(masks.DocumentMask(np.ones((2, 4), int)), None, None, 4, 4),
            ValueError,
            r"B must be 2, as ids is int32 \(2, 4\); got None",
        ),
        (
            lambda: create_block_mask(~masks.CausalMask(np.ones(3, int)), None, 1, 4, 4),
            ValueError,
            r"B must be 3, as offset is int32 \(3,\); got None",
        ),
        (
            lambda: create_block_mask(masks.MultiHeadMask([causal] * 4), 1, None, 4, 4),
            ValueError,
            "N must be 4, as masks are 4; got None",
        ),
        (
            lambda: create_block_mask(masks.MultiHeadMask([causal]), 1, None, 4, 4),
            ValueError,
            "N must be the number of them for which mask_mod differs.*got None",
        ),
        (
            lambda: create_block_mask(masks.BigBirdMask(4, heads=3), 1, None, 4, 4),
            ValueError,
            "N must be 3, as heads is 3; got None",
        ),
        (
            lambda: create_block_mask(masks.NumpyMask(np.ones((2, 4, 4), bool)), 1, None, 4, 4),
            ValueError,
            "N must be 2, as array is bool .*got None",
        ),
        (lambda: BlockMask.from_dense(np.ones((4, 4))), TypeError, "mask must have a bool dtype"),
        (lambda: BlockMask.from_dense(np.ones((4, 4), bool)), ValueError, r"\(B\|1, N\|1, T, S\)"),
        (lambda: BlockMask.from_blocks(np.ones((4, 4), bool)), ValueError, "blocks must have shape"),
        (
            lambda: BlockMask.from_blocks(np.ones((1, 1, 2, 2), bool), lengths=(256, 257)),
            ValueError,
            r"lengths must have \(2, 2\) blocks of \(128, 128\)",
        ),
        (
            lambda: BlockMask.from_blocks(np.ones((1, 1, 2, 2), bool), lengths=256),
            TypeError,
            "lengths must be None or a pair of T and S; got 256",
        ),
        (
            lambda: BlockMask.from_blocks(np.ones((1, 1, 2, 2), bool), lengths=(256,)),
            ValueError,
            "lengths must be None or a pair",
        ),
    ),
)
def test_malformed_masks(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_a_mask_by_blocks():
    layout = np.array([[1, 0, 0], [0, 1, 1]], bool)[None, None]
    mask = BlockMask.from_blocks(layout, lengths=(6, 5), block_size=(4, 2))
    assert mask.lengths == (6, 5) and mask.block_size == (4, 2)
    np.testing.assert_array_equal(mask.kinds, layout * int(Kind.FULL))
    np.testing.assert_array_equal(mask.key_blocks.counts, [[[1, 2]]])
    np.testing.assert_array_equal(mask.query_blocks.counts, [[[1, 1, 1]]])
    dense = np.repeat(np.repeat(layout, 4, axis=2), 2, axis=3)[:, :, :6, :5]
    value = jnp.asarray(np.random.default_rng(0).normal(size=KEY.shape), jnp.float32)
    got = jax_flash.flash_attention(QUERY, KEY, value, block_mask=mask)
    np.testing.assert_allclose(got, jax_flash.flash_attention(QUERY, KEY, value, mask=dense), rtol=1e-6)
    of_dense = jax_flash.flash_attention(QUERY, KEY, value, block_mask=BlockMask.from_dense(dense))
    np.testing.assert_allclose(got, of_dense, rtol=1e-6)


@pytest.mark.parametrize("block_size", (2**20, (2**31 - 1, 4), (5, 2**31 - 1), 200))
def test_blocks_longer_than_the_sequence(block_size):
    """They are one block: no more pairs are looked at than there are."""
    T = S = 12
    query = jnp.asarray(np.random.default_rng(0).normal(size=(1, T, 2, 4)), jnp.float32)

    def mask_mod(b, h, q, k):
        return (q >= k) & (q % 3 != 1)

    mask = create_block_mask(mask_mod, None, None, T, S, block_size=block_size)
    sees = mask_mod(0, 0, *np.ogrid[:T, :S])[None, None]
    counts = [-(-T // size) for size in np.broadcast_to(block_size, 2)]
    assert mask.kinds.shape == (1, 1, *counts) and max(mask.block_size) <= 128
    blocks = BlockMask.from_blocks(np.ones((1, 1, *counts), bool), lengths=(T, S), block_size=block_size)
    assert blocks.block_size == mask.block_size
    attend = functools.partial(jax_flash.flash_attention, query, query, query)
    np.testing.assert_allclose(attend(block_mask=mask), attend(mask=sees), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(attend(block_mask=blocks), attend(), rtol=1e-5, atol=1e-6)


def test_long_sequences_without_an_array_of_pairs():
    """All pairs would take 2**36 bytes. (`test_block_kinds.py` has more tokens.)"""
    T = 2**18

    def window(b, h, q, k):
        return (q >= k) & (q - k < 512)

    mask = jax.jit(lambda: create_block_mask(window, None, None, T, T, block_size=256))()
    assert mask.kinds.shape == (1, 1, 1024, 1024)
    counts = np.asarray(mask.key_blocks.counts).reshape(-1)
    np.testing.assert_array_equal(counts, np.minimum(np.arange(1024) + 1, 3))


def test_explained():
    mask = create_block_mask(causal, None, None, 6, 5)
    explanation = jax_flash.explain(QUERY, KEY, KEY, score_mod=lambda s, b, h, q, k: s * 2, block_mask=mask)
    assert explanation.automatic == "xla"
    assert "score_mod=<lambda>:" in str(explanation) and "block_kinds" in str(explanation)


SLOPES, SHORTS, BYTES = jnp.ones(4), jnp.ones(4, jnp.int16), jnp.ones(4, jnp.float8_e4m3fn)
CUDA_DTYPES = "it may be bfloat16, float16, float32, int32, uint32, bool, int8, uint8$"


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, d: (2 * d,))


@pytest.mark.parametrize(
    ("score_mod", "options", "said"),
    (
        (
            lambda s, b, h, q, k: jnp.sort(jnp.stack([s, 0 * s]))[1],
            {},
            "score_mod has sort, at .*test_.*.py",
        ),
        (lambda s, b, h, q, k: jax.lax.erf_inv(s), {}, r"score_mod has erf_inv, at .*test_functions.py"),
        (lambda s, b, h, q, k: doubled(s), {}, "score_mod has custom_vjp_call, at .*test_functions.py"),
        (
            lambda s, b, h, q, k: jnp.where(SHORTS[h] > 0, s, 0),
            {},
            f"score_mod captures an array of int16; {CUDA_DTYPES}",
        ),
        (
            lambda s, b, h, q, k: s + BYTES[h].astype(jnp.float32),
            {},
            f"score_mod captures an array of float8_e4m3fn; {CUDA_DTYPES}",
        ),
        (
            None,
            {"block_mask": create_block_mask(lambda b, h, q, k: jnp.sort(SLOPES)[k % 4] > q, 1, 1, 6, 5)},
            "mask_mod has sort, at .*test_functions.py",
        ),
        (
            None,
            {"block_mask": create_block_mask(lambda b, h, q, k: SHORTS[k % 4] > q, 1, 1, 6, 5)},
            f"mask_mod captures an array of int16; {CUDA_DTYPES}",
        ),
    ),
)
def test_refused_by_cuda(score_mod, options, said):
    """With the reason, and the line of the code where the function has what can't be written."""
    query, key = QUERY.astype(jnp.bfloat16), KEY.astype(jnp.bfloat16)
    with jax_flash.planned_for("sm_90a"), pytest.raises(NotImplementedError, match=said):
        jax_flash.flash_attention(query, key, key, score_mod=score_mod, **options, implementation="cuda")


def small_network(width):
    """A bias that a network of two hidden layers makes of positions."""
    first, second, last = (jnp.full(x, 0.1) for x in ((2, width), (width, width), (width, 4)))

    def score_mod(score, batch, head, query, key):
        hidden = jnp.tanh(jnp.stack([query - key, query + key]) * 0.1 @ first)
        return score + (jnp.tanh(hidden @ second) @ last)[head]

    return score_mod


@pytest.mark.parametrize("width", (16, 32))
def test_a_graph_that_is_too_large(width):
    """It isn't read to its end. The function runs by JAX's own evaluation."""
    traced = functions.function.traced_score_mod(small_network(width))
    found, arrays = static._static(traced)
    assert found.derivative is None and len(arrays) == 3
    assert found.refusal is not None and found.refusal.endswith(
        "with it there are more than 2048 scalar operations; code is written out for no more"
    )
    if width == 32:  # the graph of the value
        assert found.value is None
        assert re.match(r"score_mod has \w+, at .*test_functions.py:\d+", found.refusal)
    with mock.patch.object(Graph, "_node", autospec=True, side_effect=Graph._node) as made:
        static._static(traced)
    assert made.call_count < 30_000  # of which most are made already


def test_what_a_graph_that_is_too_large_computes():
    query = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 4, 8)), jnp.float32)
    score_mod, (batch, head, i, j) = small_network(32), np.ogrid[:1, :4, :5, :5]
    every = [jnp.asarray(x.reshape(-1), jnp.int32) for x in np.broadcast_arrays(batch, head, i, j)]
    bias = jax.vmap(functools.partial(score_mod, 0.0))(*every).reshape(1, 4, 5, 5)
    got = jax_flash.flash_attention(query, query, query, score_mod=score_mod)
    expected = jax_flash.flash_attention(query, query, query, bias=bias)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_mask_for_each_of_many_heads_has_a_graph():
    many = masks.MultiHeadMask([masks.BigBirdMask(1024, seed=number) for number in range(64)])
    assert static.static_mask_mod(many)[0].refusal is None


@pytest.mark.parametrize("wrap", (lambda f: f, jax.jit), ids=("plain", "jit"))
def test_a_loop_of_no_steps(wrap):
    """What it carries is its result. Without an inner `jit` the function has a graph."""
    table = jnp.arange(4.0) + 1

    def score_mod(s, b, h, q, k):
        step = lambda carry, x: (jnp.sin(carry) + x * table[0], carry)  # noqa: E731
        carry, seen = jax.lax.scan(step, s * table[h], jnp.zeros(0))
        return carry + seen.shape[0] + jax.lax.map(jnp.sin, jnp.zeros((0, 3))).shape[0]

    def loss(function, table, query):
        def scaled(s, b, h, q, k):
            return s * table[h]

        return jnp.sum(jax_flash.flash_attention(query, KEY, KEY, score_mod=function or scaled) ** 2)

    assert static.static_score_mod(score_mod)[0].limit(cpp.unsupported) is None
    got = jax.grad(loss, 2)(wrap(score_mod), table, QUERY)
    np.testing.assert_allclose(got, jax.grad(loss, 2)(None, table, QUERY), rtol=1e-5, atol=1e-6)


@pytest.mark.every_turn
def test_lowered_for_cuda():
    """Equal functions from two closures are one kernel; captured arrays are operands of the custom call."""
    query, key = QUERY.astype(jnp.bfloat16), KEY.astype(jnp.bfloat16)

    def loss(table, query):
        mod = lambda score, b, h, q, k: score + table[h, q - k]  # noqa: E731
        out = jax_flash.flash_attention(query, key, key, score_mod=mod, implementation="cuda")
        return jnp.sum(out.astype(jnp.float32))

    def step(tables, query):
        return [jax.grad(loss)(table, query) for table in tables]

    tables = [jnp.ones((4, 12)), jnp.zeros((4, 12))]
    with jax_flash.planned_for("sm_90a"):
        lowered = jax.jit(step).trace(tables, query).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count(" call @jax_flash_backward(") == 2
    assert lowered.count("custom_call @jax_flash_backward(") == 1
    assert "user_score_mod.cuh" in lowered


def test_pallas_runs_functions_where_cuda_cannot():
    query, key = QUERY.astype(jnp.bfloat16), KEY.astype(jnp.bfloat16)
    with jax_flash.planned_for("sm_80"):
        explained = jax_flash.explain(query, key, key, score_mod=lambda score, b, h, q, k: score / 2)
    assert explained.picked == "pallas"


@pytest.mark.every_turn
def test_block_masks_lowered_for_cuda():
    """Equal masks share kernels; kinds and captured arrays are operands; mask functions are no constants."""
    query, key = QUERY.astype(jnp.bfloat16), KEY.astype(jnp.bfloat16)

    def loss(query, ids, layout):
        masks = [create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 6, 5) for _ in range(2)]
        masks.append(BlockMask.from_blocks(layout, lengths=(6, 5), block_size=4))
        calls = [
            jax_flash.flash_attention(query, key, key, block_mask=mask, implementation="cuda")
            for mask in masks
        ]
        return sum(jnp.sum(out.astype(jnp.float32)) for out in calls)

    arguments = query, jnp.arange(6), jnp.ones((1, 1, 2, 2), bool)
    with jax_flash.planned_for("sm_90a"):
        lowered = jax.jit(jax.grad(loss)).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count(" call @jax_flash_backward") == 3
    assert lowered.count("custom_call @jax_flash_backward(") == 2
    assert "user_mask_mod.cuh" in lowered


def test_too_many_blocks_for_cuda():
    """Kinds that kernels would look up beyond 32 bits."""
    shapes = dict(query=(1, 8, 64, 64), key=(1, 8, 64, 64), value=(1, 8, 64, 64))
    operands = Operands(
        **{name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()},
        batch_indices=jax.ShapeDtypeStruct((1,), jnp.int32),
        head_indices=jax.ShapeDtypeStruct((1, 64), jnp.int32),
        block_kinds=jax.ShapeDtypeStruct((1, 64, 8192, 8192), jnp.int8),
    )
    spec = AttentionSpec(1.0, block_mask=BlockMaskSpec((1, 1), None, False, True))
    assert "may have 2147483647" in (cuda.supports(spec, operands, H100) or "")


@pytest.mark.parametrize("options", ({}, {"is_causal": True}, {"deterministic": True}), ids=str)
def test_block_masks_in_strict_settings(options):
    """No promotion of ranks or dtypes is asked of the user, for one batch row and one key head."""
    query = jax.ShapeDtypeStruct((1, 129, 4, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, 200, 1, 64), jnp.bfloat16)

    def loss(query, key, ids, layout):
        mask = create_block_mask(lambda b, h, q, k: (k <= q) | (ids[k] < h), None, 4, 129, 200)
        blocks = BlockMask.from_blocks(layout, lengths=(129, 200))
        attend = functools.partial(
            jax_flash.flash_attention, query, key, key, implementation="cuda", **options
        )
        return sum(jnp.sum(attend(block_mask=x).astype(jnp.float32)) for x in (mask, blocks))

    arguments = query, key, jnp.arange(200, dtype=jnp.int32), jnp.ones((1, 1, 2, 2), bool)
    strict = jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), jax.enable_x64(True)
    with strict[0], strict[1], strict[2], jax_flash.planned_for("sm_90a"):
        jax.jit(jax.grad(loss, (0, 1))).trace(*arguments).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("deterministic", (False, True))
def test_gradients_of_captured_arrays_in_strict_settings(deterministic):
    query = jax.ShapeDtypeStruct((1, 129, 4, 64), jnp.bfloat16)

    def loss(query, caps):
        def score_mod(score, batch, head, query, key):
            return caps[head] * jnp.tanh(score / caps[head])

        options = {"implementation": "cuda", "deterministic": deterministic, "score_mod": score_mod}
        return jnp.sum(jax_flash.flash_attention(query, query, query, **options).astype(jnp.float32))

    caps = jax.ShapeDtypeStruct((4,), jnp.float32)
    strict = jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), jax.enable_x64(True)
    with strict[0], strict[1], strict[2], jax_flash.planned_for("sm_90a"):
        traced = jax.jit(jax.grad(loss, (0, 1))).trace(query, caps)
        traced.lower(lowering_platforms=("cuda",))
    assert traced.out_info[1].dtype == jnp.float32


def test_masks_of_functions_are_not_pickled():
    """It says so; a layout of blocks is."""
    with pytest.raises(TypeError, match="causal, a function that JAX has traced, can't be pickled"):
        pickle.dumps(create_block_mask(causal, None, None, 6, 5))
    layout = BlockMask.from_blocks(jnp.ones((1, 1, 2, 2), bool), block_size=4)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(layout)).kinds, layout.kinds)


def test_refused_by_pallas():
    with (
        jax_flash.planned_for("sm_90a"),
        pytest.raises(NotImplementedError, match="the Triton lowering of Pallas has no such primitive"),
    ):
        attend(score_mod=lambda s, b, h, q, k: jax.lax.erf(s), implementation="pallas")


@jax.custom_jvp
def _halved_backward(score):
    return score


@_halved_backward.defjvp
def _of_halved(primals, tangents):
    return primals[0], tangents[0] / 2


@pytest.mark.parametrize(
    ("function", "is_left_out"),
    (
        (lambda s, b, h, q, k: s, True),
        (lambda s, b, h, q, k: jnp.where(jnp.ones(3)[0] > 2, s, s) * 1, True),
        (lambda s, b, h, q, k: s + 0, False),  # of -0 it is 0
        (lambda s, b, h, q, k: jax.lax.stop_gradient(s), False),
        (lambda s, b, h, q, k: _halved_backward(s), False),
        (lambda s, b, h, q, k: s.astype(jnp.bfloat16), False),
    ),
)
def test_a_score_mod_that_changes_nothing_is_left_out(function, is_left_out):
    found, _, operands = _function_arguments.operands(function, None, (2,), (6, 5, 4))
    assert (found is None) == is_left_out
    assert bool(operands) != is_left_out


def test_gradients_of_a_score_mod_that_changes_nothing():
    def loss(query, unused, **options):
        score_mod = options.get("score_mod") and (lambda s, b, h, q, k: (unused[h], s)[1])
        return jnp.sum(jax_flash.flash_attention(query, KEY, KEY, score_mod=score_mod) ** 2)

    query, unused = jnp.ones((2, 6, 4, 8)), jnp.ones(4)
    d_query, d_unused = jax.grad(functools.partial(loss, score_mod=True), (0, 1))(query, unused)
    np.testing.assert_array_equal(d_query, jax.grad(loss)(query, unused))
    np.testing.assert_array_equal(d_unused, 0)


@pytest.mark.parametrize("sizes", ((0, 2, 6, 5), (2, 2, 0, 5), (2, 2, 6, 0)), ids="BTS")
def test_sizes_of_zero(sizes):
    """Functions may look up arrays that have no element then."""
    B, N, T, S = sizes
    query, key, ids = jnp.ones((B, T, N, 4)), jnp.ones((B, S, N, 4)), np.zeros((B, max(T, S)), int)
    documents = jax_flash.masks.DocumentMask(ids[:, :T], ids[:, :S])
    for mask in (causal, documents, lambda b, h, q, k: jnp.ones((T, S), bool)[q, k]):
        block_mask = create_block_mask(mask, B, N, T, S, block_size=4)
        assert block_mask.kinds.shape == (B, N, -(-T // 4), -(-S // 4))

        def loss(table, query, block_mask=block_mask):
            out = jax_flash.flash_attention(
                query, key, key, score_mod=lambda x, b, h, q, k: x + table[b, h, q, k], block_mask=block_mask
            )
            return jnp.sum(out), out

        gradients, out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(jnp.ones(sizes), query)
        np.testing.assert_array_equal(out, np.zeros((B, T, N, 4)))
        jax.tree.map(np.testing.assert_array_equal, gradients, (np.zeros(sizes), np.zeros(query.shape)))


def test_no_sequence_has_a_cache():
    table, ids = jnp.ones((0, 5)), np.zeros((0, 5), int)
    out, _ = jax_flash.flash_attention_with_cache(
        jnp.ones((0, 2, 2, 4)),
        jax_flash.KVCache.create(0, 5, 2, 4, jnp.float32),
        score_mod=lambda score, batch, head, query, key: score + table[batch, key],
        mask_mod=jax_flash.masks.DocumentMask(ids),
    )
    assert out.shape == (0, 2, 2, 4)
