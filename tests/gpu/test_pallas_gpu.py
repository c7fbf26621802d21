"""The Pallas kernels on the GPU, through the suite that every implementation runs."""

from gpu_memory import poison
from implementation_suite import ImplementationSuite


class TestPallas(ImplementationSuite):
    implementation = "pallas"
    head_dims = (64, 96, 128, 256)
    features = ("value_head_dim", "deterministic")

    def before_run(self, nbytes):
        poison(nbytes)
