"""`jax_flash.dot_product_attention` beside the `jax.nn.dot_product_attention` of the installed JAX."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

B, N, K, H = 2, 4, 2, 8
SIZES = [(5, 7), (7, 4)]


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def inputs(T, S, batch=(B,), dtype=jnp.float32):
    shapes = (*batch, T, N, H), (*batch, S, K, H), (*batch, S, K, H)
    return [normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes)]


def compare(query, key, value, bias=None, mask=None, *, valid=True, lengths=None, **options):
    """Ours and JAX's; `valid` marks the rows `(B, T, 1)` with something to attend to: the others give 0."""

    @jax.jit  # one compilation for both
    def both(arrays, lengths):
        return [
            function(*arrays, **lengths, **options, return_residual=True, implementation="xla")
            for function in (jax_flash.dot_product_attention, jax.nn.dot_product_attention)
        ]

    arrays = (query, key, value, bias, mask)
    (out, lse), (expected, expected_lse) = both(arrays, lengths or {})
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    assert (lse.shape, lse.dtype) == (expected_lse.shape, expected_lse.dtype)
    valid = np.broadcast_to(valid, lse.shape)
    expected = np.where(valid[..., None], expected, 0)
    expected_lse = np.where(valid, expected_lse, -np.inf)
    tolerance = dict(rtol=2e-5, atol=2e-5) if out.dtype == jnp.float32 else dict(rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(out.astype(float), expected.astype(float), **tolerance)
    np.testing.assert_allclose(lse.astype(float), expected_lse.astype(float), **tolerance)


@pytest.mark.parametrize(
    "lengths", ({}, {"key_value_seq_lengths": [3, 6], "query_seq_lengths": [5, 4]}), ids=str
)
@pytest.mark.parametrize(("T", "S"), SIZES)
def test_both_functions_have_both_alignments(T, S, lengths):
    """A top-left window with a soft cap, as of a port of Gemma, needs no mask."""
    arrays, options = inputs(T, S), dict(is_causal=True, local_window_size=(3, 0), return_residual=True)
    arrays_of_lengths = {name: np.minimum(x, T if "query" in name else S) for name, x in lengths.items()}
    options |= arrays_of_lengths
    for alignment in ("top_left", "bottom_right"):
        ours = jax_flash.flash_attention(*arrays, **options, alignment=alignment)
        other = jax_flash.dot_product_attention(*arrays, **options, alignment=alignment)
        jax.tree.map(np.testing.assert_array_equal, ours, other)
    np.testing.assert_array_equal(jax_flash.flash_attention(*arrays, **options)[0], ours[0])
    i, j = np.ogrid[:T, :S]
    near = jnp.asarray((j <= i) & (j >= i - 3))
    capped = dict(logits_soft_cap=2.0, **arrays_of_lengths)
    del options["return_residual"]
    expected = jax_flash.flash_attention(*arrays, mask=near, **capped)
    got = jax_flash.flash_attention(*arrays, **options, logits_soft_cap=2.0, alignment="top_left")
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def test_slopes_of_calls_aligned_to_the_top_left():
    slopes = jnp.array([0.5, 0.25, 1.0, 2.0])
    with pytest.raises(
        ValueError, match=r"alibi_slopes must be None with alignment=\"top_left\" where .* 5 q.* 7 k"
    ):
        jax_flash.flash_attention(*inputs(5, 7), alibi_slopes=slopes, alignment="top_left")
    lengths = dict(key_value_seq_lengths=np.array([3, 5]))
    distance = np.abs(np.arange(5)[:, None] - np.arange(5))
    got = jax_flash.flash_attention(*inputs(5, 5), alibi_slopes=slopes, alignment="top_left", **lengths)
    expected = jax_flash.flash_attention(*inputs(5, 5), -slopes[:, None, None] * distance, **lengths)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def some(allowed):
    """Rows (B, T, 1) with something to attend to, of allowed (B, T, S)."""
    return allowed.any(axis=-1)[..., None]


def test_signature():
    ours = inspect.signature(jax_flash.dot_product_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    added = {"dropout_rate", "dropout_key", "alignment"}
    assert {n: (p.kind, p.default) for n, p in ours.items() if n not in added} == {
        n: (p.kind, p.default) for n, p in theirs.items()
    }
    assert {ours[n].kind for n in added} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(("T", "S"), SIZES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 2, (-1, 3)], ids=str)
def test_causality_and_windows_are_aligned_to_the_top_left(T, S, is_causal, window):
    i, j = np.ogrid[:T, :S]
    allowed = (j <= i) if is_causal else np.ones((T, S), bool)
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        allowed = allowed & (j >= i - left) & (j <= i + right)
    compare(*inputs(T, S), is_causal=is_causal, local_window_size=window, valid=some(allowed[None]))


@pytest.mark.parametrize(("T", "S", "which"), [(5, 7, "query"), (7, 4, "key_value"), (5, 7, "both")])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"local_window_size": (1, 2)}], ids=str)
def test_lengths_leave_the_alignment_alone(T, S, which, options):
    lengths = {}
    if which != "key_value":
        lengths["query_seq_lengths"] = np.array([T - 1, 3], np.int32)
    if which != "query":
        lengths["key_value_seq_lengths"] = np.array([2, S], np.int32)
    i, j = np.ogrid[:T, :S]
    allowed = i < np.reshape(lengths.get("query_seq_lengths", T), (-1, 1, 1))
    allowed = allowed & (j < np.reshape(lengths.get("key_value_seq_lengths", S), (-1, 1, 1)))
    if "is_causal" in options:
        allowed = allowed & (j <= i)
    if "local_window_size" in options:
        allowed = allowed & (j >= i - 1) & (j <= i + 2)
    compare(*inputs(T, S), lengths=lengths, **options, valid=some(allowed))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_lengths_may_be_lists(options):
    arrays, lengths = inputs(5, 7), {"query_seq_lengths": [4, 5], "key_value_seq_lengths": (3, 7)}
    expected = {name: jnp.asarray(x, jnp.int32) for name, x in lengths.items()}
    np.testing.assert_array_equal(
        jax_flash.dot_product_attention(*arrays, **lengths, **options),
        jax_flash.dot_product_attention(*arrays, **expected, **options),
    )
    traced = jax.jit(
        lambda x: jax_flash.dot_product_attention(*arrays, key_value_seq_lengths=[x, 7], **options)
    )
    eager = jax_flash.dot_product_attention(*arrays, key_value_seq_lengths=[3, 7], **options)
    np.testing.assert_allclose(traced(3), eager, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(B, N, 5, 7), (1, N, 1, 7), (B, 1, 5, 1), (N, 5, 7), (7,), ()], ids=str)
