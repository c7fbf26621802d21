"""Sharded calls on eight devices: equal in value, nothing gathered, results sharded as operands."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transform_cases as cases
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flash._spec import Operands
from jax_flash.transforms import layout
from jax_flash.transforms.partitioning import Layout

KINDS = (AxisType.Auto, AxisType.Explicit)
OPAQUE = ("opaque",)


def make_mesh(kind=AxisType.Auto, shape=(2, 4)):
    return jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=(kind,) * len(shape))


def put(operands, mesh, specs):
    """The operands on `mesh`; those that `specs` doesn't name are replicated."""
    present = operands.present()
    return Operands(
        **{n: jax.device_put(x, NamedSharding(mesh, specs.get(n, P()))) for n, x in present.items()}
    )


def by(batch, heads, key_heads="same", **others):
    """Specs for every operand: batch over `batch`, query and key heads over those mesh axes."""
    key_heads = heads if key_heads == "same" else key_heads
    rows = ("query_seq_lengths", "key_value_seq_lengths", "query_segment_ids", "key_value_segment_ids")
    return {
        "query": P(batch, None, heads),
        "key": P(batch, None, key_heads),
        "value": P(batch, None, key_heads),
        "alibi_slopes": P(None, heads),
        "sinks": P(None, heads),
        **dict.fromkeys(rows, P(batch)),
        **others,
    }


def with_gradients(operands, implementation=("plain",)):
    """The results, and the gradients for cotangents that are their sines."""
    results, pullback = jax.vjp(lambda o: cases.attend(o, implementation=implementation), operands)
    (gradients,) = pullback(jax.tree.map(jnp.sin, results))
    return results, cases.split(gradients)[0]


LAYOUTS = {
    "batch": (dict(B=8), by(("x", "y"), None)),
    "heads": (dict(N=8, K=8), by(None, ("y", "x"))),
    "batch_and_heads": (dict(N=8, K=4, bias=(4, 8, 6, 5)), by("x", "y", bias=P("x", "y"))),
    "bias_for_all_rows": (dict(N=8, K=4, bias=(1, 8, 1, 5)), by("x", "y", bias=P(None, "y"))),
    "bias_for_all_heads": (dict(N=8, K=4, bias=(4, 1, 6, 1)), by("y", "x", bias=P("y"))),
    "mqa": (dict(N=8, K=1), by("x", "y", None)),
    "gqa_with_fewer_key_heads_than_shards": (dict(N=8, K=2), by("x", "y", None)),
    "gqa_shards_of_several_groups": (dict(N=16, K=8), by("x", "y", None)),
    "gqa_groups_and_shards_out_of_step": (dict(N=12, K=3), by("x", "y", None)),
    "gqa_keys_sharded_over_one_axis_of_two": (dict(N=16, K=2), by(None, ("x", "y"), "x")),
}


