"""benchmarks/mosaic_registers.py reads what ptxas says, by itself and within nvJitLink."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "mosaic_registers.py"

BY_PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'forward_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for forward_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
ptxas info    : Function properties for backward_mosaic_gpu_kernel
    40 bytes stack frame, 36 bytes spill stores, 52 bytes spill loads
"""

BY_NVJITLINK = """
ptxas info    : (C7504) Potential Performance Loss: 'setmaxnreg' ignored to maintain compatibility
ptxas info    : wgmma.mma_async instructions are serialized for the function 'forward_mosaic_gpu_kernel'
ptxas info    : Function properties for forward_mosaic_gpu_kernel
ptxas         .     176 bytes stack frame, 420 bytes spill stores, 404 bytes spill loads
"""


@pytest.fixture(scope="module")
def script():
    specification = importlib.util.spec_from_file_location("mosaic_registers", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def test_kernels_by_ptxas(script):
    assert script.kernels(BY_PTXAS) == [
        {"kernel": "forward", "spilled_bytes": 0, "serialised": False},
        {"kernel": "backward", "spilled_bytes": 52, "serialised": False},
    ]


def test_kernels_by_nvjitlink(script):
    assert script.kernels(BY_NVJITLINK) == [{"kernel": "forward", "spilled_bytes": 420, "serialised": True}]
