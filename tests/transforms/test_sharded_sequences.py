"""`flash_attention` of arrays that are sharded along the sequence, under `jit` on simulated devices.

What it gives against one device, that results and gradients stay sharded, and what moves between devices.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transform_cases as cases
from exhaustive import in_turn, thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_calls import arrays, count, drawn_call
from sharded_jit import (
    KINDS,
    MESHES,
    OPTIONS,
    ShardedJit,
    case_of,
    check,
    check_values,
    mesh_of,
    put,
    with_gradients,
)

import jax_flash
from jax_flash._spec import Operands
from jax_flash.transforms import layout
from jax_flash.transforms.layout import Shards
from jax_flash.transforms.locations import without_locations


@pytest.mark.parametrize(
    ("mesh", "option", "sizes", "kind"),
    in_turn([
        ("two", "causal", dict(K=1)),
        ("four", "plain", {}),
        ("four", "causal", dict(T=32, S=64)),
        ("eight", "window", dict(T=64, S=32)),
        ("eight", "causal_window", dict(K=4)),
        ("with_batch_and_heads", "causal", {}),
        ("with_batch_and_heads", "window", dict(N=8, K=4)),
        ("with_batch_and_heads", "soft_cap", dict(N=4, K=1)),
        ("several_axes", "causal", {}),
        ("axes_out_of_order", "causal", {}),
        ("axes_out_of_order", "causal_window", {}),
    ], KINDS),
)  # fmt: skip
def test_as_on_one_device_and_sharded_as_given(mesh, option, sizes, kind):
    axes, spec = MESHES[mesh]
    sizes = dict(T=32, S=32, N=4, K=2) | sizes
    keys = sizes.pop("S")
    (query, *_), (_, key, value) = arrays(**sizes), arrays(**sizes | dict(T=keys))
    keys_spec = spec if sizes["K"] % axes.get("n", 1) == 0 else P(*spec[:2])
    attend = functools.partial(jax_flash.flash_attention, implementation="xla", **OPTIONS[option])
    check(attend, (query, key, value), mesh_of(axes, kind), (spec, keys_spec, keys_spec))


@pytest.mark.parametrize(
    ("name", "axes", "kind"),
    [
        ("everything", dict(s=4), KINDS[0]),
        ("everything", dict(b=2, s=2, n=2), KINDS[1]),
        ("everything_in_bfloat16", dict(b=2, s=4), KINDS[0]),
        ("dropout", dict(s=8), KINDS[1]),
        ("segments", dict(s=8), KINDS[0]),
        ("segments", dict(b=2, s=2, n=2), KINDS[1]),
        ("lengths", dict(s=4), KINDS[1]),
        ("lengths", dict(b=2, s=2, n=2), KINDS[0]),
        ("lengths_of_keys", dict(s=2), KINDS[0]),
        ("one_bias_row", dict(s=8), KINDS[0]),
        ("one_bias_column", dict(b=2, s=4), KINDS[1]),
        ("longer_queries", dict(s=4, n=2), KINDS[0]),
    ],
    ids=str,
)
def test_options(name, axes, kind):
    sharded = ShardedJit(mesh_of(axes, kind), *(axis if axis in axes else None for axis in "bn"))
    sharded.check(case_of(name))


@pytest.mark.parametrize("seed", [0, *thorough(*range(1, 16))])
def test_drawn_calls(seed):
    case, calls = drawn_call(seed)
    case = dataclasses.replace(case, batch_axes=1, transform="jit")
    ShardedJit(mesh_of(dict(s=calls.shards), KINDS[seed % 2]), context_parallel="ring").check(case)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [P(), P(None, "y"), P(None, ("x", "y"))], ids=str)
def test_keys_that_are_sharded_otherwise(keys, kind):
    """Each device has its own queries, and gets all keys."""
    mesh, spec = mesh_of(dict(x=4, y=2), kind), P(None, "x")
    query, key, value = arrays(N=4, K=4)
    mask = np.random.default_rng(1).random((1, 1, 32, 32)) < 0.9
    attend = functools.partial(jax_flash.flash_attention, mask=mask, is_causal=True, implementation="xla")
    check(attend, (query, key, value), mesh, (spec, keys, keys))
    if keys == P():
        with jax.set_mesh(mesh):
            sharded = [
                put(x, mesh, spec) for x, spec in zip((query, key, value), (spec, keys, keys), strict=True)
            ]
            text = jax.jit(attend).lower(*sharded).compile().as_text()
        assert not any(count(text, name) for name in ("all-gather", "all-to-all", "collective-permute"))


@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_keys_on_the_axis_of_the_queries(kind):
    """One of the two gives way."""
    mesh = mesh_of(dict(x=4, y=2), kind)
    attend = functools.partial(jax_flash.flash_attention, is_causal=True, implementation="xla")
    check_values(attend, arrays(N=4, K=4), mesh, (P(None, "x"), *[P(None, None, "x")] * 2))


def head_of_each(query, key, value):
    return jax_flash.flash_attention(
        query, key, value, score_mod=lambda score, b, n, t, s: score - 0.1 * n, implementation="xla"
    )


def varlen(query, key, value, score_mod=None):
    offsets = jnp.array([0, 5, 20, 32])
    attend = functools.partial(
        jax_flash.flash_attention_varlen,
        cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=15, max_seqlen_kv=15,
        is_causal=True, implementation="xla", score_mod=score_mod,
    )  # fmt: skip
    return jax.vmap(attend)(query, key, value)


def varlen_with_function(query, key, value):
    def score_mod(score, sequence, head, query, key):
        return score - 0.1 * (head + sequence) * jnp.abs(query - key) + 0.2 * (key % 3)

    return varlen(query, key, value, score_mod)


@pytest.mark.parametrize("kind", KINDS)
def test_varlen_sequences_with_a_function(kind):
    """By heads: sequences stay whole."""
    axes, spec = MESHES["four"]
    check(varlen_with_function, arrays(N=8, K=4), mesh_of(axes, kind), (spec,) * 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attend", [head_of_each, varlen], ids=lambda f: f.__name__)
def test_calls_that_take_whole_sequences(attend, kind):
    """They gather them, as there are fewer heads than devices, and results are sharded nevertheless."""
    axes, spec = MESHES["four"]
    check(attend, arrays(N=2, K=1), mesh_of(axes, kind), (spec,) * 3)


def test_a_sequence_that_devices_do_not_divide():
    mesh = mesh_of(dict(s=4), AxisType.Auto)
    args = arrays(T=30)

    def attend(*args):
        args = [jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, "s"))) for x in args]
        return jax_flash.flash_attention(*args, is_causal=True)

    actual = jax.jit(functools.partial(with_gradients, attend))(*args)
    expected = with_gradients(functools.partial(jax_flash.flash_attention, is_causal=True), *args)
    cases.assert_close(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_implementation_that_takes_no_diagonal(kind):
    """Its causal calls have whole sequences, and others are sharded."""
    seen = []

    def forward(spec, operands):
        seen.append(operands.query.shape[1])
        return cases.plain_forward(spec, operands)

    name = f"without_diagonal_{kind.name}"
    cases.add_implementation(name, forward, cases.plain_backward)
    implementation = cases.sys.modules[f"jax_flash.{name}"]
    implementation.supports = lambda spec, shapes, device: "no diagonal" if shapes.diagonal else None
    mesh = mesh_of(dict(s=4), kind)
    operands = Operands(*arrays(N=2))
    sharded = Operands(*(put(x, mesh, P(None, "s")) for x in arrays(N=2)))
    for right, tokens in ((0, 32), (None, 8)):
        spec = dataclasses.replace(cases.SPEC, right=right)
        seen.clear()
        with jax.set_mesh(mesh):
            results = jax.jit(lambda o, spec=spec: cases.attend(o, spec, (name,)))(sharded)
        assert seen[-1] == tokens
        cases.assert_close(results, cases.definition(operands, spec))
        assert results[0].sharding.is_equivalent_to(NamedSharding(mesh, P(None, "s")), 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (None, 0, 0)], ids=str)
def test_vmap(mapped, kind):
    axes, spec = MESHES["with_batch_and_heads"]
    args = [
        x if axis is None else jnp.stack([x, -x, 2 * x]) for x, axis in zip(arrays(), mapped, strict=True)
    ]
    specs = [spec if axis is None else P(None, *spec) for axis in mapped]
    attend = functools.partial(jax_flash.flash_attention, is_causal=True, implementation="xla")
    mesh = mesh_of(axes, kind)
    check(jax.vmap(attend, in_axes=mapped), args, mesh, specs, P(None, *spec))


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_over_queries_that_share_lengths_and_segments(kind):
    axes, spec = MESHES["with_batch_and_heads"]
    lengths, ids = np.array([32, 19], np.int32), np.repeat(np.arange(4, dtype=np.int32), 8)[None].repeat(2, 0)
    attend = functools.partial(
        jax_flash.flash_attention, key_value_seq_lengths=lengths, query_segment_ids=ids,
        key_value_segment_ids=ids, local_window_size=(11, 3), implementation="xla",
    )  # fmt: skip
    query, key, value = arrays()
    args, specs = (jnp.stack([query, -query]), key, value), (P(None, *spec), spec, spec)
    check(jax.vmap(attend, in_axes=(0, None, None)), args, mesh_of(axes, kind), specs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [(5, 2, 7, 0, 1, 6, 3, 4), (0,)], ids=len)
def test_devices_in_any_order(order, kind):
    devices = np.array(jax.devices("cpu"))[list(order)].reshape(-1, min(2, len(order)))
    mesh = jax.sharding.Mesh(devices, ("x", "y"), axis_types=(kind,) * 2)
    attend = functools.partial(jax_flash.flash_attention, is_causal=True, implementation="xla")
    check(attend, arrays(), mesh, (P(None, ("y", "x")),) * 3)


@pytest.mark.parametrize("explicit", ["b", "s"])
def test_mesh_with_axes_of_both_kinds(explicit):
    kinds = tuple(AxisType.Explicit if axis == explicit else AxisType.Auto for axis in "bs")
    mesh = jax.make_mesh((2, 4), ("b", "s"), axis_types=kinds)
    attend = functools.partial(
        jax_flash.flash_attention, is_causal=True, context_parallel="ring", implementation="xla"
    )
    check(attend, arrays(), mesh, (P("b", "s"),) * 3)
    with jax.set_mesh(mesh):
        sharded = [put(x, mesh, P("b", "s")) for x in arrays()]
        text = jax.jit(functools.partial(with_gradients, attend)).lower(*sharded).compile().as_text()
    assert count(text, "collective-permute") and not count(text, "all-gather")


def test_shard_map_that_leaves_the_sequence_explicit():
    mesh = mesh_of(dict(b=2, s=4), AxisType.Explicit)
    attend = functools.partial(
        jax_flash.flash_attention, is_causal=True, context_parallel="ring", implementation="xla"
    )
    mapped = jax.shard_map(attend, in_specs=P("b"), out_specs=P("b"), axis_names={"b"})
    expected = jax.jit(functools.partial(with_gradients, attend))(*arrays())
    with jax.set_mesh(mesh):
        sharded = [put(x, mesh, P("b", "s")) for x in arrays()]
        compiled = jax.jit(functools.partial(with_gradients, mapped)).lower(*sharded).compile()
        actual = compiled(*sharded)
    cases.assert_close(actual, expected)
    assert count(compiled.as_text(), "collective-permute")


def test_second_derivative():
    mesh = mesh_of(dict(s=4), AxisType.Auto)

    def squares(*args):
        attend = functools.partial(jax_flash.flash_attention, is_causal=True, implementation="xla")
        gradients = with_gradients(attend, *args)
        return sum(jnp.sum(x**2) for x in gradients)

    args = arrays(T=16)
    expected = jax.jit(jax.grad(squares))(*args)
    cases.assert_close(
        jax.jit(jax.grad(squares))(*(put(x, mesh, P(None, "s")) for x in args)), expected, 1e-4
    )


def test_eagerly():
    mesh = mesh_of(dict(s=4), AxisType.Auto)
    out = jax_flash.flash_attention(*(put(x, mesh, P(None, "s")) for x in arrays()), is_causal=True)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "s")), 4)
    cases.assert_close(out, jax_flash.flash_attention(*arrays(), is_causal=True))


def test_shards_are_numbered_in_the_order_of_the_sharding():
    mesh = {"x": 2, "y": 3, "z": 2}
    assert Shards.over(("y",), mesh, True, "ring") == Shards(("y",), (0, 1, 2), True, "ring")
    expected = Shards(("x", "y"), (0, 1, 2, 3, 4, 5), True, "ulysses")
    assert Shards.over(("x", "y"), mesh, True, "ulysses") == expected
    # The device at (x, y) has shard 2 * y + x.
    expected = Shards(("x", "y"), (0, 2, 4, 1, 3, 5), False, "all_gather")
    assert Shards.over(("y", "x"), mesh, False, "all_gather") == expected


@pytest.fixture
def places_in_python():
    limit = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 10)
    yield
    jax.config.update("jax_traceback_in_locations_limit", limit)


@pytest.mark.usefixtures("places_in_python")
def test_the_partitioned_program_has_no_places_in_python():
    """XLA would take them for places of the whole program, see `locations.py`."""

    def loop(x):
        def body(carry, _):
            return jax.lax.cond(carry.sum() > 0, jnp.sin, jnp.cos, carry), None

        return jax.lax.scan(body, x, length=3)[0]

    def places(function):
        text = jax.jit(function).lower(jnp.ones(3)).as_text(debug_info=True)
        return text.count("test_sharded_sequences.py")

    assert places(without_locations(loop)) < places(loop)
    np.testing.assert_array_equal(without_locations(loop)(jnp.ones(3)), loop(jnp.ones(3)))


def test_sharding_rule():
    """Bias and mask are partitioned along their queries, never along their keys."""
    shapes = {"query": (2, 7, 4, 16), "key": (2, 9, 4, 16), "value": (2, 9, 4, 32), "bias": (1, 4, 7, 9)}
    results = {"out": (2, 7, 4, 32), "lse": (2, 4, 7)}
    letters = layout.letters_of(shapes | results)
    rule, options = layout.sharding_rule({"x": 4}, letters, shapes, results, sequences=True)
    assert rule == "one0 k t a, b0 s k h, b0 t k h, b0 s k v -> b0 k t, b0 t k v"
    assert options == {"need_replication_factors": ("one0", "a", "h", "v")}
