import os

import pytest
from kernel_emulator import KernelEmulator


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulator")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return KernelEmulator(folder)
    built = tmp_path_factory.getbasetemp().parent / "emulated_kernels"  # of all workers
    built.mkdir(exist_ok=True)
    return KernelEmulator(folder, built)
