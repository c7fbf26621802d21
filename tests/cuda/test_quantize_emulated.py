"""The kernels that round to e4m3 and arrange e4m3 arrays, in the emulator: the bits of their definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_case import DEVICE, Case, draw
from float8_arrays import arranged

from jax_flash import _float8
from jax_flash._quantize_spec import QuantizeOperands, QuantizeSpec
from jax_flash._spec import shapes_of
from jax_flash.cuda import plan_check
from jax_flash.cuda.sm90.arrange_plan import plan_arrange
from jax_flash.cuda.sm90.quantize_plan import plan_quantize, plan_quantize_rows
from jax_flash.xla import quantizing

CASES = (
    Case(H=128, T=200, S=300, N=4, K=2, B=2),
    Case(H=64, T=130, S=140, N=6, K=1, dtype="float16", lengths="qk", B=2),
    Case(H=96, V=48, T=9, S=128, N=2, K=2),
    Case(H=256, T=40, S=270, N=1),
    Case(H=144, V=192, T=130, S=140, N=2, K=2),  # of 32 lanes 18 have columns
    Case(H=80, V=256, T=128, S=65, N=3, K=3, dtype="float16"),
    Case(H=32, V=16, T=1, S=1),
)


def operands_of(case, incoherent):
    """With outliers, and some elements that aren't finite."""
    _, operands, _, _, seed = draw(case)
    random = np.random.default_rng(seed)

    def spoilt(x):
        x = np.array(x, np.float32) * np.where(random.random(x.shape) < 0.01, 30, 1)
        for odd in (np.nan, np.inf, -np.inf):
            x[tuple(random.integers(size) for size in x.shape)] = odd
        return jnp.asarray(x, case.dtype)

    arrays = {name: spoilt(getattr(operands, name)) for name in ("query", "key", "value")}
    if incoherent:
        arrays["rotation_signs"] = jnp.stack(
            [_float8.random_signs(jax.random.key(b), case.H) for b in range(case.B)]
        )
    return operands.replace(**arrays), seed


# Where incoherent, on a device with so few multiprocessors that a CTA takes several blocks.
SMALL_DEVICE = dataclasses.replace(DEVICE, sm_count=1)


@pytest.mark.parametrize("incoherent", (True, False))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_the_definition(case, incoherent, emulator):
    operands, seed = operands_of(case, incoherent)
    plan = plan_quantize(shapes_of(operands), SMALL_DEVICE if incoherent else DEVICE)
    got = emulator.run(plan, {name: np.asarray(x) for name, x in operands.present().items()}, seed)
    spec = dataclasses.replace(draw(case)[0], quantization="fp8")
    # Compiled as a whole, which takes less time than operation by operation.
    expected = jax.jit(lambda operands: arranged(_float8.quantized(spec, operands)[1]))(operands)
    for name, buffer in (("query", "quantized_query"), ("key", "quantized_key")):
        found, right = (np.asarray(x, np.float32) for x in (got[buffer], expected[name]))
        np.testing.assert_array_equal(found, right, err_msg=name)
    found, right = (
        np.asarray(x, np.float32) for x in (got["transposed_value"], expected["transposed_value"])
    )
    np.testing.assert_array_equal(found, right)
    for name in ("query_descale", "key_descale", "value_descale"):
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


@pytest.mark.parametrize("incoherent", (True, False))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_the_definition(case, incoherent, emulator):
    """Queries and values by themselves, as `jax_flash.quantize` rounds them: NaN where one isn't finite."""
    operands, seed = operands_of(case, incoherent)
    of_queries = QuantizeOperands(operands.query, operands.rotation_signs, operands.query_seq_lengths)
    of_values = QuantizeOperands(operands.value, lengths=operands.key_value_seq_lengths)
    for spec, arrays in ((QuantizeSpec(case.N // case.K), of_queries), (QuantizeSpec(1), of_values)):
        plan = plan_quantize_rows(spec, shapes_of(arrays), SMALL_DEVICE if incoherent else DEVICE)
        plan_check.check(plan)
        got = emulator.run(plan, {name: np.asarray(x) for name, x in arrays.present().items()}, seed)
        quantized, descale = jax.jit(functools.partial(quantizing.forward, spec))(arrays)
        np.testing.assert_array_equal(got["quantized"].astype(np.float32), quantized.astype(np.float32))
        np.testing.assert_array_equal(got["descale"], descale)


@pytest.mark.parametrize("scales", ("block", "head", "none"))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_arranged(case, scales, emulator):
    """Arrays that come in e4m3: with scales of every kind, some of them 0, negative or not finite."""
    operands, seed = operands_of(case, incoherent=False)
    random = np.random.default_rng(seed)
    arrays = {name: getattr(operands, name).astype(_float8.DTYPE) for name in ("query", "key", "value")}
    for name in arrays if scales != "none" else ():
        blocks = _float8.descales_of(arrays[name].shape[1]) if scales == "block" else 1
        drawn = random.choice([0.7, 1.3, -1.0, 0.0, -0.5, np.inf, np.nan], (case.B, case.K, blocks))
        operands = operands.replace(**{f"{name}_descale": jnp.asarray(drawn, jnp.float32)})
    operands = operands.replace(**arrays)
    plan = plan_arrange(shapes_of(operands), DEVICE)
    plan_check.check(plan)
    got = emulator.run(plan, {name: np.asarray(x) for name, x in operands.present().items()}, seed)
    found = arrays | {name.removeprefix("arranged_"): x for name, x in got.items()}
    assert ("arranged_query" in got) == (scales != "none")
    right = jax.jit(arranged)(operands)
    names = ("query", "key", "transposed_value", "query_descale", "key_descale", "value_descale")
    for name in names:
        one, other = (np.asarray(x[name], np.float32) for x in (found, right))
        np.testing.assert_array_equal(one, other, err_msg=name)
