"""score_mod and block_mask over varlen sequences: each sequence gets what it gets alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import in_turn

import jax_flash
from jax_flash.cuda import varlen
from jax_flash.cuda.sm90 import forward_plan

N, K, H = 4, 2, 16
QUERIES, KEYS = (5, 0, 17, 9), (7, 4, 20, 9)
STARTS_Q, STARTS_K = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (QUERIES, KEYS))
PADDING = 2  # tokens of no sequence
PACKED = {"cu_seqlens_q": STARTS_Q, "cu_seqlens_kv": STARTS_K, "max_seqlen_q": 17, "max_seqlen_kv": 20}
SHAPES = ((STARTS_Q[-1] + PADDING, N, H), (STARTS_K[-1], K, H), (STARTS_K[-1], K, H), (len(QUERIES), N, 8))


def arrays(dtype=jnp.float32):
    """Query, key and value, and a table that each sequence and head has a row of."""
    generator = np.random.default_rng(3)
    query, key, value, table = (jnp.asarray(generator.standard_normal(shape), dtype) for shape in SHAPES)
    return query, key, value, table.astype(jnp.float32)


def score_mod_of(table, sequence=None):
    def score_mod(score, batch, head, query, key):
        row = table[batch if sequence is None else sequence, head]
        return score * jax.nn.sigmoid(row[0]) + row[jnp.clip(query - key, -4, 3) + 4]

    return score_mod


def sees(batch, head, query, key):
    return (key % 3 == batch % 2) | (query - key < 4 + head)


def mask_of(sequences, queries, keys, function=sees):
    return jax_flash.create_block_mask(function, sequences, N, queries, keys, block_size=8)


def packed(query, key, value, table, with_mask, **options):
    block_mask = mask_of(len(QUERIES), 17, 20) if with_mask else None
    score_mod = score_mod_of(table)
    return jax_flash.flash_attention_varlen(
        query, key, value, **PACKED, score_mod=score_mod, block_mask=block_mask, **options
    )


def alone(query, key, value, table, with_mask, **options):
    """Each sequence by itself."""
    outs = []
    for i, (queries, keys) in enumerate(zip(QUERIES, KEYS, strict=True)):
        if queries == 0:
            continue
        block_mask = mask_of(None, queries, keys, lambda b, h, q, k, i=i: sees(i, h, q, k))
        out = jax_flash.flash_attention(
            query[STARTS_Q[i] : STARTS_Q[i] + queries],
            *(x[STARTS_K[i] : STARTS_K[i] + keys] for x in (key, value)),
            score_mod=score_mod_of(table, i),
            block_mask=block_mask if with_mask else None,
            implementation="xla",
            **options,
        )
        outs.append(out)
    return jnp.concatenate([*outs, jnp.zeros((PADDING, N, H), query.dtype)])


@pytest.mark.parametrize(
    "options, with_mask", in_turn(({}, {"is_causal": True}, {"logits_soft_cap": 2.0}), (False, True)), ids=str
)
def test_sequences_get_what_they_get_alone(with_mask, options):
    def loss(attend):
        return lambda *x: jnp.sum(jnp.sin(3 * attend(*x, with_mask, **options)))

    given = arrays()
    np.testing.assert_allclose(
        packed(*given, with_mask, **options), alone(*given, with_mask, **options), atol=3e-6
    )
    gradients, expected = (jax.grad(loss(attend), argnums=(0, 1, 2, 3))(*given) for attend in (packed, alone))
    for got, right in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(got, right, atol=3e-5)


def test_second_derivatives():
    """Of the gradient by key, along a direction of all arrays."""
    given = arrays()
    directions = [jnp.cos(7 * x) for x in given]

    def derivative(attend):
        def gradient(*x):
            return jax.grad(lambda key: jnp.sum(jnp.sin(attend(x[0], key, *x[2:], False))))(x[1])

        return jax.jvp(gradient, given, tuple(directions))[1]

    np.testing.assert_allclose(derivative(packed), derivative(alone), atol=3e-5)


def test_slopes_of_each_sequence():
    given, slopes = arrays(), jnp.linspace(0.1, 1, len(QUERIES) * N).reshape(-1, N)
    got = packed(*given, False, alibi_slopes=slopes)
    with_slopes = []
    for i, (queries, keys) in enumerate(zip(QUERIES, KEYS, strict=True)):
        tokens = slice(STARTS_Q[i], STARTS_Q[i] + queries), *[slice(STARTS_K[i], STARTS_K[i] + keys)] * 2
        own = (x[own] for x, own in zip(given[:3], tokens, strict=True))
        score_mod = score_mod_of(given[3], i)
        with_slopes.append(jax_flash.flash_attention(*own, score_mod=score_mod, alibi_slopes=slopes[i]))
    np.testing.assert_allclose(got[: STARTS_Q[-1]], jnp.concatenate(with_slopes), atol=3e-6)


def test_vmap_over_what_a_function_captures():
    *given, table = arrays()
    tables = jnp.stack([table, -table])

    def gradient(table):
        return jax.grad(lambda table: jnp.sum(jnp.sin(packed(*given, table, False))))(table)

    np.testing.assert_allclose(jax.vmap(gradient)(tables), jnp.stack([*map(gradient, tables)]), atol=3e-5)


def test_8_bits():
    """Blocks of rows begin anew with each sequence, so it is rounded as it is alone."""
    given = arrays(jnp.bfloat16)
    got, right = (attend(*given, False, quantization="fp8") for attend in (packed, alone))
    np.testing.assert_allclose(got.astype(jnp.float32), right.astype(jnp.float32), atol=0.01)


def test_one_mask_of_all_sequences_under_jit_and_vmap():
    query, key, value, _ = arrays()
    queries = jnp.stack([query, 2 * query])

    def attend(query):
        block_mask = mask_of(None, 17, 20, lambda b, h, q, k: (q + h) % 3 != k % 3)
        return jax_flash.flash_attention_varlen(query, key, value, **PACKED, block_mask=block_mask)

    got = jax.jit(jax.vmap(attend))(queries)
    np.testing.assert_allclose(got, jnp.stack([attend(query), attend(2 * query)]), atol=3e-6)


@pytest.mark.every_turn
@pytest.mark.parametrize("implementation", ("cuda", "pallas"))
def test_lowers_for_a_gpu(implementation):
    """Sequences stay packed in the CUDA kernels: nothing is as long as all of them padded."""
    *given, table = arrays(jnp.bfloat16)

    def loss(*x):
        return jnp.sum(packed(*x, False, is_causal=True, implementation=implementation).astype(jnp.float32))

    with jax_flash.planned_for("sm_90a"):
        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
        text = step.trace(*given, table).lower(lowering_platforms=("cuda",)).as_text()
    padded = f"tensor<{len(QUERIES)}x17x{N}x{H}xbf16>"
    assert (padded in text) == (implementation == "pallas")


def test_explain():
    *given, table = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays(jnp.bfloat16))
    with jax_flash.planned_for("sm_90a"):
        found = jax_flash.explain(*given, **PACKED, score_mod=score_mod_of(jnp.zeros(table.shape)))
    assert {choice.name: choice.runs for choice in found.choices}["cuda"]
    assert found.shapes.query.shape == (1, STARTS_Q[-1] + PADDING, N, H), "sequences stay packed"


def test_explain_tells_the_tile_that_runs():
    """A look-up by the batch is one for each row, where sequences are packed."""
    shapes = [jax.ShapeDtypeStruct((4096, heads, 128), jnp.bfloat16) for heads in (8, 8, 8)]
    offsets = jax.ShapeDtypeStruct((5,), jnp.int32)
    packing = dict(cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=2048, max_seqlen_kv=2048)
    table = jnp.zeros((4, 2048))
    with jax_flash.planned_for("sm_90a"):
        found = jax_flash.explain(*shapes, **packing, score_mod=lambda s, b, h, q, k: s + table[b, k])
    spec = varlen.spec_of_tokens(found.spec, found.shapes)
    tile = forward_plan.configure(spec, found.shapes).tile
    assert f"forward {tile.rows} queries × {tile.keys} keys" in str(found)
    assert tile != forward_plan.configure(found.spec, found.shapes).tile


def test_terms_of_exact_sums_are_of_pairs_that_see_each_other():
    """Deterministic gradients of captured arrays have a limit of terms."""
    tokens = 1 << 18
    shapes = [jax.ShapeDtypeStruct((tokens, 16, 64), jnp.bfloat16)] * 3
    offsets = jax.ShapeDtypeStruct((129,), jnp.int32)
    packing = dict(cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=2048, max_seqlen_kv=2048)
    table = jnp.zeros((16,))
    with jax_flash.planned_for("sm_90a"):
        found = jax_flash.explain(
            *shapes, **packing, deterministic=True, score_mod=lambda s, b, h, q, k: s + table[h]
        )
    assert found.picked == "cuda"


@pytest.mark.parametrize(
    ("options", "said"),
    (
        (
            {"block_mask": mask_of(4, 17, 19)},
            r"block_mask must be made for 17 queries and 20 keys.*got one for \(17, 19\)",
        ),
        ({"block_mask": mask_of(3, 17, 20)}, "block_mask must be of 1 or 4 batch rows"),
    ),
)
def test_masks_that_do_not_fit(options, said):
    with pytest.raises(ValueError, match=said):
        jax_flash.flash_attention_varlen(*arrays()[:3], **PACKED, **options)


def test_no_sequences():
    query, key, value, table = arrays()
    none = {"cu_seqlens_q": np.zeros(1, np.int32), "cu_seqlens_kv": np.zeros(1, np.int32)}
    out = jax_flash.flash_attention_varlen(
        query, key, value, **PACKED | none, score_mod=score_mod_of(table), implementation="xla"
    )
    assert not out.any()
