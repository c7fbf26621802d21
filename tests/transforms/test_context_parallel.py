"""Sharded sequences on 2, 4 and 8 devices: what they give against one device, and what moves between them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharded_calls
import transform_cases as cases
from attention_case import Case, draw
from exhaustive import one_in, thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_calls import (
    AXIS,
    ShardedCalls,
    arrays,
    count,
    gradients,
    program,
    reorder,
    restore,
    sequence_mesh,
    sharded_call,
    with_gradients,
)
from strict_settings import SETTINGS, setting

import jax_flash
from jax_flash.context_parallel.strategy import STRATEGIES

LAYOUTS = [(s, kind) for s in STRATEGIES for kind in (None, "zigzag", "striped")]
LAYOUTS.remove(("all_gather", "striped"))
EVERYTHING = (
    "logits_soft_cap alibi_slopes sinks dropout segment_ids seq_lengths bias mask:BNTS deterministic".split()
)


def make_case(layout, dtype="float32", T=48, S=48, N=8, K=2, H=8, features=(), **options):
    """A case that the layout takes: a ring of stripes has no ALiBi and no window with two sides."""
    if layout == ("ring", "striped"):
        features = [feature for feature in features if feature != "alibi_slopes"]
        if options.get("is_causal"):
            options.pop("local_window_size", None)
    return Case("sharded", dtype, T=T, S=S, N=N, K=K, H=H, features=tuple(features), **options)


@pytest.mark.parametrize(
    ("layout", "shards", "dtype"),
    one_in(
        2,
        [
            (LAYOUTS[0], 4, "float32"),
            (LAYOUTS[1], 4, "bfloat16"),
            (LAYOUTS[2], 8, "float32"),
            (LAYOUTS[3], 8, "float32"),
            (LAYOUTS[4], 2, "float32"),
            (LAYOUTS[5], 4, "bfloat16"),
            (LAYOUTS[7], 4, "bfloat16"),
            (LAYOUTS[6], 2, "float32"),
        ],
    ),
    ids=str,
)
def test_every_option_at_once(layout, shards, dtype):
    case = make_case(layout, dtype, features=EVERYTHING, is_causal=True, local_window_size=(20, None))
    ShardedCalls(shards, *layout).check(case)


# Each once with each strategy, in the exhaustive tests; orders, devices and dtypes take turns.
OPTIONS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(7, 3)),
    "causal_window": dict(is_causal=True, local_window_size=(9, 0)),
    "left": dict(local_window_size=(5, None)),
    "right": dict(local_window_size=(None, 9)),
    "longer_keys": dict(is_causal=True, S=96),
    "longer_queries": dict(is_causal=True, T=96),
    "lengths": dict(features=["seq_lengths"]),
    "causal_lengths": dict(is_causal=True, features=["seq_lengths"]),
    "alibi": dict(features=["alibi_slopes"]),
    "segments": dict(is_causal=True, features=["segment_ids"]),
    "dropout": dict(features=["dropout"]),
    "sinks": dict(is_causal=True, features=["sinks", "logits_soft_cap"]),
    "bias": dict(is_causal=True, features=["bias:N1S", "mask:BNTS"]),
    "rows": dict(is_causal=True, features=["bias:BNT1", "mask:B11S"]),
    "heads": dict(is_causal=True, K=8, H=16, V=8),
    "one_key_head": dict(is_causal=True, K=1, residual="absent"),
    "three_key_heads": dict(is_causal=True, N=24, K=3, residual="unused"),
}
TURNS = itertools.cycle(itertools.product((2, 4, 8), ("float32", "bfloat16")))
ORDERS = {name: itertools.cycle(k for s, k in LAYOUTS if s == name) for name in STRATEGIES}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("option", "layout", "shards", "dtype"),
    [(option, (name, next(ORDERS[name])), *next(TURNS)) for option in OPTIONS for name in STRATEGIES],
)
def test_each_option(option, layout, shards, dtype):
    options = OPTIONS[option]
    if layout == ("ring", "striped") and option in ("window", "causal_window", "alibi"):
        layout = ("ring", None)
    ShardedCalls(shards, *layout).check(make_case(layout, dtype, **options))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(12))
def test_drawn_calls(seed):
    case, calls = sharded_calls.drawn_call(seed)
    try:
        calls.check(case)
    except NotImplementedError as refusal:
        assert "run this call" in str(refusal)


@pytest.mark.parametrize(
    ("name", "moves"),
    [
        ("ring", {"collective-permute"}),
        ("all_gather", {"all-gather", "reduce-scatter"}),
        ("ulysses", {"all-to-all"}),
    ],
)
def test_moves_what_it_says_and_nothing_else(name, moves):
    text = program(sharded_call(4, strategy=name, is_causal=True), *arrays())
    known = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    assert {operation for operation in known if count(text, operation)} == moves


def test_a_ring_sends_before_it_computes():
    """In each loop, and in each step beside them: the transfer doesn't wait for the step's results."""
    call = sharded_call(4, strategy="ring", is_causal=True)
    for function in (call, lambda *args: gradients(call, *args)):
        for body in bodies_with_ppermute(jax.make_jaxpr(function)(*arrays()).jaxpr):
            names = [equation.primitive.name for equation in body.eqns]
            assert names.index("ppermute") < names.index("cond")


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, "segments", "lengths"], ids=str)
def test_steps_in_which_nothing_is_visible_are_skipped(options):
    """The program has a condition where there may be such steps, and none elsewhere."""
    query, key, value = arrays()
    ids = jnp.repeat(jnp.arange(4), 8)[None].repeat(2, 0)
    if options == "segments":
        options = dict(query_segment_ids=ids, key_value_segment_ids=ids)
    elif options == "lengths":
        options = dict(key_value_seq_lengths=jnp.array([8, 7]))
    specs = {name: P() if "lengths" in name else P(None, AXIS) for name in options if name != "is_causal"}
    static = {name: x for name, x in options.items() if name not in specs}
    call = functools.partial(jax_flash.context_parallel_attention, axis_name=AXIS, strategy="ring", **static)
    mapped = jax.shard_map(
        lambda query, key, value, others: call(query, key, value, **others),
        mesh=sequence_mesh(4),
        in_specs=(P(None, AXIS),) * 3 + (specs,),
        out_specs=P(None, AXIS),
    )
    others = {name: options[name] for name in specs}
    text = str(jax.make_jaxpr(mapped)(query, key, value, others))
    assert ("cond[" in text) == bool(options)
    actual = jax.jit(mapped)(query, key, value, others)
    cases.assert_close(actual, jax_flash.flash_attention(query, key, value, **options))


def bodies_with_ppermute(jaxpr):
    """The bodies of loops that send something."""
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                if equation.primitive.name == "scan" and "ppermute" in [e.primitive.name for e in inner.eqns]:
                    yield inner
                yield from bodies_with_ppermute(inner)


@pytest.mark.parametrize("name", STRATEGIES)
def test_keeps_its_shards_alone_for_the_backward_pass(name):
    """Outputs, operands and lse of a device, and neither others' keys nor anything of T × S."""
    query, key, value = arrays(T=256)
    call = sharded_call(4, strategy=name, is_causal=True)
    _, vjp = jax.vjp(jax.jit(call), query, key, value)
    kept = sum(x.nbytes for x in jax.tree.leaves(vjp) if isinstance(x, jax.Array))
    keys = 2 * key.nbytes * (2 if name == "ulysses" else 1)  # 2 key heads become 4
    assert kept <= 1.1 * (2 * query.nbytes + keys + query.nbytes // 8)


@pytest.mark.parametrize("left", [9, *thorough(0, 5, 8, 16)])
def test_a_ring_for_a_window_is_exact(left):
    call = sharded_call(4, strategy="ring", is_causal=True, local_window_size=(left, 0))
    whole = functools.partial(jax_flash.flash_attention, is_causal=True, local_window_size=(left, 0))
    compiled = jax.jit(with_gradients(call)).lower(*arrays()).compile()
    cases.assert_close(compiled(*arrays()), with_gradients(whole)(*arrays()))
    assert bool(count(compiled.as_text(), "collective-permute")) == (left > 0)


@pytest.mark.parametrize("call", ["shards", "jit", "jit of whole keys"])
def test_all_gather_rounds_the_sum_of_gradients_once(call):
    """Devices have parts of dV that are 50 times their sum: to round a part is to be wrong by a tenth."""
    tokens, mesh = 64, jax.make_mesh((8,), (AXIS,), axis_types=(AxisType.Auto,))
    normal = np.random.default_rng(0).standard_normal
    half, d_half = normal((2, 1, tokens // 2, 4, 8))
    own = [np.concatenate([half, half], 1), *normal((2, 1, tokens, 1, 8))]
    query, key, value = (jnp.asarray(x, jnp.bfloat16) for x in own)
    d_out = np.concatenate([d_half, -d_half], 1) + 0.02 * normal((1, tokens, 4, 8))
    d_out = jnp.asarray(d_out, jnp.bfloat16)

    def d_value(attend, *args):
        _, pullback = jax.vjp(attend, *args)
        return pullback(d_out.astype(args[0].dtype))[2].astype(jnp.float32)

    wide = [x.astype(jnp.float32) for x in (query, key, value)]
    expected = jax.jit(functools.partial(d_value, jax_flash.flash_attention))(*wide)
    attend, args = sharded_call(8, strategy="all_gather"), (query, key, value)
    if call != "shards":
        attend = functools.partial(jax_flash.flash_attention, context_parallel="all_gather")
        keys = P() if call == "jit of whole keys" else P(None, AXIS)
        specs = P(None, AXIS), keys, keys
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
    on_one = jax.jit(functools.partial(d_value, jax_flash.flash_attention))(query, key, value)
    on_eight = jax.jit(functools.partial(d_value, attend))(*args)
    for actual in (on_one, on_eight):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2**-8 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("name", STRATEGIES)
def test_rematerialisation_by_names(name):
    """With the policy of `transforms/autodiff.py`, attention does not run a second time."""

    def forward_passes(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        call = jax.checkpoint(sharded_call(2, strategy=name, is_causal=True), policy=policy)
        text = jax.jit(functools.partial(gradients, call)).lower(*arrays()).as_text()
        return text.count("call @jax_flash_forward")

    assert 2 * forward_passes("jax_flash_out", "jax_flash_lse") == forward_passes("jax_flash_out")


@pytest.mark.parametrize("name", STRATEGIES)
def test_inside_pmap(name):
    query, key, value = arrays()
    call = functools.partial(jax_flash.context_parallel_attention, strategy=name, is_causal=True)

    def mapped(*args):
        shards = [jnp.stack(jnp.split(x, 4, axis=1)) for x in args]
        return jnp.concatenate(
            list(jax.pmap(functools.partial(call, axis_name="i"), axis_name="i")(*shards)), 1
        )

    whole = functools.partial(jax_flash.flash_attention, is_causal=True)
    cases.assert_close(mapped(query, key, value), whole(query, key, value))
    actual = jax.grad(lambda *args: jnp.sum(jnp.sin(mapped(*args))), argnums=(0, 1, 2))(query, key, value)
    cases.assert_close(actual, gradients(whole, query, key, value))


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_the_check_of_types(name):
    """Gradients of operands that devices share are summed over them either way."""
    arguments, *_ = draw(make_case((name, "zigzag"), is_causal=True, features=["sinks", "bias:N1S"]))
    arguments = {k: x for k, x in arguments.items() if x is not None}
    inputs = {k: arguments.pop(k) for k in ("query", "key", "value", "sinks", "bias")}

    def loss(attend, inputs):
        return jnp.sum(jnp.sin(attend(inputs | arguments)))

    def sharded(arguments):
        return sharded_calls.attend(arguments, 2, name, "zigzag", check_vma=False)

    actual = jax.jit(jax.grad(functools.partial(loss, sharded)))(inputs)
    whole = functools.partial(loss, lambda arguments: jax_flash.flash_attention(**arguments))
    cases.assert_close(actual, jax.jit(jax.grad(whole))(inputs))


@pytest.mark.parametrize("name", STRATEGIES)
def test_scan_over_rematerialised_layers_on_a_mesh_of_three_axes(name):
    """Batch, sequence and heads sharded; the sequence's collectives stay within its axis."""
    query, key, value = arrays(N=8, K=4)
    mesh = jax.make_mesh((2, 2, 2), ("data", AXIS, "model"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    spec = P("data", AXIS, "model")

    def layers(attend, query, key, value):
        def layer(x, weight):
            return x + attend(x * weight, key, value), None

        return jax.lax.scan(jax.checkpoint(layer), query, jnp.linspace(0.5, 1, 3))[0]

    attend = functools.partial(
        jax_flash.context_parallel_attention, axis_name=AXIS, is_causal=True, strategy=name
    )
    local = functools.partial(layers, attend)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    whole = functools.partial(layers, functools.partial(jax_flash.flash_attention, is_causal=True))
    cases.assert_close(jax.jit(mapped)(query, key, value), whole(query, key, value))
    cases.assert_close(gradients(mapped, query, key, value), gradients(whole, query, key, value), 1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", STRATEGIES)
def test_shard_map_that_leaves_other_axes(name, kind):
    """They partition batch and heads. Explicit ones are refused where types would not fit, and a ring refuses
    both: it skips steps, in which the compiler may communicate."""
    args, options = arrays(N=8, K=4), dict(is_causal=True, key_value_seq_lengths=jnp.array([32, 7]))
    mesh = jax.make_mesh((2, 2, 2), ("data", AXIS, "model"), axis_types=(kind,) * 3)
    call = functools.partial(
        jax_flash.context_parallel_attention, axis_name=AXIS, strategy=name, load_balance="zigzag", **options
    )
    shards = P(None, AXIS)
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(call, in_specs=shards, out_specs=shards, axis_names={AXIS})
        zigzag = [sharded_calls.reorder(x, 1, 2, "zigzag") for x in args]
        zigzag = [jax.device_put(x, NamedSharding(mesh, P("data", AXIS, "model"))) for x in zigzag]
        if name == "ring" or (kind == AxisType.Explicit and name != "ulysses"):
            with pytest.raises(NotImplementedError, match=f"leaves the {kind.name} axes"):
                jax.eval_shape(mapped, *zigzag)
            return
        results = jax.device_get(jax.jit(with_gradients(mapped))(*zigzag))
    actual = jax.tree.map(lambda x: sharded_calls.restore(x, 1, 2, "zigzag"), results)
    whole = functools.partial(jax_flash.flash_attention, **options)
    cases.assert_close(actual, with_gradients(whole)(*args))


@pytest.mark.parametrize("name", [*thorough("ring"), "all_gather", "ulysses", "auto"])
def test_stripes_with_key_lengths(name):
    """Which keys there are goes by their order in the sequence."""
    args, options = arrays(N=6, K=2), dict(key_value_seq_lengths=jnp.array([5, 0]))
    whole = jax_flash.flash_attention(*args, **options)
    striped = [sharded_calls.reorder(x, 1, 2, "striped") for x in args]
    call = sharded_call(2, strategy=name, load_balance="striped", **options)
    cases.assert_close(sharded_calls.restore(call(*striped), 1, 2, "striped"), whole)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_row_of_bias_that_each_device_has_for_its_queries(name):
    args = arrays(N=4, K=2)
    rows = jax.random.normal(
        jax.random.key(7), (2, 2, 4, 1, args[1].shape[1])
    )  # device, batch, head, query, key

    def call(rows, *args):
        return jax_flash.context_parallel_attention(*args, rows[0], axis_name=AXIS, strategy=name)

    spec = P(None, AXIS)
    mapped = jax.shard_map(call, mesh=sequence_mesh(2), in_specs=(P(AXIS), spec, spec, spec), out_specs=spec)
    bias = jnp.repeat(jnp.moveaxis(rows[:, :, :, 0], 0, 2), args[0].shape[1] // 2, axis=2)
    cases.assert_close(jax.jit(mapped)(rows, *args), jax_flash.flash_attention(*args, bias))


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("axes", [0, 2])
def test_batch_axes_and_vmap(name, axes):
    args, lengths = arrays(B=4), jnp.array([32, 20, 5, 31])
    options = dict(is_causal=True, return_residual=True)
    whole = jax_flash.flash_attention(*args, key_value_seq_lengths=lengths, **options)

    def call(*args):
        *args, lengths = args
        options_of_shards = options | dict(axis_name=AXIS, strategy=name, key_value_seq_lengths=lengths)
        return jax_flash.context_parallel_attention(*args, **options_of_shards)

    if axes:
        args, lengths = [x.reshape(2, 2, *x.shape[1:]) for x in args], lengths.reshape(2, 2)
    else:  # `vmap` maps the only batch axis
        call = jax.vmap(call)
    spec = P(*[None] * (args[0].ndim - 3), AXIS)
    mapped = jax.shard_map(call, mesh=sequence_mesh(2), in_specs=(spec, spec, spec, P()), out_specs=spec)
    results = jax.jit(mapped)(*args, lengths)
    cases.assert_close(tuple(x.reshape(y.shape) for x, y in zip(results, whole, strict=True)), whole)


@pytest.mark.parametrize(
    ("name", "kind"), [("ring", "striped"), ("all_gather", "striped"), ("ulysses", "zigzag")]
)
def test_on_one_device(name, kind):
    """All orders are alike, and nothing is refused."""
    options = dict(is_causal=True, local_window_size=(9, None), alibi_slopes=jnp.array([0.1, 0.2, 0.3, 0.4]))
    actual = jax.jit(sharded_call(1, strategy=name, load_balance=kind, **options))(*arrays(T=15))
    cases.assert_close(actual, jax_flash.flash_attention(*arrays(T=15), **options))


STRICT = {option for option in SETTINGS if option != "disable jit"}
MIXED = {"rank promotion raise", "dtype promotion strict"}


@pytest.mark.parametrize("name", ["ring", *thorough("all_gather", "ulysses")])
@pytest.mark.parametrize("option", [*sorted(MIXED), *thorough(*sorted(STRICT - MIXED))])
def test_strict_settings(name, option):
    check_strict(option, name, "zigzag")


@pytest.mark.parametrize("option", [*sorted(MIXED), *thorough(*sorted(STRICT - MIXED))])
@pytest.mark.parametrize("kind", [None, *thorough("zigzag")])
def test_strict_settings_with_a_narrow_window(option, kind):
    check_strict(option, "all_gather", kind, local_window_size=(3, 0))


def check_strict(option, name, kind, **options):
    features = ["sinks", "alibi_slopes", "dropout", "segment_ids", "bias:BNTS"]
    case = make_case((name, kind), T=16, S=16, is_causal=True, features=features, **options)
    arguments, *_ = draw(case)
    on_mesh = functools.partial(jax.device_put, device=NamedSharding(sequence_mesh(2), P()))
    inputs = {k: on_mesh(arguments.pop(k)) for k in ("query", "key", "value", "bias", "sinks")}
    arguments = {k: on_mesh(x) if hasattr(x, "shape") else x for k, x in arguments.items()}

    def loss(inputs):
        return jnp.sum(sharded_calls.attend(inputs | arguments, 2, name, kind))

    with setting(option):
        jax.block_until_ready(jax.jit(jax.grad(loss))(inputs))


@pytest.mark.parametrize(
    "call",
    [("ring", {}, False), *thorough(("ring", {}, True), ("all_gather", {"local_window_size": (3, 0)}, True))],
)
def test_results_alone_are_checked_outside_of_jit(call):
    """On the way to them there are log-sum-exps of -inf, of steps that see nothing."""
    name, options, differentiates = call
    mesh = sequence_mesh(2)
    inputs = [jax.device_put(x, NamedSharding(mesh, P(None, AXIS))) for x in arrays(T=16, B=1, N=1, K=1)]

    def attend(query, key, value):
        return jax_flash.context_parallel_attention(
            query, key, value, axis_name=AXIS, strategy=name, is_causal=True, implementation="xla", **options
        )

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=P(None, AXIS), out_specs=P(None, AXIS))
    with setting("debug infs"):
        assert jnp.all(jnp.isfinite(sharded(*inputs)))
        if differentiates:
            jax.block_until_ready(jax.grad(lambda query: jnp.sum(sharded(query, *inputs[1:])))(inputs[0]))


def second_derivative(function, *args):
    def norm_of_gradient(query, key, value):
        first = jax.grad(lambda key: jnp.sum(jnp.sin(function(query, key, value))))(key)
        return jnp.sum(first**2)

    return jax.jit(jax.grad(norm_of_gradient))(*args)


@pytest.mark.parametrize(
    ("layout", "options"),
    one_in(
        2,
        [
            (("ulysses", None), {"is_causal": True}),
            (("all_gather", None), {"is_causal": True}),
            (("all_gather", "zigzag"), {"local_window_size": (3, 1)}),
            (("all_gather", None), {"local_window_size": (3, 1)}),
        ],
    ),
    ids=str,
)
def test_second_derivative(layout, options):
    name, kind = layout
    whole = functools.partial(jax_flash.flash_attention, **options)
    inputs = [reorder(x, 1, 2, kind) for x in arrays()]
    actual = second_derivative(sharded_call(2, strategy=name, load_balance=kind, **options), *inputs)
    cases.assert_close(restore(actual, 1, 2, kind), second_derivative(whole, *arrays()), 1e-4)


def test_a_ring_has_no_second_derivative():
    with pytest.raises(NotImplementedError, match="no second derivative"):
        second_derivative(sharded_call(2, strategy="ring", is_causal=True), *arrays())


@pytest.mark.parametrize("shape", [(0, 8, 4, 8), (2, 0, 4, 8)])
def test_nothing_to_compute(shape):
    x = jnp.zeros(shape)
    assert sharded_call(4, is_causal=True, load_balance="zigzag")(x, x, x).shape == shape
