"""From what a caller passed to canonical operands and back; the maths is each implementation's own suite.

`plain` is attention by its definition on whole matrices, with the caller's own batch axes.
"""

import functools
import importlib.metadata
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_flash
from jax_flash._call import Arguments, prepare
from jax_flash._mask import Window

B, T, S, N, K, H, V = 2, 5, 7, 4, 2, 8, 6
TOLERANCE = dict(rtol=2e-5, atol=2e-5)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def inputs(*batch, queries=T, keys=S):
    return normal(0, *batch, queries, N, H), normal(1, *batch, keys, K, H), normal(2, *batch, keys, K, V)


def plain(
    query, key, value, *, allowed=True, added=0.0, keep=None, rate=0.0, soft_cap=None, sinks=None, scale=None
):
    """out (*B, T, N, V) and lse (*B, T, N); allowed, added and keep broadcast to (*B, N, T, S)."""
    group = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(x, group, axis=-2) for x in (key, value))
    logits = jnp.einsum("...tnh,...snh->...nts", query, key, precision="highest")
    logits = logits * (query.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    allowed = jnp.broadcast_to(allowed, logits.shape)
    logits = jnp.where(allowed, logits + added, -1e30)
    sum_exp = jnp.sum(jnp.where(allowed, jnp.exp(logits), 0), axis=-1)
    if sinks is not None:
        sum_exp = sum_exp + jnp.exp(sinks)[:, None]
    some = jnp.any(allowed, axis=-1)
    lse = jnp.where(some, jnp.log(jnp.where(some, sum_exp, 1)), -jnp.inf)
    p = jnp.where(allowed, jnp.exp(logits - jnp.where(some, lse, 0)[..., None]), 0)
    if keep is not None:
        p = jnp.where(keep, p / (1 - rate), 0)
    return jnp.einsum("...nts,...snv->...tnv", p, value, precision="highest"), jnp.swapaxes(lse, -1, -2)


def check(arrays, options, **definition):
    """Values, residual and gradients with respect to all of `arrays`."""

    def ours(arrays):
        return jax_flash.flash_attention(**arrays, **options, return_residual=True)

    def theirs(arrays):
        terms = {name: term(arrays) if callable(term) else term for name, term in definition.items()}
        return plain(arrays["query"], arrays["key"], arrays["value"], **terms)

    def with_gradients(function):
        def loss(arrays):
            out, lse = function(arrays)
            weights = normal(3, *out.shape), normal(4, *lse.shape)
            finite_lse = jnp.where(jnp.isfinite(lse), lse, 0)
            return jnp.sum(out * weights[0]) + jnp.sum(finite_lse * weights[1]), (out, lse)

        gradients, results = jax.jit(jax.grad(loss, has_aux=True))(arrays)
        return results, gradients

    (got, gradients), (expected, wanted) = with_gradients(ours), with_gradients(theirs)
    for x, y in zip(got, expected, strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, **TOLERANCE)
    for name in arrays:
        assert gradients[name].shape == arrays[name].shape and gradients[name].dtype == arrays[name].dtype
        np.testing.assert_allclose(gradients[name], wanted[name], err_msg=name, rtol=1e-4, atol=1e-4)


def named(query, key, value):
    return {"query": query, "key": key, "value": value}


@pytest.mark.parametrize("batch", [(), (1,), (2, 3)], ids=str)
def test_any_leading_batch_axes(batch):
    check(named(*inputs(*batch)), {})


@pytest.mark.parametrize(
    "shape",
    [(), (S,), (T, 1), (N, 1, S), (3, 1, 1, S), (1, N, T, S), (2, 1, 1, T, S), (2, 3, N, T, S)],
    ids=str,
)
def test_bias_broadcasts_and_its_gradient_sums(shape):
    arrays = named(*inputs(2, 3)) | {"bias": normal(5, *shape)}
    check(arrays, {}, added=lambda arrays: arrays["bias"])


@pytest.mark.parametrize("shape", [(S,), (T, S), (N, T, 1), (3, 1, T, S), (2, 1, 1, 1, S)], ids=str)
def test_mask_broadcasts(shape):
    mask = np.random.default_rng(6).random(shape) < 0.6
    check(named(*inputs(2, 3)), {"mask": mask}, allowed=mask)


def test_broadcast_axes_are_not_repeated():
    query, key, value = inputs(2, 3)

    def canonical(*shape):
        call = prepare(Arguments(query, key, value, jnp.zeros(shape)))
        return call.operands.bias.shape, call.shapes.bias.shape

    assert canonical(T, S) == ((1, 1, 1, T, S), (1, 1, T, S))
    assert canonical(1, 1, N, 1, S) == ((1, 1, N, 1, S), (1, N, 1, S))
    assert canonical(2, 3, 1, T, 1) == ((2, 3, 1, T, 1), (6, 1, T, 1))
    assert canonical(3, 1, T, 1) == ((1, 3, 1, T, 1), (6, 1, T, 1))


@pytest.mark.parametrize("shape", [(N,), (2, 3, N)], ids=str)
def test_alibi(shape):
    distance = np.abs(np.arange(T)[:, None] + S - T - np.arange(S))
    check(
        named(*inputs(2, 3)) | {"alibi_slopes": jnp.abs(normal(7, *shape))},
        {},
        added=lambda arrays: -arrays["alibi_slopes"][..., None, None] * distance,
    )


def test_alibi_without_batch():
    distance = np.abs(np.arange(T)[:, None] + S - T - np.arange(S))
    check(
        named(*inputs()) | {"alibi_slopes": jnp.abs(normal(7, N))},
        {},
        added=lambda arrays: -arrays["alibi_slopes"][..., None, None] * distance,
    )


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_sinks(batch):
    check(named(*inputs(*batch)) | {"sinks": normal(8, N)}, {}, sinks=lambda arrays: arrays["sinks"])


@pytest.mark.parametrize(("queries", "keys"), [(5, 7), (7, 5), (1, 6)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 2, (0, None), (-1, 2)], ids=str)
def test_causality_and_windows_are_aligned_to_the_bottom_right(queries, keys, is_causal, window):
    i, j = np.ogrid[:queries, :keys]
    left, right = (window, window) if window is None or isinstance(window, int) else window
    diagonal = i + keys - queries
    allowed = np.ones((queries, keys), bool)
    if left not in (None, -1):
        allowed &= j >= diagonal - left
    if right not in (None, -1):
        allowed &= j <= diagonal + right
    if is_causal:
        allowed &= j <= diagonal
    query, key, value = inputs(B, queries=queries, keys=keys)
    out = jax_flash.flash_attention(query, key, value, is_causal=is_causal, local_window_size=window)
    np.testing.assert_allclose(out, plain(query, key, value, allowed=allowed)[0], **TOLERANCE)


def test_a_window_that_reaches_everything_is_no_window():
    query, key, value = inputs(B)

    def window(left, right, query=query):
        spec = prepare(Arguments(query, key, value, window=Window(left, right))).spec
        return spec.left, spec.right

    assert window(S - 1, T - 1) == (None, None)
    assert window(S - 2, T - 2) == (S - 2, T - 2)
    assert window(None, 0) == (None, 0)
    assert window(None, 0, query=query[:, :1]) == (None, None)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"local_window_size": (1, 2)}], ids=str)