# With automatic shardings keys take on the sharding of these queries, as every mesh axis divides them.
EXPLICIT_ALONE = {"gqa_shards_of_several_groups"}


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, kind) for case in LAYOUTS for kind in KINDS if kind == KINDS[1] or case not in EXPLICIT_ALONE],
)
def test_partitions_over_batch_and_heads(case, kind):
    sizes, specs = LAYOUTS[case]
    operands = cases.make_operands(**sizes)
    mesh = make_mesh(kind)
    sharded = put(operands, mesh, specs)
    allowed = {"all-reduce"} | ({"dynamic-slice"} if "gqa" in case else set())  # of a device's own key heads
    assert cases.collectives(lambda o: with_gradients(o, OPAQUE), sharded) <= allowed
    (out, lse), gradients = jax.jit(with_gradients)(sharded)
    batch, _, heads = specs["query"]
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(batch, None, heads)), 4)
    assert lse.sharding.is_equivalent_to(NamedSharding(mesh, P(batch, heads)), 3)
    for name, gradient in gradients.items():
        assert gradient.sharding.is_equivalent_to(getattr(sharded, name).sharding, gradient.ndim), name
    expected, pullback = jax.vjp(cases.definition, operands)
    cases.assert_close((out, lse), expected)
    # A row with nothing to attend to has lse -inf, whose sine is no number, and gradients of 0.
    cotangents = jax.tree.map(lambda x: jnp.sin(jnp.where(jnp.isfinite(x), x, 0)), expected)
    cases.assert_close(gradients, cases.split(pullback(cotangents)[0])[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["plain", "xla"])
def test_varlen_sequences(kind, implementation):
    """Offsets go along with the batch, and the tokens are never gathered."""
    operands, spec = cases.make_varlen_operands(B=4, N=8, K=4)
    mesh = make_mesh(kind)
    sharded = put(operands, mesh, by("x", "y", query_offsets=P("x"), key_value_offsets=P("x")))

    def ours(operands):
        return cases.attend(operands, spec, (implementation,))

    assert not cases.collectives(lambda o: cases.attend(o, spec, OPAQUE), sharded)
    cases.assert_close(jax.jit(ours)(sharded), cases.definition(operands, spec))
    gradients = jax.jit(lambda o: cases.gradients(ours, o))(sharded)
    cases.assert_close(gradients, cases.gradients(lambda o: cases.definition(o, spec), operands))


def test_varlen_sequences_under_shard_map():
    operands, spec = cases.make_varlen_operands(B=4, N=8, K=4)
    mesh = make_mesh()
    specs = by("x", "y", query_offsets=P("x"), key_value_offsets=P("x"))
    mapped = jax.shard_map(
        lambda o: cases.attend(o, spec, ("xla",)),
        mesh=mesh,
        in_specs=(Operands(**{name: specs[name] for name in operands.present()}),),
        out_specs=(P("x", None, "y"), P("x", "y")),
    )
    cases.assert_close(jax.jit(mapped)(operands), cases.definition(operands, spec))
    actual = cases.gradients(mapped, operands)
    cases.assert_close(actual, cases.gradients(lambda o: cases.definition(o, spec), operands))


@pytest.mark.parametrize("explicit", ["x", "y"])
def test_mesh_with_axes_of_both_kinds(explicit):
    kinds = tuple(AxisType.Explicit if axis == explicit else AxisType.Auto for axis in "xy")
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)
    operands = cases.make_operands(N=8, K=4)
    sharded = put(operands, mesh, by("x", "y"))
    with jax.set_mesh(mesh):
        assert cases.collectives(lambda o: with_gradients(o, OPAQUE), sharded) <= {"all-reduce"}
        actual = jax.jit(cases.attend)(sharded)
        gradients = cases.gradients(cases.attend, sharded)
    cases.assert_close(actual, cases.definition(operands))
    cases.assert_close(gradients, cases.gradients(cases.definition, operands))


