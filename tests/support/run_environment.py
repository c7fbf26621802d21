"""What tests ran, and on what, for the summaries that they leave behind."""

import datetime
import platform
import subprocess
import sys
from pathlib import Path

import jax
import jaxlib

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from measured_commit import measured_commit

from jax_flash.cuda.compile import NvrtcNotFoundError, nvrtc_version


def environment(device: jax.Device) -> dict[str, str]:
    """The commit, `device`, and the versions of everything that what ran there depends on."""
    on_gpu = {"driver": _driver(), "nvrtc": _nvrtc()} if device.platform == "gpu" else {}
    return {
        "commit": measured_commit(),
        "device": device.device_kind,
        **on_gpu,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        driver = []
    return driver[0] if driver else "unknown"


def _nvrtc() -> str:
    try:
        return ".".join(map(str, nvrtc_version()))
    except NvrtcNotFoundError:
        return "not installed"
