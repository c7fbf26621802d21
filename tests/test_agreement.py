"""How the tests' own bounds tell many numbers from few."""

import agreement
import numpy as np
import pytest


def test_random_numbers_all_count():
    x = np.random.default_rng(0).normal(size=(40, 100))
    assert agreement._numbers(x) == pytest.approx(4000, rel=0.1)
    assert agreement._numbers(1e-30 * x) == pytest.approx(agreement._numbers(x))


def test_those_that_are_outweighed_do_not():
    x = np.random.default_rng(0).normal(size=1000)
    x[500] = 1000
    assert agreement._numbers(x) < 4
    x = np.zeros(1000)
    x[:10] = 1
    assert agreement._numbers(x) == pytest.approx(30)


def test_there_are_no_more_than_there_are():
    assert agreement._numbers(np.ones(7)) == 7
    assert agreement._numbers(np.zeros(7)) == 7  # whatever they say of each other
    assert agreement._numbers(np.zeros(0)) == 0
