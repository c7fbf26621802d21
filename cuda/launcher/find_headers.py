"""Prints the include folders of XLA's FFI and of the CUDA driver API, for CMake (`;` between them)."""

import importlib.util
import pathlib
import sys


def find(package: str, header: str) -> str:
    """The folder that `header` is in, anywhere in the wheels of `package`."""
    spec = importlib.util.find_spec(package)
    for root in spec.submodule_search_locations or () if spec else ():
        for found in sorted(pathlib.Path(root).glob(f"**/include/{header}")):
            return str(found).removesuffix(f"/{header}")
    sys.exit(f"{header} was not found: the Python environment of the build needs the package that has it")


print(find("jaxlib", "xla/ffi/api/ffi.h"), find("nvidia", "cuda.h"), sep=";", end="")