def test_bias(shape):
    compare(*inputs(5, 7), normal(3, *shape), is_causal=True)


def test_bfloat16():
    compare(*inputs(5, 7, dtype=jnp.bfloat16), normal(3, N, 5, 7, dtype=jnp.bfloat16), is_causal=True)


def test_bias_of_integers():
    compare(*inputs(5, 7), jnp.arange(7))


@pytest.mark.parametrize("shape", [(B, N, 5, 7), (B, 1, 1, 7), (5, 7)], ids=str)
def test_mask_beside_bias_and_lengths(shape):
    # The first key is never masked out, so that every row within the lengths has something to attend to.
    mask = (np.random.default_rng(4).random(shape) < 0.5) | (np.arange(7) == 0)
    lengths = np.array([4, 5])
    valid = (np.arange(5) < lengths[:, None])[..., None]
    compare(
        *inputs(5, 7),
        normal(3, 1, N, 5, 7),
        jnp.asarray(mask),
        is_causal=True,
        lengths={"query_seq_lengths": jnp.asarray(lengths)},
        scale=0.3,
        valid=valid,
    )


def test_without_a_batch_axis():
    compare(*inputs(5, 7, batch=()), normal(3, N, 5, 7), is_causal=True)


def test_without_the_residual():
    arrays = inputs(5, 7)
    out = jax_flash.dot_product_attention(*arrays)
    assert out.shape == (B, 5, N, H)
    np.testing.assert_array_equal(out, jax_flash.dot_product_attention(*arrays, return_residual=True)[0])


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True, "key_value_seq_lengths": np.array([3, 7])}], ids=str
)
def test_gradients(options):
    arrays = (*inputs(5, 7), normal(3, 1, N, 5, 7))
    options = {k: jnp.asarray(v, jnp.int32) if k != "is_causal" else v for k, v in options.items()}

    def gradients(function):
        def loss(*arrays):
            out, lse = function(*arrays, **options, return_residual=True)
            return jnp.sum(out * normal(5, *out.shape)) + jnp.sum(lse)  # none flows through lse

        return jax.grad(loss, argnums=(0, 1, 2, 3))(*arrays)

    pairs = zip(
        gradients(jax_flash.dot_product_attention), gradients(jax.nn.dot_product_attention), strict=True
    )
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_rows_with_nothing_to_attend_to_give_0():
    mask = jnp.ones((B, 1, 5, 7), bool).at[:, :, 2].set(False)
    arrays = inputs(5, 7)
    out, lse = jax_flash.dot_product_attention(*arrays, mask=mask, return_residual=True)
    np.testing.assert_array_equal(out[:, 2], 0)
    np.testing.assert_array_equal(lse[:, 2], -np.inf)
    gradient = jax.grad(lambda q: jax_flash.dot_product_attention(q, *arrays[1:], mask=mask).sum())(arrays[0])
    np.testing.assert_array_equal(gradient[:, 2], 0)


