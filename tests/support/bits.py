"""Arrays that are the same bit by bit. NumPy compares 16-bit floats that it doesn't know ten times slower."""

import jax
import numpy as np


def bits(x) -> np.ndarray:
    """An array's elements as unsigned integers."""
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def assert_same_bits(first, second) -> None:
    """Of two trees of arrays."""
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(bits(x), bits(y)), first, second)
