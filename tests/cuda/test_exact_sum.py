"""Exact sums of floats: what the kernels add, and the float that is made of it."""

import ctypes
import subprocess
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from function_harness import COMPILE, EMULATOR

from jax_flash.cuda import exact_sum
from jax_flash.cuda.compile import kernels_folder

SOURCE = """
#include "emulator.h"
#include "common/exact_sum.cuh"
extern "C" void add(const float* terms, int count, ExactSum* sum) {
    for (int i = 0; i < count; ++i) sum->add(terms[i]);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exact_sum")
    (folder / "sum.cc").write_text(SOURCE)
    includes = (f"-I{EMULATOR}", f"-I{kernels_folder()}")
    subprocess.run([*COMPILE, *includes, "sum.cc", "-o", "sum.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "sum.so"))


def words_of(library, terms) -> np.ndarray:
    terms = np.ascontiguousarray(terms, np.float32)
    words = np.zeros(exact_sum.shape_of_sums(()), np.uint32)
    library.add(terms.ctypes.data_as(ctypes.c_void_p), len(terms), words.ctypes.data_as(ctypes.c_void_p))
    return words


def float_of(words) -> np.ndarray:
    """As a program has it: the compiler may change what it does."""
    found = np.asarray(jax.jit(exact_sum.to_float32)(jnp.asarray(words)))
    np.testing.assert_array_equal(found, np.asarray(exact_sum.to_float32(jnp.asarray(words))))
    return found


def total(terms) -> float:
    """The sum of floats, rounded once."""
    exact = sum((Fraction(float(x)) for x in terms), Fraction(0))
    return float(np.float32(float(exact)))


def drawn(kind, generator) -> np.ndarray:
    count = 3000
    terms = generator.standard_normal(count)
    if kind == "of all magnitudes":
        terms *= np.exp2(generator.integers(-120, 100, count))
    elif kind == "that cancel":
        terms *= np.exp2(generator.integers(-20, 20, count))
        terms = np.concatenate([terms, -terms[1:]])
    elif kind == "of one sign, small":
        terms = -np.abs(terms) * 2.0**-125
    return generator.permutation(terms).astype(np.float32)


@pytest.mark.parametrize("kind", ("normal", "of all magnitudes", "that cancel", "of one sign, small"))
def test_sums_are_rounded_once_or_twice(kind, library):
    generator = np.random.default_rng(5)
    for _ in range(20):
        terms = drawn(kind, generator)
        got = float_of(words_of(library, terms))
        expected = total(terms)
        assert got.dtype == np.float32
        # Numbers near the smallest of float32 may be taken for 0.
        assert abs(got - expected) <= 2 * np.spacing(np.float32(abs(expected))) + 2.0**-126, (got, expected)


def test_the_order_does_not_matter(library):
    terms = drawn("of all magnitudes", np.random.default_rng(6))
    np.testing.assert_array_equal(words_of(library, terms), words_of(library, np.sort(terms)))


LARGEST = np.finfo(np.float32).max


@pytest.mark.parametrize(
    ("terms", "expected"),
    (
        ([], 0.0),
        ([0.0, -0.0], 0.0),
        ([1.0, -1.0], 0.0),
        ([-1.0], -1.0),
        ([-(2.0**-110), 2.0**-100, -(2.0**-100)], -(2.0**-110)),
        ([LARGEST], LARGEST),
        ([LARGEST, LARGEST], np.inf),
        ([-LARGEST, -LARGEST], -np.inf),
        ([LARGEST, LARGEST, -LARGEST], LARGEST),  # no sum of floats gives this
        ([2.0**60, 1.0, -(2.0**60)], 1.0),
        ([np.inf, 1.0], np.inf),
        ([-np.inf, np.inf], np.nan),
        ([-np.inf], -np.inf),
        ([np.nan, np.inf], np.nan),
    ),
)
def test_single_sums(terms, expected, library):
    np.testing.assert_array_equal(float_of(words_of(library, terms)), np.float32(expected))


def test_sums_of_an_array(library):
    rows = np.random.default_rng(7).standard_normal((6, 50)).astype(np.float32)
    words = np.stack([words_of(library, row) for row in rows]).reshape(*exact_sum.shape_of_sums((2, 3)))
    np.testing.assert_allclose(float_of(words), rows.reshape(2, 3, 50).astype(np.float64).sum(-1), rtol=3e-7)
