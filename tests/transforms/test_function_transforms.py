"""score_mod and block_mask under JAX's transforms: a call gives the same in each.

Captured arrays are the point of it. They are operands, found by tracing, and gradients flow to them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_flash
from jax_flash.transforms import autodiff

B, T, S, N, K, H = 8, 24, 40, 4, 2, 8
RANDOM = np.random.default_rng(0)
IDS = jnp.asarray(np.sort(RANDOM.integers(0, 3, (B, S)), axis=-1), jnp.int32)


def normal(*shape):
    return jnp.asarray(RANDOM.standard_normal(shape), jnp.float32)


def inputs():
    return {
        "query": normal(B, T, N, H),
        "key": normal(B, S, K, H),
        "value": normal(B, S, K, H),
        "table": normal(N, 9),
        "gate": normal(B),
    }


def mask_of(rows=B, heads=N, ids=IDS):
    """By batch row, by head, and by a captured array."""
    return jax_flash.create_block_mask(
        lambda b, h, q, k: (ids[b, q] == ids[b, k]) | (k < 2 * h), rows, heads, T, S, block_size=(8, 16)
    )


def attend(arrays, mask=None, **options):
    table, gate = jnp.asarray(arrays["table"]), jnp.asarray(arrays["gate"])

    def score_mod(score, b, h, q, k):
        return score * jax.nn.sigmoid(gate[b]) + table[h, jnp.clip(q - k, -4, 4) + 4]

    rest = {name: arrays[name] for name in ("query", "key", "value")}
    return jax_flash.flash_attention(
        **rest, score_mod=score_mod, block_mask=mask, implementation="xla", **options
    )


def with_gradients(function, arrays, *rest):
    out, vjp = jax.vjp(lambda arrays: function(arrays, *rest), arrays)
    return out, vjp(jnp.sin(out))[0]


def assert_close(got, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), got, expected)


@pytest.fixture(scope="module")
def expected():
    """Arrays, a mask and what the call gives outside of any transform."""
    arrays, mask = inputs(), mask_of()
    return arrays, mask, with_gradients(attend, arrays, mask)


@pytest.mark.parametrize("transform", (jax.jit, jax.checkpoint))
def test_jit_and_checkpoint(expected, transform):
    arrays, mask, results = expected
    assert_close(with_gradients(transform(attend), arrays, mask), results)


def test_mask_made_within_jit(expected):
    arrays, _, results = expected
    made = jax.jit(lambda arrays, ids: with_gradients(lambda a: attend(a, mask_of(ids=ids)), arrays))
    assert_close(made(arrays, IDS), results)


def by_rows(arrays):
    """Each row by itself, which counts batch rows from 0. `gate` has its own row; `table` is shared."""
    return {name: x if name == "table" else x[:, None] for name, x in arrays.items()}


@pytest.mark.parametrize("loop", ("vmap", "scan"))
def test_vmap_and_scan_over_rows(expected, loop):
    """Of captured arrays, one is mapped and one is not; the mask is mapped as the pytree that it is."""
    arrays, _, results = expected
    rows = {name: x for name, x in by_rows(arrays).items() if name != "table"}
    masks = [mask_of(1, N, IDS[b : b + 1]) for b in range(B)]
    masks = jax.tree.map(lambda *x: jnp.stack(x), *masks)

    def run(arrays):
        rows = {name: x for name, x in arrays.items() if name != "table"}

        def one(row, mask):
            return attend({**row, "table": arrays["table"]}, mask)

        if loop == "vmap":
            return jax.vmap(one)(rows, masks)[:, 0]
        return jax.lax.scan(lambda _, x: (None, one(*x)), None, (rows, masks))[1][:, 0]

    out, gradients = with_gradients(run, {**rows, "table": arrays["table"]})
    gradients = {name: x if name == "table" else x[:, 0] for name, x in gradients.items()}
    assert_close((out, gradients), results)


def test_vmap_over_a_captured_array_alone():
    """Several tables for the same query, key and value."""
    arrays, tables = inputs(), normal(3, N, 9)

    def one(table, arrays):
        return with_gradients(attend, arrays | {"table": table})

    got = jax.jit(jax.vmap(one, (0, None)))(tables, arrays)
    for number in range(3):
        assert_close(jax.tree.map(lambda x, i=number: x[i], got), one(tables[number], arrays))


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
@pytest.mark.parametrize(("batch", "heads"), ((("x", "y"), None), ("x", "y"), (None, "y")))
def test_sharded_jit(expected, kind, batch, heads):
    """Each device's rows and heads have the indices that they have in the whole."""
    arrays, mask, results = expected
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    specs = {name: P(batch, None, heads) for name in ("query", "key", "value")} | {"table": P(), "gate": P()}

    def put(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    placed = {name: put(x, specs[name]) for name, x in arrays.items()}
    mask = jax.tree.map(lambda x: put(x, P()), mask)
    with jax.set_mesh(mesh):
        compiled = jax.jit(functools.partial(with_gradients, attend)).lower(placed, mask).compile()
        out, gradients = compiled(placed, mask)
    assert_close((out, gradients), results)
    assert out.sharding.is_equivalent_to(placed["query"].sharding, 4)
    text = compiled.as_text()
    assert "all-gather" not in text and "all-to-all" not in text


def test_shard_map_and_pmap(expected):
    """Arrays are one device's there, and rows count from 0. Gradients of what devices share are summed."""
    arrays, _, results = expected
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    rows = {name: P("x") for name in arrays} | {"table": P()}
    whole = jax.tree.map(np.asarray, mask_of())
    kinds, ids = whole.kinds, np.asarray(IDS)

    def one(arrays, ids):
        return attend(arrays, mask_of(1, N, ids))

    run = jax.shard_map(one, mesh=mesh, in_specs=(rows, P("x")), out_specs=P("x"))
    assert_close(jax.jit(with_gradients, static_argnums=0)(run, arrays, ids), results)
    assert kinds.shape == (B, N, 3, 3)

    def loss(arrays, ids):
        return with_gradients(one, arrays, ids)

    mapped = {name: 0 for name in arrays} | {"table": None}
    out, gradients = jax.pmap(loss, in_axes=(mapped, 0))(by_rows(arrays), ids[:, None])
    gradients = {name: x.sum(0) if name == "table" else x[:, 0] for name, x in gradients.items()}
    assert_close((out[:, 0], gradients), results)


def test_second_derivatives():
    small = {"query": normal(1, 5, 2, 4), "key": normal(1, 6, 1, 4), "value": normal(1, 6, 1, 4)}
    small |= {"table": normal(2, 9), "gate": normal(1)}
    ids = jnp.zeros((1, 6), jnp.int32)
    mask = jax_flash.create_block_mask(lambda b, h, q, k: (q >= k) & (ids[b, q] == 0), 1, 1, 5, 6)
    check_grads(lambda arrays: attend(arrays, mask), (small,), order=2, modes=("rev",), rtol=0.05, atol=0.05)
    hessian = jax.hessian(lambda gate: attend(small | {"gate": gate}, mask).sum())(small["gate"])
    assert np.isfinite(hessian).all() and np.abs(hessian).max() > 0


def test_equal_functions_are_compiled_once():
    """Two closures over different arrays of the same shapes, called outside of `jit`, are one program."""
    arrays = inputs()
    attend(arrays)
    before = autodiff.jax_flash_forward.fun._cache_size()
    attend(arrays | {"table": normal(N, 9)})
    attend(arrays)
    assert autodiff.jax_flash_forward.fun._cache_size() == before
    query = arrays["query"]
    jax_flash.flash_attention(query, query, query, score_mod=lambda s, b, h, q, k: s + 1.5 * q)
    jax_flash.flash_attention(query, query, query, score_mod=lambda s, b, h, q, k: s + 2.5 * q)
    assert autodiff.jax_flash_forward.fun._cache_size() == before + 2


def test_several_batch_axes(expected):
    """Batch rows count over all leading axes."""
    arrays, mask, (out, gradients) = expected
    shaped = {
        name: x.reshape(2, B // 2, *x.shape[1:]) if name in ("query", "key", "value") else x
        for name, x in arrays.items()
    }
    got, found = with_gradients(attend, shaped, mask)
    flat = {name: x.reshape(gradients[name].shape) for name, x in found.items()}
    assert_close((got.reshape(out.shape), flat), (out, gradients))


def test_no_tracer_stays(expected):
    arrays, mask, _ = expected
    with jax.checking_leaks():
        jax.jit(functools.partial(with_gradients, attend))(arrays, mask)


def test_gradients_of_a_guarded_branch():
    """A `cond` keeps what isn't finite out of gradients, as it does in JAX."""
    arrays = [jax.random.normal(jax.random.key(i), (1, 9, 2, 8)) for i in range(3)]

    def loss(function, factor):
        def score_mod(score, b, h, i, j):
            return score + function(i - j, factor)

        return (jax_flash.flash_attention(*arrays, score_mod=score_mod) ** 2).sum()

    def guarded(distance, factor):
        return jax.lax.cond(distance > 0, lambda: jnp.sqrt(distance * factor), lambda: 0.0)

    def safe(distance, factor):
        return jnp.where(distance > 0, jnp.sqrt(jnp.maximum(distance, 1) * factor), 0.0)

    found, expected = (jax.value_and_grad(lambda x, f=f: loss(f, x))(1.5) for f in (guarded, safe))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
