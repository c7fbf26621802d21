import itertools

import numpy as np
import pytest

from jax_flash._spec import AttentionSpec, Sizes
from jax_flash.cuda.window import Window, binding_window


def visible(window, T, S):
    i = np.arange(T)[:, None] + S - T
    j = np.arange(S)[None]
    seen = np.ones((T, S), bool)
    if window.left is not None:
        seen &= j >= i - window.left
    if window.right is not None:
        seen &= j <= i + window.right
    return seen


@pytest.mark.parametrize("T,S", [(1, 1), (5, 5), (3, 8), (8, 3)])
def test_hides_the_same_keys_and_names_only_sides_that_bind(T, S):
    sides = [None, -(2**31), -20, -4, -1, 0, 1, 2, 4, 7, 9, 2**31 - 1]
    n = Sizes(B=1, T=T, S=S, N=1, K=1, H=8, V=8)
    for left, right in itertools.product(sides, sides):
        got = binding_window(AttentionSpec(1.0, left, right), n)
        np.testing.assert_array_equal(visible(got, T, S), visible(Window(left, right), T, S))
        for side, alone in (("left", Window(left, None)), ("right", Window(None, right))):
            assert (getattr(got, side) is None) == visible(alone, T, S).all()
            assert getattr(got, side) is None or abs(getattr(got, side)) <= max(T, S)