@pytest.mark.parametrize("which", ["query", "key_value", "both"])
def test_lengths_take_the_places_of_T_and_S(which, options):
    batch = (2, 2)
    query_lengths, key_lengths = np.array([[5, 3], [0, 4]]), np.array([[7, 2], [4, 0]])
    lengths = {}
    if which != "key_value":
        lengths["query_seq_lengths"] = query_lengths
    if which != "query":
        lengths["key_value_seq_lengths"] = key_lengths
    t = np.broadcast_to(lengths.get("query_seq_lengths", T), batch)[..., None, None, None]
    s = np.broadcast_to(lengths.get("key_value_seq_lengths", S), batch)[..., None, None, None]
    i, j = np.ogrid[:T, :S]
    allowed = (i < t) & (j < s)
    if options.get("is_causal"):
        allowed &= j <= i + s - t
    if "local_window_size" in options:
        left, right = options["local_window_size"]
        allowed &= (j >= i + s - t - left) & (j <= i + s - t + right)
    check(named(*inputs(*batch)), lengths | options, allowed=allowed)


def test_lengths_are_clipped():
    query, key, value = inputs(B)
    out = jax_flash.flash_attention(
        query,
        key,
        value,
        is_causal=True,
        query_seq_lengths=np.array([T + 5, -3]),
        key_value_seq_lengths=np.array([S + 9, -1]),
    )
    whole = jax_flash.flash_attention(query, key, value, is_causal=True)
    np.testing.assert_allclose(out[0], whole[0], **TOLERANCE)
    np.testing.assert_array_equal(out[1], 0)


