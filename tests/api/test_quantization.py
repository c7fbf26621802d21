"""Calls in 8 bits: `quantize` and its definition, e4m3 arrays with scales, `quantization="fp8"`."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exhaustive import in_turn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import _float8, _reference, masks
from jax_flash._call import Arguments, prepare
from jax_flash._float8_arguments import Float8
from jax_flash.xla.backward import backward

E4M3 = jnp.float8_e4m3fn
SCALES = ("query_descale", "key_descale", "value_descale")


def arrays(seed, B=2, T=300, S=260, N=4, K=2, H=32, V=32, dtype=jnp.bfloat16):
    """Normal numbers, one in a hundred of them an outlier, of which each head has its own size."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        x = rng.normal(size=shape) * (1 + 9 * (rng.random(shape) < 0.01))
        return jnp.asarray(x * 10.0 ** rng.uniform(-1, 1, (1, 1, shape[2], 1)), dtype)

    query, key, value = draw(B, T, N, H), draw(B, S, K, H), draw(B, S, K, V)
    return 0.3 * query / jnp.std(query), key / jnp.std(key), value


def hadamard(size):
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(matrix, [[1, 1], [1, -1]])
    return matrix


def rotation(signs):
    """The orthogonal matrix of incoherent processing, by its definition."""
    dim = len(signs)
    size = max(2**i for i in range(10) if dim % 2**i == 0)
    return np.diag(signs) @ np.kron(np.eye(dim // size), hadamard(size)) / np.sqrt(size)


def quantized_by_definition(x, key_heads):
    """e4m3 numbers and scales of `(B, rows, heads, D)`, in float64 and block by block."""
    batch, rows, heads, _ = x.shape
    group, blocks = heads // key_heads, -(-rows // 128)
    numbers = np.zeros(x.shape, ml_dtypes.float8_e4m3fn)
    scales = np.ones((batch, key_heads, blocks), np.float64)
    for b, head, block in np.ndindex(scales.shape):
        where = b, slice(128 * block, 128 * block + 128), slice(head * group, head * group + group)
        largest = np.abs(x[where]).max()
        if largest:
            scales[b, head, block] = 2.0 ** np.ceil(np.log2(largest / 448))
        numbers[where] = (x[where] / scales[b, head, block]).astype(ml_dtypes.float8_e4m3fn)
    return numbers, scales


@pytest.mark.parametrize(("H", "V"), [(64, 64), (96, 40), (6, 2), (256, 128)])
@pytest.mark.parametrize("incoherent", (True, False))
def test_quantize_is_its_definition(H, V, incoherent):
    given = arrays(1, B=1, N=6, K=2, H=H, V=V)
    found = jax_flash.quantize(*given, incoherent=incoherent)
    matrix = np.eye(H)
    if incoherent:
        matrix = rotation(np.asarray(_float8.fixed_signs(H), np.float64))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(H), atol=1e-12)
    for i, x in enumerate(given):
        x = np.asarray(x, np.float64)
        numbers, scales = quantized_by_definition(x @ matrix if i < 2 else x, key_heads=2)
        np.testing.assert_array_equal(found[3 + i], scales)
        assert found[i].dtype == E4M3
        mine, theirs = np.asarray(found[i], np.float64), np.asarray(numbers, np.float64)
        # Sums in float32 may fall on the other side of a tie.
        assert np.mean(mine != theirs) < (1e-3 if incoherent and i < 2 else 1e-12)
        np.testing.assert_allclose(mine, theirs, rtol=2**-3, atol=2**-9)


def test_signs_are_of_the_key():
    given = arrays(2)
    key = jax.random.key(5)
    found = jax_flash.quantize(*given, quantization_key=key)
    query, _ = _float8.rounded(_float8.rotated(given[0], jax.random.rademacher(key, 32, jnp.float32)), 2)
    np.testing.assert_array_equal(found.query, query)
    assert np.any(np.asarray(found.query) != np.asarray(jax_flash.quantize(*given).query))
    assert 20 < np.sum(_float8.fixed_signs(64) > 0) < 44


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-38, 0.7, 447.9, 448.0, 448.1, 1e30, 3e38])
def test_scales_bring_the_largest_just_below_448(largest):
    x = jnp.full((1, 1, 1, 1), largest, jnp.float32)
    numbers, scale = (np.asarray(y, np.float64).item() for y in _float8.rounded(x, 1))
    assert np.log2(scale) == np.round(np.log2(scale))
    assert numbers <= 448
    if largest > 1e-35:
        assert numbers > 223
        assert abs(numbers * scale - largest) <= largest / 16
    if largest == 0:
        assert (numbers, scale) == (0, 1)


