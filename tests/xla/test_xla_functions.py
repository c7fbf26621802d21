"""score_mod and block_mask in plain JAX, against the functions' own values for all pairs."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from function_cases import MASK_MODS, SCORE_MODS, Case, check, with_gradients

import jax_flash
from jax_flash import _reference
from jax_flash._call import Arguments, prepare

CASES = [
    *(Case(name, None) for name in SCORE_MODS),
    *(Case(None, name) for name in MASK_MODS),
    Case("relative_position", "window", "bfloat16"),
    Case("relative_position", None, "bfloat16", "bfloat16"),
    Case("documents", "documents", "float16", "float16"),
    Case("alibi", "of both", others=("bias", "cap")),
    Case("soft_cap", "window", others=("lengths", "is_causal")),
    Case("of_rows", "causal", others=("sinks", "dropout")),
    Case(None, "window", block_size=(16, 64)),
    Case(None, "of heads", block_size=(300, 500)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_definition(case):
    inputs, cotangents, mask = case.inputs(), case.cotangents(), case.block_mask()
    got = with_gradients(lambda x: case.attend(x, mask, implementation="xla"), inputs, cotangents)
    check(case, got, inputs, cotangents)


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_the_oracle_agrees(case):
    """`_reference.py` has the functions from what JAX traced, `expected` from the functions."""
    inputs = case.inputs()
    arguments = dict(inputs)
    score_mod = case.score(arguments.pop("captured"))
    call = prepare(
        Arguments(
            **arguments, score_mod=score_mod, block_mask=case.block_mask(), **_as_fields(case.options())
        )
    )
    d_out, d_lse = case.cotangents()
    out, lse, gradients = _reference.reference_with_gradients(
        call.spec, call.operands, d_out, np.asarray(d_lse).transpose(0, 2, 1)
    )
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), inputs)
        right = with_gradients(lambda x: case.expected(x, jnp.float64), wide, (d_out, d_lse))
    np.testing.assert_allclose(out, right["out"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse.transpose(0, 2, 1), right["lse"], rtol=1e-6, atol=1e-6)
    found = gradients.present()
    for name in ("query", "key", "value"):
        np.testing.assert_allclose(found[name], right[name], rtol=1e-6, atol=1e-6, err_msg=name)
    of_captured = [x for name, x in found.items() if name.startswith("score_mod_")]
    assert sorted(x.size for x in of_captured) == sorted(x.size for x in right["captured"])


def _as_fields(options):
    from jax_flash import _arguments

    window = _arguments.window(options.pop("is_causal", False), None)
    return options | {"window": window}


def test_a_function_that_is_no_graph_of_scalars():
    """JAX runs anything: here a sort, a loop, and a derivative by custom_vjp."""

    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, None), lambda _, d: (2 * d,))
    case = dataclasses.replace(Case("relative_position", "window"))

    def strange(table):
        def function(score, b, h, q, k):
            middle = jnp.sort(jnp.stack([q, k, 40]))[1]
            total, _ = jax.lax.scan(lambda c, x: (c + x, None), 0.0, table[h])
            return (
                doubled(score) * table[h, middle % 17]
                + jax.lax.while_loop(
                    lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + 0.1), (0, jax.lax.stop_gradient(total))
                )[1]
            )

        return function

    original = SCORE_MODS["relative_position"]
    SCORE_MODS["relative_position"] = strange, original[1]
    try:
        inputs, cotangents, mask = case.inputs(), case.cotangents(), case.block_mask()
        got = with_gradients(lambda x: case.attend(x, mask, implementation="xla"), inputs, cotangents)
        check(case, got, inputs, cotangents)
    finally:
        SCORE_MODS["relative_position"] = original


def test_blocks_that_are_hidden_are_not_computed():
    """NaN in keys that no block sees reaches nothing, forward or backward, and costs no second run."""
    T = 512
    arrays = {name: jnp.ones((1, T, 1, 16)) for name in ("query", "key", "value")}
    blocks = np.zeros((1, 1, 4, 4), bool)
    blocks[..., :2] = True
    mask = jax_flash.BlockMask.from_blocks(blocks)
    arrays["key"] = arrays["key"].at[:, 256:].set(jnp.nan)

    def loss(arrays):
        return jax_flash.flash_attention(**arrays, block_mask=mask, implementation="xla").sum()

    value, gradients = jax.jit(jax.value_and_grad(loss))(arrays)
    np.testing.assert_allclose(value, T * 16, rtol=1e-6)
    assert all(bool(jnp.isfinite(x).all()) for x in gradients.values())


def test_time_falls_with_the_blocks():
    """By XLA's own count of what runs: a loop over all blocks has a branch for those that are hidden."""
    T = 2048
    q = jnp.ones((1, T, 1, 16))
    blocks = jnp.zeros((1, 1, 16, 16), bool).at[0, 0, jnp.arange(16), jnp.arange(16)].set(True)
    mask = jax_flash.BlockMask.from_blocks(blocks)
    text = str(jax.make_jaxpr(lambda q: jax_flash.flash_attention(q, q, q, block_mask=mask))(q))
    assert "cond" in text


