"""The Pallas kernels on the GPU, through the suite that every implementation runs."""

from implementation_suite import ImplementationSuite
from test_cuda import poison


class TestPallas(ImplementationSuite):
    implementation = "pallas"
    head_dims = (64, 96, 128, 256)
    features = ("value_head_dim", "deterministic")

    def before_run(self, nbytes):
        poison(nbytes)
