"""C++ of functions on chunks: they see indices of the whole sequences, from starts that are an operand."""

import jax.numpy as jnp
import numpy as np
import pytest
from function_harness import Case, Compiled, compile_by_nvrtc
from jax.extend.core import ClosedJaxpr

from jax_flash.functions.chunks import on_chunks
from jax_flash.functions.function import ScalarFunction
from jax_flash.functions.graph import Graph
from jax_flash.functions.static import static_mask_mod, static_score_mod

ROWS, COLUMNS, IDS = jnp.linspace(-1, 1, 50), jnp.linspace(2, 3, 60), jnp.arange(60) // 9
STARTS = np.array([11, 7], np.int32)


def of_tokens(score, b, h, q, k):
    return jnp.tanh(score * ROWS[q]) + COLUMNS[k] * (h + q - k)


def documents(b, h, q, k):
    return (IDS[q] == IDS[k]) & (q >= k)


def case_of(function, captured, stride):
    own = on_chunks(function, stride)
    captured = (*map(np.asarray, captured), STARTS)
    traced = ScalarFunction(ClosedJaxpr(own.jaxpr, captured), captured, own.arguments, Graph(), own.value)
    return Case(traced, own.derivative)


STRIDES = (1, 3)
FUNCTIONS = {"score": static_score_mod(of_tokens), "mask": static_mask_mod(documents)}
CASES = [case_of(*FUNCTIONS[name], stride) for name in FUNCTIONS for stride in STRIDES]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return Compiled(tmp_path_factory.mktemp("chunks"), CASES)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(compiled, name, stride):
    batch, head, query, key = np.indices((1, 2, 9, 11), np.int32).reshape(4, -1)
    score = np.linspace(-2, 2, query.size, dtype=np.float32)
    d_value = np.cos(score)
    number = list(FUNCTIONS).index(name) * len(STRIDES) + STRIDES.index(stride)
    value, d_score, gradients = compiled.run(number, (score, batch, head, query, key), d_value)
    function, captured = FUNCTIONS[name]
    whole = dict(batch=batch, head=head, query=STARTS[0] + stride * query, key=STARTS[1] + stride * key)
    whole = {name: jnp.asarray(x)[None] for name, x in (whole | dict(score=score)).items()}
    captured = [x[None] for x in captured]
    np.testing.assert_allclose(value, function(whole, captured)[0], rtol=2e-5, atol=2e-5)
    if name == "score":
        expected, sums = function.pullback(whole, captured, jnp.asarray(d_value)[None], lambda x: x)
        np.testing.assert_allclose(d_score * d_value, expected[0], rtol=2e-5, atol=2e-5)
        assert sorted(gradients) == sorted(sums) == [0, 1]
        for n, x in sums.items():
            np.testing.assert_allclose(gradients[n], x[0], rtol=2e-4, atol=2e-5)


def test_compile_by_nvrtc():
    compile_by_nvrtc(CASES)
