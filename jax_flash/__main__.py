"""`python -m jax_flash`: a report on this machine, for bug reports."""

import collections
import importlib.metadata
import platform
from collections.abc import Iterator

import jax
import jax.numpy as jnp

import jax_flash
from jax_flash import _device
from jax_flash._device import Device
from jax_flash.cuda import _launcher, cache
from jax_flash.cuda.compile import NvrtcNotFoundError, nvrtc_version

_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "cuda-bindings", "flax", "numpy")

# A call as most models make it: grouped heads, causal.
_TYPICAL_QUERY = jax.ShapeDtypeStruct((1, 4096, 32, 128), jnp.bfloat16)
_TYPICAL_KEY = jax.ShapeDtypeStruct((1, 4096, 8, 128), jnp.bfloat16)


def report() -> Iterator[str]:
    """The lines of the report. What the machine lacks is a line too, never an error."""
    yield f"jax_flash {jax_flash.__version__}"
    yield f"Python    {platform.python_version()} on {platform.platform()}"
    yield f"packages  {', '.join(_versions())}"
    yield f"NVRTC     {_nvrtc()}"
    yield f"driver    {_driver()}"
    try:
        devices = collections.Counter(map(_described, jax.local_devices()))
    except RuntimeError as error:  # the chosen platform can't start
        yield f"devices   JAX found none: {error}"
    else:
        for device, count in devices.items():
            yield f"devices   {count} × {_device_line(device)}"
        yield "a causal call, query bfloat16 (1, 4096, 32, 128), key and value (1, 4096, 8, 128):"
        explanation = jax_flash.explain(_TYPICAL_QUERY, _TYPICAL_KEY, _TYPICAL_KEY, is_causal=True)
        for choice in explanation.choices:
            yield f"  {choice}"
        yield f"  implementation=None picks {explanation.automatic}"
    yield f"cache     {_cache()}"


def _versions() -> Iterator[str]:
    for package in _PACKAGES:
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _nvrtc() -> str:
    try:
        major, minor = nvrtc_version()
    except NvrtcNotFoundError as error:
        return f"none: {error}"
    return f"{major}.{minor}"


def _driver() -> str:
    try:
        major, minor = _launcher.driver_version()
    except RuntimeError as error:
        return f"none: {error}"
    return f"for CUDA up to {major}.{minor}"


def _described(device: jax.Device) -> Device:
    with jax.default_device(device):
        return _device.current()


def _device_line(device: Device) -> str:
    if device.platform != "cuda":
        return f"{device.kind} ({device.platform})"
    return f"{device.kind} (cuda, {device.arch}, {device.sm_count} multiprocessors)"


def _cache() -> str:
    try:
        folder = cache.folder()
    except RuntimeError as error:
        return f"none: {error}; JAX_FLASH_CACHE_DIR names a folder"
    entries, size = cache.usage()
    return f"{folder}: {entries} compiled kernels, {size} bytes"


if __name__ == "__main__":
    for line in report():
        print(line, flush=True)
