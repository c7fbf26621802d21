import pytest
from kernel_emulator import KernelEmulator


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    return KernelEmulator(tmp_path_factory.mktemp("emulator"))