@pytest.mark.parametrize("scales", ("head", "tensor"))
def test_fewer_scales(scales):
    given = arrays(3)
    found = jax_flash.quantize(*given, scales=scales, incoherent=False)
    for i, x in enumerate(given):
        x = np.abs(np.asarray(x, np.float64)).reshape(2, x.shape[1], 2, -1)
        largest = x.max((1, 3)) if scales == "head" else np.full((2, 2), x.max())
        np.testing.assert_array_equal(found[3 + i], 2.0 ** np.ceil(np.log2(largest / 448)))


def test_what_is_not_finite_and_padding_count_for_no_scale():
    query, key, value = arrays(4)
    spoilt = query.at[0, 5, 0, 0].set(jnp.nan).at[0, 6, 3, 1].set(jnp.inf).at[1, 290].set(1e30)
    lengths = jnp.array([300, 280])
    clean = jax_flash.quantize(query, key, value, incoherent=False, query_seq_lengths=lengths)
    found = jax_flash.quantize(spoilt, key, value, incoherent=False, query_seq_lengths=lengths)
    untouched = np.asarray(query.astype(jnp.float32) == spoilt.astype(jnp.float32))
    same = np.asarray(found.query, np.float32) == np.asarray(clean.query, np.float32)
    assert np.all(same[untouched])
    assert np.all(np.isnan(np.asarray(found.query, np.float32)[0, [5, 6], [0, 3], [0, 1]]))
    block = jax_flash.quantize(spoilt, key, value, incoherent=False)
    assert block.query_descale[1, 0, 2] > 1e20
    np.testing.assert_array_equal(block.query_descale[0], clean.query_descale[0])


def error(found, expected):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window, soft cap": {"local_window_size": (40, 10), "logits_soft_cap": 5.0},
    "lengths": {"query_seq_lengths": jnp.array([300, 7]), "key_value_seq_lengths": jnp.array([260, 100])},
    "sinks, ALiBi": {"sinks": jnp.arange(4.0), "alibi_slopes": jnp.arange(4.0) / 8},
    "dropout": {"dropout_rate": 0.3, "dropout_key": jax.random.key(0)},
    "block mask": {"block_mask": jax_flash.create_block_mask(masks.CausalMask(), None, None, 300, 260)},
}


@pytest.mark.parametrize(("name", "scales"), in_turn(OPTIONS, ("block", "head", None)))
def test_float8_arrays(name, scales):
    """By the definition in float64, with what the scales say."""
    options = OPTIONS[name]
    given = jax_flash.quantize(*arrays(5), scales=scales or "head")._asdict()
    if scales is None:
        given = {name: x for name, x in given.items() if name not in SCALES} | {"scale": 0.002}
    options = options | {"return_residual": True, "out_dtype": jnp.float32}
    out, lse = jax_flash.flash_attention(**given, **options)
    assert out.dtype == jnp.float32
    names = ("return_residual", "out_dtype", "is_causal", "local_window_size", *SCALES)
    rest = {name: x for name, x in (given | options).items() if name not in names}
    window = jax_flash._arguments.window(options.get("is_causal", False), options.get("local_window_size"))
    float8 = Float8(*(given.get(name) for name in SCALES), jnp.float32)
    call = prepare(Arguments(**rest, window=window, float8=float8))
    with jax.enable_x64(True):
        wide = jax.tree.map(_reference._widen, call.operands)
        definition = jax.jit(_reference.reference, static_argnums=(0, 2))
        expected, expected_lse = definition(call.spec, wide, jnp.float64)
    assert error(out, expected) < 3e-6
    np.testing.assert_allclose(lse, expected_lse.transpose(0, 2, 1), rtol=1e-5, atol=1e-5)