@pytest.mark.parametrize("manual", ["x", "y"])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_shard_map_that_leaves_an_axis_automatic(manual, key_heads):
    """The axis that is left partitions heads: of keys too where it divides them."""
    mesh = make_mesh(shape=(2, 4))
    left = "y" if manual == "x" else "x"
    operands = cases.make_operands(B=4, N=8, K=key_heads)
    sizes = dict(mesh.shape)
    whole = by(manual, left, left if key_heads % sizes[left] == 0 else None)
    specs = {name: P(*(a if a == manual else None for a in spec)) for name, spec in whole.items()}

    def mapped(implementation):
        return jax.shard_map(
            lambda o: cases.attend(o, implementation=implementation),
            mesh=mesh,
            in_specs=(Operands(**{name: specs.get(name, P()) for name in operands.present()}),),
            out_specs=(P(manual), P(manual)),
            axis_names={manual},
        )

    sharded = put(operands, mesh, whole)
    loss = jax.value_and_grad(cases.loss(mapped(OPAQUE)))
    allowed = {"all-reduce"} | (set() if key_heads % sizes[left] == 0 else {"dynamic-slice"})
    assert cases.collectives(loss, *cases.split(sharded)) <= allowed
    cases.assert_close(jax.jit(mapped(("plain",)))(sharded), cases.definition(operands))
    gradients = cases.gradients(mapped(("plain",)), sharded)
    cases.assert_close(gradients, cases.gradients(cases.definition, operands))


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_shard_map_that_leaves_axes_of_both_kinds(check):
    """Each device has its row by "x" and "y", and its heads by "z"."""
    seen = []

    def forward(spec, operands):
        seen.append(operands.query.shape)
        return cases.plain_forward(spec, operands)

    name = f"measuring_{check}"  # one for each case, as the other's trace is kept
    cases.add_implementation(name, forward, cases.plain_backward)
    kinds = (AxisType.Auto, AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=kinds)
    operands = cases.make_operands(B=4, T=6, N=4, K=2, H=4)
    rows = {name: P("x") for name, spec in by("x", None).items() if spec and spec[0] == "x"}
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            lambda o: cases.attend(o, implementation=(name,)),
            in_specs=(Operands(**{name: rows.get(name, P()) for name in operands.present()}),),
            out_specs=(P("x"), P("x")),
            axis_names={"x"},
            check_vma=check,
        )
        results = jax.jit(mapped)(put(operands, mesh, by(("x", "y"), "z")))
    assert seen == [(1, 6, 2, 4)]
    cases.assert_close(results, cases.definition(operands))


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_that_are_not_on_the_mesh(kind):
    operands = cases.make_operands(N=8, K=4)
    numpy = jax.tree.map(np.asarray, operands)
    expected = cases.definition(operands)
    with jax.set_mesh(make_mesh(kind)):
        for arrays in (operands, numpy, operands.replace(query=numpy.query)):
            cases.assert_close(jax.jit(cases.attend)(arrays), expected)
        cases.assert_close(cases.attend(operands), expected)
        gradients = cases.gradients(cases.attend, operands)
        # One operand on the mesh, as a mask that the program makes, and the others not.
        mask = jax.device_put(numpy.mask, NamedSharding(jax.sharding.get_mesh(), P()))
        mixed = jax.jit(lambda mask: cases.attend(operands.replace(mask=mask)))(mask)
    cases.assert_close(mixed, expected)
    cases.assert_close(gradients, cases.gradients(cases.definition, operands))


def test_shard_map_over_one_axis_of_an_explicit_mesh():
    mesh = make_mesh(AxisType.Explicit)
    operands = cases.make_operands(N=8, K=4)
    specs = {name: P(*(a if a == "x" else None for a in spec)) for name, spec in by("x", "y").items()}
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            cases.attend,
            in_specs=(Operands(**{name: specs.get(name, P()) for name in operands.present()}),),
            out_specs=(P("x"), P("x")),
            axis_names={"x"},
        )
        sharded = put(operands, mesh, by("x", "y"))
        cases.assert_close(jax.jit(mapped)(sharded), cases.definition(operands))
        actual = cases.gradients(mapped, sharded)
    cases.assert_close(actual, cases.gradients(cases.definition, operands))


@pytest.mark.parametrize("sharded", [{"query": P(None, "x", None, "y")}, {"key": P(None, "y")}])
@pytest.mark.parametrize("kind", KINDS)
def test_head_dim_and_keys_of_whole_queries_are_gathered(sharded, kind):
    operands = cases.make_operands(S=8)
    sharded = put(operands, make_mesh(kind), sharded)
    cases.assert_close(jax.jit(cases.attend)(sharded), cases.definition(operands))
    actual = jax.jit(lambda o: cases.gradients(cases.attend, o))(sharded)
    cases.assert_close(actual, cases.gradients(cases.definition, operands))


