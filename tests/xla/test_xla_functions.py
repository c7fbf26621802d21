"""score_mod and block_mask in plain JAX, against the functions' own values for all pairs."""

import dataclasses

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
