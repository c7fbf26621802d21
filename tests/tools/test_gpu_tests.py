"""The tests that need a GPU, without one."""

import os
import subprocess
import sys
from pathlib import Path

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
