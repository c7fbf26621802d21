"""The tests that need a GPU, without one."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

GPU_TESTS = Path(__file__).parents[1] / "gpu"


def test_each_module_is_imported_alone():
    """pytest leaves them out where there is no GPU, and puts other folders of tests on the path."""
    modules = sorted(path.stem for path in GPU_TESTS.glob("test_*.py"))
    paths = [str(GPU_TESTS), str(GPU_TESTS.parent / "support")]
    program = (
        f"import importlib, sys; sys.path[:0] = {paths}\nfor name in {modules}: importlib.import_module(name)"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300
    )
    assert modules and result.returncode == 0, result.stderr


def test_a_run_is_complete_if_all_its_tests_ran():
    """Not if a signal ended it, which pytest may call an error of its own, or a file was not collected."""
    spec = importlib.util.spec_from_file_location("gpu_conftest", GPU_TESTS / "conftest.py")
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    assert conftest._is_complete(pytest.ExitCode.OK) and conftest._is_complete(pytest.ExitCode.TESTS_FAILED)
    assert not conftest._is_complete(pytest.ExitCode.INTERRUPTED)
    assert not conftest._is_complete(pytest.ExitCode.INTERNAL_ERROR)
    conftest.pytest_collectreport(SimpleNamespace(failed=True, nodeid="tests/gpu/test_cuda_gpu.py"))
    assert not conftest._is_complete(pytest.ExitCode.TESTS_FAILED)
