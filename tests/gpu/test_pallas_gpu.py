"""The Pallas kernels on the GPU, through the suite that every implementation runs."""

import jax
import pytest
from gpu_memory import poison
from implementation_suite import FEATURES, ImplementationSuite
from nonfinite_suite import NonFiniteSuite

from jax_flash.pallas import lowering
from jax_flash.pallas.mosaic import tiles as mosaic_tiles

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


class TestPallas(ImplementationSuite):
    """By Mosaic GPU on Hopper, by Triton elsewhere."""

    implementation = "pallas"
    head_dims = (64, 80, 96, 128, 256)  # every swizzle of shared memory
    features = FEATURES

    def before_run(self, nbytes):
        poison(nbytes)


class TestPallasByTriton(TestPallas):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def by_triton(cls):
        with lowering.only(lowering.TRITON):
            yield


class TestPallasNonFiniteByTriton(NonFiniteSuite):
    implementation = "pallas"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def by_triton(cls):
        with lowering.only(lowering.TRITON):
            yield


class TestPallasNonFiniteOfManyTilesByTriton(TestPallasNonFiniteByTriton):
    """In float16, whose rounding hides less of a difference in float32."""

    dtype = "float16"
    sizes = dict(T=300, S=410, N=4, K=2, H=128)  # noqa: RUF012


class TestPallasTogether(TestPallas):
    """With one kernel for all gradients however few keys there are, on Hopper."""

    head_dims = (128,)

    @classmethod
    def cases(cls):
        return [case for case in super().cases() if case.category != "feature"]  # Triton's

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def together(cls):
        jax.clear_caches()  # which don't know of the number of keys
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mosaic_tiles, "KEYS_TO_SUM_TOGETHER", 0)
            yield
        jax.clear_caches()