def test_without_shardy_is_refused():
    """Compiled, such a program would end the process on some versions of JAX."""
    sharded = put(cases.make_operands(), make_mesh(), by("x", None))
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with pytest.raises(NotImplementedError, match="jax_use_shardy_partitioner must be True"):
            jax.jit(cases.attend).lower(sharded)
        cases.assert_close(cases.attend(cases.make_operands()), cases.definition(cases.make_operands()))
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def test_sharding_of_the_queries_passes_on_to_everything():
    operands = cases.make_operands(B=2, N=8, K=4)
    mesh = make_mesh()

    def constrained(operands):
        query = jax.lax.with_sharding_constraint(operands.query, NamedSharding(mesh, P("x", None, "y")))
        return cases.attend(operands.replace(query=query))

    compiled = jax.jit(lambda o: cases.gradients(constrained, o)).lower(put(operands, mesh, {})).compile()
    gradients = compiled(put(operands, mesh, {}))
    assert gradients["key"].sharding.is_equivalent_to(NamedSharding(mesh, P("x", None, "y")), 4)
    cases.assert_close(gradients, cases.gradients(cases.definition, operands))


def test_heads_sharded_within_a_projection():
    """Reshaping a projection shards heads over a part of a mesh axis, where they are too few for it."""
    operands = cases.make_operands(N=4, K=2)
    mesh = make_mesh(shape=(8,))
    present = operands.present()
    flat = {name: present[name].reshape(*present[name].shape[:2], -1) for name in ("query", "key")}

    def attend(flat, operands):
        whole = {name: x.reshape(present[name].shape) for name, x in flat.items()}
        return cases.attend(operands.replace(**whole))

    sharded = {n: jax.device_put(x, NamedSharding(mesh, P(None, None, "x"))) for n, x in flat.items()}
    cases.assert_close(jax.jit(attend)(sharded, put(operands, mesh, {})), cases.definition(operands))


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_over_an_unsharded_axis_keeps_the_sharded_batch(kind):
    operands = cases.make_operands(N=8, K=4)
    mesh = make_mesh(kind)
    specs = by("x", "y")
    sharded = put(operands, mesh, specs)
    queries = jnp.stack([operands.query, -operands.query])
    sharded_queries = jax.device_put(queries, NamedSharding(mesh, P(None, "x", None, "y")))

    def each(function):
        def one(query, operands):
            return cases.gradients(function, operands.replace(query=query))

        return jax.vmap(one, in_axes=(0, None))

    opaque = each(lambda o: cases.attend(o, implementation=OPAQUE))
    assert cases.collectives(opaque, sharded_queries, sharded) <= {"all-reduce"}
    actual = jax.jit(each(cases.attend))(sharded_queries, sharded)
    cases.assert_close(actual, each(cases.definition)(queries, operands))


@pytest.mark.parametrize("kinds", [(AxisType.Explicit,) * 2, (AxisType.Explicit, AxisType.Auto)], ids=str)
@pytest.mark.parametrize("names", [("query",), ("query", "key", "value", "mask", "sinks")], ids=len)
def test_vmap_over_a_sharded_axis(names, kinds):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)
    operands, specs = cases.make_operands(N=8, K=4), by(None, "y")
    present = operands.present()
    mapped = {n: jnp.stack([x, jnp.flip(x, -1)]) if n in names else x for n, x in present.items()}
    specs = {n: P("x", *specs.get(n, ())) if n in names else specs.get(n, P()) for n in present}
    in_axes = (Operands(**{n: 0 if n in names else None for n in present}),)

    def each(function):
        return jax.vmap(lambda o: (function(o), cases.gradients(function, o)), in_axes=in_axes)

    sharded = put(Operands(**mapped), mesh, specs)
    opaque = each(lambda o: cases.attend(o, implementation=OPAQUE))
    assert cases.collectives(opaque, sharded) <= {"all-reduce"}
    results = jax.jit(each(cases.attend))(sharded)
    assert jax.typeof(results[0][0]).sharding.spec[0] == "x"
    cases.assert_close(results, each(cases.definition)(Operands(**mapped)))


def test_uneven_batch():
    operands = cases.make_operands(B=3)
    mesh = make_mesh()

    def constrained(operands):
        query = jax.lax.with_sharding_constraint(operands.query, NamedSharding(mesh, P("x")))
        return cases.attend(operands.replace(query=query))

    cases.assert_close(jax.jit(constrained)(put(operands, mesh, {})), cases.definition(operands))


