"""Runs launch plans on a CPU: the kernels' own sources, compiled by g++ over the emulated PTX layer in
tests/support/emulator. What is emulated, and what is not, is said in tests/support/emulator/emulator.h."""

import ctypes
import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from jax_flash.cuda.compile import describe, generated_headers, kernels_folder
from jax_flash.cuda.launch_plan import ELEMENT_BYTES, Kernel, Launch, LaunchPlan, Pointer, TensorMap, Zero
from jax_flash.cuda.parameters import layout, pack

EMULATOR = Path(__file__).parent / "emulator"
# Quick to compile rather than quick: most kernels run for a fraction of a second.
COMPILE = (
    "g++",
    "-std=c++17",
    "-O1",
    "-Werror=invalid-pch",
    "-Wno-psabi",
    "-fPIC",
    "-fno-gnu-unique",
)  # each has shared memory of its own
STANDARD = "standard.h"  # the standard library's headers
EMULATED_BY = ("emulator", "copies", "races")
FOR_THIS_CPU = ("-O3", "-march=native", "-ffp-contract=off")  # joins of clocks take vector instructions
INSTRUMENT = ("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-g1")
DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "int32": np.int32,
    "uint32": np.uint32,
    "int8": np.int8,
    "uint8": np.uint8,
    "bool": np.bool_,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}


shared_folder: Path | None = None
"""Where the emulated layer is compiled once for all emulators, those of other processes too. If None, each
emulator compiles it for itself."""


