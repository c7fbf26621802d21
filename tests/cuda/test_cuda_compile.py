"""Compilation by NVRTC, which needs no GPU."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import threading

import pytest

from jax_flash.cuda import cache, compile
from jax_flash.cuda.compile import CompileError, NvrtcNotFoundError, compile_kernel
from jax_flash.cuda.launch_plan import Kernel
from jax_flash.cuda.parameters import struct

pytestmark = pytest.mark.every_turn

SOURCE = """
#include "scale.cuh"
#include "parameters.cuh"
extern "C" __global__ void multiply(Parameters of_call) { of_call.x[threadIdx.x] *= SCALE * factor; }
"""
PARAMETERS = struct("Parameters", x="float*")


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder of one kernel that includes a header, and an empty disk cache."""
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile, "_compiled", {})
    folder = tmp_path / "kernels"
    (folder / "sm90").mkdir(parents=True)
    (folder / "sm90" / "multiply.cu").write_text(SOURCE)
    (folder / "scale.cuh").write_text("constexpr float factor = 2;")
    (folder / "ptx").mkdir()
    shutil.copy(compile.kernels_folder() / "ptx" / "types.cuh", folder / "ptx")
    return folder


@pytest.fixture
def compilations(monkeypatch):
    """The kernels that the compiler is given from here on."""
    seen = []
    real = compile._compile

    def noted(kernel, folder):
        seen.append(kernel)
        return real(kernel, folder)

    monkeypatch.setattr(compile, "_compile", noted)
    return seen


def make_kernel(scale: float | str = 3.0, arch: str = "sm_90a") -> Kernel:
    return Kernel("sm90/multiply.cu", "multiply", arch, (("SCALE", scale),), PARAMETERS)


def forget_this_process(monkeypatch):
    monkeypatch.setattr(compile, "_compiled", {})


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a"])
def test_compiles_for_each_architecture(sources, arch):
    compiled = compile_kernel(make_kernel(arch=arch), sources)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert f"Compiling entry function 'multiply' for '{arch}'" in compiled.log
    assert "0 bytes spill stores, 0 bytes spill loads" in compiled.log
    assert "registers" in compiled.log


def test_a_process_compiles_a_kernel_once(sources, compilations):
    assert compile_kernel(make_kernel(), sources) is compile_kernel(make_kernel(), sources)
    assert compilations == [make_kernel()]


