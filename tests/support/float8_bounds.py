"""By how much a kernel that computes in e4m3 may differ from "xla", which keeps probabilities in float32."""

import numpy as np


def check(found, expected, query, key, value, scale=None) -> None:
    """Compares `(out, lse)`. Probabilities are rounded to 4 bits, by 2.6% of their own size in the mean.

    Tensor cores cut sums of products off some 13 bits below their largest term (docs/tuning/8-bits.md). That
    is at most the product of the rows' norms.
    """
    query_norm, key_norm = (np.linalg.norm(np.asarray(x, np.float64), axis=-1).max() for x in (query, key))
    cut = 2.0**-13 * query_norm * key_norm * (np.shape(query)[-1] ** -0.5 if scale is None else abs(scale))
    (out, lse), (right, right_lse) = (
        [np.asarray(x, np.float64) for x in results] for results in (found, expected)
    )
    nowhere = np.isneginf(right_lse)
    np.testing.assert_array_equal(np.isneginf(lse), nowhere)
    lse, right_lse = (np.where(nowhere, 0, x) for x in (lse, right_lse))
    np.testing.assert_allclose(lse, right_lse, rtol=1e-3, atol=2e-3 + cut)
    assert np.all(np.isfinite(out))
    error, size = np.linalg.norm(out - right, axis=-1), np.linalg.norm(right, axis=-1)
    largest = np.linalg.norm(np.abs(np.asarray(value, np.float64)).max(tuple(range(np.ndim(value) - 1))))
    assert np.linalg.norm(error) <= 0.035 * np.linalg.norm(size) + 1e-3 * largest * np.sqrt(error.size)
    assert np.all(error <= 0.05 * size + 0.05 * largest)
