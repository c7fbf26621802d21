"""`flash_attention(context_parallel=...)` of sharded sequences, under `jit` on simulated devices.

Each strategy against one device, what moves between devices, what "auto" takes, and what is refused.
"""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transform_cases as cases
from exhaustive import in_turn, thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_calls import arrays, count, drawn_call
from sharded_jit import KINDS, MESHES, OPTIONS, ShardedJit, case_of, check, mesh_of, put, with_gradients

import jax_flash
from jax_flash._spec import Operands
from jax_flash.context_parallel import strategy

STRATEGIES = ("all_gather", "ring", "ulysses")
MOVES = {"all_gather": "all-gather", "ring": "collective-permute", "ulysses": "all-to-all"}
OPAQUE = ("opaque",)


def attention(name, **options):
    options = dict(implementation="xla") | options
    return functools.partial(jax_flash.flash_attention, context_parallel=name, **options)


def compiled_text(function, args, mesh, specs):
    sharded = [put(x, mesh, spec) for x, spec in zip(args, specs, strict=True)]
    with jax.set_mesh(mesh):
        return jax.jit(functools.partial(with_gradients, function)).lower(*sharded).compile().as_text()


@pytest.mark.parametrize(
    ("name", "mesh", "option", "sizes", "kind"),
    in_turn([
        ("all_gather", "two", "causal", dict(K=1)),
        ("all_gather", "eight", "window", dict(T=64, S=32)),
        ("all_gather", "with_batch_and_heads", "soft_cap", dict(N=4, K=1)),
        ("all_gather", "axes_out_of_order", "causal_window", {}),
        ("ulysses", "two", "causal", dict(K=1)),
        ("ulysses", "four", "plain", dict(T=32, S=64)),
        ("ulysses", "eight", "window", dict(N=8, K=2, T=64)),
        ("ulysses", "eight", "causal_window", dict(N=24, K=3)),
        ("ulysses", "with_batch_and_heads", "causal", dict(N=8, K=4)),
        ("ulysses", "with_batch_and_heads", "soft_cap", dict(N=4, K=1)),
        ("ulysses", "with_batch_and_heads", "causal", dict(N=12, K=3)),
        ("ulysses", "several_axes", "causal", dict(N=8, K=4)),
        ("ulysses", "axes_out_of_order", "causal", {}),
        ("ring", "four", "causal", {}),
        ("ring", "axes_out_of_order", "window", {}),
    ], KINDS),
)  # fmt: skip
def test_as_on_one_device_and_sharded_as_given(name, mesh, option, sizes, kind):
    axes, spec = MESHES[mesh]
    sizes = dict(T=32, S=32, N=4, K=2) | sizes
    keys = sizes.pop("S")
    (query, *_), (_, key, value) = arrays(**sizes), arrays(**sizes | dict(T=keys))
    keys_spec = spec if sizes["K"] % axes.get("n", 1) == 0 else P(*spec[:2])
    specs = (spec, keys_spec, keys_spec)
    check(attention(name, **OPTIONS[option]), (query, key, value), mesh_of(axes, kind), specs)


# Ulysses takes no bias and no mask that is for all heads and has an axis of queries.
PER_HEAD = dict(features=["alibi_slopes", "sinks", "bias:BNTS", "mask:1NTS", "dropout", "segment_ids"])