def test_segment_ids():
    batch = (2, 2)
    rng = np.random.default_rng(9)
    query_ids, key_ids = rng.integers(0, 3, (*batch, T)), rng.integers(1, 4, (*batch, S))
    allowed = query_ids[..., None, :, None] == key_ids[..., None, None, :]
    assert not allowed.any(-1).all()  # the case has rows with nothing to attend to
    options = {"query_segment_ids": query_ids, "key_value_segment_ids": key_ids}
    check(named(*inputs(*batch)), options, allowed=allowed)


def test_eager_and_jitted_with_the_residual_and_without():
    arrays = named(*inputs(B))
    out, _ = jax_flash.flash_attention(**arrays, return_residual=True)
    np.testing.assert_array_equal(jax_flash.flash_attention(**arrays), out)
    np.testing.assert_array_equal(jax.jit(jax_flash.flash_attention)(**arrays), out)


def test_soft_cap_and_scale():
    check(named(*inputs(B)), {"scale": 0.7, "logits_soft_cap": 1.5}, scale=0.7, soft_cap=1.5)


@pytest.mark.parametrize("batch", [(), (2, 2)], ids=str)
def test_dropout_keeps_what_dropout_mask_says(batch):
    key = jax.random.key(11)
    keep = jax_flash.dropout_mask(key, 0.4, (*batch, N, T, S))
    assert 0.3 < keep.mean() < 0.9
    check(named(*inputs(*batch)), {"dropout_rate": 0.4, "dropout_key": key}, keep=keep, rate=0.4)


def test_a_row_with_nothing_to_attend_to():
    query, key, value = inputs(B)
    mask = jnp.ones((T, S), bool).at[2].set(False)

    def loss(query, key, value):
        out, lse = jax_flash.flash_attention(query, key, value, mask=mask, return_residual=True)
        return jnp.sum(out) + jnp.sum(lse[:, :2]), (out, lse)

    gradients, (out, lse) = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(query, key, value)
    np.testing.assert_array_equal(out[:, 2], 0)
    np.testing.assert_array_equal(lse[:, 2], -np.inf)
    np.testing.assert_array_equal(gradients[0][:, 2], 0)
    assert all(np.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_of_results_and_gradients(dtype):
    query, key, value = (x.astype(dtype) for x in inputs(B))
    bias, sinks = normal(5, T, S).astype("bfloat16"), normal(8, N).astype("float16")
    arrays = named(query, key, value) | {"bias": bias, "sinks": sinks}
    out, lse = jax_flash.flash_attention(**arrays, return_residual=True)
    assert (out.dtype, lse.dtype) == (jnp.dtype(dtype), jnp.float32)
    gradients = jax.grad(lambda arrays: jax_flash.flash_attention(**arrays).astype(jnp.float32).sum())(arrays)
    assert {name: g.dtype for name, g in gradients.items()} == {name: x.dtype for name, x in arrays.items()}


@pytest.mark.parametrize(
    ("batch", "queries", "keys"),
    [((0,), T, S), ((2, 0), T, S), ((B,), 0, S), ((B,), T, 0), ((), 0, 0)],
    ids=str,
)
def test_sizes_of_zero_work(batch, queries, keys):
    arrays = named(*inputs(*batch, queries=queries, keys=keys)) | {"sinks": normal(8, N)}

    def loss(arrays):
        out, lse = jax_flash.flash_attention(
            **arrays, is_causal=True, implementation="cuda", return_residual=True
        )
        assert out.shape == (*batch, queries, N, V) and lse.shape == (*batch, queries, N)
        return jnp.sum(out), (out, lse)

    gradients, (out, lse) = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    for name, gradient in gradients.items():
        assert gradient.shape == arrays[name].shape
        np.testing.assert_array_equal(gradient, 0)


def test_no_query_heads():
    query, key, value = jnp.zeros((B, T, 0, H)), normal(1, B, S, K, H), normal(2, B, S, K, V)
    assert jax_flash.flash_attention(query, key, value).shape == (B, T, 0, V)


def test_one_trace_serves_calls_of_equal_shape():
    query, key, value = inputs(B)
    traces = itertools.count()

    @jax.jit
    def attend(query, key, value, lengths):
        next(traces)
        return jax_flash.flash_attention(query, key, value, key_value_seq_lengths=lengths)

    for lengths in ([1, 2], [3, 4]):
        attend(query, key, value, jnp.array(lengths))
    assert next(traces) == 1


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("x", "y"), P(None, "y"), P(None, "y", None, "x")], ids=str)
def test_sharded_leading_axes_stay_as_they_are(axis_type, spec):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)

    @jax.jit
    @jax.grad
    def gradients(arrays):
        return jnp.sum(jax_flash.flash_attention(**arrays, is_causal=True) ** 2)

    arrays = named(*inputs(4, 2))
    expected = gradients(arrays)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(arrays, NamedSharding(mesh, spec))
        assert "all-gather" not in gradients.lower(sharded).compile().as_text()
        results = gradients(sharded)
    for name, x in results.items():
        assert x.sharding.is_equivalent_to(sharded[name].sharding, x.ndim)
        np.testing.assert_allclose(x, expected[name], **TOLERANCE)


