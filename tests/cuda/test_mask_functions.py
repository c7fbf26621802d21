"""Masks of jax_flash.masks as C++, against their definitions."""

import numpy as np
import pytest
from function_harness import Compiled, compile_by_nvrtc, mask_mod
from mask_cases import CASES, B, N


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return Compiled(tmp_path_factory.mktemp("masks"), [mask_mod(case.mask) for case in CASES.values()])


@pytest.mark.parametrize("name", CASES)
def test_values(compiled, name):
    case = CASES[name]
    indices = np.indices((B, N, case.T, case.S)).reshape(4, -1)
    no_score = np.zeros(indices.shape[1], np.float32)
    value, _, _ = compiled.run(list(CASES).index(name), (no_score, *indices))
    np.testing.assert_array_equal(value.astype(bool), case.expected().reshape(-1))


def test_compile_by_nvrtc():
    compile_by_nvrtc([mask_mod(case.mask) for case in CASES.values()])