def test_threads_that_want_the_same_kernel_compile_it_once(sources, compilations):
    threads = [threading.Thread(target=compile_kernel, args=(make_kernel(), sources)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compilations == [make_kernel()]


def test_the_disk_cache_gives_the_same(sources, compilations, monkeypatch):
    first = compile_kernel(make_kernel(), sources)
    forget_this_process(monkeypatch)
    assert compile_kernel(make_kernel(), sources) == first
    assert len(compilations) == 1
    assert [path.name.split("-")[:2] for path in cache.folder().glob("*.kernel")] == [["multiply", "sm_90a"]]


@pytest.mark.parametrize("change", ["define", "parameters", "header", "source", "options", "NVRTC", "build"])
def test_whatever_changes_the_code_is_compiled_anew(sources, compilations, monkeypatch, change):
    compile_kernel(make_kernel(), sources)
    forget_this_process(monkeypatch)
    kernel = make_kernel()
    match change:
        case "define":
            kernel = make_kernel(scale=4.0)
        case "parameters":
            kernel = dataclasses.replace(kernel, parameters=struct("Parameters", x="float*", n="int32_t"))
        case "header":
            (sources / "scale.cuh").write_text("constexpr float factor = 5;")
        case "source":
            (sources / "sm90" / "multiply.cu").write_text(SOURCE + "// more")
        case "options":
            monkeypatch.setattr(compile, "OPTIONS", (*compile.OPTIONS, "--use_fast_math"))
        case "NVRTC":
            monkeypatch.setattr(compile, "nvrtc_version", lambda: (99, 0))
        case "build":
            monkeypatch.setattr(compile, "_nvrtc_build", lambda: "13.0.88")
    compile_kernel(kernel, sources)
    assert len(compilations) == 2
    assert cache.usage()[0] == 2


def test_a_damaged_entry_is_compiled_again(sources, compilations, monkeypatch):
    first = compile_kernel(make_kernel(), sources)
    (entry,) = cache.folder().glob("*.kernel")
    entry.write_bytes(entry.read_bytes()[:100])
    forget_this_process(monkeypatch)
    assert compile_kernel(make_kernel(), sources).cubin == first.cubin
    assert len(compilations) == 2


def test_a_read_only_cache_folder_warns_and_compiles(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_warned", False)
    (tmp_path / "cache").write_text("no folder can be made here")
    with pytest.warns(RuntimeWarning, match="can't keep compiled kernels on disk"):
        assert compile_kernel(make_kernel(), sources).cubin


def test_of_processes_that_want_the_same_kernel_at_once_one_compiles_it(sources):
    program = """if True:
        import pathlib, sys
        from jax_flash.cuda import compile
        from jax_flash.cuda.launch_plan import Kernel
        from jax_flash.cuda.parameters import Struct
        real = compile._compile
        compile._compile = lambda *of_call: (print("compiles"), real(*of_call))[1]
        print("ready", flush=True)
        sys.stdin.readline()
        parameters = Struct("Parameters", (("x", "float*"),))
        kernel = Kernel("sm90/multiply.cu", "multiply", "sm_90a", (("SCALE", 3.0),), parameters)
        print(len(compile.compile_kernel(kernel, pathlib.Path(sys.argv[1])).cubin))
    """
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([sys.executable, "-c", program, sources], stdin=pipe, stdout=pipe, text=True)
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    lines = [line for process in processes for line in process.communicate()[0].split()]
    assert [process.returncode for process in processes] == [0, 0, 0]
    size = str(len(compile_kernel(make_kernel(), sources).cubin))
    assert sorted(lines) == sorted(["compiles", size, size, size])
    assert cache.usage()[0] == 1


def test_code_of_sources_that_changed_meanwhile_is_not_kept(sources, monkeypatch):
    real = compile._compile

    def edited(kernel, folder):
        (sources / "scale.cuh").write_text("constexpr float factor = 5;")
        return real(kernel, folder)

    monkeypatch.setattr(compile, "_compile", edited)
    assert compile_kernel(make_kernel(), sources).cubin
    assert cache.usage()[0] == 0


def test_a_child_process_has_locks_of_its_own(sources):
    """One that the parent held when it forked, nobody would release in the child."""
    program = """if True:
        import os, pathlib, sys
        from jax_flash.cuda import compile
        from jax_flash.cuda.launch_plan import Kernel
        from jax_flash.cuda.parameters import Struct
        parameters = Struct("Parameters", (("x", "float*"),))
        kernel = Kernel("sm90/multiply.cu", "multiply", "sm_90a", (("SCALE", 3.0),), parameters)
        folder = pathlib.Path(sys.argv[1])
        compile._locks[kernel, folder].acquire()
        compile._guard.acquire()
        child = os.fork()
        if child == 0:
            os._exit(0 if compile.compile_kernel(kernel, folder).cubin else 1)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    assert (
        subprocess.run([sys.executable, "-c", program, sources], env=environment, timeout=120).returncode == 0
    )


def test_a_kernel_that_does_not_compile_shows_the_log_and_the_kernel(sources):
    with pytest.raises(CompileError) as raised:
        compile_kernel(make_kernel(scale="unheard_of"), sources)
    message = str(raised.value)
    assert "multiply of sm90/multiply.cu for sm_90a (SCALE=unheard_of)" in message
    assert 'sm90/multiply.cu(4): error: identifier "unheard_of" is undefined' in message
    assert cache.usage() == (0, 0)


@pytest.mark.parametrize("missing", ["bindings", "library"])
def test_missing_nvrtc_names_the_extra(sources, monkeypatch, missing):
    compile._nvrtc.cache_clear()
    if missing == "bindings":
        monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    else:
        from cuda.bindings import nvrtc

        def no_library():
            raise RuntimeError("libnvrtc.so was not found")

        monkeypatch.setattr(nvrtc, "nvrtcVersion", no_library)
    with pytest.raises(NvrtcNotFoundError, match=r"pip install 'jax_flash\[cuda13\]'"):
        compile_kernel(make_kernel(), sources)


def test_nvrtc_version():
    major, minor = compile.nvrtc_version()
    assert major >= 12 and minor >= 0


def test_the_package_finds_its_kernels():
    assert (compile.kernels_folder() / "sm90" / "forward" / "forward.cu").is_file()


def test_kernels_have_no_generic_lambdas():
    """NVRTC 13.0 refuses them, and newer ones, which the other tests have, don't."""
    for path in compile.kernels_folder().rglob("*.cu*"):
        found = re.search(r"\]\s*\([^)]*\bauto\b", path.read_text())
        assert not found, f"{path.name}: {found}"


def test_no_driver_is_needed(sources):
    program = """if True:
        import ctypes, pathlib, sys
        from jax_flash.cuda.compile import compile_kernel
        from jax_flash.cuda.launch_plan import Kernel
        from jax_flash.cuda.parameters import Struct
        parameters = Struct("Parameters", (("x", "float*"),))
        kernel = Kernel("sm90/multiply.cu", "multiply", "sm_90a", (("SCALE", 3),), parameters)
        compile_kernel(kernel, pathlib.Path(sys.argv[1]))
        print("libcuda.so" in pathlib.Path("/proc/self/maps").read_text())
    """
    command = [sys.executable, "-c", program, sources]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
