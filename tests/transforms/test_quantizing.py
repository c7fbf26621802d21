"""`quantize` where a kernel runs it: planned for a Hopper GPU and run on CPUs, by what "xla" computes for it.

So what is tested is how a call is mapped, partitioned and lowered; `tests/cuda/test_quantize_emulated.py` has
the kernel.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import one_in
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import _slower
from jax_flash._device import CPU, H100, assume
from jax_flash._quantize import Quantized


def arrays(seed, B=2, T=512, S=512, N=4, K=2, H=32, V=16, dtype="bfloat16"):
    """With an outlier, and an element that isn't finite."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, V)
    given = [rng.normal(size=shape) for shape in shapes]
    for x in given:
        x[-1, T // 2, 0, 3] = 300
        x[0, 5, -1, 1] = np.nan
    return [jnp.asarray(x, dtype) for x in given]


def lengths(B, T=512):
    return {"query_seq_lengths": jnp.arange(1, B + 1) * T // (B + 1), "key_value_seq_lengths": jnp.full(B, 7)}


def planned(*args, **options):
    with assume(H100):
        return jax_flash.quantize(*args, **options)


def portable(*args, **options):
    with assume(CPU):
        return jax_flash.quantize(*args, **options, implementation="xla")


def check(found, expected):
    for name, x, right in zip(found._fields, found, expected, strict=True):
        assert x.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(right, np.float32), err_msg=name)


@pytest.mark.parametrize("batch", ((), (2,), (2, 3)), ids=str)
def test_batch_axes(batch):
    B = int(np.prod(batch))
    given = [x.reshape(*batch, *x.shape[1:]) for x in arrays(1, B=B, T=140)]
    options = {name: x.reshape(batch) for name, x in lengths(B, 140).items()}
    check(planned(*given, **options), portable(*given, **options))


def test_vmap():
    given = [jnp.stack([x, 2 * x]) for x in arrays(2, T=140)]
    keys = jax.random.split(jax.random.key(1), 3)
    of_one = {name: jnp.stack([x, x // 2]) for name, x in lengths(2, 140).items()}

    def both(quantize):
        def call(query, key, value, lengths, quantization_key):
            return quantize(query, key, value, **lengths, quantization_key=quantization_key)

        over_lengths = jax.vmap(call, (None, None, None, 0, None))
        over_arrays = jax.vmap(call, (0, None, 0, None, None))
        over_all = jax.vmap(jax.vmap(call, (0, 0, 0, 0, None)), (None, None, None, None, 0))
        first = [x[0] for x in given]
        lengths_of_first = {name: x[0] for name, x in of_one.items()}
        return (
            over_lengths(*first, of_one, keys[0]),
            over_arrays(given[0], first[1], given[2], lengths_of_first, keys[0]),
            over_all(*given, of_one, keys),
            jax.vmap(quantize)(*(x[:0] for x in given)),
        )

    for found, expected in zip(both(planned), both(portable), strict=True):
        check(found, expected)


@pytest.mark.parametrize("heads", ((8, 8), (8, 4), (8, 2), (8, 1)), ids=str)
@pytest.mark.parametrize("spec", (P("x", None, "y"), P(None, "y", "x"), P("x", "y"), P()), ids=str)
@pytest.mark.parametrize(
    "T, kind",
    one_in(
        2, [(512, AxisType.Auto), (512, AxisType.Explicit), (500, AxisType.Explicit), (500, AxisType.Auto)]
    ),
    ids=str,
)
def test_sharded(T, spec, heads, kind):
    mesh = jax.make_mesh((2, 4), ("x", "y"), (kind,) * 2)
    N, K = heads
    given, options = arrays(3, T=T, S=T, N=N, K=K), lengths(2, T)
    with jax.set_mesh(mesh):

        def placed(x, heads):
            of_heads = spec[2] if len(spec) > 2 and heads % mesh.shape[spec[2]] == 0 else None
            along = spec[1] if len(spec) > 1 and (spec[1] is None or T % 4 == 0) else None
            return jax.device_put(x, NamedSharding(mesh, P(spec[0] if spec else None, along, of_heads)))

        query, key, value = (placed(x, n) for x, n in zip(given, (N, K, K), strict=True))
        call = jax.jit(functools.partial(planned, **options))
        found = call(query, key, value)
        text = call.lower(query, key, value).compile().as_text()
    check(found, portable(*given, **options))
    if T == 512:
        assert found.query.sharding.is_equivalent_to(query.sharding, 4)
        assert found.value.sharding.is_equivalent_to(value.sharding, 4)
        # Nothing larger than scales is exchanged.
        moved = re.findall(r"= (\w+)\[([\d,]*)\]\S* (?:all-gather|all-to-all|all-reduce|collective)", text)
        assert all(np.prod([int(n) for n in shape.split(",") if n] or [1]) <= 128 for _, shape in moved), (
            moved
        )


@pytest.mark.parametrize("axes", (("x",), ("x", "y")), ids=str)
def test_in_a_shard_map(axes):
    mesh = jax.make_mesh((2, 4), ("x", "y"), (AxisType.Auto,) * 2)
    given = arrays(4, B=2, N=8, K=4)
    of_axes = P("x", None, "y" if "y" in axes else None)
    scales = P("x", "y" if "y" in axes else None)
    call = jax.shard_map(
        planned, mesh=mesh, axis_names=set(axes), in_specs=of_axes, out_specs=Quantized(
            *(of_axes,) * 3, *(scales,) * 3
        ),
    )  # fmt: skip
    with jax.set_mesh(mesh):
        check(jax.jit(call)(*given), portable(*given))


def test_derivatives():
    """Of the rounded numbers' conversions, as XLA's own operations have them."""
    given = arrays(5, T=140, S=130)
    given = [jnp.nan_to_num(x) for x in given]

    def tangents(quantize):
        return jax.jvp(functools.partial(quantize, **lengths(2, 140)), given, given)[1]

    check(tangents(planned), tangents(portable))

    def loss(quantize, query):
        return quantize(query, *given[1:]).query.astype(jnp.float32).sum()

    found, expected = (jax.grad(functools.partial(loss, q))(given[0]) for q in (planned, portable))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.every_turn
def test_lowered_for_a_gpu():
    given = arrays(6, T=140, S=130)
    text = jax.jit(planned).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @jax_flash_quantize(") == 3


def test_export():
    given = arrays(7, T=140, S=130)
    checks = [jax.export.DisabledSafetyCheck.custom_call("jax_flash_quantize")]
    call = jax.jit(lambda *x: tuple(planned(*x)))
    exported = jax.export.export(call, platforms=("cpu", "cuda"), disabled_checks=checks)(*given)
    found = jax.export.deserialize(exported.serialize()).call(*given)
    check(Quantized(*found), portable(*given))


def test_limits():
    given = arrays(8, T=140, S=130)
    wide = [x.astype(jnp.float32) for x in given]
    for call, options, reason in (
        (wide, {}, "the dtype is float32"),
        (given, {"scales": "head"}, 'scales are "head"'),
        ([*given[:2], jnp.tile(given[2], 20)], {}, "the head dim is 320"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            planned(*call, **options, implementation="cuda")
        with pytest.warns(_slower.SlowerImplementationWarning, match=reason):
            found = planned(*call, **options)
        check(found, portable(*call, **options))
    with pytest.raises(NotImplementedError, match="no kernels for rounding to e4m3"):
        planned(*given, implementation="pallas")
    empty = [x[:, :0] for x in given]
    check(planned(*empty), portable(*empty))


def test_debug_nans():
    given = [jnp.nan_to_num(x) for x in arrays(9, T=140, S=130)]
    with jax.debug_nans(True), jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        check(planned(*given, **lengths(2, 140)), portable(*given, **lengths(2, 140)))
