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
from attention_case import Case
from exhaustive import thorough
from implementation_suite import Implementation
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_calls import arrays, count, drawn_call, token_axes

import jax_flash
from jax_flash._spec import Operands
from jax_flash.transforms import layout
from jax_flash.transforms.layout import Shards
from jax_flash.transforms.locations import without_locations

KINDS = (AxisType.Auto, AxisType.Explicit)
OPAQUE = ("opaque",)

# Axes of the mesh, and how arrays (B, T, N, H) are sharded over them.
MESHES = {
    "two": (dict(s=2), P(None, "s")),
    "four": (dict(s=4), P(None, "s")),
    "eight": (dict(s=8), P(None, "s")),
    "with_batch_and_heads": (dict(b=2, s=2, n=2), P("b", "s", "n")),
    "several_axes": (dict(x=2, y=2, n=2), P(None, ("x", "y"), "n")),
    "axes_out_of_order": (dict(x=2, b=2, y=2), P("b", ("y", "x"))),
}
OPTIONS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(9, 4)),
    "causal_window": dict(is_causal=True, local_window_size=(6, 0)),
    "soft_cap": dict(is_causal=True, logits_soft_cap=2.0),
}


def mesh_of(axes, kind):
    devices = jax.devices("cpu")[: int(np.prod(list(axes.values())))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=devices)


def put(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def with_gradients(function, *args):
    """The output, and the gradients for a cotangent that is its sine."""
    out, pullback = jax.vjp(function, *args)
    return out, *pullback(jnp.sin(out))


def check_values(function, args, mesh, specs):
    """The results on the mesh, where they are as on one device."""
    expected = jax.jit(functools.partial(with_gradients, function))(*args)
    sharded = [put(x, mesh, spec) for x, spec in zip(args, specs, strict=True)]
    with jax.set_mesh(mesh):
        actual = jax.jit(functools.partial(with_gradients, function))(*sharded)
    cases.assert_close(actual, expected)
    return actual


def check(function, args, mesh, specs, out_spec=None):
    """And the output is sharded as the first argument, gradients as the arguments."""
    actual = check_values(function, args, mesh, specs)
    specs = (specs[0] if out_spec is None else out_spec, *specs)
    for name, x, spec in zip(("out", "query", "key", "value"), actual, specs, strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), (name, x.sharding)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mesh", "option", "sizes"),
    [
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
    ],
)
def test_as_on_one_device_and_sharded_as_given(mesh, option, sizes, kind):
    axes, spec = MESHES[mesh]
    sizes = dict(T=32, S=32, N=4, K=2) | sizes
    keys = sizes.pop("S")
    (query, *_), (_, key, value) = arrays(**sizes), arrays(**sizes | dict(T=keys))
    keys_spec = spec if sizes["K"] % axes.get("n", 1) == 0 else P(*spec[:2])
    attend = functools.partial(jax_flash.flash_attention, implementation="xla", **OPTIONS[option])
    check(attend, (query, key, value), mesh_of(axes, kind), (spec, keys_spec, keys_spec))


@dataclasses.dataclass
class ShardedJit(Implementation):
    """An implementation for `check`: `flash_attention` with arguments that are sharded over a mesh."""

    mesh: jax.sharding.Mesh
    batch: str | None = None
    heads: str | None = None

    implementation = "xla"

    def environment(self):
        return jax.set_mesh(self.mesh)

    def attend(self, arguments, **options):
        arguments = {name: self.sharded(name, x) for name, x in arguments.items()}
        results = jax_flash.flash_attention(**arguments, **options, implementation="xla")
        for x in jax.tree.leaves(results):
            if AxisType.Explicit in self.mesh.axis_types:
                assert jax.typeof(x).sharding.spec[-3 if x.ndim > 3 else 1] == "s"
        return jax.tree.map(lambda x: self.put(x, P()), results)

    def sharded(self, name, x):
        if not hasattr(x, "shape") or name == "dropout_key":
            return x
        spec = [None] * x.ndim
        for axis, is_sharded in token_axes(name, jnp.asarray(x)).items():
            spec[axis] = "s" if is_sharded else None
        if name in ("query", "key", "value"):
            spec[0], spec[2] = self.batch, self.heads
        return self.put(jnp.asarray(x), P(*spec))

    def put(self, x, spec):
        is_explicit = AxisType.Explicit in self.mesh.axis_types
        place = jax.sharding.reshard if is_explicit else jax.lax.with_sharding_constraint
        return place(x, NamedSharding(self.mesh, spec))


EVERYTHING = (
    "logits_soft_cap alibi_slopes sinks dropout segment_ids seq_lengths bias mask:BNTS deterministic".split()
)
CALLS = {
    "everything": dict(features=EVERYTHING, is_causal=True, local_window_size=(20, None)),
    "everything_in_bfloat16": dict(dtype="bfloat16", features=EVERYTHING, is_causal=True),
    "dropout": dict(features=["dropout"], is_causal=True),
    "segments": dict(features=["segment_ids"], is_causal=True),
    "lengths": dict(features=["seq_lengths"], is_causal=True),
    "lengths_of_keys": dict(features=["seq_lengths:key_value", "mask:B1TS"], S=64),
    "one_bias_row": dict(dtype="bfloat16", features=["bias:BN1S", "sinks"], residual="absent"),
    "one_bias_column": dict(features=["bias:1NT1", "mask:11TS"]),
    "longer_queries": dict(features=["alibi_slopes"], T=64, local_window_size=(None, 5)),
}