def test_eager_on_sharded_arrays():
    operands = cases.make_operands(N=8, K=4)
    mesh = make_mesh()
    out, _ = results = cases.attend(put(operands, mesh, by("x", "y")))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x", None, "y")), 4)
    cases.assert_close(results, cases.definition(operands))


def test_programs_that_differ_in_the_spec_alone_have_different_text():
    """Caches key on the program's text, in which the partitioned computation is but an address."""
    sharded = put(cases.make_operands(), make_mesh(), by("x", None))

    def text(scale):
        spec = dataclasses.replace(cases.SPEC, scale=scale)
        lines = jax.jit(lambda o: cases.attend(o, spec)).lower(sharded).as_text().splitlines()
        return [line for line in lines if "CustomSPMDPartitioning" not in line]

    assert text(0.5) == text(0.5) != text(0.25)


def test_sharding_rule():
    shapes = {"query": (2, 7, 8, 16), "key": (2, 9, 4, 16), "value": (2, 9, 4, 32), "bias": (1, 8, 7, 1)}
    results = {"out": (2, 7, 8, 32), "lse": (2, 8, 7)}
    letters = layout.letters_of(shapes | results)
    rule, options = layout.sharding_rule({"x": 4}, letters, shapes, results)
    assert rule == "one0 (k g) t one1, b0 s k h, b0 t (k g) h, b0 s k v -> b0 (k g) t, b0 t (k g) v"
    assert options == {"need_replication_factors": ("one0", "t", "one1", "s", "h", "v"), "g": 2}
    rule, options = layout.sharding_rule({"x": 3}, letters, shapes, results)
    assert rule == "one0 n t one1, b0 s k h, b0 t n h, b0 s k v -> b0 n t, b0 t n v"
    assert "g" not in options


@pytest.mark.parametrize(
    ("key_heads", "key_spec", "expected"),
    [
        (8, P(None, None, ("x", "y")), (("x", "y"), ())),
        (2, P(None, None, "x"), (("x",), ("y",))),
        (2, P(), ((), ("x", "y"))),
        (1, P(), ((), ("x", "y"))),
    ],
)
def test_layout_of_heads(key_heads, key_spec, expected):
    shapes = {"query": (2, 5, 8, 4), "key": (2, 5, key_heads, 4)}
    inputs = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    specs = {"query": P(None, None, ("x", "y")), "key": key_spec}
    found = Layout.of({"x": 2, "y": 4}, layout.letters_of(shapes), inputs, specs)
    assert (found.key_heads, found.group) == expected


@pytest.mark.parametrize(
    ("sizes", "mesh", "expected"),
    [
        (dict(B=2, N=8, K=8), {"y": 4}, ([()], ("y",), ())),
        (dict(B=2, N=8, K=2), {"y": 4}, ([()], (), ("y",))),
        (dict(B=4, N=3, K=3), {"y": 4}, ([("y",)], (), ())),
        (dict(B=3, N=3, K=3), {"y": 4}, ([()], (), ())),
        (dict(B=2, N=8, K=8), {"x": 2, "y": 4}, ([("x",)], ("y",), ())),
        (dict(B=3, N=8, K=4), {"x": 2, "y": 4}, ([()], ("x",), ("y",))),
        (dict(B=8, N=3, K=3), {"x": 2, "y": 4}, ([("x", "y")], (), ())),
    ],
)
def test_layout_over_axes_that_a_shard_map_leaves(sizes, mesh, expected):
    present = cases.make_operands(**sizes).present()
    inputs = {name: present[name] for name in ("query", "key", "value")}
    letters = layout.letters_of({name: x.shape for name, x in inputs.items()})
    found = Layout.of({}, letters, inputs, dict.fromkeys(inputs, P())).over_more(mesh, inputs)
    assert ([*found.batch], found.key_heads, found.group) == expected
