"""The examples of the documents run. Of a diff, the code after it runs; the code before it too, where it can,
and both have the same `out`."""

import functools
import pathlib
import re
import types

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_flash

ROOT = pathlib.Path(__file__).resolve().parents[2]
PORTING = (ROOT / "docs" / "porting.md").read_text()
DIFFS = re.findall(r"^```diff\n(.*?)^```", PORTING, re.DOTALL | re.MULTILINE)
# What code before a port computes, where that can't run here: the package isn't installed, or isn't for JAX.
SAME = "(ids[:, None, :, None] == ids[:, None, None, :])"
MEANING = {
    "flash_attn_func(": "jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(127, 0))",
    "flash_attn_varlen_func(": f"jax.nn.dot_product_attention(q, k, v, mask={SAME}[0], is_causal=True)",
    "DotProductAttention(": "jax.nn.dot_product_attention(query, key, value, is_causal=True)",
    "fused_attn(": f"jax.nn.dot_product_attention(query, key, value, mask={SAME}, is_causal=True)",
}


def names():
    """What the examples take for granted, by name."""
    B, T, N, K, H = 2, 16, 8, 2, 4
    normal = np.random.default_rng(0).normal
    q, k, v = (jnp.asarray(normal(size=(T, heads, H)), jnp.float32) for heads in (N, K, K))
    return {
        **{
            "jax": jax,
            "jnp": jnp,
            "nn": flax.linen,
            "nnx": nnx,
            "functools": functools,
            "jax_flash": jax_flash,
        },
        **{"B": B, "T": T, "N": N, "K": K, "H": H, "q": q, "k": k, "v": v},
        "query": jnp.asarray(normal(size=(B, T, N, H)), jnp.float32),
        "key": jnp.asarray(normal(size=(B, T, K, H)), jnp.float32),
        "value": jnp.asarray(normal(size=(B, T, K, H)), jnp.float32),
        "x": jnp.asarray(normal(size=(B, T, N * H)), jnp.float32),
        "ids": jnp.asarray([[1] * 5 + [2] * 11, [3] * 16]),
        **{"cu_seqlens": jnp.asarray([0, 5, T]), "max_seqlen": 11},
    }


def side(diff, leaves_out):
    """The code without the lines that the other side has."""
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(leaves_out))


def run(code):
    """The names that the code leaves."""
    found = names()
    if "flash_attn_func" in code:  # a batch
        found |= {name: jnp.stack([found[name]] * 2) for name in "qkv"}
    exec(code.replace("127", "5").replace("128", "6"), found)  # windows that hide some of the T keys
    return types.SimpleNamespace(**found)


@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: diff.splitlines()[0])
def test_a_port(diff):
    before, after = side(diff, "+"), side(diff, "-")
    for name, meaning in MEANING.items():
        if re.search(rf"(?<!\w){re.escape(name)}", before):
            before = f"{'# flash_attn_func' if name == 'flash_attn_func(' else ''}\nout = {meaning}"
    np.testing.assert_allclose(run(after).out, run(before).out, rtol=1e-4, atol=1e-5)


def test_each_source_has_a_port():
    sources = ("from jax.nn", "nn.Multi", "nnx.Multi", "from flash_attn", "from transformer_engine", "einsum")
    for name in sources:
        assert any(name in side(diff, "+") for diff in DIFFS), name


def examples(page, heading):
    section = (ROOT / page).read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def test_attention_to_several_caches():
    (code,) = examples("docs/porting.md", "From attention that you wrote")
    found = run(code)
    halves = [(found.key[:, part], found.value[:, part]) for part in (slice(0, 7), slice(7, None))]
    expected = jax_flash.flash_attention(found.query, found.key, found.value)
    np.testing.assert_allclose(found.merged_attention(found.query, halves), expected, rtol=1e-4, atol=1e-5)


def test_a_sharded_sequence():
    (code,) = examples("docs/scale-out.md", "An example")
    found = run(code)
    expected = jax_flash.flash_attention(found.query, found.key, found.value, is_causal=True)
    np.testing.assert_allclose(found.out, expected, rtol=1e-4, atol=1e-5)