def case_of(name, dtype="float32", **options):
    return Case("sharded", **dict(dtype=dtype, T=32, S=32, N=4, K=2, H=8) | CALLS[name] | options)


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
    ShardedJit(mesh_of(dict(s=calls.shards), KINDS[seed % 2])).check(case)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", ["four", "with_batch_and_heads", "axes_out_of_order"])
def test_a_ring_is_all_that_moves(mesh, kind):
    """Of a custom call, which the compiler can't partition by itself."""
    axes, spec = MESHES[mesh]
    operands = cases.make_operands(T=8, S=16, bias=(1, 4, 8, 16))
    rows = P(spec[0], spec[1])
    heads = spec[2] if len(spec) > 2 else None
    tokens = dict(query=spec, key=spec, value=spec, query_segment_ids=rows, key_value_segment_ids=rows)
    specs = tokens | dict(mask=P(None, None, spec[1]), bias=P(None, heads, spec[1]))
    specs |= dict(query_seq_lengths=P(spec[0]), key_value_seq_lengths=P(spec[0]))
    specs |= dict(alibi_slopes=P(None, heads), sinks=P(None, heads))
    sharded = Operands(**{n: put(x, mesh_of(axes, kind), specs[n]) for n, x in operands.present().items()})

    def run(operands):
        results, pullback = jax.vjp(lambda o: cases.attend(o, implementation=OPAQUE), operands)
        return results, cases.split(pullback(jax.tree.map(jnp.sin, results))[0])[0]

    # Sums of shared operands' gradients, and a chunk's own columns of its bias.
    moves = cases.collectives(run, sharded)
    assert "collective-permute" in moves
    assert moves <= {"collective-permute", "all-reduce", "dynamic-slice"}


@pytest.mark.parametrize("kind", KINDS)
def test_moves_nothing_whole_in_a_layer(kind):
    """Activations are sharded along the sequence, and weights are whole. Only keys and values move."""
    mesh = mesh_of(dict(s=4), kind)
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(size=(2, 64, 32)), jnp.float32)
    weights = jnp.asarray(0.2 * draw.normal(size=(2, 3, 32, 4, 8)), jnp.float32)

    def layer(x, weights):
        query, key, value = (jnp.einsum("btd,dnh->btnh", x, w) for w in weights)
        out = jax_flash.flash_attention(query, key, value, is_causal=True, implementation="xla")
        return x + out.reshape(*x.shape, out_sharding=P(None, "s") if kind == KINDS[1] else None)

    def loss(x, weights, call=layer):
        step = jax.checkpoint(lambda x, w: (call(x, w), None))
        return jnp.mean(jax.lax.scan(step, x, weights)[0] ** 2)

    def on_one_device(x, weights):
        query, key, value = (jnp.einsum("btd,dnh->btnh", x, w) for w in weights)
        return x + jax_flash.flash_attention(query, key, value, is_causal=True).reshape(x.shape)

    with jax.set_mesh(mesh):
        sharded = put(x, mesh, P(None, "s")), put(weights, mesh, P())
        compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*sharded).compile()
        actual = compiled(*sharded)
    cases.assert_close(actual, jax.value_and_grad(loss, argnums=(0, 1))(x, weights, on_one_device))
    moves = {name for name in ("all-gather", "all-to-all") if count(compiled.as_text(), name)}
    assert not moves and count(compiled.as_text(), "collective-permute")


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


def packed(query, key, value):
    offsets = jnp.array([0, 5, 20, 32])
    attend = functools.partial(
        jax_flash.flash_attention_varlen,
        cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=15, max_seqlen_kv=15,
        is_causal=True, implementation="xla",
    )  # fmt: skip
    return jax.vmap(attend)(query, key, value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attend", [head_of_each, packed], ids=lambda f: f.__name__)
def test_calls_that_take_whole_sequences(attend, kind):
    """They gather them, and results are sharded nevertheless."""
    axes, spec = MESHES["four"]
    check(attend, arrays(), mesh_of(axes, kind), (spec,) * 3)


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
    attend = functools.partial(jax_flash.flash_attention, is_causal=True, implementation="xla")
    check(attend, arrays(), mesh, (P("b", "s"),) * 3)
    with jax.set_mesh(mesh):
        sharded = [put(x, mesh, P("b", "s")) for x in arrays()]
        text = jax.jit(functools.partial(with_gradients, attend)).lower(*sharded).compile().as_text()
    assert count(text, "collective-permute") and not count(text, "all-gather")


def test_shard_map_that_leaves_the_sequence_explicit():
    mesh = mesh_of(dict(b=2, s=4), AxisType.Explicit)
    attend = functools.partial(jax_flash.flash_attention, is_causal=True, implementation="xla")
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
    assert Shards.over(("y",), mesh, True) == Shards(("y",), (0, 1, 2), True)
    assert Shards.over(("x", "y"), mesh, True) == Shards(("x", "y"), (0, 1, 2, 3, 4, 5), True)
    # The device at (x, y) has shard 2 * y + x.
    assert Shards.over(("y", "x"), mesh, False) == Shards(("x", "y"), (0, 2, 4, 1, 3, 5), False)


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
