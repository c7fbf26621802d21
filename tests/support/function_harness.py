"""Runs C++ that was written for users' functions: compiled by g++ over the emulated PTX layer, and by
NVRTC."""

import ctypes
import dataclasses
import hashlib
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cuda_functions as functions
import jax
import numpy as np

from jax_flash.cuda.compile import kernels_folder
from jax_flash.cuda.parameters import HEADER_NAME, header
from jax_flash.functions import Derivative, ScalarFunction, differentiate

EMULATOR = Path(__file__).parent / "emulator"
COMPILE = ("g++", "-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-include", "standard.h")

_LOOP = """
extern "C" void run{n}(const Operands{n}& operands, int count, const float* score, const int* batch,
                       const int* head, const int* query, const int* key, float* value,
                       float* d_score, const float* d_value, const Gradients{n}& gradients) {{
    for (int i = 0; i < count; ++i) {{
        const Position query_at(query[i] - 5, 5, query[i]), key_at(key[i] + 3, -3, key[i]);
        const auto tile = f{n}::make_tile(operands, batch[i]);
        const auto row = f{n}::make_row(operands, tile, batch[i], head[i], query_at);
        const auto column = f{n}::make_column(operands, tile, batch[i], key_at);
        {element}
        value[i] = element.value;
        {derivative}
    }}
}}
"""
_ARGUMENTS = "operands, tile, row, column, {score} batch[i], head[i], query_at, key_at"
_ELEMENT_OF_SCORE = f"""const float largest = f{{n}}::largest_in_tanh({_ARGUMENTS});
        const auto element = largest < 1.f / 6 ? f{{n}}::make_element<TanhRange::sixth>({_ARGUMENTS})
                             : largest < 1   ? f{{n}}::make_element<TanhRange::one>({_ARGUMENTS})
                                             : f{{n}}::make_element<TanhRange::all>({_ARGUMENTS});"""
_ELEMENT = f"const auto element = f{{n}}::make_element({_ARGUMENTS});"
_DERIVATIVE = """d_score[i] = element.d_score;
        f{n}::add_gradients(gradients, element, d_value[i], [](int, float* sums, int index, float term) {{
            atomicAdd(sums + index, term);
        }});"""


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, traced, and its derivative if the case is about that."""

    traced: ScalarFunction
    derivative: Derivative | None = None

    def text(self, n: int) -> str:
        if self.derivative is not None:
            return functions.derivative_text(self.derivative, f"f{n}", f"Operands{n}", f"Gradients{n}")
        return functions.function_text(self.traced, f"f{n}", f"Operands{n}")

    def parameters(self, n: int) -> str:
        gradients = self.derivative or Derivative(
            self.traced.graph, self.traced.output, self.traced.output, ()
        )
        structs = (
            functions.operand_struct(self.traced, f"Operands{n}"),
            functions.gradient_struct(gradients, f"Gradients{n}"),
        )
        return "\n".join(header(struct) for struct in structs)

    def loop(self, n: int) -> str:
        derivative = "" if self.derivative is None else _DERIVATIVE.format(n=n)
        has_score = "score" in self.traced.arguments
        element = (_ELEMENT_OF_SCORE if has_score else _ELEMENT).format(
            n=n, score="ScaledScore{score[i], 1}," if has_score else ""
        )
        return _LOOP.format(n=n, derivative=derivative, element=element)


def score_mod(function: Callable[..., Any]) -> Case:
    return Case(functions.trace_score_mod(function))


def mask_mod(function: Callable[..., Any]) -> Case:
    return Case(functions.trace_mask_mod(function))


def differentiated(function: Callable[..., Any]) -> Case:
    traced = functions.trace_score_mod(function)
    return Case(traced, differentiate(traced))


class Compiled:
    """Cases compiled together by g++."""

    def __init__(self, folder: Path, cases: Sequence[Case]):
        self.cases = cases
        source = _source(cases)
        own = folder / hashlib.sha256(source.encode()).hexdigest()[:16]
        own.mkdir()
        (own / HEADER_NAME).write_text(_parameters(cases))
        (own / "cases.cc").write_text(source)
        includes = (f"-I{own}", f"-I{EMULATOR}", f"-I{kernels_folder()}")
        subprocess.run([*COMPILE, *includes, "cases.cc", "-o", "cases.so"], cwd=own, check=True)
        self.library = ctypes.CDLL(str(own / "cases.so"))

    def run(
        self, n: int, arguments: Sequence[np.ndarray], d_value: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, dict[int, np.ndarray]]:
        """Case n for arrays of arguments, score first: its values, derivatives by the score, and for
        `d_value` the gradients of captured arrays by number."""
        case = self.cases[n]
        score, *indices = arguments
        score = np.ascontiguousarray(score, np.float32)
        indices = [np.ascontiguousarray(x, np.int32) for x in indices]
        value, d_score = np.zeros_like(score), np.zeros_like(score)
        d_value = np.ones_like(score) if d_value is None else np.ascontiguousarray(d_value, np.float32)
        captured = [np.ascontiguousarray(x) for x in case.traced.captured]
        gradients = {
            gather.operand: np.zeros(captured[gather.operand].shape, np.float32)
            for gather in (case.derivative.gathers if case.derivative else ())
        }
        getattr(self.library, f"run{n}")(
            _pointers(captured),
            len(score),
            *map(_pointer, (score, *indices, value, d_score, d_value)),
            _pointers([gradients[number] for number in sorted(gradients)]),
        )
        return value, d_score, gradients


def compile_by_nvrtc(cases: Sequence[Case]) -> None:
    """Compiles cases as device code of an H100, and raises the compiler's log if it can't."""
    from cuda.bindings import nvrtc

    loops = _source(cases).replace('extern "C" void', 'extern "C" __global__ void')
    # Parameters of kernels aren't references.
    for kind in ("Operands", "Gradients"):
        for n in range(len(cases)):
            loops = loops.replace(f"run{n}(const {kind}{n}&", f"run{n}(const {kind}{n}")
            loops = loops.replace(
                f"const {kind}{n}& {kind.lower()}) {{\n    for",
                f"const {kind}{n} {kind.lower()}) {{\n    for",
            )
    headers, names = [_parameters(cases).encode()], [HEADER_NAME.encode()]
    _, program = nvrtc.nvrtcCreateProgram(loops.encode(), b"cases.cu", 1, headers, names)
    options = [b"--std=c++17", b"--gpu-architecture=sm_90a", f"--include-path={kernels_folder()}".encode()]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()


def reference(function: Callable[..., Any], arguments: Sequence[np.ndarray]) -> np.ndarray:
    """The function by JAX, each operation by itself, so that nothing is fused."""
    with jax.disable_jit():
        return np.asarray(jax.vmap(function)(*map(jax.numpy.asarray, arguments)))


def _source(cases: Sequence[Case]) -> str:
    texts = [case.text(n).replace("#pragma once\n", "") for n, case in enumerate(cases)]
    return "\n".join([*texts, *(case.loop(n) for n, case in enumerate(cases))])


def _parameters(cases: Sequence[Case]) -> str:
    return "#pragma once\n" + "\n".join(case.parameters(n) for n, case in enumerate(cases)).replace(
        "#pragma once\n", ""
    )


def _pointer(x: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.ctypes.data)


def _pointers(arrays: Sequence[np.ndarray]) -> Any:
    """A struct of pointers; of one field if there are none."""
    return (ctypes.c_void_p * max(1, len(arrays)))(*(x.ctypes.data for x in arrays))