def test_output_dtypes():
    given = jax_flash.quantize(*arrays(6, T=9, S=9))._asdict()
    wide = jax_flash.flash_attention(**given, out_dtype="float32")
    for dtype in (None, jnp.float16, jnp.bfloat16):
        out = jax_flash.flash_attention(**given, out_dtype=dtype)
        assert out.dtype == (dtype or jnp.bfloat16)
        np.testing.assert_array_equal(out, wide.astype(out.dtype))
    empty = {name: x[:, :0] if name in ("query", "key", "value") else x for name, x in given.items()}
    empty |= {name: empty[name][..., :0] for name in SCALES}
    assert jax_flash.flash_attention(**empty).dtype == jnp.bfloat16


@pytest.mark.parametrize("name, dtype", in_turn(OPTIONS, (jnp.bfloat16, jnp.float16)))
def test_quantization_is_quantize_and_the_backward_pass_of_16_bits(name, dtype):
    options = OPTIONS[name]
    given = arrays(7, dtype=dtype)
    lengths = {name: x for name, x in options.items() if name.endswith("seq_lengths")}
    quantized = jax_flash.quantize(*given, **lengths)._asdict()
    attend = functools.partial(jax_flash.flash_attention, **options, return_residual=True)
    (out, lse), vjp = jax.vjp(functools.partial(attend, quantization="fp8"), *given)
    expected, expected_lse = attend(**quantized, out_dtype=dtype)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)
    assert error(out, attend(*given)[0]) < 0.1

    rng = np.random.default_rng(0)
    d_out, d_lse = (jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in (out, lse))
    gradients = vjp((d_out, d_lse))
    window = jax_flash._arguments.window(options.get("is_causal", False), options.get("local_window_size"))
    rest = {name: x for name, x in options.items() if name not in ("is_causal", "local_window_size")}
    call = prepare(Arguments(*given, **rest, window=window))
    expected = jax.jit(backward, static_argnums=0)(
        call.spec, call.operands, out, lse.transpose(0, 2, 1), d_out, d_lse.transpose(0, 2, 1)
    )
    for name, found in zip(("query", "key", "value"), gradients, strict=True):
        np.testing.assert_array_equal(found, getattr(expected, name), err_msg=name)


@pytest.mark.parametrize("shape, bound", (((1, 200, 2, 64), 0.03), ((2, 64, 2, 32), 0.04)), ids=str)
def test_gradients_are_near_those_without(shape, bound):
    """Their rounding is that of 16 bits; what is left comes from the output and lse of the forward pass."""
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in range(4)]

    def gradients(**options):
        attend = functools.partial(jax_flash.flash_attention, is_causal=True, **options)
        return jax.vjp(attend, *given[:3])[1](given[3])

    for found, expected in zip(gradients(quantization="fp8"), gradients(), strict=True):
        assert error(found, expected) < bound


def test_second_derivatives_are_those_of_16_bits():
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.normal(size=(1, 60, 2, 32)), jnp.bfloat16) for _ in range(3)]

    def of_query(**options):
        def loss(query):
            out = jax_flash.flash_attention(query, *given[1:], **options)
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return jax.grad(lambda query: jnp.sum(jnp.cos(jax.grad(loss)(query).astype(jnp.float32))))(given[0])

    assert error(of_query(quantization="fp8"), of_query()) < 0.1


