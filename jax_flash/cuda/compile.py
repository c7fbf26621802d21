"""Kernels compiled by NVRTC where they are needed: once a process, and once a machine.

NVRTC needs neither a driver nor a GPU, so all of this runs anywhere.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import json
import os
import threading
from pathlib import Path

from jax_flash.cuda import cache
from jax_flash.cuda.launch_plan import Kernel
from jax_flash.cuda.parameters import HEADER_NAME, header

OPTIONS = (
    "--std=c++17",
    "--generate-line-info",  # names source lines in profilers and sanitizers; the code is the same
    "--ptxas-options=--verbose",  # registers, spills and shared memory, in the log
)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Machine code of one kernel, and what the compiler said of it."""

    cubin: bytes
    log: str  # NVRTC's and ptxas's, for each entry point its registers, spills and shared memory


class CompileError(RuntimeError):
    """A kernel that does not compile. The message has the kernel, its defines and the compiler's log."""


class NvrtcNotFoundError(ImportError):
    """NVRTC or its Python bindings are not installed. The message names the extra that brings them."""


def kernels_folder() -> Path:
    """Where the kernels' sources are: installed beside this module, or in the checkout it runs from."""
    installed = Path(__file__).parent / "kernels"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "cuda" / "kernels"


def nvrtc_version() -> tuple[int, int]:
    """(major, minor). Raises NvrtcNotFoundError."""
    nvrtc = _nvrtc()
    _, major, minor = nvrtc.nvrtcVersion()
    return major, minor


def compile_kernel(kernel: Kernel, folder: Path | None = None) -> Compiled:
    """Machine code of `kernel`, whose sources are under `folder` (default: `kernels_folder()`).

    Taken from this process, from the disk cache, or from the compiler, in this order. Safe to call
    from many threads and processes at once; threads that want the same kernel compile it once.

    Raises CompileError, or NvrtcNotFoundError.
    """
    folder = folder or kernels_folder()
    with _guard:
        lock = _locks[kernel, folder]
    with lock:
        if (kernel, folder) not in _compiled:
            _compiled[kernel, folder] = _from_disk_or_compiler(kernel, folder)
        return _compiled[kernel, folder]


def is_stored(kernel: Kernel) -> bool:
    """Whether the disk cache has the machine code of `kernel`."""
    return cache.read(_cache_key(kernel, kernels_folder())) is not None


def store(kernel: Kernel) -> bool:
    """Compiles `kernel` where it must, and keeps it in the disk cache; whether it is there then.

    Raises CompileError, or NvrtcNotFoundError.
    """
    compiled = compile_kernel(kernel)
    if not is_stored(kernel):  # compiled by this process for another folder, or the folder was cleared since
        cache.write(_cache_key(kernel, kernels_folder()), _pack(compiled))
    return is_stored(kernel)


_guard = threading.Lock()
_locks: dict[tuple[Kernel, Path], threading.Lock] = collections.defaultdict(threading.Lock)
_compiled: dict[tuple[Kernel, Path], Compiled] = {}


def _renew_locks() -> None:
    """In a child process: a thread of the parent may have held a lock, and is not there to release it."""
    global _guard
    _guard = threading.Lock()
    _locks.clear()


os.register_at_fork(after_in_child=_renew_locks)


def generated_headers(kernel: Kernel) -> dict[str, str]:
    """Headers that a kernel includes and no file has, by the names by which it does."""
    return {HEADER_NAME: header(kernel.parameters), **dict(kernel.headers)}


def describe(kernel: Kernel) -> str:
    """`kernel` on one line, for errors and reports."""
    defines = " ".join(f"{name}={value}" for name, value in kernel.defines)
    return f"{kernel.entry} of {kernel.source} for {kernel.arch} ({defines})"


def _from_disk_or_compiler(kernel: Kernel, folder: Path) -> Compiled:
    key = _cache_key(kernel, folder)
    entry = cache.read(key)
    if entry is not None:
        return _unpack(entry)
    with cache.exclusive(key):
        entry = cache.read(key)  # another process may have made it meanwhile
        if entry is not None:
            return _unpack(entry)
        compiled = _compile(kernel, folder)
        # The compiler read the sources after they were hashed. If they changed, this is the code of others.
        if _cache_key(kernel, folder) == key:
            cache.write(key, _pack(compiled))
        return compiled


def _cache_key(kernel: Kernel, folder: Path) -> str:
    """Everything that the machine code depends on, and in front what a person looks for.

    All sources count, as any may be included: a change to one compiles every kernel again.
    """
    digest = hashlib.sha256()
    identity = [
        dataclasses.astuple(kernel),
        generated_headers(kernel),
        OPTIONS,
        nvrtc_version(),
        _nvrtc_build(),
    ]
    digest.update(json.dumps(identity).encode())
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"\n{path.relative_to(folder)} {len(content)}\n".encode())
        digest.update(content)
    return f"{kernel.entry}-{kernel.arch}-{digest.hexdigest()[:32]}"


def _pack(compiled: Compiled) -> bytes:
    log = compiled.log.encode()
    return len(log).to_bytes(8, "little") + log + compiled.cubin


def _unpack(entry: bytes) -> Compiled:
    end = 8 + int.from_bytes(entry[:8], "little")
    return Compiled(cubin=entry[end:], log=entry[8:end].decode())


def _compile(kernel: Kernel, folder: Path) -> Compiled:
    nvrtc = _nvrtc()
    path = folder / kernel.source
    options = [
        *OPTIONS,
        f"--gpu-architecture={kernel.arch}",
        f"--include-path={folder}",  # sources include by paths under it
        *(f"-D{name}={value}" for name, value in kernel.defines),
    ]

    def check(result, call: str):
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{call} failed with {result.name}: {describe(kernel)}\n{read_log()}")

    def read_log() -> str:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        return log.rstrip(b"\0").decode(errors="replace").strip()

    # The log names the file by its path under `folder`, which is the same on every machine.
    generated = generated_headers(kernel)
    names, headers = ([x.encode() for x in column] for column in zip(*generated.items(), strict=True))
    source = path.read_bytes(), kernel.source.encode()
    _, program = nvrtc.nvrtcCreateProgram(*source, len(names), headers, names)
    try:
        encoded = [option.encode() for option in options]
        check(nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)[0], "nvrtcCompileProgram")
        result, size = nvrtc.nvrtcGetCUBINSize(program)
        check(result, "nvrtcGetCUBINSize")
        cubin = bytearray(size)
        check(nvrtc.nvrtcGetCUBIN(program, cubin)[0], "nvrtcGetCUBIN")
        return Compiled(bytes(cubin), read_log())
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@functools.cache
def _nvrtc_build() -> str | None:
    """The full version of the wheel that brings NVRTC, as "13.0.88". NVRTC itself tells two numbers of it."""
    for distribution in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


@functools.cache
def _nvrtc():
    """The module of NVRTC's bindings, once NVRTC itself was found."""
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # no bindings; bindings that find no library
        raise NvrtcNotFoundError(
            "jax_flash compiles its CUDA kernels by NVRTC, which is not installed: "
            "pip install 'jax_flash[cuda13]' (or 'jax_flash[cuda12]' beside jax[cuda12]) brings it. "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        ) from error
    return nvrtc
