"""What every result of a GPU benchmark records about its run, and how figures are printed."""

import datetime
import importlib.metadata
import json
import subprocess
from pathlib import Path

import contenders
import jax
import jax.numpy as jnp
import jaxlib
import timing
from measured_commit import measured_commit


def environment() -> dict:
    """The commit, the device and the versions that figures belong to."""
    return {
        "commit": measured_commit(),
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "driver": _driver(),
        "versions": {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "cuda": _version("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
            **contenders.versions(),
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "timing": timing.method(),
    }


def _version(*distributions: str) -> str | None:
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _driver() -> str | None:
    if jax.default_backend() != "gpu":
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return lines[0] if lines else None


def product_ceiling(dtype: str) -> float | None:
    """TFLOP/s of a large matrix product, in the same run: what the tensor cores give at most. GPU only."""
    if jax.default_backend() != "gpu":
        return None
    n = 8192
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.dtype(dtype)) for i in (0, 1))
    return 2 * n**3 / timing.milliseconds(jnp.matmul, a, b) / 1e9


def heading(result: dict) -> str:
    """The device, its ceiling if it was measured, and the versions of `result`, on one line."""
    ceiling = f", 8192³ product {result['ceiling']:.0f} TFLOP/s" if result.get("ceiling") else ""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    return f"{result['device']}{ceiling}; {versions}"


def error(exception: Exception) -> str:
    """The text of a row without figures."""
    return f"{type(exception).__name__}: {exception}"[:300]


def rate(value: float | None) -> str:
    """TFLOP/s in a table's cell."""
    return "-" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def earlier_rows(path: Path, result: dict) -> list[dict]:
    """Rows of the file at `path`, if there is one, which `result` is to be added to.

    Raises ValueError where they come from other conditions than `result`'s.
    """
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())
    for key in result.keys() - {"date", "ceiling", "rows"}:
        if earlier.get(key) != result[key]:
            raise ValueError(f"{path} can't be added to: its {key} is {earlier.get(key)}, not {result[key]}")
    return earlier["rows"]


def other_rows(path: Path | None, device: str) -> list[dict]:
    """What another program measured on this kind of device, from its file; nothing without a path.

    Raises ValueError where it measured another kind.
    """
    if path is None:
        return []
    theirs = json.loads(path.read_text())
    if theirs["device"] != device:
        raise ValueError(f"{path} is of {theirs['device']}, and this device is {device}")
    return theirs["rows"]


def write(result: dict, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
