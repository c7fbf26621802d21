"""JAX's transformations of the public function, with the portable implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transform_cases as cases
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

B, T, N, K, H = 4, 6, 4, 2, 8
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


INPUTS = normal(B, T, N * H)
WEIGHTS = {"query": normal(3, N * H, N, H) / 8, "key": normal(3, N * H, K, H) / 8, "slopes": normal(3, N)}


def layer(x, weights, return_residual=False):
    """Grouped-query attention with a residual connection; values are the keys."""
    query = jnp.einsum("...d,dnh->...nh", x, weights["query"])
    key = jnp.einsum("...d,dkh->...kh", x, weights["key"])
    out = jax_flash.flash_attention(
        query, key, key, is_causal=True, alibi_slopes=weights["slopes"], implementation="xla"
    )
    return x + out.reshape(x.shape)


def model(weights, x):
    for i in range(3):
        x = layer(x, jax.tree.map(lambda w, i=i: w[i], weights))
    return x


def loss(weights, x, model=model):
    return jnp.mean(jnp.sin(model(weights, x)))


@pytest.fixture(scope="module")
def expected():
    """Loss, and its gradients with respect to the weights."""
    return jax.jit(jax.value_and_grad(loss))(WEIGHTS, INPUTS)


def test_jit_is_the_same_as_without(expected):
    cases.assert_close(jax.value_and_grad(loss)(WEIGHTS, INPUTS), expected)


def test_scan_over_layers(expected):
    def scanned(weights, x):
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]

    step = jax.jit(jax.value_and_grad(lambda w, x: loss(w, x, scanned)))
    cases.assert_close(step(WEIGHTS, INPUTS), expected)


@pytest.mark.parametrize(
    "policy",
    [None, jax.checkpoint_policies.save_only_these_names("jax_flash_out", "jax_flash_lse")],
    ids=["recompute", "save_attention"],
)
def test_scan_over_checkpointed_layers(policy, expected):
    def scanned(weights, x):
        block = jax.checkpoint(lambda x, w: (layer(x, w), None), policy=policy)
        return jax.lax.scan(block, x, weights)[0]

    step = jax.jit(jax.value_and_grad(lambda w, x: loss(w, x, scanned)))
    cases.assert_close(step(WEIGHTS, INPUTS), expected)


def test_vmap_over_the_batch_axis(expected):
    def mapped(weights, x):
        return jax.vmap(model, in_axes=(None, 0))(weights, x)

    step = jax.jit(jax.value_and_grad(lambda w, x: loss(w, x, mapped)))
    cases.assert_close(step(WEIGHTS, INPUTS), expected)


def test_gradients_of_each_example(expected):
    each = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(WEIGHTS, INPUTS)
    cases.assert_close(jax.tree.map(lambda g: g.mean(0), each), expected[1])


def test_pmap_over_the_batch(expected):
    @jax.pmap
    def on_each_device(x):
        return jax.value_and_grad(loss)(WEIGHTS, x)

    losses, gradients = on_each_device(INPUTS.reshape(4, 1, T, -1))
    cases.assert_close((losses.mean(), jax.tree.map(lambda g: g.mean(0), gradients)), expected)


def test_pmap_with_collectives(expected):
    def step(weights, x):
        return jax.lax.pmean(jax.value_and_grad(loss)(weights, x), "data")

    results = jax.pmap(step, axis_name="data", in_axes=(None, 0))(WEIGHTS, INPUTS.reshape(2, 2, T, -1))
    cases.assert_close(jax.tree.map(lambda x: x[1], results), expected)


def make_mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


WEIGHT_SPECS = {"query": P(None, None, "model"), "key": P(None, None, "model"), "slopes": P(None, "model")}


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_shard_map_with_replicated_weights(check, expected):
    """Weights are the same everywhere; their gradients come out summed over the mesh, and so typed."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    sharded_model = jax.shard_map(
        model, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=check
    )
    step = jax.jit(jax.value_and_grad(lambda w, x: loss(w, x, sharded_model)))
    cases.assert_close(step(WEIGHTS, INPUTS), expected)


