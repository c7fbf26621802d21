"""Each primitive that users' functions may have, as C++, against JAX, over edge values."""

import numpy as np
import pytest
from function_harness import Compiled, compile_by_nvrtc, mask_mod, reference, score_mod
from function_primitives import CASES, arguments_of


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    cases = [score_mod(f) for f, _, _ in CASES.values()]
    return Compiled(tmp_path_factory.mktemp("primitives"), cases)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_jax(compiled, name):
    function, _, tolerance = CASES[name]
    arguments = arguments_of(name)
    value, _, _ = compiled.run(list(CASES).index(name), arguments)
    expected = reference(function, arguments)
    if tolerance:
        np.testing.assert_allclose(value, expected, rtol=tolerance, atol=1e-6)
        return
    # Bit by bit, but for NaN, and for which of two zeros is the larger.
    same = (value.view(np.int32) == expected.view(np.int32)) | (np.isnan(value) & np.isnan(expected))
    if name.startswith("binary"):
        # XLA's CPU code flushes subnormal quotients.
        same |= (np.abs(value) < np.finfo(np.float32).tiny) & (expected == 0)
    wrong = [(a[~same][:5]) for a in (*arguments, value, expected)]
    assert same.all(), wrong


def test_mask_functions_return_bool(tmp_path):
    def prefix(b, h, q, k):
        return (k <= q) | (k < 3 * h)

    compiled = Compiled(tmp_path, [mask_mod(prefix)])
    q, k = (x.ravel().astype(np.int32) for x in np.meshgrid(np.arange(8), np.arange(8)))
    value, _, _ = compiled.run(0, (q, q * 0, q % 3, q, k))
    np.testing.assert_array_equal(value != 0, (k <= q) | (k < 3 * (q % 3)))


@pytest.mark.every_turn
def test_compiles_by_nvrtc():
    compile_by_nvrtc([score_mod(f) for f, _, _ in CASES.values()] + [mask_mod(lambda b, h, q, k: q >= k)])
