"""C++ of users' functions: what is computed when, what the text depends on, and what is refused."""

import inspect
import re

import cuda_functions as functions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from function_harness import Compiled, compile_by_nvrtc, differentiated, reference, score_mod

from jax_flash.functions import Scope, UnsupportedPrimitiveError
from jax_flash.functions.scopes import by_scope


def text_of(function):
    traced = functions.trace_score_mod(function)
    return functions.function_text(traced, "score_mod", "ScoreModOperands")


def operations(function):
    """Names of the primitives of each scope."""
    traced = functions.trace_score_mod(function)
    return {scope: [node.operation for node in nodes] for scope, nodes in by_scope([traced.output]).items()}


def test_scopes():
    table, documents, scale = jnp.ones(4), jnp.zeros((2, 9), jnp.int32), jnp.float32(2.0)

    def function(score, b, h, q, k):
        of_row = jnp.exp(table[h]) + jnp.sin(q * 1.0)
        of_column = jnp.where(documents[b, k] == 0, jnp.cos(k * 1.0), 0.0)
        return jnp.tanh(score) * jnp.sqrt(scale) + of_row * of_column + jnp.log1p(jnp.float32(3.0))

    found = operations(function)
    assert {"sqrt", "load"} <= set(found[Scope.TILE])
    assert {"exp", "sin", "load"} <= set(found[Scope.ROW])
    assert {"cos", "load", "select_n"} <= set(found[Scope.COLUMN])
    assert found[Scope.ELEMENT] == ["tanh", "mul", "mul", "add", "add"]


def test_index_of_a_row_is_computed_once_a_row():
    bias = jnp.ones((2, 3, 16, 16))
    found = operations(lambda score, b, h, q, k: score + bias[b, h, q, k])
    assert found[Scope.ELEMENT] == ["add", "load", "add"], "the place, the load and the sum"


def test_constants_fold_and_common_subexpressions_merge():
    def function(score, b, h, q, k):
        slope = 2.0 ** -(8.0 / jnp.float32(4.0))
        return score * slope + jnp.sin(score) * jnp.sin(score) + jnp.arange(5)[3] * 0.5 + 0 * q

    found = operations(function)
    assert found[Scope.ELEMENT].count("sin") == 1
    assert sorted(found[Scope.ELEMENT]) == ["add", "add", "add", "mul", "mul", "sin"]
    assert "0x1.0000000000000p-2f" in text_of(function), "2^-2"


def alibi_of(slopes, cap):
    def some_name(s, b, n, i, j):
        return cap * jnp.tanh(s / cap) - slopes[n] * jnp.abs(i - j)

    return some_name


def test_equal_functions_have_equal_text():
    first = text_of(alibi_of(jnp.ones(4), 20.0))
    assert text_of(alibi_of(jnp.arange(4.0), 20.0)) == first, "what an array holds doesn't count"
    assert text_of(jax.jit(alibi_of(jnp.ones(4), 20.0))) == first
    assert text_of(alibi_of(jnp.ones(4), 30.0)) != first
    assert text_of(alibi_of(jnp.ones(5), 20.0)) != first
    derivatives = [
        functions.derivative_text(differentiated(alibi_of(jnp.full(4, x), 20.0)).derivative, "f", "O", "G")
        for x in (1.0, 2.0)
    ]
    assert derivatives[0] == derivatives[1]


def test_sums_of_positions_have_a_base_and_an_offset():
    text = text_of(alibi_of(jnp.ones(4), 20.0))
    assert "index()" not in text, "no position is bounded where none is looked up by"
    assert "fabsf" in text and "scalar::absolute" not in text, "of the float"
    assert text.count("static_cast<float>") == 2, "of the base and of the offset"
    window = text_of(lambda s, b, h, q, k: jnp.where((q - k < 8) & (k <= q + 3), s, 0.0))
    assert "index()" not in window and window.count(".offset") == 4
    wraps = text_of(lambda s, b, h, q, k: jnp.where(q - k < 2**30, s, 0.0))
    assert "index()" in wraps, "a difference of what is large may wrap around"


def test_tangents_of_what_is_cheap_have_a_faster_version():
    caps = jnp.ones(4)

    def has_tanh(function):
        text = text_of(function)
        assert ("tanh_in<range>(" in text) == ("constexpr bool has_tanh = true;" in text)
        return "tanh_in<range>(" in text

    assert has_tanh(alibi_of(jnp.ones(4), 20.0))
    assert has_tanh(lambda s, b, h, q, k: caps[h] * jnp.tanh(s / caps[h]) + jnp.tanh(s * caps[0]))
    assert not has_tanh(lambda s, b, h, q, k: s + caps[h])
    assert not has_tanh(lambda s, b, h, q, k: s + jnp.tanh(caps[h])), "once a row"
    assert not has_tanh(lambda s, b, h, q, k: jnp.tanh(s + jnp.tanh(s))), "of a tangent"
    assert not has_tanh(lambda s, b, h, q, k: jnp.tanh(s * caps[(q - k) % 4])), "looked up for each score"
    assert not has_tanh(lambda s, b, h, q, k: jnp.tanh(s.astype(jnp.bfloat16)).astype(jnp.float32))


