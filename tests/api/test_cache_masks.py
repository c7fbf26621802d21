"""mask_mod on key-value caches: masks of positions in the sequence, with every other option."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import KVCache, PagedKVCache, masks

B, S, N, K, H, T = 3, 24, 4, 2, 16, 5
LENGTHS = np.array([0, 7, S - T], np.int32)  # before the append
IDS = np.sort(np.random.default_rng(3).integers(0, 4, (B, S)))
SEEN = np.random.default_rng(4).random((B, N, S, S)) < 0.4
RULES = {
    "local": (masks.LocalMask((4, 1)), lambda b, h, q, k: (q - 4 <= k) & (k <= q + 1)),
    "chunked": (masks.ChunkedCausalMask(5), lambda b, h, q, k: (k <= q) & (k // 5 == q // 5)),
    "documents": (masks.DocumentMask(IDS), lambda b, h, q, k: IDS[b, q] == IDS[b, k]),
    "array": (masks.NumpyMask(SEEN), lambda b, h, q, k: SEEN[b, h, q, k]),
    "heads": (
        masks.MultiHeadMask([masks.LocalMask(n) for n in range(N)]),
        lambda b, h, q, k: abs(q - k) <= h,
    ),
    "combined": (
        masks.CausalMask() & ~masks.LocalMask(2) | (lambda b, h, q, k: k % 4 == b),
        lambda b, h, q, k: (k <= q) & (abs(q - k) > 2) | (k % 4 == b),
    ),
    "no graph of scalars": (
        lambda b, h, q, k: jnp.sort(jnp.stack([q, k, 5 * h]))[0] > 1,
        lambda b, h, q, k: np.minimum(np.minimum(q, k), 5 * h) > 1,
    ),
    "hides whole rows": (
        lambda b, h, q, k: (q + h) % 3 != 0,
        lambda b, h, q, k: ((q + h) % 3 != 0) & (k >= 0),
    ),
    "hides all": (lambda b, h, q, k: False, lambda b, h, q, k: np.zeros((B, N, T, S), bool)),
}


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def arguments(lengths=LENGTHS):
    """Of a call that appends T tokens."""
    cache = KVCache(normal(0, B, S, K, H), normal(1, B, S, K, H), jnp.asarray(lengths))
    return normal(2, B, T, N, H), cache, normal(3, B, T, K, H), normal(4, B, T, K, H)


def as_pages(cache, page=4):
    order = jax.random.permutation(jax.random.key(9), B * S // page)
    key, value = (
        jnp.zeros((B * S // page, page, K, H)).at[order].set(x.reshape(-1, page, K, H))
        for x in (cache.key, cache.value)
    )
    return PagedKVCache(key, value, order.reshape(B, -1).astype(jnp.int32), cache.lengths)


def defined(query, cache, sees, scale=H**-0.5, cap=None, change=None, slopes=None, sinks=None):
    """`(out, lse)` in float64, of a cache that has the new keys: softmax over whole matrices.

    Args:
      sees: of `(batch, head, query, key)`, positions; what is beyond the lengths is hidden too.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, cache.key, cache.value))
    key, value = (x.repeat(N // K, axis=2) for x in (key, value))
    lengths = np.asarray(cache.lengths)
    b, h, t, k = np.ogrid[:B, :N, :T, :S]
    at = lengths.reshape(B, 1, 1, 1) - T + t
    x = np.einsum("btnh,bsnh->bnts", query, key) * scale
    if cap is not None:
        x = cap * np.tanh(x / cap)
    if change is not None:
        x = change(x, b, h, at, k)
    if slopes is not None:
        x = x - np.reshape(slopes, (1, N, 1, 1)) * abs(at - k)
    x = np.where(sees(b, h, at, k) & (k < lengths.reshape(B, 1, 1, 1)), x, -np.inf)
    of_sinks = np.full((B, N, T, 1), -np.inf)
    if sinks is not None:
        of_sinks[:] = np.reshape(sinks, (1, N, 1, 1))
    sees_nothing = np.isneginf(x).all(-1, keepdims=True)
    top = np.maximum(x.max(-1, keepdims=True), of_sinks)
    top = np.where(np.isneginf(top), 0, top)
    p = np.exp(x - top)
    total = p.sum(-1, keepdims=True) + np.exp(of_sinks - top)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(sees_nothing, 0, np.einsum("bnts,bsnh->bnth", p, value) / total)
        lse = np.where(sees_nothing, -np.inf, top + np.log(total))
    return out.transpose(0, 2, 1, 3), lse[..., 0].transpose(0, 2, 1)


def assert_same(got, want):
    for ours, right in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, right, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("make", (lambda cache: cache, as_pages), ids=("contiguous", "paged"))
@pytest.mark.parametrize("name", RULES)
def test_is_the_mask_of_positions(name, make):
    mask_mod, sees = RULES[name]
    query, cache, key, value = arguments()
    options = {"is_causal": False, "mask_mod": mask_mod, "return_residual": True}
    got, after = jax.jit(functools.partial(jax_flash.flash_attention_with_cache, **options))(
        query, make(cache), key, value
    )
    np.testing.assert_array_equal(after.lengths, LENGTHS + T)
    assert_same(got, defined(query, cache.append(key, value), sees))


@pytest.mark.parametrize("window", ({}, {"local_window_size": (6, 2), "is_causal": False}), ids=len)
def test_goes_with_every_option(window):
    """It hides what it hides, whatever score_mod, soft cap and slopes make of the score."""
    mask_mod, sees = RULES["combined"]
    slopes, sinks = np.linspace(0.1, 0.5, N), np.linspace(-1, 1, N)
    table = np.random.default_rng(5).normal(size=(N, S))
    query, cache, key, value = arguments()

    def in_window(b, h, q, k):
        return sees(b, h, q, k) & ((q - 6 <= k) & (k <= q + 2) if window else k <= q)

    @jax.jit
    def attend(query, cache, key, value, slopes, sinks, table):
        return jax_flash.flash_attention_with_cache(
            query,
            cache,
            key,
            value,
            scale=0.7,
            logits_soft_cap=3.0,
            alibi_slopes=slopes,
            sinks=sinks,
            score_mod=lambda score, b, h, q, k: 2 * score + table[h, k],
            mask_mod=mask_mod,
            return_residual=True,
            **window,
        )

    of_float32 = (jnp.asarray(x, jnp.float32) for x in (slopes, sinks, table))
    got, _ = attend(query, cache, key, value, *of_float32)
    change = lambda x, b, h, q, k: 2 * x + table[h, k]  # noqa: E731
    options = {"scale": 0.7, "cap": 3.0, "change": change, "slopes": slopes, "sinks": sinks}
    assert_same(got, defined(query, cache.append(key, value), in_window, **options))


def test_new_keys_are_rotated():
    mask_mod, sees = RULES["documents"]
    query, cache, key, value = arguments()
    angles = np.random.default_rng(6).uniform(0, 6, (S, H // 2))
    tables = {"rotary_cos": jnp.cos(angles), "rotary_sin": jnp.sin(angles)}
    got, after = jax_flash.flash_attention_with_cache(
        query, cache, key, value, is_causal=False, mask_mod=mask_mod, return_residual=True, **tables
    )
    rotated = jax_flash.apply_rotary(query, *tables.values(), offsets=cache.lengths)
    assert_same(got, defined(rotated, after, sees))


def test_decodes_as_the_mask_says_of_the_whole_sequence():
    """Token after token, with the mask that a model is trained with."""
    mask = masks.LocalMask((6, 0)) | masks.GlobalMask(2)
    query, key, value = normal(5, B, S, N, H), normal(6, B, S, K, H), normal(7, B, S, K, H)
    block_mask = jax_flash.create_block_mask(mask & masks.CausalMask(), None, None, S, S)
    whole = jax_flash.flash_attention(query, key, value, block_mask=block_mask)
    cache = KVCache.create(B, S, K, H, dtype=jnp.float32)
    step = jax.jit(functools.partial(jax_flash.flash_attention_with_cache, mask_mod=mask))
    for begin, end in ((0, 10), *((t, t + 1) for t in range(10, S))):
        out, cache = step(query[:, begin:end], cache, key[:, begin:end], value[:, begin:end])
        np.testing.assert_allclose(out, whole[:, begin:end], rtol=2e-5, atol=2e-5)


PARENTS = np.array([[-1, 0, 0, 2, 1], [-1, -1, 0, 1, 3], [-1, 0, 1, 2, 3]])


@pytest.mark.parametrize("of_rows", (False, True), ids=("one tree", "a tree of each sequence"))
def test_a_tree_of_tokens(of_rows):
    """A step of speculative decoding: each token sees what it would see if its ancestors alone were ahead."""
    query, cache, key, value = arguments()
    parents = PARENTS if of_rows else PARENTS[0]

    @jax.jit
    def verify(query, cache, key, value):
        tree = masks.TreeMask(parents, cache.lengths, takes_positions=True)
        return jax_flash.flash_attention_with_cache(query, cache, key, value, mask_mod=tree)

    out, after = verify(query, cache, key, value)
    np.testing.assert_array_equal(after.lengths, LENGTHS + T)
    for b in range(B):
        context, own = int(LENGTHS[b]), (parents[b] if of_rows else parents)
        for token in range(T):
            path = [token]
            while own[path[0]] >= 0:
                path.insert(0, own[path[0]])
            keys, values = (
                jnp.concatenate([old[b, :context], new[b, np.array(path)]])[None]
                for old, new in ((cache.key, key), (cache.value, value))
            )
            alone = jax_flash.flash_attention(query[b : b + 1, token : token + 1], keys, values)
            np.testing.assert_allclose(out[b, token], alone[0, 0], rtol=2e-5, atol=2e-5)


def test_a_tree_at_other_positions():
    """A query ahead of the tree, or behind it, attends to the context."""
    tree = masks.TreeMask([-1, 0], np.array([3, 1]), takes_positions=True)
    sees = np.asarray([[[bool(tree(b, 0, q, k)) for k in range(6)] for q in range(6)] for b in range(2)])
    expected = np.zeros((2, 6, 6), bool)
    for b, context in enumerate((3, 1)):
        expected[b, :, :context] = True
        expected[b, context, context] = expected[b, context + 1, context : context + 2] = True
    np.testing.assert_array_equal(sees, expected)


@pytest.mark.parametrize("wild", (jnp.nan, jnp.inf, -jnp.inf))
def test_a_score_that_is_hidden_may_be_anything(wild):
    mask_mod, sees = RULES["combined"]
    score_mod = lambda score, b, h, q, k: jnp.where(mask_mod(b, h, q, k), score, wild)  # noqa: E731
    query, cache, key, value = arguments()
    got, after = jax_flash.flash_attention_with_cache(
        query,
        cache,
        key,
        value,
        is_causal=False,
        score_mod=score_mod,
        mask_mod=mask_mod,
        alibi_slopes=jnp.full(N, 0.1),
        return_residual=True,
    )
    assert_same(got, defined(query, after, sees, slopes=np.full(N, 0.1)))


def test_one_that_hides_nothing_costs_nothing():
    found = jax_flash.explain(*arguments(), mask_mod=masks.FullMask() | masks.CausalMask())
    assert found.spec.attention.score_mod is None and found.shapes.captured == {}


def test_what_is_hidden_may_be_anything():
    """NaN in a key and in its value, which no query sees."""
    query, cache, key, value = arguments(np.array([9, 12, 15], np.int32))
    spoiled = KVCache(*(x.at[:, 4].set(jnp.nan) for x in (cache.key, cache.value)), cache.lengths)
    mask_mod = lambda b, h, q, k: k != 4  # noqa: E731
    of_clean, of_spoiled = (
        jax_flash.flash_attention_with_cache(query, x, key, value, is_causal=False, mask_mod=mask_mod)[0]
        for x in (cache, spoiled)
    )
    np.testing.assert_allclose(of_spoiled, of_clean, rtol=1e-6, atol=1e-6)
    seen, _ = jax_flash.flash_attention_with_cache(
        query, spoiled, key, value, mask_mod=lambda b, h, q, k: (k != 4) | (q == 12)
    )
    positions = np.asarray(spoiled.lengths)[:, None] + np.arange(T)
    np.testing.assert_array_equal(np.isnan(seen).all((2, 3)), positions == 12)
    np.testing.assert_array_equal(np.isnan(seen).any((2, 3)), positions == 12)


COMPLEX = jnp.zeros(S, jnp.complex64)


def of_int(b, h, q, k):
    return q - k


ERRORS = {
    "int": (of_int, TypeError, r"mask_mod \(of_int\) returns int32; it must return bool"),
    "array": (lambda b, h, q, k: jnp.stack([q >= k]), ValueError, r"mask_mod .* must return a scalar"),
    "complex": (
        lambda b, h, q, k: COMPLEX[k].real > 0,
        TypeError,
        r"mask_mod .* captures an array of complex",
    ),
    "block mask": (
        jax_flash.create_block_mask(masks.CausalMask(), None, None, S, S),
        TypeError,
        r"mask_mod must be None or a function of batch.*got BlockMask.*pass the function",
    ),
    "capacity": (
        masks.DocumentMask(IDS[:, 1:]),
        ValueError,
        r"mask_mod must be of B = 3 sequences.*T = S = 24: ids is int32 \(3, 23\)",
    ),
    "sequences": (masks.TreeMask([-1], LENGTHS[1:], True), ValueError, r"mask_mod must.*B = 3"),
    "a tree by tokens": (
        masks.TreeMask([-1], LENGTHS),
        ValueError,
        "key-value cache, set takes_positions=True",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_it(name):
    mask_mod, kind, message = ERRORS[name]
    for others in ({}, {"score_mod": lambda score, b, h, q, k: score}):
        with pytest.raises(kind, match=message):
            jax_flash.flash_attention_with_cache(*arguments(), mask_mod=mask_mod, **others)


def test_an_error_of_the_score_mod_names_that():
    with pytest.raises(TypeError, match=r"score_mod .* returns int32"):
        jax_flash.flash_attention_with_cache(
            *arguments(), mask_mod=masks.CausalMask(), score_mod=lambda score, b, h, q, k: q
        )


def test_explain_names_the_function_and_the_line():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, arguments())
    mask_mod = lambda b, h, q, k: jnp.sort(jnp.stack([q, k]))[0] > 2  # noqa: E731
    with jax_flash.planned_for("sm_90a"):
        found = jax_flash.explain(*half, mask_mod=masks.CausalMask() & masks.LocalMask(3))
        assert (found.picked, [choice.runs for choice in found.choices]) == ("cuda", [True] * 3)
        alone = jax_flash.explain(*half, mask_mod=mask_mod)
        both = jax_flash.explain(*half, mask_mod=mask_mod, score_mod=lambda score, b, h, q, k: score + k)
    for found, name in ((alone, "mask_mod"), (both, "score_mod or mask_mod")):
        assert [choice.runs for choice in found.choices] == [False, False, True]
        for choice in found.choices[:2]:
            assert choice.reason.startswith(f"{name} has sort, at {__file__}:")
