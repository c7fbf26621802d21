"""Pallas by Mosaic GPU, on the CPU: what isn't finite and isn't seen, in JAX's interpreter, and lowering."""

import contextlib

import jax.numpy as jnp
import numpy as np
import pytest
from nonfinite_suite import NonFiniteSuite
from pallas_lowering import only_lowering

from jax_flash.pallas import compat, lowering
from jax_flash.pallas.mosaic import nonfinite
from jax_flash.pallas.mosaic import tiles as mosaic_tiles

MOSAIC_CALL = "mosaic_gpu_v2"


@contextlib.contextmanager
def interpreted_by_mosaic():
    with compat.interpret(), only_lowering(lowering.MOSAIC):
        yield


@pytest.mark.skipif(not compat.mosaic_interprets(), reason="this JAX interprets no Mosaic GPU kernels")
class TestMosaicNonFinite(NonFiniteSuite):
    implementation = "pallas"
    sizes = dict(T=150, S=290, N=2, K=1, B=1, H=64)  # noqa: RUF012
    situations = ("window", "window and soft cap", "lengths", "segments alone", "packed alone")

    def environment(self):
        return interpreted_by_mosaic()


@pytest.mark.exhaustive
class TestMosaicNonFiniteCausal(TestMosaicNonFinite):
    """With queries that see nothing, and values of another head dim."""

    sizes = dict(T=300, S=210, N=2, K=1, B=1, H=64, V=96)  # noqa: RUF012
    situations = ("causal",)


@pytest.mark.exhaustive
class TestMosaicNonFiniteOfWideHeads(TestMosaicNonFinite):
    """With kernels of their own for dK and dV."""

    sizes = dict(T=130, S=150, N=2, K=2, B=1, H=256)  # noqa: RUF012


@pytest.mark.exhaustive
class TestMosaicNonFiniteTogether(TestMosaicNonFinite):
    """With one kernel for all gradients. That of dQ alone computes dQ again."""

    sizes = dict(T=150, S=290, N=2, K=1, B=1, H=128)  # noqa: RUF012
    sums_in_any_order = ("d_query",)

    @pytest.fixture(autouse=True)
    def together(self, monkeypatch):
        monkeypatch.setattr(mosaic_tiles, "KEYS_TO_SUM_TOGETHER", 0)


def test_marks_of_rows():
    x = np.zeros((2, 40, 3, 8), np.float32)
    x[0, 17, 1, 3], x[1, 0, 2, 0], x[1, 39, 0, 7] = np.nan, np.inf, -np.inf
    marks = nonfinite.marks_of_rows(jnp.asarray(x), tile_rows=64)
    assert marks.shape == (2, 3, 4)
    assert set(zip(*(index.tolist() for index in np.nonzero(np.asarray(marks))), strict=True)) == {
        (0, 1, 1),
        (1, 2, 0),
        (1, 0, 2),
    }
