"""Derivatives of users' functions, as C++, against jax.grad."""

import cuda_functions as functions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from function_harness import Compiled, compile_by_nvrtc, differentiated

from jax_flash.functions import Scope, UnsupportedPrimitiveError, differentiate
from jax_flash.functions.graph import CONSTANT, reachable

RANDOM = np.random.default_rng(1)
BATCH, HEADS, LENGTH = 2, 3, 7


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RANDOM.standard_normal(shape), dtype)


# Each takes arrays, and makes the function that captures them.
def soft_cap(cap):
    return lambda score, b, h, q, k: cap * jnp.tanh(score / cap)


def alibi(slopes):
    return lambda score, b, h, q, k: score - slopes[h] * jnp.abs(q - k)


def relative_position(table):
    return lambda score, b, h, q, k: score + table[h, jnp.clip(q - k, -3, 3) + 3]


def temperature(by_head, shared):
    return lambda score, b, h, q, k: score * jax.nn.softplus(by_head[h]) + shared * score**2


DOCUMENTS = jnp.asarray(RANDOM.integers(0, 4, (BATCH, LENGTH)), jnp.int32)


def documents(embedding, gates):
    def function(score, b, h, q, k):
        own, other = DOCUMENTS[b, q], DOCUMENTS[b, k]
        near = embedding[own] @ embedding[other]
        return jnp.where(own == other, score + near, score * gates[own, other])

    return function


def out_of_range(table):
    def function(score, b, h, q, k):
        return score * table.at[q - k].get(mode="fill", fill_value=0) + table[q + k] + table[-1] * table[-1]

    return function


@jax.custom_jvp
def halved(x):
    return x


halved.defjvp(lambda primals, tangents: (primals[0], tangents[0] * 0.5))


def custom_rule(x):
    return lambda score, b, h, q, k: halved(score * x[h]) + jax.nn.relu(score)


def nested(x):
    @jax.jit
    def function(score, b, h, q, k):
        rows = jax.checkpoint(lambda s: jnp.sin(s) * x[q])(score)
        return jax.lax.cond(q > k, lambda: rows, lambda: x.sum() * score) + jax.lax.stop_gradient(x[k])

    return function


CASES = {
    "soft_cap": (soft_cap, (jnp.float32(3.0),)),
    "alibi": (alibi, (normal(HEADS),)),
    "relative_position": (relative_position, (normal(HEADS, 7),)),
    "relative_position_bfloat16": (relative_position, (normal(HEADS, 7, dtype=jnp.bfloat16),)),
    "temperature": (temperature, (normal(HEADS), normal())),
    "documents": (documents, (normal(4, 5), normal(4, 4))),
    "out_of_range": (out_of_range, (normal(4),)),
    "custom_rule": (custom_rule, (normal(HEADS),)),
    "nested": (nested, (normal(LENGTH),)),
}


def arguments():
    axes = [np.arange(size, dtype=np.int32) for size in (BATCH, HEADS, LENGTH, LENGTH)]
    indices = [x.ravel() for x in np.meshgrid(*axes, indexing="ij")]
    score = np.asarray(normal(indices[0].size))
    return score, *indices


def make(name):
    of, arrays = CASES[name]
    return of(*arrays)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return Compiled(tmp_path_factory.mktemp("derivatives"), [differentiated(make(name)) for name in CASES])


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_jax_grad(compiled, name):
    of, arrays = CASES[name]
    given = arguments()
    d_value = np.asarray(normal(given[0].size))

    def loss(score, arrays):
        values = jax.vmap(of(*arrays))(score, *given[1:])
        return (values * d_value).sum(), values

    # The kernels sum gradients in float32.
    wide = tuple(x.astype(jnp.float32) for x in arrays)
    (_, expected), (d_score, d_arrays) = jax.value_and_grad(loss, (0, 1), has_aux=True)(given[0], wide)
    n = list(CASES).index(name)
    value, by_score, gradients = compiled.run(n, given, d_value)
    np.testing.assert_allclose(value, expected, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(by_score * d_value, d_score, rtol=2e-5, atol=1e-5)
    captured = compiled.cases[n].traced.captured
    for array, expected in zip(arrays, d_arrays, strict=True):
        (number,) = (number for number, x in enumerate(captured) if x is array)
        np.testing.assert_allclose(gradients[number], expected, rtol=1e-4, atol=1e-4)
    assert len(gradients) == len(arrays)


def test_the_derivative_of_a_branch_that_is_not_taken_does_not_count(tmp_path):
    """Not even where it isn't finite, as 0 times that is NaN. Branches may share what they are made of."""
    array = normal(HEADS)

    def chosen(score, h, q, choose):
        score = score * array[h]
        for n in range(3):
            score = choose((q + n) % 2 > 0, jnp.sin, lambda x: x * array[0], score)
        return score

    def guarded(score, b, h, q, k):
        score = chosen(score, h, q, jax.lax.cond)
        branches = [lambda x: x * jnp.sqrt(k - q), lambda x: x, lambda x: x * jnp.log(q - k)]
        return jax.lax.switch(jnp.clip(q - k, -1, 1) + 1, branches, score)

    def safe(score, b, h, q, k):
        score = chosen(
            score, h, q, lambda which, if_true, if_false, x: jnp.where(which, if_true(x), if_false(x))
        )
        root, logarithm = jnp.sqrt(jnp.maximum(k - q, 1)), jnp.log(jnp.maximum(q - k, 1))
        return score * jnp.where(q < k, root, jnp.where(q == k, 1, logarithm))

    compiled = Compiled(tmp_path, [differentiated(guarded), differentiated(safe)])
    given = arguments()
    ours, expected = (compiled.run(n, given, np.ones(given[0].size, np.float32)) for n in range(2))
    for found, right in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)