def test_incoherent_processing_keeps_outliers_apart():
    """A feature in which all queries and keys are large costs half the error if it is spread."""
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 1, 512, 2, 64))
    query[..., 3] *= 12
    key[..., 3] *= 12
    exact = [jnp.asarray(x, jnp.float32) for x in (query / 8, key, value)]
    expected = jax_flash.flash_attention(*exact)

    def found(incoherent):
        quantized = jax_flash.quantize(*exact, incoherent=incoherent)
        return jax_flash.flash_attention(**quantized._asdict(), out_dtype=jnp.float32)

    assert error(found(True), expected) < 0.5 * error(found(False), expected)


def test_varlen_sequences():
    """Each is rounded as it is alone."""
    query, key, value = (x[0] for x in arrays(9))
    offsets = np.array([0, 100, 100, 290]), np.array([0, 90, 95, 260])
    packed = functools.partial(
        jax_flash.flash_attention_varlen,
        **dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), offsets, strict=True)),
        **{"max_seqlen_q": 190, "max_seqlen_kv": 165, "is_causal": True},
    )
    found = packed(query, key, value, quantization="fp8")
    for (t, t_end), (s, s_end) in zip(*(np.stack([x[:-1], x[1:]], 1) for x in offsets), strict=True):
        if t_end > t:
            alone = query[None, t:t_end], key[None, s:s_end], value[None, s:s_end]
            expected = jax_flash.flash_attention(*alone, is_causal=True, quantization="fp8")[0]
            assert error(found[t:t_end], expected) < 1e-3
    gradient = jax.grad(lambda x: packed(x, key, value, quantization="fp8").astype(jnp.float32).sum())(query)
    assert np.all(np.isfinite(np.asarray(gradient, np.float32)))
    assert np.all(np.asarray(gradient[290:]) == 0)


