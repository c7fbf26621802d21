"""The Pallas kernels on the GPU, through the suite that every implementation runs."""

import pytest
from gpu_memory import poison
from implementation_suite import FEATURES, ImplementationSuite

from jax_flash.pallas import lowering

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


class TestPallas(ImplementationSuite):
    """By Mosaic GPU on Hopper, by Triton elsewhere."""

    implementation = "pallas"
    head_dims = (64, 96, 128, 256)
    features = FEATURES

    def before_run(self, nbytes):
        poison(nbytes)


class TestPallasByTriton(TestPallas):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def by_triton(cls):
        with lowering.only(lowering.TRITON):
            yield
