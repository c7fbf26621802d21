"""benchmarks/compile_ahead.py: a ring sends beside its kernels. Needs JAX's CUDA plugin, and no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("way", ("ring, zigzag", "Ulysses"))
def test_prints_the_order_of_kernels_and_transfers(way, tmp_path):
    pytest.importorskip("jax_cuda13_plugin")
    script = Path(__file__).parents[2] / "benchmarks" / "compile_ahead.py"
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_dump_to={tmp_path}"
    command = [sys.executable, str(script), "--devices", "4", "--tokens", "8192", "--way", way]
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    memory, *thunks = done.stdout.splitlines()
    assert "GiB beside arguments and results" in memory
    kinds = [line.split(": ")[1].split()[0] for line in thunks if ": k" in line]
    if way == "Ulysses":
        assert kinds.count("kAllToAll") == 4
        return
    # The transfer begins before the step's kernel; it is awaited behind it.
    start, call, end = (kinds.index(kind) for kind in ("kAsyncStart", "kCustomCall", "kAsyncDone"))
    assert start < call < end and kinds[start + 1] == "kCollectivePermute"