class _TensorMap(ctypes.Structure):
    """`TensorMap` of tests/support/emulator/ptx/types.cuh."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * 5),
        ("strides", ctypes.c_int64 * 4),
        ("box", ctypes.c_int64 * 5),
        ("element_bytes", ctypes.c_int32),
        ("swizzle", ctypes.c_int32),
    )


class KernelEmulator:
    """Builds into `folder` what it runs, and keeps it for the next call.

    `built` is where libraries go that other processes build too; `defines` come on top of those of a plan.
    With `seeks_races` a launch in which accesses to shared memory race is an AssertionError. `edits` are of
    the kernels' sources: what to put in the place of a text that a file has once, by the file and the text.
    """

    def __init__(
        self,
        folder: Path,
        built: Path | None = None,
        *,
        seeks_races: bool = True,
        edits: Mapping[tuple[str, str], str] = MappingProxyType({}),
        **defines: int,
    ):
        self.folder = folder
        self.built = built or folder
        self.seeks_races = seeks_races
        self.edits = edits
        self.defines = defines
        self.libraries: dict[Kernel, ctypes.CDLL] = {}

    def run(
        self,
        plan: LaunchPlan,
        operands: dict[str, Any],
        seed: int,
        resident: int = 1,
        memory: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> dict[str, np.ndarray]:
        """The plan's results by name, scratch memory among them. `seed` decides the order of what the
        hardware does at once; it has room for so many `resident` CTAs. `memory` is what results hold at
        first, where it isn't NaN."""
        arrays = {}
        for buffer in (*plan.operands, *plan.results):
            arrays[buffer.name] = _aligned(buffer.shape, DTYPES[buffer.dtype])
        for buffer in plan.operands:
            arrays[buffer.name][...] = operands[buffer.name]
        for name, array in memory.items():
            arrays[name][...] = array
        for alias in plan.aliases:
            arrays[alias.result] = arrays[alias.operand]
        for step in plan.steps:
            if isinstance(step, Zero):
                arrays[step.buffer][...] = 0
            else:
                self._launch(step, arrays, seed, resident)
        return {buffer.name: arrays[buffer.name] for buffer in plan.results}

    def _launch(self, launch: Launch, arrays: dict[str, np.ndarray], seed: int, resident: int):
        assert launch.grid[1:] == (1, 1), "grids of one axis"
        parameters = _parameters(launch, arrays)
        library = self._library(launch.kernel)
        if launch.shared_bytes == 0:
            resident = 1  # static shared memory is one CTA's
        clusters = max(1, resident // launch.cluster)
        shape = (launch.grid[0], launch.cluster, clusters, launch.block)
        library.emulate(*shape, ctypes.c_uint64(seed), ctypes.c_void_p(parameters.ctypes.data))
        if self.seeks_races:
            found = library.races_found().decode().splitlines()
            if found:
                lines = "\n".join(_described(line, Path(library._name)) for line in found)
                raise AssertionError(f"races in {launch.kernel.entry}:\n{lines}")
        if count := library.take_phases_unseen():
            what = "arrivals at mbarriers whose last phase no thread has found complete"
            raise AssertionError(f"{count} {what}, in {launch.kernel.entry}")

    def _library(self, kernel: Kernel) -> ctypes.CDLL:
        if kernel not in self.libraries:
            headers = generated_headers(kernel)
            meaning = f"{describe(kernel)} {headers} {self.defines} {self.seeks_races} {self.edits}"
            name = hashlib.sha256(meaning.encode()).hexdigest()[:16]
            library = self.built / f"{name}.so"
            if not library.exists():
                self._build(kernel, headers, name, library)
            loaded = ctypes.CDLL(str(library))
            loaded.races_found.restype = ctypes.c_char_p
            if self.seeks_races:
                loaded.seek_races()
            self.libraries[kernel] = loaded
        return self.libraries[kernel]

    def _build(self, kernel: Kernel, headers: dict[str, str], name: str, library: Path):
        sources = self._sources()
        generated = self.folder / name
        generated.mkdir()
        for header_name, text in headers.items():
            (generated / header_name).write_text(text)
        named = {"ENTRY": kernel.entry, "SOURCE": kernel.source}
        defines = {**dict(kernel.defines), **self.defines, **named}
        layer = _layer(self._compile(), shared_folder or self.folder)
        command = [*self._compile(), "-include", str(layer / STANDARD), "-I.", f"-I{generated}"]
        command += [f"-D{name}={value}" for name, value in defines.items()]
        kernel_object, ready = generated / "kernel.o", generated / "kernel.so"
        subprocess.run([*command, "-c", "kernel.cc", "-o", str(kernel_object)], cwd=sources, check=True)
        # Not as -fsanitize=thread would have it linked: races.cc takes the calls that it makes.
        objects = [str(kernel_object), *(str(layer / f"{name}.o") for name in EMULATED_BY)]
        subprocess.run(["g++", "-shared", *objects, "-o", str(ready)], cwd=sources, check=True)
        ready.replace(library)  # at once, for whoever looks for it meanwhile

    def _sources(self) -> Path:
        """The folder of what is compiled: the kernels, with the emulated layer for the real one."""
        sources = self.folder / "sources"
        if not sources.exists():
            shutil.copytree(kernels_folder(), sources)
            shutil.copytree(EMULATOR, sources, dirs_exist_ok=True)
            for (file, text), other in self.edits.items():
                source = (sources / file).read_text()
                assert source.count(text) == 1, (file, text)
                (sources / file).write_text(source.replace(text, other))
        return sources

    def _compile(self) -> tuple[str, ...]:
        return (*COMPILE, *(INSTRUMENT if self.seeks_races else ()))


def _layer(compiler: tuple[str, ...], folder: Path) -> Path:
    """The folder of the compiled layer, which kernels are linked with, and of compiled standard headers.

    To compile them takes as long as several kernels. Kernels are compiled with the same flags, or g++ passes
    the headers over."""
    layer = folder / f"layer_{hashlib.sha256(repr(compiler).encode()).hexdigest()[:8]}"
    folder.mkdir(exist_ok=True)
    with (folder / "layer.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed: one process compiles, and others wait for it
        if not (layer / "complete").exists():
            shutil.copytree(kernels_folder(), layer)
            shutil.copytree(EMULATOR, layer, dirs_exist_ok=True)
            subprocess.run([*compiler, "-w", "-x", "c++-header", STANDARD], cwd=layer, check=True)
            for name in EMULATED_BY:
                command = [*COMPILE, *FOR_THIS_CPU, "-I.", "-c", f"{name}.cc"]
                subprocess.run(command, cwd=layer, check=True)
            (layer / "complete").touch()
    return layer


def _described(race: str, library: Path) -> str:
    """A line of `races_found`, with places in the sources for those in the library."""
    what, first, first_place, second, second_place = race.split("|")
    places = (_source_places(library, place) for place in (first_place, second_place))
    return "{}:\n    {}, {}\n    {}, {}".format(
        what, *(x for pair in zip((first, second), places, strict=True) for x in pair)
    )


def _source_places(library: Path, place: str) -> str:
    """File and line of an address in a library, and those of the calls that it was inlined into."""
    command = ["addr2line", "-i", "-s", "-e", str(library), hex(int(place, 16) - 1)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return " < ".join(line for line in lines if ":" in line)


def _aligned(shape: tuple[int, ...], dtype: Any, alignment: int = 256) -> np.ndarray:
    """Memory as XLA's, aligned, with NaN in it."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(size + alignment, 0xFF, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + size].view(dtype).reshape(shape)


def _parameters(launch: Launch, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The bytes of the kernel's parameter struct, aligned as one with tensor maps has to be."""
    struct = launch.kernel.parameters
    numbers = [x if isinstance(x, int | float) else None for x in launch.arguments]
    memory = _aligned((layout(struct).bytes,), np.uint8)
    memory[...] = np.frombuffer(pack(struct, numbers), np.uint8)
    for slot, argument in zip(layout(struct).slots, launch.arguments, strict=True):
        if isinstance(argument, Pointer):
            value = ctypes.c_void_p(arrays[argument.buffer].ctypes.data)
        elif isinstance(argument, TensorMap):
            assert argument.swizzle in (0, 128)
            absent = (1,) * (5 - len(argument.sizes))  # axes
            value = _TensorMap(
                arrays[argument.buffer].ctypes.data,
                (ctypes.c_int64 * 5)(*argument.sizes, *absent),
                (ctypes.c_int64 * 4)(*argument.strides, *absent),
                (ctypes.c_int64 * 5)(*argument.box, *absent),
                ELEMENT_BYTES[argument.dtype],
                argument.swizzle,
            )
        else:
            continue
        memory[slot.offset : slot.offset + ctypes.sizeof(value)] = np.frombuffer(bytes(value), np.uint8)
    return memory