def test_vmap():
    given = [jnp.stack([x, 2 * x]) for x in arrays(10, T=140, S=130)]
    keys = jax.random.split(jax.random.key(1), 2)

    def attend(query, key, value, quantization_key):
        return jax_flash.flash_attention(
            query, key, value, quantization="fp8", quantization_key=quantization_key
        )

    one_by_one = jnp.stack([attend(*(x[i] for x in (*given, keys))) for i in range(2)])
    np.testing.assert_array_equal(jax.vmap(attend)(*given, keys), one_by_one)
    quantized = jax.vmap(jax_flash.quantize)(*given)
    attend = functools.partial(jax_flash.flash_attention, out_dtype=jnp.float32)

    def of_arrays(query, key, value, *scales):
        return attend(query, key, value, **dict(zip(SCALES, scales, strict=True)))

    one_by_one = jnp.stack([of_arrays(*(x[i] for x in quantized)) for i in range(2)])
    np.testing.assert_array_equal(jax.vmap(of_arrays)(*quantized), one_by_one)
    no_batch = jax_flash.quantize(*(x[0, 0] for x in given))
    np.testing.assert_allclose(of_arrays(*no_batch), one_by_one[0, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("N, K, explicit", in_turn(((8, 4), (8, 2), (8, 1)), (False, True)))
def test_sharded_heads(N, K, explicit):
    """Devices that share a key head take its scales."""
    kinds = (jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("x", "y"), kinds)
    given = arrays(11, N=N, K=K)
    quantized = jax_flash.quantize(*given)._asdict()
    of_keys = "y" if K % 4 == 0 else None
    specs = {"query": P("x", None, "y"), "key": P("x", None, of_keys), "value": P("x", None, of_keys)}
    specs |= {name: P("x", of_keys) for name in SCALES}
    attend = jax.jit(jax_flash.flash_attention, static_argnames=("is_causal", "quantization"))
    attend = functools.partial(attend, is_causal=True)
    with jax.set_mesh(mesh):
        sharded = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in quantized.items()}
        found = attend(**sharded)
        names = ("query", "key", "value")
        qkv = [
            jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in zip(names, given, strict=True)
        ]
        of_16_bits = attend(*qkv, quantization="fp8")
    assert found.sharding.spec[:3] == ("x", None, "y")
    assert error(found, attend(**quantized)) < 1e-3
    assert error(of_16_bits, attend(*given, quantization="fp8")) < 1e-3


@pytest.mark.parametrize("strategy", ("all_gather", "ring", "ulysses"))
def test_sharded_sequences(strategy):
    mesh = jax.make_mesh((4,), ("x",), (jax.sharding.AxisType.Auto,))
    given = arrays(12, T=512, S=512, K=4)
    attend = functools.partial(jax_flash.flash_attention, is_causal=True, quantization="fp8")

    def gradients(query, key, value, **options):
        return jax.vjp(functools.partial(attend, **options), query, key, value)[1](2 * query)

    sharded = [jax.device_put(x, NamedSharding(mesh, P(None, "x"))) for x in given]
    found = jax.jit(functools.partial(attend, context_parallel=strategy))(*sharded)
    assert error(found, attend(*given)) < 1e-3
    found = jax.jit(functools.partial(gradients, context_parallel=strategy))(*sharded)
    for one, other in zip(found, jax.jit(gradients)(*given), strict=True):
        assert error(one, other) < 5e-3


def test_float8_arrays_go_with_whole_sequences():
    mesh = jax.make_mesh((4,), ("x",), (jax.sharding.AxisType.Explicit,))
    given = jax_flash.quantize(*arrays(13, T=512, S=512), scales="head")
    with jax.set_mesh(mesh):
        rows = [jax.device_put(x, NamedSharding(mesh, P(None, "x"))) for x in given[:3]]
        call = dict(zip(SCALES, given[3:], strict=True), query=rows[0], key=rows[1], value=rows[2])
        with pytest.raises(NotImplementedError, match="8 bits go with whole sequences"):
            jax_flash.flash_attention(**call, context_parallel="ring")
        found = jax_flash.flash_attention(**call)
    assert error(found, jax_flash.flash_attention(**given._asdict())) < 1e-3


def test_explain():
    given = arrays(14)
    with jax_flash.planned_for("sm_90a"):
        found = jax_flash.explain(*given, quantization="fp8")
        of_arrays = jax_flash.explain(**jax_flash.quantize(*given)._asdict(), out_dtype="float16")
    assert found.picked == of_arrays.picked == "cuda"
    for call in (found, of_arrays):
        assert [choice.reason for choice in call.choices] == [None] * 3
    assert "out_dtype=float16" in str(of_arrays)
    (tile,) = {re.search(r"forward in e4m3 [^;\n]* stages", str(call))[0] for call in (found, of_arrays)}
    assert "keys" in tile
    assert "backward" in str(found) and "backward" not in str(of_arrays)


def test_strict_settings():
    given = arrays(15, T=140, S=130)
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.debug_nans(True),
        jax.enable_x64(True),
        jax.transfer_guard("disallow"),
    ):
        out = jax_flash.flash_attention(*given, quantization="fp8")
        of_arrays = jax_flash.flash_attention(**jax_flash.quantize(*given)._asdict())
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, of_arrays)


def test_export():
    given = jax_flash.quantize(*arrays(16, T=140, S=130))
    attend = jax.jit(lambda quantized: jax_flash.flash_attention(**quantized._asdict()))
    exported = jax.export.export(attend)(given._replace())
    restored = jax.export.deserialize(
        jax.export.export(jax.jit(lambda *x: attend(type(given)(*x))))(*given).serialize()
    )
    np.testing.assert_array_equal(exported.call(given), attend(given))
    np.testing.assert_array_equal(restored.call(*given), attend(given))


def test_symbolic_lengths():
    batch, length = jax.export.symbolic_shape("b, t")
    shape = jax.ShapeDtypeStruct((batch, length, 4, 32), jnp.bfloat16)
    attend = jax.jit(lambda *qkv: jax_flash.flash_attention(*qkv, is_causal=True, quantization="fp8"))
    exported = jax.export.export(attend)(shape, shape, shape)
    given = arrays(18, T=300, S=300, K=4)
    assert error(exported.call(*given), attend(*given)) < 1e-3
    of_8_bits = jax.ShapeDtypeStruct(shape.shape, E4M3)
    with pytest.raises(ValueError, match="lengths must not be symbolic where query is float8_e4m3fn"):
        jax.export.export(jax.jit(jax_flash.flash_attention))(of_8_bits, of_8_bits, of_8_bits)


