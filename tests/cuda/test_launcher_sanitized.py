"""The launcher under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer.

A program of C++ alone (tests/support/launcher_stress.cc) runs it against a driver that runs nothing.
"""

import os
import pathlib
import subprocess
import sys

import pytest

SUPPORT = pathlib.Path(__file__).parents[1] / "support"
LAUNCHER = SUPPORT.parents[1] / "cuda" / "launcher"
PROGRAM = [
    SUPPORT / "launcher_stress.cc",
    SUPPORT / "fake_xla.cc",
    *(LAUNCHER / name for name in ("driver.cc", "handlers.cc", "plan.cc")),
]


def compiled(sources, output: pathlib.Path, *flags: str) -> pathlib.Path:
    finder = [sys.executable, LAUNCHER / "find_headers.py"]
    found = subprocess.run(finder, capture_output=True, text=True, check=True).stdout
    headers = [flag for path in found.split(";") for flag in ("-isystem", path)]
    command = ["g++", "-std=c++17", "-O1", "-g", "-fPIC", f"-I{LAUNCHER}", *headers, *flags]
    subprocess.run([*command, *sources, "-o", output, "-ldl", "-pthread"], check=True)
    return output


def supported(sanitizer: str, folder: pathlib.Path) -> bool:
    """Whether the compiler has the sanitizer's library."""
    source = folder / "empty.cc"
    source.write_text("int main() {}")
    command = ["g++", f"-fsanitize={sanitizer}", source, "-o", folder / "empty"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_many_threads_and_wrong_plans(sanitizer, tmp_path):
    if not supported(sanitizer, tmp_path):
        pytest.skip(f"g++ has no library for -fsanitize={sanitizer}")
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    driver = compiled([SUPPORT / "fake_libcuda.cc"], tmp_path / "libfake.so", "-shared", *flags)
    program = compiled([*PROGRAM, driver], tmp_path / "stress", *flags, f"-Wl,-rpath,{tmp_path}")
    environment = os.environ | {
        "JAX_FLASH_LIBCUDA": str(driver),
        "TSAN_OPTIONS": "halt_on_error=1",
        "ASAN_OPTIONS": "detect_leaks=1",
    }
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
