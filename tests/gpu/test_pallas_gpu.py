"""The Pallas kernels on the GPU, through the suite that every implementation runs."""

import pytest
from gpu_memory import poison
from implementation_suite import ImplementationSuite

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


class TestPallas(ImplementationSuite):
    implementation = "pallas"
    head_dims = (64, 96, 128, 256)
    features = ("value_head_dim", "deterministic")

    def before_run(self, nbytes):
        poison(nbytes)