Q, K_, V_ = arrays(17, T=140, S=130)
Q8, K8, V8 = (x.astype(E4M3) for x in (Q, K_, V_))
ONES = jnp.ones((2, 2))


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (TypeError, "same dtype; got float8_e4m3fn, bfloat16", {"query": Q8, "key": K_, "value": V_}),
        (TypeError, "query must have a floating dtype of 16 bits at least, or float8_e4m3fn; got float8_e5m2",
         {"query": Q.astype(jnp.float8_e5m2), "key": K8, "value": V8}),
        (ValueError, r"query_descale must have shape \(\*B, K\) = \(2, 2\) or .* = \(2, 2, 2\); got",
         {"query_descale": jnp.ones((2, 2, 3))}),
        (ValueError, "key_descale must have shape", {"key_descale": jnp.ones((2, 4))}),
        (ValueError, "value_descale must have shape", {"value_descale": jnp.ones(2)}),
        (TypeError, "value_descale must have a floating dtype", {"value_descale": ONES.astype(int)}),
        (TypeError, "out_dtype must be a floating dtype", {"out_dtype": "int8"}),
        (TypeError, "out_dtype must be a floating dtype", {"out_dtype": E4M3}),
        (TypeError, "out_dtype must have 32 bits at most without jax_enable_x64", {"out_dtype": "float64"}),
        (TypeError, "must be bfloat16 or float16 with quantization", {"quantization": "fp8"}),
        (ValueError, "query_descale goes with arrays of dtype float8_e4m3fn",
         {"query": Q, "key": K_, "value": V_, "query_descale": ONES}),
        (ValueError, "out_dtype goes with", {"query": Q, "key": K_, "value": V_, "out_dtype": "float32"}),
        (ValueError, 'quantization must be None or "fp8"; got',
         {"query": Q, "key": K_, "value": V_, "quantization": "int8"}),
        (ValueError, "quantization_key goes with", {"quantization_key": jax.random.key(0)}),
        (ValueError, "even head dim; got 5",
         {"query": Q[..., :5], "key": K_[..., :5], "value": V_, "quantization": "fp8"}),
    ],
)  # fmt: skip
def test_errors(error, text, call):
    with pytest.raises(error, match=text):
        jax_flash.flash_attention(**{"query": Q8, "key": K8, "value": V8} | call)


def test_other_errors():
    with pytest.raises(TypeError, match="multiply query_descale by a traced one"):
        jax.jit(lambda scale: jax_flash.flash_attention(Q8, K8, V8, scale=scale))(0.1)
    with pytest.raises(NotImplementedError, match="differentiate flash_attention"):
        jax.grad(lambda x: jax_flash.flash_attention(Q8, K8, V8, value_descale=x).sum().astype(float))(ONES)
    with pytest.raises(TypeError, match="query must have a floating dtype of 16 bits at least"):
        jax_flash.dot_product_attention(Q8, K8, V8)
    with pytest.raises(TypeError, match="16 bits at least"):
        jax_flash.quantize(Q8, K8, V8)
    with pytest.raises(ValueError, match="scales must be"):
        jax_flash.quantize(Q, K_, V_, scales="row")
    with pytest.raises(ValueError, match="incoherent=True"):
        jax_flash.quantize(Q, K_, V_, incoherent=False, quantization_key=jax.random.key(0))


@pytest.mark.parametrize("scales", ["block", "head", "tensor"])
@pytest.mark.parametrize("shape", [(1, 0, 2, 8), (0, 2, 8), (0, 3, 2, 8)])
def test_quantize_of_nothing(shape, scales):
    x = jnp.zeros(shape)
    found = jax_flash.quantize(x, x, x, scales=scales)
    assert found.query.shape == shape and found.query.dtype == jnp.float8_e4m3fn
    assert found.query_descale.size == 0 or (found.query_descale == 1).all()