SMALL = {name: jnp.asarray(np.random.default_rng(3).normal(size=(2, 6, 4, 8)), jnp.float32) for name in "qkv"}


def small(score_mod=None, query=None, **options):
    query = SMALL["q"] if query is None else query
    keys = SMALL["k"], SMALL["v"]
    return jax_flash.flash_attention(query, *keys, score_mod=score_mod, implementation="xla", **options)


def test_captured_arrays_without_a_gradient_of_their_own():
    """Compared with, or behind stop_gradient: their gradients are 0, and those of others are there."""
    weights = jnp.linspace(-1, 1, 4)

    def loss(weights, query):
        def mod(score, b, h, q, k):
            return jnp.where(weights[h] > 0, score, jax.lax.stop_gradient(weights[h]) * 2)

        return jnp.sum(small(mod, query) ** 2)

    d_weights, d_query = jax.grad(loss, (0, 1))(weights, SMALL["q"])
    assert not d_weights.any() and d_query[:, :, 2:].any() and not d_query[:, :, :2].any()


@pytest.mark.parametrize(
    ("mod", "same"),
    (
        (lambda s, b, h, q, k: s + jnp.argmax(jnp.arange(h + 1) * 0 + jnp.arange(4)[::-1]), None),
        (lambda s, b, h, q, k: s + jnp.argmax(POSITIONS), lambda s, b, h, q, k: s + 3),
        (lambda s, b, h, q, k: 0.0, lambda s, b, h, q, k: 0 * s),
    ),
)
def test_functions_of_whole_arrays_and_of_nothing(mod, same):
    if same is None:
        with pytest.raises(TypeError):  # JAX's own: a shape that depends on an index
            small(mod)
    else:
        np.testing.assert_allclose(small(mod), small(same), rtol=1e-6)


POSITIONS = jnp.asarray([0, 1, 2, 5, 4])


@pytest.mark.parametrize(
    ("captured", "said"),
    ((jnp.ones(4, jnp.complex64), "complex64"), (jax.random.split(jax.random.key(0), 4), "random keys")),
    ids=("complex", "keys"),
)
def test_what_may_not_be_captured(captured, said):
    def mod(score, b, h, q, k):
        own = captured[h]
        is_key = jnp.issubdtype(own.dtype, jax.dtypes.prng_key)
        return score + (jax.random.uniform(own) if is_key else own.real)

    with pytest.raises(TypeError, match=said):
        small(mod)


def test_nothing_of_a_function_without_a_graph_stays():
    def run():
        table = jnp.ones((4, 6)) * 3
        return small(lambda s, b, h, q, k: s + jnp.cumsum(table[h])[k]).sum()

    run()
    gc.collect()
    before = len(jax.live_arrays())
    run()
    run()
    gc.collect()
    assert len(jax.live_arrays()) <= before


def test_rules_of_custom_derivatives_tell_functions_apart():
    """Alike in value and first derivative, and not in the second."""

    def squared(rule):
        function = jax.custom_jvp(lambda s: s * s / 2)
        function.defjvp(lambda primals, tangents: (function(*primals), rule(primals[0]) * tangents[0]))
        return lambda s, b, h, q, k: function(s)

    def second(mod):
        return jax.grad(lambda q: jnp.sum(jax.grad(lambda q: small(mod, q).sum())(q) ** 2))(SMALL["q"])

    plain = second(squared(lambda s: s))
    stopped = second(squared(jax.lax.stop_gradient))
    assert np.abs(plain - stopped).max() > 1e-2
    np.testing.assert_allclose(plain, second(lambda s, b, h, q, k: s * s / 2), rtol=1e-4, atol=1e-5)


def test_a_mask_without_a_graph_under_vmap():
    def attend(ends):
        function = lambda b, h, q, k: jnp.sort(jnp.stack([q, k, ends[0]]))[0] == k  # noqa: E731
        return small(block_mask=jax_flash.create_block_mask(function, None, None, 6, 6))

    ends = jnp.asarray([[2], [5]])
    got = jax.vmap(attend)(ends)
    for number in range(2):
        np.testing.assert_allclose(got[number], attend(ends[number]), rtol=1e-6)
    table = jnp.ones((4, 6))
    with pytest.raises(ValueError, match="depends on head"):
        jax_flash.create_block_mask(lambda b, h, q, k: jnp.cumsum(table[h])[k] > 0, None, None, 6, 6)


def test_constants_of_64_bits():
    with jax.enable_x64(True):
        large = np.float64(1e300)
        got = small(lambda s, b, h, q, k: jnp.where(jnp.asarray(large) < jnp.asarray(2 * large), s, -s))
    np.testing.assert_allclose(got, small(), rtol=1e-6)