def test_gradients_inside_shard_map(expected):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def step(weights, x):
        return jax.value_and_grad(lambda w: jax.lax.pmean(loss(w, x), "data"))(weights)

    sharded = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    cases.assert_close(jax.jit(sharded)(WEIGHTS, INPUTS), expected)


def attention(query, key, bias, sinks):
    return jax_flash.flash_attention(
        query, key, key, bias, sinks=sinks, return_residual=True, implementation="xla"
    )


MANUAL_SPECS = {
    "bias_and_sinks": {"query": P("data"), "key": P("data"), "bias": P(), "sinks": P()},
    "bias_for_all_heads": {
        "query": P("data", None, "model"),
        "key": P("data", None, "model"),
        "bias": P(),
        "sinks": P("model"),
    },
    "keys_for_all_queries": {
        "query": P(None, "data"),
        "key": P(),
        "bias": P(None, None, "data"),
        "sinks": P(),
    },
}


@pytest.mark.parametrize("case", MANUAL_SPECS)
@pytest.mark.parametrize("partly", [False, True], ids=["all_axes", "one_axis_left_automatic"])
def test_shard_map_gradients_of_replicated_operands(case, partly):
    specs = MANUAL_SPECS[case]
    arrays = {
        "query": normal(B, 8, N, H),
        "key": normal(B, T, N, H),
        "bias": normal(1, 1, 8, T),
        "sinks": normal(N),
    }
    if partly:
        specs = {name: P(*(a if a == "data" else None for a in spec)) for name, spec in specs.items()}
    sharded = jax.shard_map(
        lambda arrays: attention(**arrays),
        mesh=make_mesh(),
        in_specs=(specs,),
        out_specs=(specs["query"], specs["query"]),
        axis_names={"data"} if partly else {"data", "model"},
    )

    def gradients(function):
        def scalar(arrays):
            return sum(jnp.sum(jnp.sin(x)) for x in function(arrays))

        return jax.jit(jax.grad(scalar))(arrays)

    cases.assert_close(gradients(sharded), gradients(lambda arrays: attention(**arrays)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_sharded_jit_with_tensor_parallel_weights(kind, expected):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    put = jax.tree.map(lambda w, spec: jax.device_put(w, NamedSharding(mesh, spec)), WEIGHTS, WEIGHT_SPECS)
    x = jax.device_put(INPUTS, NamedSharding(mesh, P("data")))

    def project_and_attend(weights, x):
        query = jnp.einsum("btd,dnh->btnh", x, weights["query"][0])
        key = jnp.einsum("btd,dkh->btkh", x, weights["key"][0])
        slopes = weights["slopes"][0]
        out = jax_flash.flash_attention(query, key, key, alibi_slopes=slopes, implementation="xla")
        return jnp.mean(jnp.sin(out))

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.value_and_grad(project_and_attend)).lower(put, x).compile()
    assert "all-gather" not in compiled.as_text()
    cases.assert_close(compiled(put, x), jax.value_and_grad(project_and_attend)(WEIGHTS, INPUTS))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_sharded_axis_behind_another_batch_axis(kind):
    arrays = {"query": normal(2, B, T, N, H), "key": normal(2, B, T, N, H), "bias": normal(B, 1, T, T)}
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    specs = {
        "query": P(None, "data", None, "model"),
        "key": P(None, "data", None, "model"),
        "bias": P("data"),
    }
    sharded = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}

    def step(arrays):
        results, pullback = jax.vjp(lambda arrays: attention(**arrays, sinks=None), arrays)
        return results, pullback(jax.tree.map(jnp.sin, results))

    with jax.set_mesh(mesh):
        compiled = jax.jit(step).lower(sharded).compile()
    assert "all-gather" not in compiled.as_text()
    cases.assert_close(compiled(sharded), jax.jit(step)(arrays))


def test_dropout_is_the_same_under_any_sharding():
    arrays = normal(B, T, N, H), normal(B, T, N, H), normal(B, T, N, H)
    mesh = make_mesh()
    sharded = [jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))) for x in arrays]

    @jax.jit
    def attend(query, key, value):
        return jax_flash.flash_attention(
            query, key, value, dropout_rate=0.4, dropout_key=jax.random.key(1), implementation="xla"
        )

    cases.assert_close(attend(*sharded), attend(*arrays))