def test_functions():
    arrays = run("")
    relative, local, by_blocks = (
        run(code)
        for heading in ("A score function", "A mask function")
        for code in examples("docs/functions.md", heading)
    )
    assert relative.d_table.shape == (arrays.N, 65) and jnp.abs(relative.d_table).max() > 0
    tokens = np.arange(arrays.T)
    distance = tokens[:, None] - tokens
    sees = (distance >= 0) & (distance <= 5) | (tokens < 4) | (tokens < 4)[:, None]
    qkv = arrays.query, arrays.key, arrays.value
    expected = jax_flash.flash_attention(*qkv, mask=sees)
    np.testing.assert_allclose(local.out, expected, rtol=1e-4, atol=1e-5)
    expected = jax_flash.flash_attention(*qkv, mask=tokens[:, None] // 8 >= tokens // 8)
    np.testing.assert_allclose(by_blocks.out, expected, rtol=1e-4, atol=1e-5)


def test_functions_on_a_cache():
    """A prompt, and then token after token, is the whole sequence."""
    (code,) = examples("docs/functions.md", "Key-value caches")
    found = run(code)
    B, T, K, H = found.key.shape
    table = jnp.asarray(np.random.default_rng(1).normal(size=(found.N, 65)), jnp.float32)
    cache, outs = jax_flash.KVCache.create(B, T, K, H, jnp.float32), []
    for begin, end in ((0, 9), *((t, t + 1) for t in range(9, T))):
        arrays = (x[:, begin:end] for x in (found.query, found.key, found.value))
        query, *new = arrays
        out, cache = jax.jit(found.step)(query, cache, *new, table)
        outs.append(out)
    distance = np.arange(T)[:, None] - np.arange(T)
    expected = jax_flash.flash_attention(
        found.query,
        found.key,
        found.value,
        bias=table[:, np.clip(distance, -32, 32) + 32],
        mask=(distance >= 0) & ((distance <= 5) | (np.arange(T) < 4) | (np.arange(T) < 4)[:, None]),
    )
    np.testing.assert_allclose(jnp.concatenate(outs, 1), expected, rtol=1e-4, atol=1e-5)


def test_a_tree_on_a_cache():
    """Each token attends as if its ancestors alone were ahead of it."""
    (code,) = (x for x in examples("docs/masks.md", "Tree") if "cache" in x)
    found = run(code)
    lengths, T = np.array([3, 7]), len(found.parents)
    angles = jnp.asarray(np.random.default_rng(1).uniform(0, 6, (found.T, found.H // 2)), jnp.float32)
    tables = jnp.cos(angles), jnp.sin(angles)
    query, key, value = (x[:, -T:] for x in (found.query, found.key, found.value))
    cache = jax_flash.KVCache(found.key, found.value, jnp.asarray(lengths, jnp.int32))
    out, _ = jax.jit(found.verify)(query, cache, key, value, *tables)
    for b, length in enumerate(lengths):
        for token in range(T):
            path = [token]
            while found.parents[path[0]] >= 0:
                path.insert(0, found.parents[path[0]])
            rows = slice(b, b + 1), np.array(path)
            before = (x[b : b + 1, :length] for x in (found.key, found.value))
            alone, _ = jax_flash.flash_attention_with_cache(
                query[b : b + 1, token : token + 1],
                jax_flash.KVCache.create(1, found.T, found.K, found.H, jnp.float32).append(*before),
                key[rows],
                value[rows],
                rotary_cos=tables[0],
                rotary_sin=tables[1],
            )
            np.testing.assert_allclose(out[b, token], alone[0, 0], rtol=1e-4, atol=1e-5)


def test_rematerialisation():
    (code,) = examples("README.md", "Rematerialisation")
    code = "from jax_flash import flash_attention\n" + code
    weights, x = jnp.ones((3, 4, 16, 2, 8)) / 16, run("").x[..., :16]

    def forward_passes(code):
        loss = run(code).loss
        return jax.jit(jax.grad(loss)).lower(weights, x).as_text().count("call @jax_flash_forward")

    assert forward_passes(code) == 1
    for name in ("jax_flash_out", "jax_flash_lse"):
        assert forward_passes(code.replace(f'"{name}"', '"another"')) == 2


def test_8_bits(capsys):
    (of_16_bits,) = examples("docs/fp8.md", "From 16-bit arrays, with gradients")
    (of_8_bits,) = examples("docs/fp8.md", "Arrays of 8 bits")
    (of_cache,) = examples("docs/fp8.md", "Key-value caches")
    (explained,) = examples("docs/fp8.md", "What runs where")
    found: dict = {}
    exec(of_16_bits + of_8_bits + explained, found)
    assert capsys.readouterr().out.count("implementation=None picks") == 3
    with_cache = dict(found)
    exec(of_cache, with_cache)
    assert with_cache["cache"].key.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(with_cache["cache"].lengths, [21, 21])
    seen = [found[name][:, :21] for name in ("key", "value")]
    expected = jax_flash.flash_attention(found["query"][:, 20:21], *seen)
    np.testing.assert_allclose(with_cache["out"].astype(float), expected.astype(float), atol=0.1)
    arrays = [found[name] for name in ("query", "key", "value")]
    assert [x.shape for x in found["gradients"]] == [x.shape for x in arrays]
    expected = jax_flash.flash_attention(*arrays, is_causal=True, quantization="fp8")
    np.testing.assert_array_equal(found["out"], expected)
