"""The Pallas kernels on the GPU, through the suite that every implementation runs."""

import pytest
from gpu_memory import poison
from implementation_suite import FEATURES, ImplementationSuite

from jax_flash.pallas import lowering

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


class PallasSuite(ImplementationSuite):
    implementation = "pallas"
    head_dims = (64, 96, 128, 256)
    features = FEATURES

    def before_run(self, nbytes):
        poison(nbytes)


class TestPallas(PallasSuite):
    """By Mosaic GPU on Hopper, by Triton elsewhere."""

    @classmethod
    def cases(cls):
        """Those without features, which Triton takes in any case, and whose compilation is slow."""
        return [case for case in super().cases() if case.category != "feature"]


class TestPallasByTriton(PallasSuite):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def by_triton(cls):
        with lowering.only(lowering.TRITON):
            yield