def test_values_may_have_a_head_dim_of_their_own():
    query, key, _ = inputs(5, 7)
    assert jax_flash.dot_product_attention(query, key, normal(6, B, 7, K, 3)).shape == (B, 5, N, 3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            dict(query=jnp.ones((5, H))),
            ValueError,
            "query must have shape (B, T, N, H) or (T, N, H); got float32 (5, 8)",
        ),
        (dict(key=jnp.ones((1, B, 7, K, H))), ValueError, "key must have shape (B, S, K, H) or (S, K, H)"),
        (dict(key=jnp.ones((3, 7, K, H))), ValueError, "key must have shape (*B, S, K, H) with *B = (2,)"),
        (dict(mask=jnp.ones((5, 7))), TypeError, "mask must have a bool dtype"),
        (dict(query_seq_lengths=jnp.ones(B)), TypeError, "query_seq_lengths must have an integer dtype"),
        (
            dict(key_value_seq_lengths=jnp.ones((B, 1), jnp.int32), is_causal=True),
            ValueError,
            "key_value_seq_lengths must have shape (*B,) = (2,); got int32 (2, 1)",
        ),
        (dict(implementation="cudnn"), ValueError, "implementation must be None, one of"),
        (dict(local_window_size=(1, 2, 3)), ValueError, "local_window_size must be None, an int or a pair"),
        (dict(is_causal="yes"), TypeError, "is_causal must be True or False"),
        (
            dict(local_window_size=-1),
            ValueError,
            "local_window_size must hold sizes (left, right) with left + right of at least 0, or None for "
            "unbounded: no row would see a key; got -1 (int)",
        ),
        (dict(local_window_size=(2, -3)), ValueError, "got (2, -3) (tuple)"),
        (dict(mask=jnp.ones((5, 6), bool)), ValueError, "= (2, 4, 5, 7); got bool (5, 6)"),
        (dict(value=jnp.ones((7, K, H))), ValueError, "as in key; got float32 (7, 2, 8)"),
        (
            dict(query=jnp.ones((5, N, H)), key=jnp.ones((7, K, 6))),
            ValueError,
            "*B = () and H = 8 as in query (5, 4, 8); got float32 (7, 2, 6)",
        ),
        (
            dict(query=jnp.ones((5, N, H)), key=jnp.ones((7, K, H)), value=jnp.ones((6, K, H))),
            ValueError,
            "(*B, S, K) = (7, 2) as in key; got float32 (6, 2, 8)",
        ),
        (
            dict(key_value_seq_lengths=[3, "7"]),
            TypeError,
            "key_value_seq_lengths must have an integer dtype; got <U21 (2,)",
        ),
    ],
    ids=str,
)
def test_errors(changes, error, message):
    arguments = dict(zip(("query", "key", "value"), inputs(5, 7), strict=True))
    with pytest.raises(error) as raised:
        jax_flash.dot_product_attention(**arguments | changes)
    assert message in str(raised.value)


def test_dropout_is_that_of_dropout_mask():
    dropout = {"dropout_rate": 0.25, "dropout_key": jax.random.key(1)}
    query, key, _ = (jnp.zeros_like(x) for x in inputs(5, 7))
    value = jnp.broadcast_to(jnp.eye(7)[:, None], (B, 7, K, 7))
    out = jax_flash.dot_product_attention(query, key, value, **dropout)
    keep = jax_flash.dropout_mask(dropout["dropout_key"], 0.25, (B, N, 5, 7))
    np.testing.assert_allclose(out, jnp.swapaxes(keep, 1, 2) / 7 / 0.75, rtol=1e-6)