def test_terms_of_a_head_are_known():
    table = jnp.ones((4, 9))

    def text(function):
        return differentiated(function).text(0)

    of_slopes = text(alibi_of(jnp.ones(4), 20.0))
    assert "is_of_head(int gather) { return gather == 0; }" in of_slopes
    assert "is_finite(int gather) { return gather == 0; }" in of_slopes
    of_table = text(lambda s, b, h, q, k: s + s * table[h, q])
    assert "is_of_head(int gather) { return false; }" in of_table
    assert "is_finite(int gather) { return false; }" in of_table


def test_captured_arrays_are_operands():
    table, scale = jnp.ones((4, 4), jnp.bfloat16), np.float32(2.0) * jnp.ones(())
    traced = functions.trace_score_mod(lambda score, b, h, q, k: score * scale + table[h, q])
    assert [x.shape for x in traced.shapes] == [(), (4, 4)]
    assert functions.operand_struct(traced, "O").fields == (
        ("operand0", "const float*"),
        ("operand1", "const bfloat16*"),
    )


TRANSFORMS = {
    "jit_of_grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
    "vmap": lambda f: jax.vmap(lambda x: f(jnp.full(4, x))),
    "checkpoint": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
    "scan": lambda f: lambda x: jax.lax.scan(lambda y, _: (f(y), None), x, length=2)[0],
    "shard_map": lambda f: jax.shard_map(
        lambda x: f(jnp.concatenate([x, x])),
        mesh=jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=jax.sharding.PartitionSpec("x"),
        out_specs=jax.sharding.PartitionSpec("x"),
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_captured_tracers(name):
    """Within transformations captured arrays are tracers, and what is written is the same."""
    found = []

    def texts(slopes):
        case = differentiated(alibi_of(slopes, 20.0))
        return case.text(0), type(case)(case.traced).text(0)

    def call(slopes):
        found.append(texts(slopes * 2))
        return slopes

    TRANSFORMS[name](call)(jnp.ones(4))
    assert found and set(found) == {texts(jnp.ones(4))}


def test_64_bits_enabled():
    table = jnp.ones((4, 9))
    with jax.enable_x64(True):
        wide = text_of(lambda score, b, h, q, k: score * 2 + table[h, q - k])
    assert wide == text_of(lambda score, b, h, q, k: score * 2 + table[h, q - k])


def line_of(function, words):
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if words in line)


def sorts(score, b, h, q, k):
    rows = jnp.stack([score, score + 1])
    return jnp.sort(rows)[0]


def uses_erf_inv(score, b, h, q, k):
    return score + jax.scipy.special.erfinv(score)


def draws(score, b, h, q, k):
    return score + jax.random.uniform(jax.random.fold_in(jax.random.key(0), q))


def prints(score, b, h, q, k):
    jax.debug.print("{}", score)
    return score


def loops(score, b, h, q, k):
    return jax.lax.while_loop(lambda x: x < 10, lambda x: x * 2, score)


def sums_long(score, b, h, q, k):
    return score + jnp.ones(1000)[: 500 + 1].sum()


REFUSED = {
    "sort": (sorts, "jnp.sort"),
    "erf_inv": (uses_erf_inv, "erfinv"),
    "random": (draws, "jax.random"),
    "debug": (prints, "debug.print"),
    "while": (loops, "while_loop"),
    "reduce_sum": (sums_long, "sum()"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_refused_with_name_and_line(name, wrap):
    function, words = REFUSED[name]
    with pytest.raises(UnsupportedPrimitiveError) as caught:
        functions.trace_score_mod(wrap(function))
    assert caught.value.primitive.startswith(name), caught.value
    place = f"{re.escape(__file__)}:{line_of(function, words)}:"
    assert re.match(place, caught.value.line), caught.value
    assert caught.value.primitive in str(caught.value) and caught.value.line in str(caught.value)


def test_64_bit_types_are_refused():
    with jax.enable_x64(True):
        with pytest.raises(UnsupportedPrimitiveError, match="float64"):
            functions.trace_score_mod(lambda s, b, h, q, k: (s.astype(jnp.float64) * 2).astype(jnp.float32))
        captured = jnp.ones(3, jnp.float64)
        with pytest.raises(TypeError, match="float64"):
            functions.trace_score_mod(lambda s, b, h, q, k: s + captured[q].astype(jnp.float32))


def test_what_is_not_used_is_not_refused():
    text_of(lambda score, b, h, q, k: (jax.scipy.special.erfinv(score), score)[1])


def test_loops_of_a_static_length_are_written_out():
    def function(score, b, h, q, k):
        x = jax.lax.fori_loop(0, 3, lambda i, x: x * (i + 1), score)
        return jax.lax.scan(lambda x, y: (x + y, None), x, jnp.arange(4.0))[0]

    assert operations(function)[Scope.ELEMENT] == ["mul", "mul", "add", "add", "add", "add"]


def test_a_custom_vjp_is_inlined_forward():
    @jax.custom_vjp
    def doubled(x):
        return x * 2

    doubled.defvjp(lambda x: (x * 2, None), lambda _, d: (d,))
    assert operations(lambda score, b, h, q, k: doubled(score))[Scope.ELEMENT] == ["mul"]


def test_results_that_are_no_score():
    with pytest.raises(ValueError, match="must return a scalar"):
        functions.trace_score_mod(lambda score, b, h, q, k: jnp.stack([score, score]))
    with pytest.raises(TypeError, match="returns int32; it must return float32"):
        functions.trace_score_mod(lambda score, b, h, q, k: q)
    with pytest.raises(TypeError, match="returns int32; it must return bool"):
        functions.trace_mask_mod(lambda b, h, q, k: q)


TABLE = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), jnp.float32)
BUCKETS = jnp.asarray(np.random.default_rng(1).integers(-9, 9, (8, 8)), jnp.int32)


def random_function(seed):
    """A random expression, of operations whose results are exact."""
    random = np.random.default_rng(seed)

    def integer(depth, indices):
        if depth == 0:
            return indices[random.integers(4)] if random.random() < 0.8 else int(random.integers(-3, 9))
        a, b = integer(depth - 1, indices), integer(depth - 1, indices)
        forms = [
            lambda: a + b,
            lambda: a - b,
            lambda: a * b,
            lambda: jnp.floor_divide(a, b),
            lambda: jnp.remainder(a, b),
            lambda: jnp.bitwise_xor(a, b),
            lambda: jnp.where(jnp.less(a, b), a, b),
            lambda: BUCKETS[jnp.asarray(a, jnp.int32), jnp.asarray(b, jnp.int32)],
            lambda: jnp.right_shift(jnp.asarray(a, jnp.int32), jnp.asarray(b, jnp.int32)),
            lambda: jnp.clip(a, -5, 5),
        ]
        return forms[random.integers(len(forms))]()

    def number(depth, score, indices):
        if depth == 0:
            leaves = [
                lambda: score,
                lambda: float(random.integers(-4, 5)) / 2,
                lambda: integer(1, indices) * 1.0,
            ]
            return leaves[random.choice(3, p=(0.6, 0.2, 0.2))]()
        a, b = number(depth - 1, score, indices), number(depth - 1, score, indices)
        i, j = integer(2, indices), integer(2, indices)
        forms = [
            lambda: a + b,
            lambda: a * b,
            lambda: a - b,
            lambda: a / b,
            lambda: jnp.maximum(a, b),
            lambda: jnp.where(jnp.less(i, j), a, b),
            lambda: jnp.where(jnp.greater_equal(a, b), b, a * 2),
            lambda: jnp.abs(a) + TABLE[jnp.asarray(i, jnp.int32), jnp.asarray(j, jnp.int32)],
            lambda: jnp.floor(a) + jnp.asarray(b, jnp.bfloat16),
            lambda: jnp.sign(a) * TABLE.at[1, jnp.asarray(i, jnp.int32)].get(mode="fill", fill_value=1),
            lambda: jnp.asarray(a, jnp.int32) * 1.0 - b,
        ]
        return forms[random.integers(len(forms))]()

    def function(score, b, h, q, k):
        nonlocal random
        random = np.random.default_rng(seed)  # so that it is the same at each trace
        return jnp.asarray(number(4, score, (b, h, q, k)) * 1.0, jnp.float32) + 0 * score

    return function


SEEDS = range(14)


def test_random_functions(tmp_path):
    made = [random_function(seed) for seed in SEEDS]
    compiled = Compiled(tmp_path, [score_mod(f) for f in made])
    random = np.random.default_rng(2)
    indices = [random.integers(0, size, 500).astype(np.int32) for size in (2, 4, 8, 8)]
    score = random.standard_normal(500).astype(np.float32) * 3
    for seed, function in zip(SEEDS, made, strict=True):
        value, _, _ = compiled.run(seed, (score, *indices))
        expected = reference(function, (score, *indices))
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-30, err_msg=f"seed {seed}")


def test_derivatives_of_random_functions(tmp_path):
    made = [random_function(seed) for seed in SEEDS]
    compiled = Compiled(tmp_path, [differentiated(f) for f in made])
    random = np.random.default_rng(3)
    indices = [random.integers(0, size, 500).astype(np.int32) for size in (2, 4, 8, 8)]
    score = random.standard_normal(500).astype(np.float32) * 3
    for seed, function in zip(SEEDS, made, strict=True):
        _, d_score, _ = compiled.run(seed, (score, *indices))
        expected = reference(jax.grad(function), (score, *indices))
        np.testing.assert_allclose(d_score, expected, rtol=1e-5, atol=1e-5, err_msg=f"seed {seed}")


def test_random_functions_and_derivatives_compile_by_nvrtc():
    compile_by_nvrtc([differentiated(random_function(seed)) for seed in list(SEEDS)[:8]])