@pytest.mark.parametrize(
    ("name", "call", "axes", "kind"),
    [
        ("all_gather", "everything", dict(s=4), KINDS[0]),
        ("all_gather", "everything_in_bfloat16", dict(b=2, s=2, n=2), KINDS[1]),
        ("all_gather", "dropout", dict(s=8), KINDS[1]),
        ("all_gather", "one_bias_row", dict(s=8), KINDS[0]),
        ("ring", "everything", dict(b=2, s=2, n=2), KINDS[0]),
        ("ulysses", "per_head", dict(s=4), KINDS[0]),
        ("ulysses", "per_head", dict(b=2, s=2, n=2), KINDS[1]),
        ("ulysses", "everything_in_bfloat16", dict(s=4), KINDS[1]),
        ("ulysses", "dropout", dict(s=4), KINDS[1]),
        ("ulysses", "segments", dict(b=2, s=4), KINDS[0]),
        ("ulysses", "lengths", dict(b=2, s=2, n=2), KINDS[1]),
        ("ulysses", "one_bias_row", dict(s=4), KINDS[0]),
    ],
    ids=str,
)
def test_options(name, call, axes, kind):
    """Dropout keeps the same probabilities as on one device, and deterministic gradients repeat."""
    options = PER_HEAD if call == "per_head" else {}
    case = case_of("everything" if call == "per_head" else call, **options)
    if name == "ulysses" and call == "everything_in_bfloat16":
        features = ["bias:BNTS" if x == "bias" else x for x in case.features]
        case = dataclasses.replace(case, features=features)
    batch, heads = (axis if axis in axes else None for axis in "bn")
    ShardedJit(mesh_of(axes, kind), batch, heads, name).check(case)


@pytest.mark.parametrize("seed", [100, *thorough(*range(101, 109))])
@pytest.mark.parametrize("name", ["all_gather", "ulysses"])
def test_drawn_calls(name, seed):
    """A ring runs such calls in `test_sharded_sequences.py`."""
    case, calls = drawn_call(seed)
    case = dataclasses.replace(case, batch_axes=1, transform="jit")
    if name == "ulysses":
        features = [re.sub("(bias|mask):.*", r"\1:BNTS", x) for x in case.features]
        case = dataclasses.replace(case, N=case.K * calls.shards, features=tuple(features))
    ShardedJit(mesh_of(dict(s=calls.shards), KINDS[seed % 2]), context_parallel=name).check(case)


@pytest.mark.parametrize("kind", KINDS)
def test_a_narrow_window_with_lengths_of_which_some_rows_move_the_diagonal(kind):
    """Devices that have other rows of the batch take the other branch of a program."""
    queries, keys = jnp.array([30, 11]), jnp.array([30, 19])
    options = dict(local_window_size=(5, 2), query_seq_lengths=queries, key_value_seq_lengths=keys)
    check(attention("all_gather", **options), arrays(), mesh_of(dict(b=2, s=4), kind), (P("b", "s"),) * 3)


@pytest.mark.parametrize(
    ("name", "mesh", "kind"),
    in_turn(itertools.product(STRATEGIES, ["four", "with_batch_and_heads", "axes_out_of_order"]), KINDS),
)
def test_what_moves(name, mesh, kind):
    """Of a custom call, which the compiler can't partition by itself."""
    axes, spec = MESHES[mesh]
    operands = cases.make_operands(T=8, S=16, N=8, bias=(1, 8, 8, 16), mask=name != "ulysses")
    rows = P(spec[0], spec[1])
    heads = spec[2] if len(spec) > 2 else None
    tokens = dict(query=spec, key=spec, value=spec, query_segment_ids=rows, key_value_segment_ids=rows)
    specs = tokens | dict(mask=P(None, None, spec[1]), bias=P(None, heads, spec[1]))
    specs |= dict(query_seq_lengths=P(spec[0]), key_value_seq_lengths=P(spec[0]))
    specs |= dict(alibi_slopes=P(None, heads), sinks=P(None, heads))
    sharded = Operands(**{n: put(x, mesh_of(axes, kind), specs[n]) for n, x in operands.present().items()})

    def run(operands):
        call = functools.partial(cases.attend, implementation=OPAQUE, context_parallel=name)
        results, pullback = jax.vjp(call, operands)
        return results, cases.split(pullback(jax.tree.map(jnp.sin, results))[0])[0]

    # Sums of shared operands' gradients, and a device's own part of what is whole: a ring's columns of bias,
    # Ulysses' heads of sinks.
    allowed = {MOVES[name], "all-reduce", "dynamic-slice"}
    if name == "ulysses":
        allowed.add("all-gather")  # of segment ids
    moves = cases.collectives(run, sharded)
    assert MOVES[name] in moves and moves <= allowed, moves
    text = jax.jit(run).lower(sharded).compile().as_text()
    of_floats = re.findall(r"= f32\[([0-9,]*)\]\S* all-gather\(", text)
    assert all(shape.split(",")[1] == "16" for shape in of_floats) and (name != "ulysses" or not of_floats)


