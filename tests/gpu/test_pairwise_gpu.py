"""Every pair of values of all factors of a call, on the GPU."""

import pytest
from gpu_memory import poison
from pairwise_suite import PairwiseSuite

LENGTHS = ((333, 333), (129, 517), (517, 129), (1, 333), (333, 1))


class TestCudaPairwise(PairwiseSuite):
    implementation = "cuda"
    lengths = LENGTHS
    head_dims = (64, 80, 96, 128, 160, 192, 256, 40, 100)
    value_head_dim = 48

    def before_run(self, nbytes):
        poison(nbytes)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
class TestPallasPairwise(PairwiseSuite):
    implementation = "pallas"
    lengths = LENGTHS
    head_dims = (64, 96, 128, 256)
    value_head_dim = 48

    def before_run(self, nbytes):
        poison(nbytes)
