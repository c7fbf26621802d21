"""`python -m jax_flash`: the report, on machines that have everything and on those that lack something."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

import jax_flash
from jax_flash import __main__ as main
from jax_flash import _device
from jax_flash.cuda import cache
from jax_flash.cuda.compile import NvrtcNotFoundError, nvrtc_version


def run(**environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "jax_flash"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def test_report(tmp_path):
    done = run(JAX_PLATFORMS="cpu", JAX_FLASH_LIBCUDA="libno-such.so", JAX_FLASH_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"jax_flash {jax_flash.__version__}"
    assert f"jax {jax.__version__}, jaxlib" in lines[2]
    assert lines[3] == "NVRTC     {}.{}".format(*nvrtc_version())
    assert lines[4].startswith("driver    none: there is no CUDA driver: libno-such.so")
    assert lines[5] == "devices   1 × cpu (cpu)"
    assert lines[7].startswith("  cuda    does not run: it needs a CUDA GPU")
    assert lines[9].startswith("  xla     runs: ")
    assert lines[10] == "  implementation=None picks xla"
    assert lines[11] == f"cache     {tmp_path}: 0 compiled kernels, 0 bytes"


def test_report_of_a_platform_that_cannot_start():
    done = run(JAX_PLATFORMS="no_such_platform")
    assert done.returncode == 0, done.stderr
    assert "devices   JAX found none: " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("cache     ")


def test_without_nvrtc_the_report_names_the_extra(monkeypatch):
    def missing():
        raise NvrtcNotFoundError("pip install 'jax_flash[cuda13]'")

    monkeypatch.setattr(main, "nvrtc_version", missing)
    assert "NVRTC     none: pip install 'jax_flash[cuda13]'" in list(main.report())


def test_equal_devices_share_a_line(monkeypatch):
    monkeypatch.setattr(main, "_described", lambda device: _device.H100)
    devices = [line for line in main.report() if line.startswith("devices")]
    count = len(jax.local_devices())
    assert devices == [f"devices   {count} × NVIDIA H100 (cuda, sm_90a, 132 multiprocessors)"]


def test_cache_line(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path))
    cache.write("key", b"content")
    size = cache.usage()[1]
    assert list(main.report())[-1] == f"cache     {tmp_path}: 1 compiled kernels, {size} bytes"


def test_no_home_folder(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache, "folder", no_home)
    assert list(main.report())[-1].startswith("cache     none: Could not determine home directory.")


@pytest.mark.parametrize("platform, line", [("tpu", "TPU v9 (tpu)"), ("cpu", "cpu (cpu)")])
def test_other_platforms_have_no_architecture(platform, line):
    kind = "TPU v9" if platform == "tpu" else "cpu"
    assert main._device_line(_device.Device(platform, kind)) == line


@pytest.mark.parametrize("arguments", [["-m", "jax_flash"], ["-c", "import jax_flash.flax"]], ids=" ".join)
def test_a_source_checkout_that_shadows_the_installed_package(tmp_path, arguments):
    """Python finds the package in the current folder, where nothing has built its host module."""
    source = pathlib.Path(jax_flash.__file__).parent
    ignored = shutil.ignore_patterns("_launcher*.so", "_launcher*.pyd", "__pycache__")
    shutil.copytree(source, tmp_path / "jax_flash", ignore=ignored)
    done = subprocess.run(
        [sys.executable, "-S", *arguments],  # -S: without an editable install's own finder
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: jax_flash was imported from {tmp_path / 'jax_flash'}, which lacks the compiled module "
        "jax_flash.cuda._launcher. If that is a source checkout, either work in another folder, where Python "
        "finds the installed package, or build the module in place with `pip install -e .`."
    )
