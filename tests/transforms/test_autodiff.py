"""The derivative of a call: values, residuals, and what implementations and policies get to see."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transform_cases as cases

import jax_flash
from jax_flash import _device
from jax_flash._spec import Operands
from jax_flash.transforms import autodiff
from jax_flash.xla import differentiable


@pytest.mark.parametrize("return_residual", [True, False])
def test_values_and_gradients(return_residual):
    spec = dataclasses.replace(cases.SPEC, return_residual=return_residual)
    operands = cases.make_operands()
    ours, expected = (cases.loss(lambda o, f=f: f(o, spec)) for f in (cases.attend, cases.definition))
    cases.assert_close(cases.attend(operands, spec), cases.definition(operands, spec))
    cases.assert_close(
        jax.value_and_grad(ours)(*cases.split(operands)), jax.value_and_grad(expected)(*cases.split(operands))
    )


def test_integer_operands_get_float0():
    differentiable, others = cases.split(cases.make_operands())
    gradients = jax.grad(cases.loss(cases.attend), argnums=1, allow_int=True)(differentiable, others)
    assert {x.dtype for x in gradients.values()} == {jax.dtypes.float0}


def test_residuals_are_operands_out_and_lse():
    operands = cases.make_operands(T=9, S=11)
    (out, lse), vjp = jax.vjp(cases.attend, operands)
    kept = sorted(np.shape(x) for x in jax.tree.leaves(vjp))
    assert kept == sorted(x.shape for x in [*operands.present().values(), out, lse])


def test_backward_gets_no_lse_cotangent_when_lse_is_not_returned():
    seen = []

    def backward(spec, operands, out, lse, d_out, d_lse):
        seen.append(d_lse)
        return cases.plain_backward(spec, operands, out, lse, d_out, d_lse)

    cases.add_implementation("recording", cases.plain_forward, backward)
    spec = dataclasses.replace(cases.SPEC, return_residual=False)
    cases.gradients(lambda o: cases.attend(o, spec, ("recording",)), cases.make_operands())
    assert seen and all(x is None for x in seen)


def count_forward_passes(policy):
    def block(query, operands):
        return jax.nn.gelu(cases.attend(operands.replace(query=query))[0])[..., :1] * query

    def scalar(query, operands):
        block_again = jax.checkpoint(block, policy=policy)
        return jnp.sum(block_again(block_again(query, operands), operands))

    operands = cases.make_operands()
    lowered = jax.jit(jax.value_and_grad(scalar)).lower(operands.query, operands)
    return lowered.as_text().count("call @jax_flash_forward")


def test_checkpoint_policy_saves_the_forward_pass():
    save = jax.checkpoint_policies.save_only_these_names("jax_flash_out", "jax_flash_lse")
    assert count_forward_passes(save) == 2
    assert count_forward_passes(jax.checkpoint_policies.nothing_saveable) == 4


@pytest.mark.parametrize("name", [None, "jax_flash_out", "jax_flash_lse"])
def test_checkpoint_gives_the_same_gradients(name):
    policy = jax.checkpoint_policies.save_only_these_names(*([name] if name else []))
    operands = cases.make_operands()
    cases.assert_close(
        cases.gradients(jax.checkpoint(cases.attend, policy=policy), operands),
        cases.gradients(cases.definition, operands),
    )


def test_forward_mode_is_refused():
    operands = cases.make_operands(mask=False)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: cases.attend(operands.replace(query=q))[0], (operands.query,), (operands.query,))


@pytest.mark.parametrize("kind", ("forward over reverse", "reverse twice"))
def test_second_derivatives(kind):
    operands = cases.make_operands(B=2)

    def second(function):
        differentiable, others = cases.split(operands)
        scalar = cases.loss(function)
        if kind == "reverse twice":
            scalar = jax.checkpoint(scalar)
        gradient = jax.grad(scalar)

        def along(direction):
            if kind == "forward over reverse":
                return jax.jvp(lambda x: gradient(x, others), (differentiable,), (direction,))[1]

            def inner(x):
                return jax.tree.reduce(jnp.add, jax.tree.map(jnp.vdot, gradient(x, others), direction))

            return jax.grad(inner)(differentiable)

        direction = jax.tree.map(jnp.cos, differentiable)
        if kind == "forward over reverse":
            return jax.jit(jax.vmap(along))(jax.tree.map(lambda x: jnp.stack([x, 2 * x]), direction))
        return jax.jit(along)(direction)

    cases.assert_close(second(cases.attend), second(cases.definition), 1e-4)


def test_second_derivatives_of_varlen_sequences():
    operands, spec = cases.make_varlen_operands(B=2)
    differentiable, others = cases.split(operands)

    def second(function):
        scalar = cases.loss(lambda operands: function(operands, spec))

        def inner(x):
            return sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(jax.grad(scalar)(x, others)))

        return jax.jit(jax.grad(inner))(differentiable)

    cases.assert_close(second(cases.attend), second(cases.definition), 1e-4)


def _second_derivatives_by_position(function):
    spec = dataclasses.replace(cases.SPEC, right=0, return_residual=False, logits_soft_cap=2.0)

    def gradients(*x):
        return jax.grad(lambda *x: jnp.sum(jnp.sin(function(Operands(*x), spec))), argnums=(0, 1, 2))(*x)

    return jax.jit(jax.grad(lambda *x: sum(jnp.sum(jnp.sin(g)) for g in gradients(*x)), argnums=(0, 1, 2)))


def test_second_derivatives_over_blocks_of_which_the_last_overlaps(monkeypatch):
    monkeypatch.setattr(differentiable, "LOGITS_PER_BLOCK", 0)
    arrays = [jax.random.normal(jax.random.key(i), (1, 49, 1, 4)) for i in range(3)]
    ours, expected = map(_second_derivatives_by_position, (cases.attend, cases.definition))
    cases.assert_close(ours(*arrays), expected(*arrays), 1e-4)


@pytest.mark.parametrize("spoiled", ["query", "key"])
def test_second_derivatives_without_what_is_not_finite_in_padding(spoiled):
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))
    padding = x.at[:, 3].set(jnp.nan)

    def second(rest):
        def loss(x):
            if spoiled == "query":
                out = jax_flash.flash_attention(rest, x, x, query_seq_lengths=jnp.array([3]))
            else:
                out = jax_flash.flash_attention(x, rest, rest, key_value_seq_lengths=jnp.array([3]))
            return jnp.sum(out**3)

        return jax.jvp(jax.grad(loss), (x,), (jnp.cos(x),))[1]

    np.testing.assert_allclose(second(padding), second(x.at[:, 3].set(0)), rtol=1e-5, atol=1e-6)


def test_a_second_derivative_shows_what_is_not_finite():
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))

    def loss(query):
        out = jax_flash.flash_attention(query, x, x.at[:, 2, :, 0].set(jnp.inf), is_causal=True)
        return jnp.sum(out[:, :3] ** 3)

    is_finite = jnp.isfinite(jax.jvp(jax.grad(loss), (x,), (x,))[1]).all((0, 2, 3))
    np.testing.assert_array_equal(is_finite[:3], [True, True, False])


def test_memory_of_second_derivatives_is_linear(monkeypatch):
    monkeypatch.setattr(differentiable, "LOGITS_PER_BLOCK", 0)
    attend = functools.partial(cases.attend, implementation=("xla",))

    def temporary(T):
        x = jax.ShapeDtypeStruct((1, T, 1, 4), jnp.float32)
        program = _second_derivatives_by_position(attend).lower(x, x, x).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary(4096) < 2.5 * temporary(2048)


def test_device_of_the_call_reaches_every_pass():
    seen = []

    def forward(spec, operands):
        seen.append(_device.current())
        return cases.plain_forward(spec, operands)

    def backward(*args):
        seen.append(_device.current())
        return cases.plain_backward(*args)

    cases.add_implementation("looking", forward, backward)
    operands = cases.make_operands()
    for device in (_device.H100, dataclasses.replace(_device.H100, sm_count=78)):
        seen.clear()
        with _device.assume(device):
            results, vjp = jax.vjp(lambda o: cases.attend(o, implementation=("looking",)), operands)
        vjp(results)
        assert len(seen) >= 2 and set(seen) == {device}


def opaque_forward(spec, operands):
    B, T, N, _ = operands.query.shape
    results = (
        jax.ShapeDtypeStruct((B, T, N, operands.value.shape[-1]), operands.query.dtype),
        jax.ShapeDtypeStruct((B, N, T), jnp.float32),
    )
    return jax.ffi.ffi_call("only_on_gpu", results)(operands.query, operands.key, operands.value)


def test_automatic_choice_is_settled_by_the_platform():
    def backward(spec, operands, *rest):
        return cases.plain_backward(spec, operands, *rest)

    cases.add_implementation("only_on_gpu", opaque_forward, backward)
    operands = cases.make_operands()

    def automatic(operands):
        with _device.assume(_device.H100):
            return cases.attend(operands, implementation=("only_on_gpu", "plain"))

    cases.assert_close(automatic(operands), cases.definition(operands))
    cases.assert_close(cases.gradients(automatic, operands), cases.gradients(cases.definition, operands))
    traced = jax.jit(automatic).trace(operands)
    assert "only_on_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    here = traced.lower(lowering_platforms=("cpu",))
    assert "only_on_gpu" not in here.as_text()
    assert "conditional" not in here.compile().as_text()


def test_forward_and_backward_are_named_in_the_program():
    operands = cases.make_operands()
    text = jax.jit(jax.grad(cases.loss(cases.attend))).lower(*cases.split(operands)).as_text()
    assert "jax_flash_forward" in text and "jax_flash_backward" in text


def test_every_operand_may_be_absent():
    operands = Operands(*jax.tree.leaves(cases.make_operands())[:3])
    assert autodiff.attend(cases.SPEC, ("plain",), operands)[0].shape == (4, 6, 4, 3)
