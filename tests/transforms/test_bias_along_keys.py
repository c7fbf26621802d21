"""A bias and a mask that are sharded along their keys: all queries, with the keys of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import in_turn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from seeds import seed_of
from sharded_calls import AXIS, TWO_AXES, reorder, restore, sequence_mesh

import jax_flash

B, T, N, K, H = 2, 48, 8, 2, 8
LAYOUTS = (
    ("all_gather", "zigzag", 4, "NTS"),
    ("all_gather", None, 2, "B11S"),
    ("ring", "zigzag", 2, "N1S"),
    ("ring", "striped", 4, "BNTS"),
    ("ulysses", "zigzag", 4, "NTS"),
    ("ulysses", "striped", 2, "1S"),
    ("auto", "zigzag", 8, "NTS"),
    ("ring", "zigzag", (2, 2), "NTS"),
    ("all_gather", None, (2, 2), "N1S"),
)
SIZES = {"B": B, "N": N, "T": T, "S": T, "1": 1}


def drawn(letters):
    """query, key, value, a bias with these axes, the output's cotangent."""
    generator = np.random.default_rng(seed_of(letters))
    axes = tuple(SIZES[letter] for letter in letters)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, H), axes, (B, T, N, H))
    return [jnp.asarray(generator.standard_normal(shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize(
    "strategy, order, shards, letters, check_vma", in_turn(LAYOUTS, (True, False)), ids=str
)
def test_same_as_whole(strategy, order, shards, letters, check_vma):
    *arrays, bias, d_out = drawn(letters)
    hidden = np.random.default_rng(seed_of("hidden")).random((B, 1, 1, T)) < 0.2
    mask = jnp.asarray(~hidden)
    count = int(np.prod(shards))
    axis = TWO_AXES if isinstance(shards, tuple) else AXIS
    rows, columns = P(None, axis), P(*[None] * (bias.ndim - 1), axis)
    call = functools.partial(
        jax_flash.context_parallel_attention,
        axis_name=axis, strategy=strategy, load_balance=order, is_causal=True,
    )  # fmt: skip
    mapped = jax.shard_map(
        lambda *given: call(*given[:3], bias=given[3], mask=given[4]),
        mesh=sequence_mesh(shards),
        in_specs=(rows, rows, rows, columns, P(None, None, None, axis)),
        out_specs=rows,
        check_vma=check_vma,
    )

    def of_shards(query, key, value, bias):
        x = [reorder(x, 1, count, order) for x in (query, key, value)]
        bias = reorder(bias, bias.ndim - 1, count, order)
        if bias.shape[-2] != 1:
            bias = reorder(bias, bias.ndim - 2, count, order)
        return restore(mapped(*x, bias, reorder(mask, 3, count, order)), 1, count, order)

    def whole(query, key, value, bias):
        return jax_flash.flash_attention(query, key, value, bias, mask, is_causal=True)

    def results(attend):
        out, vjp = jax.vjp(attend, *arrays, bias)
        return out, *vjp(d_out)

    found, expected = (jax.jit(functools.partial(results, attend))() for attend in (of_shards, whole))
    for x, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, reference, rtol=2e-5, atol=2e-5)


def test_pmap():
    *arrays, bias, _ = drawn("NTS")
    shards = [jnp.stack(jnp.split(x, 4, axis=1)) for x in arrays]
    of_keys = jnp.stack(jnp.split(bias, 4, axis=2))
    call = functools.partial(jax_flash.context_parallel_attention, axis_name=AXIS, strategy="ring")
    out = jax.pmap(call, axis_name=AXIS, devices=jax.devices()[:4])(*shards, of_keys)
    expected = jax_flash.flash_attention(*arrays, bias)
    np.testing.assert_allclose(jnp.concatenate(list(out), axis=1), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ("Auto", "Explicit"))
@pytest.mark.parametrize("strategy", ("all_gather", "ring", "ulysses"))
def test_under_jit(strategy, kind):
    """Arrays stay sharded; the compiler moves the bias, and its gradient back."""
    *arrays, bias, d_out = drawn("BNTS")
    mesh = jax.make_mesh((4,), (AXIS,), (getattr(jax.sharding.AxisType, kind),), devices=jax.devices()[:4])
    rows = NamedSharding(mesh, P(None, AXIS))
    given = [jax.device_put(x, rows) for x in arrays]
    given.append(jax.device_put(bias, NamedSharding(mesh, P(None, None, None, AXIS))))

    def results(attend, d_out, *given):
        out, vjp = jax.vjp(lambda *x: attend(*x, is_causal=True), *given)
        return out, *vjp(d_out)

    attend = functools.partial(jax_flash.flash_attention, context_parallel=strategy)
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(results, attend))(jax.device_put(d_out, rows), *given)
    expected = jax.jit(functools.partial(results, jax_flash.flash_attention))(d_out, *arrays, bias)
    for x, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, reference, rtol=2e-5, atol=2e-5)
    if kind == "Explicit":
        assert [jax.typeof(x).sharding.spec for x in found[1:]] == [
            jax.typeof(x).sharding.spec for x in given
        ]