def test_value_is_that_of_the_function_itself(compiled, tmp_path):
    """Both passes compute a score by the same operations."""
    names = list(CASES)
    forward = Compiled(tmp_path, [functions_alone(case) for case in compiled.cases])
    for n in range(len(names)):
        given = arguments()
        np.testing.assert_array_equal(forward.run(n, given)[0], compiled.run(n, given)[0], err_msg=names[n])


def functions_alone(case):
    return type(case)(case.traced)


def scopes(function):
    derivative = differentiate(functions.trace_score_mod(function))
    return [(gather.operand, gather.scope) for gather in derivative.gathers]


def test_scopes_of_gathers():
    slopes, table = normal(HEADS), normal(LENGTH)
    assert scopes(soft_cap(jnp.float32(2.0))) == [(0, Scope.TILE)]
    assert scopes(alibi(slopes)) == [(0, Scope.ROW)]
    assert scopes(relative_position(normal(HEADS, 7))) == [(0, Scope.ELEMENT)]
    assert scopes(lambda score, b, h, q, k: score + table[k]) == [(0, Scope.COLUMN)]


def test_one_gather_of_an_element_looked_up_twice():
    table = normal(HEADS)
    assert scopes(lambda score, b, h, q, k: score * table[h] + jnp.sin(table[h])) == [(0, Scope.ROW)]


def test_no_gather_of_integers_or_of_what_does_not_count():
    ids, table = jnp.arange(4), normal(4)
    assert scopes(lambda score, b, h, q, k: jnp.where(ids[q] == ids[k], score, table[h] * 0 < 1)) == []


def test_derivative_of_a_function_without_score():
    table = normal(HEADS)
    derivative = differentiate(functions.trace_score_mod(lambda score, b, h, q, k: table[h]))
    assert derivative.d_score.value == 0
    assert [gather.d_value.value for gather in derivative.gathers] == [1]


def test_sums_have_the_shapes_of_arrays():
    traced = functions.trace_score_mod(make("documents"))
    derivative = differentiate(traced)
    fields = dict(functions.gradient_struct(derivative, "Sums").fields)
    shapes = functions.shapes_of_gradients(traced, derivative)
    assert list(fields) == list(shapes) and set(fields.values()) == {"float*"}
    assert sorted(x.shape for x in shapes.values()) == [(4, 4), (4, 5)]


def test_custom_vjp_is_refused():
    @jax.custom_vjp
    def doubled(x):
        return x * 2

    doubled.defvjp(lambda x: (x * 2, None), lambda _, d: (d,))
    traced = functions.trace_score_mod(lambda score, b, h, q, k: doubled(score))
    with pytest.raises(UnsupportedPrimitiveError, match=r"custom_vjp_call, at .*test_function_derivative"):
        differentiate(traced)


@pytest.mark.every_turn
def test_compiles_by_nvrtc():
    compile_by_nvrtc([differentiated(make(name)) for name in CASES])


def test_constant_factors_of_a_derivative_are_one():
    """Those of a soft cap cancel. A product that float32 has no number for stays as it is."""

    def factors(function):
        derivative = differentiate(functions.trace_score_mod(function))
        products = [node for node in reachable([derivative.d_score]) if node.operation == "mul"]
        return [float(x.value) for node in products for x in node.arguments if x.operation == CONSTANT]

    assert factors(lambda s, b, h, q, k: 16 * jnp.sin(s / 16)) == []
    assert factors(lambda s, b, h, q, k: 3 * jnp.sin(s * 4)) == [4.0, 12.0], "one of the argument"
    assert len(factors(lambda s, b, h, q, k: 1e30 * jnp.sin(s * 1e30))) == 3
