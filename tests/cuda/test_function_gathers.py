"""How users' functions look captured arrays up, as C++, against JAX: in range and out, of every dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from function_harness import Compiled, compile_by_nvrtc, reference, score_mod

RANDOM = np.random.default_rng(0)
HEADS, QUERIES, KEYS = 4, 6, 10
TABLE = RANDOM.standard_normal((HEADS, KEYS)).astype(np.float32)


def table(dtype):
    values = (
        RANDOM.integers(0, 2, TABLE.shape) if dtype == "bool" else RANDOM.integers(-100, 100, TABLE.shape)
    )
    return jnp.asarray(values).astype(dtype)


def of_dtype(dtype):
    captured = table(dtype)
    return lambda score, b, h, q, k: score + captured[h, k].astype(jnp.float32)


def in_mode(mode, dtype=jnp.float32, fill_value=None):
    captured = jnp.asarray(TABLE * 10).astype(dtype)

    def function(score, b, h, q, k):
        return score + captured.at[h, q - k].get(mode=mode, fill_value=fill_value).astype(jnp.float32)

    return function


def rows(score, b, h, q, k):
    embedding = jnp.asarray(TABLE)
    return (
        score + embedding[h] @ embedding[q] + embedding[:, jnp.clip(k, 0, 9)].max() + embedding[h, 2:5].sum()
    )


def computed(score, b, h, q, k):
    """Arrays made within the function."""
    slopes = 2.0 ** -jnp.arange(1, HEADS + 1)
    both = jnp.concatenate([jnp.asarray(TABLE).T[::-1], jnp.ones((3, HEADS))])
    stacked = jnp.stack([score, slopes[h], q * 1.0])
    return (
        both[k, h] * slopes[h]
        + stacked[k % 3]
        + both.reshape(13 * HEADS)[q * 3]
        + jnp.split(both, 13)[5][0, h]
    )


DOCUMENTS = jnp.asarray(RANDOM.integers(0, 3, (2, KEYS)), jnp.int32)
BUCKETS = jnp.asarray(RANDOM.integers(-KEYS - 2, KEYS + 2, (QUERIES, KEYS)), jnp.int8)
SCALE = jnp.float32(1.5)


def chained(score, b, h, q, k):
    """An index that is looked up."""
    bias = jnp.asarray(TABLE)[h, BUCKETS[q, k]]
    return jnp.where(DOCUMENTS[b, q] == DOCUMENTS[b, k], score * SCALE + bias, -jnp.inf)


def branches(score, b, h, q, k):
    captured = jnp.asarray(TABLE)
    x = jax.lax.cond(q > k, lambda: captured[h, q], lambda: score)
    return x + jax.lax.switch(k, [lambda: 1.0, lambda: captured[q, h], lambda: score * 2])


def batched_indices(score, b, h, q, k):
    return score + jnp.asarray(TABLE)[jnp.array([h, q, -1]), jnp.array([k, 0, 3])].sum()


CASES = {
    **{x: of_dtype(x) for x in "float32 bfloat16 float16 int32 uint32 int16 uint16 int8 uint8 bool".split()},
    "clip": in_mode("clip"),
    "fill": in_mode("fill"),
    "fill_with": in_mode("fill", fill_value=7),
    "fill_int": in_mode("fill", jnp.int32),
    "fill_bfloat16": in_mode("fill", jnp.bfloat16),
    "default": in_mode(None),
    "unsigned": lambda score, b, h, q, k: score + jnp.asarray(TABLE)[h, (q - k).astype(jnp.uint32)],
    "wrap": lambda score, b, h, q, k: score + jnp.take(jnp.asarray(TABLE)[h], q - k, mode="wrap"),
    "scalar": lambda score, b, h, q, k: score * SCALE,
    "rows": rows,
    "computed": computed,
    "chained": chained,
    "branches": branches,
    "batched": batched_indices,
}


def arguments():
    """Indices in range of all arrays and beyond."""
    edges = np.array([0, 1, 3, 4, 5, 9, 10, 11, -1, -2, -4, -5, -11, 1000], np.int32)
    h, q, k = (x.ravel() for x in np.meshgrid(edges, edges, edges))
    score = RANDOM.standard_normal(h.shape).astype(np.float32)
    return score, np.abs(h) % 2, h, q, k


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return Compiled(tmp_path_factory.mktemp("gathers"), [score_mod(f) for f in CASES.values()])


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_jax(compiled, name):
    given = arguments()
    value, _, _ = compiled.run(list(CASES).index(name), given)
    np.testing.assert_allclose(value, reference(CASES[name], given), rtol=1e-5, atol=1e-5)


@pytest.mark.every_turn
def test_compiles_by_nvrtc():
    compile_by_nvrtc([score_mod(f) for f in CASES.values()])
