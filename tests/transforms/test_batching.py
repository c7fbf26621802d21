"""`vmap`: every operand, mapped alone and left alone, over any axes, forward and backward."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import transform_cases as cases

from jax_flash import _dropout
from jax_flash._spec import Operands, sizes

OPERANDS = cases.make_operands(B=2, N=2, K=1)
NAMES = tuple(OPERANDS.present())


def stack(x, axis=0):
    """Three different arrays like `x`, along a new axis."""
    last = x if x.dtype != jnp.float32 else -0.5 * x
    return jnp.stack([x, jnp.flip(x, -1), last], axis)


def mapped(names, axes=None):
    """Operands with those of `names` mapped, and the `in_axes` that say so."""
    axes = axes or dict.fromkeys(names, 0)
    present = OPERANDS.present()
    operands = Operands(**{n: stack(x, axes[n]) if n in names else x for n, x in present.items()})
    return operands, Operands(**{n: axes[n] if n in names else None for n in present})


def one_by_one(function, operands, in_axes):
    """What `vmap` means."""

    def pick(i):
        return Operands(
            **{
                name: x if (axis := getattr(in_axes, name)) is None else jnp.take(x, i, axis)
                for name, x in operands.present().items()
            }
        )

    return jax.tree.map(lambda *x: jnp.stack(x), *(function(pick(i)) for i in range(3)))


@jax.jit
def expected(operands):
    return cases.definition(operands), cases.gradients(cases.definition, operands)


def ours(operands):
    return cases.attend(operands), cases.gradients(cases.attend, operands)


NOT_MAPPED = ("query", "key", "bias", "sinks", "key_value_segment_ids")


@pytest.mark.parametrize(
    "names",
    [*((name,) for name in NAMES), *(tuple(n for n in NAMES if n != name) for name in NOT_MAPPED)],
    ids=[*NAMES, *(f"all_but_{name}" for name in NOT_MAPPED)],
)
def test_every_operand(names):
    operands, in_axes = mapped(names)
    actual = jax.jit(jax.vmap(ours, in_axes=(in_axes,)))(operands)
    cases.assert_close(actual, one_by_one(expected, operands, in_axes))


def test_axes_other_than_the_first():
    axes = {name: -1 if i % 2 else 1 for i, name in enumerate(NAMES)}
    operands, in_axes = mapped(NAMES, axes)
    actual = jax.jit(jax.vmap(cases.attend, in_axes=(in_axes,), out_axes=(2, -1)))(operands)
    out, lse = one_by_one(cases.definition, operands, in_axes)
    cases.assert_close(actual, (jnp.moveaxis(out, 0, 2), jnp.moveaxis(lse, 0, -1)))


@pytest.mark.parametrize("names", [NAMES, ("query",), ("bias", "mask"), ("key", "sinks")], ids="+".join)
def test_gradient_of_a_sum_over_vmap(names):
    operands, in_axes = mapped(names)

    def total(function):
        def scalar(differentiable, others):
            each = jax.vmap(lambda o: cases.loss(function)(*cases.split(o)), in_axes=(in_axes,))
            return jnp.sum(each(Operands(**differentiable, **others)))

        return jax.jit(jax.grad(scalar))(*cases.split(operands))

    cases.assert_close(total(cases.attend), total(cases.definition))


def test_vmap_of_a_pullback_over_cotangents_alone():
    results, pullback = jax.vjp(cases.attend, OPERANDS)
    _, expected = jax.vjp(cases.definition, OPERANDS)
    cotangents = jax.tree.map(lambda x: jnp.stack([x, 2 * x + 1]), jnp.nan_to_num(results[0]))
    no_lse = jnp.zeros_like(results[1])
    for i, ours in enumerate(cases.split(jax.vmap(lambda d: pullback((d, no_lse)))(cotangents)[0])[:1] * 2):
        one = cases.split(expected((cotangents[i], no_lse))[0])[0]
        cases.assert_close({name: x[i] for name, x in ours.items()}, one)


@pytest.mark.parametrize("size", [1, 3])
def test_nested(size):
    """The outer map over queries, the inner one over keys and bias: each pair of them is a call."""
    queries = jnp.stack([OPERANDS.query] * size) * jnp.arange(1.0, size + 1).reshape(-1, 1, 1, 1, 1)
    keys, biases = stack(OPERANDS.key), stack(OPERANDS.bias)

    def table(function):
        def one(query, key, bias):
            return function(OPERANDS.replace(query=query, key=key, bias=bias))

        inner = jax.vmap(one, in_axes=(None, 0, 0))
        return jax.jit(jax.vmap(inner, in_axes=(0, None, None)))(queries, keys, biases)

    both = [lambda o, f=f: (f(o), cases.gradients(f, o)) for f in (cases.attend, cases.definition)]
    cases.assert_close(*map(table, both))


def test_implementation_sees_one_batch_axis_and_shared_operands_once():
    seen = []

    def forward(spec, operands):
        seen.append({name: x.shape for name, x in operands.present().items()})
        return cases.plain_forward(spec, operands)

    cases.add_implementation("measuring", forward, cases.plain_backward)
    operands, in_axes = mapped(("query",))
    jax.vmap(lambda o: cases.attend(o, implementation=("measuring",)), in_axes=(in_axes,))(operands)
    shapes = seen[-1]
    assert shapes["query"] == (6, 6, 2, 4) and shapes["key"] == (6, 5, 1, 4)
    assert shapes["mask"] == (1, 1, 6, 5) and shapes["bias"] == (1, 1, 1, 1) and shapes["sinks"] == (1, 2)


def test_over_a_spmd_axis():
    mesh = jax.make_mesh((3,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:3])
    operands, in_axes = mapped(NAMES)
    with jax.set_mesh(mesh):
        actual = jax.jit(jax.vmap(ours, in_axes=(in_axes,), spmd_axis_name="x"))(operands)
    cases.assert_close(actual, one_by_one(expected, operands, in_axes))


@pytest.mark.parametrize("implementation", ["plain", "xla"])
@pytest.mark.parametrize(
    "names",
    [("query_offsets",), ("query", "key_value_offsets", "alibi_slopes"), ("key", "value", "sinks")],
    ids="+".join,
)
def test_varlen_sequences(names, implementation):
    operands, spec = cases.make_varlen_operands(B=2, N=2, K=1)
    present = operands.present()
    rows = {
        name: jnp.stack([x, x // 2 if x.dtype == jnp.int32 else -x]) if name in names else x
        for name, x in present.items()
    }
    in_axes = Operands(**{name: 0 if name in names else None for name in present})

    def both(function):
        def run(operands):
            return function(operands), cases.gradients(function, operands)

        return run

    actual = jax.vmap(both(lambda o: cases.attend(o, spec, (implementation,))), in_axes=(in_axes,))(
        Operands(**rows)
    )
    for i in range(2):
        one = Operands(**{name: x[i] if name in names else x for name, x in rows.items()})
        expected = both(lambda o: cases.definition(o, spec))(one)
        cases.assert_close(jax.tree.map(lambda x, i=i: x[i], actual), expected)


def test_dropout_hashes_are_mapped_like_any_operand():
    spec = dataclasses.replace(cases.SPEC, dropout_rate=0.5)
    n = sizes(OPERANDS)
    columns = _dropout.hashes(jax.random.key(0), n.B, n.N, n.T, n.S)[1]
    rows = jnp.stack([_dropout.hashes(jax.random.key(i), n.B, n.N, n.T, n.S)[0] for i in range(3)])

    def attend(function, rows):
        return function(OPERANDS.replace(dropout_rows=rows, dropout_columns=columns), spec)[0]

    actual = jax.vmap(lambda x: attend(cases.attend, x))(rows)
    cases.assert_close(actual, jnp.stack([attend(cases.definition, x) for x in rows]))
