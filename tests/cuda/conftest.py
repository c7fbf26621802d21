import functools
import os

import kernel_emulator
import pytest
from exhaustive import in_part
from kernel_emulator import KernelEmulator


@pytest.fixture(scope="session", autouse=True)
def emulated_layer(tmp_path_factory):
    """Is compiled once for all emulators of all workers."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    kernel_emulator.shared_folder = base / "emulated_layer"
    yield
    kernel_emulator.shared_folder = None


@pytest.fixture(scope="session")
def emulator_that(tmp_path_factory):
    """A function that gives the emulator which seeks races, or the one that doesn't."""

    @functools.cache
    def that(seeks_races: bool) -> KernelEmulator:
        folder = tmp_path_factory.mktemp("emulator")
        if "PYTEST_XDIST_WORKER" not in os.environ:
            return KernelEmulator(folder, seeks_races=seeks_races)
        built = tmp_path_factory.getbasetemp().parent / "emulated_kernels"  # of all workers
        built.mkdir(exist_ok=True)
        return KernelEmulator(folder, built, seeks_races=seeks_races)

    return that


@pytest.fixture
def emulator(request, emulator_that):
    """Seeks races, which takes twice the time, in a third of the tests that aren't exhaustive; in all if
    JAX_FLASH_TEST_RACES is "all"."""
    is_exhaustive = request.node.get_closest_marker("exhaustive") is not None
    is_chosen = not is_exhaustive and in_part(request.node.nodeid, 0, 3)
    return emulator_that(is_chosen or os.environ.get("JAX_FLASH_TEST_RACES") == "all")