@pytest.mark.parametrize(("name", "kind"), in_turn(STRATEGIES, KINDS))
def test_moves_nothing_whole_in_a_layer(name, kind):
    """Activations are sharded along the sequence, and weights are whole. Attention alone moves tokens."""
    mesh = mesh_of(dict(s=4), kind)
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(size=(2, 64, 32)), jnp.float32)
    weights = jnp.asarray(0.2 * draw.normal(size=(2, 3, 32, 4, 8)), jnp.float32)

    def layer(x, weights):
        query, key, value = (jnp.einsum("btd,dnh->btnh", x, w) for w in weights)
        out = attention(name, is_causal=True)(query, key, value)
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
    known = ("all-gather", "all-to-all", "collective-permute")
    assert {move for move in known if count(compiled.as_text(), move)} == {MOVES[name]}


def test_all_gather_scatters_the_gradients_of_keys():
    text = compiled_text(attention("all_gather"), arrays(), mesh_of(dict(s=4), KINDS[0]), (P(None, "s"),) * 3)
    assert count(text, "reduce-scatter") and not count(text, "all-reduce")


@pytest.mark.parametrize("name", STRATEGIES)
def test_changes_nothing_where_sequences_are_whole(name):
    """On one device, with other axes sharded, and inside of a shard_map over the sequence's mesh axes."""
    mesh, args = mesh_of(dict(s=4), KINDS[0]), arrays(B=4)
    call, plain = attention(name, is_causal=True), attention("auto", is_causal=True)
    expected = jax.jit(functools.partial(with_gradients, plain))(*args)
    jax.tree.map(
        np.testing.assert_array_equal, jax.jit(functools.partial(with_gradients, call))(*args), expected
    )
    check(call, args, mesh, (P("s"),) * 3)
    assert not any(count(compiled_text(call, args, mesh, (P("s"),) * 3), move) for move in MOVES.values())
    local, local_plain = (
        jax.shard_map(x, mesh=mesh, in_specs=P(None, "s"), out_specs=P(None, "s")) for x in (call, plain)
    )
    np.testing.assert_array_equal(jax.jit(local)(*args), jax.jit(local_plain)(*args))


@pytest.mark.parametrize(("name", "kind"), in_turn(STRATEGIES, KINDS))
def test_vmap(name, kind):
    axes, spec = MESHES["with_batch_and_heads"]
    query, key, value = arrays()
    args, specs = (jnp.stack([query, -query, 2 * query]), key, value), (P(None, *spec), spec, spec)
    call = jax.vmap(attention(name, is_causal=True), in_axes=(0, None, None))
    check(call, args, mesh_of(axes, kind), specs)