def test_the_public_names():
    assert sorted(jax_flash.__all__) == [
        "BlockMask",
        "KVCache",
        "PagedKVCache",
        "and_masks",
        "apply_rotary",
        "context_parallel_attention",
        "create_block_mask",
        "dot_product_attention",
        "dropout_mask",
        "explain",
        "flash_attention",
        "flash_attention_varlen",
        "flash_attention_with_cache",
        "flash_attn",
        "masks",
        "or_masks",
        "planned_for",
        "precompile",
        "quantize",
        "ragged_paged_attention",
        "reorder_for_load_balance",
        "restore_order",
    ]
    assert all(hasattr(jax_flash, name) for name in jax_flash.__all__)


def test_the_version_is_that_of_the_package():
    assert jax_flash.__version__ == importlib.metadata.version("jax_flash")


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_a_traced_scale_has_a_gradient(dtype):
    query, key, value, d_out = (jax.random.normal(jax.random.key(i), (1, 9, 2, 16), dtype) for i in range(4))

    def loss(attend, scale):
        return jnp.sum((attend(query, key, value, scale=scale) * d_out).astype(jnp.float32))

    def plain(query, key, value, scale):
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        p = jax.nn.softmax(scale * jnp.einsum("btnh,bsnh->bnts", query, key))
        return jnp.einsum("bnts,bsnh->btnh", p, value)

    for attend in (jax_flash.flash_attention, jax_flash.dot_product_attention):
        got = jax.jit(jax.value_and_grad(functools.partial(loss, attend)))(0.3)
        expected = jax.value_and_grad(functools.partial(loss, plain))(0.3)
        np.testing.assert_allclose(got, expected, rtol=1e-4 if dtype == "float32" else 0.05)
    many = jax.vmap(functools.partial(loss, jax_flash.flash_attention))(jnp.array([0.3, -0.5]))
    np.testing.assert_allclose(many[0], got[0], rtol=1e-4 if dtype == "float32" else 0.05)


def test_the_gradient_of_a_scale_leaves_padding_out():
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))

    def gradient(query, **options):
        return jax.grad(lambda scale: jax_flash.flash_attention(query, x, x, scale=scale, **options).sum())(
            0.5
        )

    padded, lengths = x.at[:, 3].set(jnp.nan), jnp.array([3])
    assert gradient(padded, query_seq_lengths=lengths) == gradient(x, query_seq_lengths=lengths)
    assert jnp.isnan(gradient(padded))


def test_float64_sinks_and_slopes_stay_so():
    with jax.enable_x64(True):
        arrays = [jax.random.normal(jax.random.key(i), (2, 5, 4, 8), jnp.float64) for i in range(3)]
        numbers = jax.random.normal(jax.random.key(3), (4,), jnp.float64)
        attend = functools.partial(jax_flash.flash_attention, *arrays)
        check_grads(lambda x: attend(sinks=x), (numbers,), 2, modes=["rev"])
        check_grads(lambda x: attend(alibi_slopes=x), (numbers,), 2, modes=["rev"])


def test_a_soft_cap_too_large_to_matter():
    x = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
    np.testing.assert_array_equal(
        jax_flash.flash_attention(x, x, x, logits_soft_cap=1e38), jax_flash.flash_attention(x, x, x)
    )


@pytest.mark.parametrize("keys", [3, 0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_lse_has_one_dtype_with_and_without_keys(dtype, keys):
    with jax.enable_x64(True):
        q = jnp.ones((1, 3, 2, 4), dtype)
        _, lse = jax_flash.flash_attention(q, q[:, :keys], q[:, :keys], return_residual=True)
        assert lse.dtype == (jnp.float64 if dtype == "float64" else jnp.float32)