@pytest.mark.parametrize("heads", [4, 2])
def test_ulysses_beside_axes_that_a_shard_map_leaves_auto(heads):
    """The last Auto axis partitions heads if both axes divide them, else the batch."""
    kinds = (AxisType.Auto, AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((2, 2, 2), ("b", "s", "n"), axis_types=kinds)
    call, args = attention("ulysses", is_causal=True), arrays(B=4, N=heads)
    mapped = jax.shard_map(call, in_specs=P("b"), out_specs=P("b"), axis_names={"b"})
    expected = jax.jit(functools.partial(with_gradients, call))(*args)
    with jax.set_mesh(mesh):
        sharded = [put(x, mesh, P("b", "s")) for x in args]
        compiled = jax.jit(functools.partial(with_gradients, mapped)).lower(*sharded).compile()
        actual = compiled(*sharded)
    cases.assert_close(actual, expected)
    assert count(compiled.as_text(), "all-to-all")


def test_a_mesh_axis_of_one_device_leaves_sequences_whole():
    mesh = mesh_of(dict(s=1, x=2), AxisType.Explicit)
    check(attention("ring", is_causal=True), arrays(), mesh, (P("x", "s"), P("x"), P("x")))


@pytest.mark.parametrize("kind", KINDS)
def test_ulysses_runs_functions(kind):
    """Of each device's heads, by their numbers in the whole call; with gradients of a captured array."""
    mesh, spec = mesh_of(dict(s=4, n=2), kind), P(None, "s", "n")
    blocks = jax_flash.create_block_mask(
        lambda b, n, t, s: (t >= s) | (s < 8 * n), 1, 8, 32, 32, block_size=8
    )

    def of(name, slopes):
        def attend(query, key, value):
            def score_mod(score, b, n, t, s):
                return score - slopes[n] * jnp.abs(t - s)

            return attention(name, score_mod=score_mod, block_mask=blocks)(query, key, value)

        return attend

    args, slopes = arrays(N=8, K=4), jnp.linspace(0.1, 0.8, 8)
    check(of("ulysses", slopes), args, mesh, (spec,) * 3)
    assert not count(compiled_text(of("ulysses", slopes), args, mesh, (spec,) * 3), "all-gather")

    def loss(slopes, name, *args):
        return jnp.sum(jnp.sin(of(name, slopes)(*args)))

    expected = jax.jit(jax.grad(loss), static_argnums=1)(slopes, "auto", *args)
    with jax.set_mesh(mesh):
        sharded = [put(x, mesh, spec) for x in args]
        actual = jax.jit(jax.grad(loss), static_argnums=1)(slopes, "ulysses", *sharded)
    cases.assert_close(actual, expected)


# "auto" -----------------------------------------------------------------------------------------------------


def taken_by_auto(args, **options):
    """The strategies whose moves are in the program."""
    text = compiled_text(
        attention("auto", **options), args, mesh_of(dict(s=4), KINDS[0]), (P(None, "s"),) * 3
    )
    return {name for name, move in MOVES.items() if count(text, move)}


def test_auto_takes_the_cheapest(monkeypatch):
    """As `context_parallel_attention` does."""
    assert taken_by_auto(arrays(N=8, K=8)) == {"ulysses"}
    assert taken_by_auto(arrays(N=4, K=1)) == {"all_gather"}
    monkeypatch.setattr(strategy, "FLOPS_PER_BYTE", 1e-3)  # a step hides any transfer
    assert taken_by_auto(arrays(N=8, K=8)) == {"ring"}


def test_auto_takes_what_can_run():
    assert taken_by_auto(arrays(N=6, K=6)) == {"all_gather"}
    layout = jnp.ones((1, 1, 3, 4), bool)
    blocks = jax_flash.BlockMask.from_blocks(layout, lengths=(32, 32), block_size=(12, 8))  # chunks are of 8
    assert taken_by_auto(arrays(N=4, K=1)) == {"all_gather"}
    assert taken_by_auto(arrays(N=4, K=1), block_mask=blocks) == {"ulysses"}


# What is refused --------------------------------------------------------------------------------------------

SEQUENCE, WHOLE = P(None, "s"), P()


def varlen(name, *args):
    """`flash_attention_varlen` has no such argument; the call below it has."""
    offsets = jnp.array([[0, 5, 20, 32]], jnp.int32)
    spec = dataclasses.replace(
        cases.SPEC, max_query_length=15, max_key_value_length=15, return_residual=False
    )
    operands = Operands(*args, query_offsets=offsets, key_value_offsets=offsets)
    return cases.attend(operands, spec, ("xla",), name)


def bias_for_all_heads(name, *args):
    return attention(name, bias=jnp.ones((1, 1, 32, 32)))(*args)


def no_diagonal(name, *args):
    return cases.attend(Operands(*args), cases.SPEC, ("never_diagonal",), name)[0]


cases.add_implementation("never_diagonal", cases.plain_forward, cases.plain_backward)
cases.sys.modules["jax_flash.never_diagonal"].supports = lambda spec, shapes, device: (
    "no diagonal" if shapes.diagonal is not None else None
)

REFUSED = {
    "keys_are_whole": ("ring", attention, {}, (SEQUENCE, WHOLE, WHOLE), "sharded over the same devices"),
    "queries_are_whole": ("ulysses", attention, {}, (WHOLE, SEQUENCE, SEQUENCE), "sharded over the same dev"),
    "heads": ("ulysses", attention, dict(N=6, K=3), SEQUENCE, "6 query heads must be divisible by the 4 dev"),
    "bias_for_all_heads": ("ulysses", bias_for_all_heads, {}, SEQUENCE, "bias must have an axis of 4 heads"),
    "varlen": ("all_gather", varlen, {}, SEQUENCE, 'varlen sequences that are sharded go with "ulysses"'),
    "implementation": ("ring", no_diagonal, {}, SEQUENCE, '"never_diagonal": no diagonal'),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", REFUSED)
def test_a_named_strategy_that_can_not_run(what, kind):
    """Nothing is gathered in its place. Of Auto axes the compiler alone knows, so it raises the error."""
    name, call, sizes, specs, message = REFUSED[what]
    mesh = mesh_of(dict(s=4), kind)
    specs = specs if type(specs) is tuple else (specs,) * 3
    function = attention(name) if call is attention else functools.partial(call, name)
    message = re.escape(f'context_parallel="{name}" can\'t run this call: ') + ".*" + re.escape(message)
    error = NotImplementedError if kind == AxisType.Explicit else jax.errors.JaxRuntimeError
    sharded = [put(x, mesh, spec) for x, spec in zip(arrays(**sizes), specs, strict=True)]
    with jax.set_mesh(mesh), pytest.raises(error, match=message):
        jax.jit(function).lower(*sharded).compile()


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_sequence_that_devices_do_not_divide(name):
    mesh = mesh_of(dict(s=4), AxisType.Auto)

    def attend(*args):
        args = [jax.lax.with_sharding_constraint(x, NamedSharding(mesh, SEQUENCE)) for x in args]
        return attention(name)(*args)

    with pytest.raises(jax.errors.JaxRuntimeError, match="30 queries must be divisible by the 4 devices"):
        jax.jit(attend)(*arrays(T=30))


def test_all_gather_of_keys_that_are_sharded_otherwise():
    """Each device gets all keys, however they are sharded, and keeps its own queries, or all."""
    mesh, call = mesh_of(dict(x=4, y=2), KINDS[0]), attention("all_gather", is_causal=True)
    check(call, arrays(), mesh, (P(None, "x"), P(None, "y"), P(None, "y")))
    check(call, arrays(), mesh, (P(), P(None, "y"), P(None, "y")))


def test_where_it_is_not_known_how_sequences_lie():
    mesh = mesh_of(dict(b=2, s=4), KINDS[0])
    call = attention("ring", is_causal=True)
    mapped = jax.shard_map(call, mesh=mesh, in_specs=P("b"), out_specs=P("b"), axis_names={"b"})
    message = r'context_parallel must be "auto" .* got "ring"'
    with pytest.raises(NotImplementedError, match=message):
        jax.jit(mapped)(*arrays())
    sharded = [put(x, mesh, P("b", "s")) for x in arrays()]
    with pytest.raises(NotImplementedError, match=message):
        jax.export.export(jax.jit(call))(*sharded)
