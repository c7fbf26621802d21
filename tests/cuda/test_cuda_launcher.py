"""The launcher against a driver that records its calls (fake_libcuda.cc), with no GPU.

Its handlers are called as XLA would (fake_xla.cc).
"""

import ctypes
import json
import os
import pathlib
import struct
import subprocess
import sys
import threading

import pytest

from jax_flash.cuda import _launcher, call

SUPPORT = pathlib.Path(__file__).parents[1] / "support"
OPERAND, SCRATCH = 0x1000, 0x2000  # addresses
SIZES = {"operand_bytes": [512], "result_bytes": [256]}


class FakeDriver:
    """Loads the recording driver in this process, where it takes the place of libcuda."""

    def __init__(self, library: pathlib.Path):
        self._library = ctypes.CDLL(str(library))
        self._library.fake_log.restype = ctypes.c_char_p
        self._library.fake_reset.argtypes = (ctypes.c_char_p, ctypes.c_ulonglong, ctypes.c_char_p)
        self.reset()

    def reset(self, layout: str = "", context: int = 1, failing_call: str = "") -> None:
        """Forgets the log; the next launches have parameters of `layout`, and `failing_call` fails."""
        self._library.fake_reset(layout.encode(), context, failing_call.encode())

    def calls(self, name: str | None = None) -> list[dict]:
        lines = map(json.loads, self._library.fake_log().decode().splitlines())
        return [line for line in lines if name in (None, line["call"])]


def build_library(folder: pathlib.Path, source: str) -> pathlib.Path:
    finder = SUPPORT.parents[1] / "cuda" / "launcher" / "find_headers.py"
    found = subprocess.run([sys.executable, finder], capture_output=True, text=True, check=True).stdout
    headers = [flag for path in found.split(";") for flag in ("-isystem", path)]
    library = folder / source.replace(".cc", ".so")
    command = ["g++", "-std=c++17", "-shared", "-fPIC", *headers, "-o", library, SUPPORT / source]
    subprocess.run(command, check=True)
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    library = build_library(tmp_path_factory.mktemp("fake"), "fake_libcuda.cc")
    os.environ["JAX_FLASH_LIBCUDA"] = str(library)
    try:
        _launcher.driver_version()  # the launcher keeps the first driver that it finds
    finally:
        del os.environ["JAX_FLASH_LIBCUDA"]
    return library


@pytest.fixture
def driver(library):
    return FakeDriver(library)


class FakeXla:
    """Calls the launcher's handlers."""

    INVALID_ARGUMENT, INTERNAL = 3, 13  # error codes

    def __init__(self, library: pathlib.Path):
        self._library = ctypes.CDLL(str(library))
        self._library.call_handler.restype = ctypes.c_char_p

    def call(self, stage: str, text: str, operand_bytes=(512,), result_bytes=(256,), stream: int = 77) -> str:
        """The error, as "code: message", or an empty text. Addresses are 4096, 8192, and so on."""
        sizes = (*operand_bytes, *result_bytes)
        return self._library.call_handler(
            self._handler(stage),
            {"initialize": 2, "execute": 3}[stage],
            ctypes.c_uint64(stream),
            text.encode(),
            len(operand_bytes),
            len(result_bytes),
            (ctypes.c_uint64 * len(sizes))(*(0x1000 * (i + 1) for i in range(len(sizes)))),
            (ctypes.c_int64 * len(sizes))(*sizes),
        ).decode()

    def traits(self, stage: str) -> int:
        return self._library.handler_traits(self._handler(stage))

    def _handler(self, stage: str) -> ctypes.c_void_p:
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype = ctypes.c_void_p
        pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)
        return ctypes.c_void_p(pointer_of(_launcher.handlers()[stage], None))


@pytest.fixture(scope="module")
def xla(tmp_path_factory):
    return FakeXla(build_library(tmp_path_factory.mktemp("fake"), "fake_xla.cc"))


def make_kernel(entry: str = "forward") -> "_launcher.Kernel":
    return _launcher.Kernel(b"CUBIN", entry, f"{entry} of some.cu")


def make_launch(
    parameters=b"", pointers=(), maps=(), kernel=None, shared_bytes=0, cluster=1, overlap_previous=False
):
    kernel = kernel or make_kernel()
    fields = (parameters, list(pointers), list(maps))
    return _launcher.Launch(kernel, (4, 3, 2), 128, shared_bytes, cluster, overlap_previous, *fields)


def make_map(offset: int) -> "_launcher.TensorMap":
    return _launcher.TensorMap(offset, 0, "uint8", (16,), (), (16,), 0)


def make_plan(*steps) -> "_launcher.Plan":
    return _launcher.Plan(**SIZES, steps=list(steps))


def test_driver_version(driver):
    assert _launcher.driver_version() == (12, 8)


def test_launch_configuration(driver):
    plan = make_plan(make_launch(shared_bytes=49152, cluster=2, overlap_previous=True))
    plan.run([OPERAND, SCRATCH], stream=77)
    (launched,) = driver.calls("cuLaunchKernelEx")
    assert launched == {
        "call": "cuLaunchKernelEx",
        "name": "forward",
        "grid": [4, 3, 2],
        "block": [128, 1, 1],
        "shared_bytes": 49152,
        "stream": 77,
        "cluster": [2, 1, 1],
        "overlap": 1,
        "parameters": [],
    }


def test_no_attribute_that_the_launch_does_not_ask_for(driver):
    make_plan(make_launch()).run([OPERAND, SCRATCH], stream=0)
    (launched,) = driver.calls("cuLaunchKernelEx")
    assert "cluster" not in launched and "overlap" not in launched
    assert driver.calls("cuFuncSetAttribute") == []


def test_addresses_are_written_between_the_numbers(driver):
    driver.reset(layout="ppiulf")
    numbers = struct.pack("<16xiIqf4x", -5, 2**32 - 1, -(2**40), 0.125)
    pointers = [_launcher.Pointer(0, 1), _launcher.Pointer(8, 0)]
    make_plan(make_launch(numbers, pointers)).run([OPERAND, SCRATCH], stream=0)
    (launched,) = driver.calls("cuLaunchKernelEx")
    assert launched["parameters"] == [SCRATCH, OPERAND, -5, 2**32 - 1, -(2**40), 0.125]


def test_tensor_maps_are_encoded_for_the_buffers_of_each_run(driver):
    driver.reset(layout="mm")
    first = _launcher.TensorMap(0, 0, "bfloat16", (64, 3, 5), (128, 384), (64, 1, 4), 128)
    second = _launcher.TensorMap(128, 1, "float32", (8,), (), (8,), 0)
    plan = make_plan(make_launch(bytes(256), maps=[first, second]))
    plan.run([OPERAND, SCRATCH], stream=0)
    plan.run([OPERAND + 64, SCRATCH], stream=0)
    encoded = driver.calls("cuTensorMapEncodeTiled")
    assert [e["address"] for e in encoded] == [OPERAND, SCRATCH, OPERAND + 64, SCRATCH]
    assert all(e["aligned"] for e in encoded)
    want = {"type": 9, "sizes": [64, 3, 5], "strides": [128, 384], "box": [64, 1, 4]}
    want |= {"element_strides": [1, 1, 1], "swizzle": 3}
    assert {key: encoded[0][key] for key in want} == want
    assert (encoded[1]["type"], encoded[1]["strides"], encoded[1]["swizzle"]) == (7, [], 0)
    launched = driver.calls("cuLaunchKernelEx")
    assert [x for launch in launched for x in launch["parameters"]] == [e["id"] for e in encoded]


def test_steps_run_in_order(driver):
    plan = make_plan(
        make_launch(kernel=make_kernel("before")), _launcher.Zero(1), make_launch(kernel=make_kernel("after"))
    )
    plan.load()
    driver.reset()
    plan.run([OPERAND, SCRATCH], stream=9)
    before, zero, after = driver.calls()
    assert (before["name"], after["name"]) == ("before", "after")
    assert zero == {"call": "cuMemsetD8Async", "address": SCRATCH, "value": 0, "bytes": 256, "stream": 9}


def test_modules_are_loaded_once_in_each_context(driver):
    kernel = make_kernel()
    plan, other = make_plan(make_launch(kernel=kernel)), make_plan(make_launch(kernel=kernel))
    plan.load()
    plan.run([OPERAND, SCRATCH], stream=0)
    other.run([OPERAND, SCRATCH], stream=0)
    assert len(driver.calls("cuModuleLoadData")) == 1
    driver.reset(context=2)
    plan.run([OPERAND, SCRATCH], stream=0)
    plan.run([OPERAND, SCRATCH], stream=0)
    assert len(driver.calls("cuModuleLoadData")) == 1
    driver.reset(context=1)
    plan.run([OPERAND, SCRATCH], stream=0)
    assert driver.calls("cuModuleLoadData") == []


def test_shared_memory_is_raised_to_the_most_that_any_launch_needs(driver):
    kernel = make_kernel()
    for shared_bytes in (1000, 3000, 2000):
        make_plan(make_launch(kernel=kernel, shared_bytes=shared_bytes)).load()
    max_dynamic_shared_bytes = 8
    assert [(c["attribute"], c["value"]) for c in driver.calls("cuFuncSetAttribute")] == [
        (max_dynamic_shared_bytes, 1000),
        (max_dynamic_shared_bytes, 3000),
    ]


def test_many_threads_load_a_kernel_once(driver):
    plan = make_plan(make_launch(shared_bytes=1000))
    threads = [threading.Thread(target=plan.run, args=([OPERAND, SCRATCH], 0)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.calls("cuModuleLoadData")) == 1
    assert len(driver.calls("cuLaunchKernelEx")) == 8


@pytest.mark.parametrize(
    "failing_call, subject",
    [
        ("cuCtxGetId", "no CUDA context is current"),
        ("cuModuleLoadData", "forward of some.cu"),
        ("cuModuleGetFunction", "forward of some.cu"),
        ("cuFuncSetAttribute", "forward of some.cu, 1000 bytes of dynamic shared memory"),
        ("cuTensorMapEncodeTiled", "forward of some.cu"),
        ("cuLaunchKernelEx", "forward of some.cu"),
        ("cuMemsetD8Async", "zeroing buffer 1"),
    ],
)
def test_errors_name_the_call_the_error_and_the_kernel(driver, failing_call, subject):
    tensor_map = _launcher.TensorMap(0, 0, "float16", (8, 4), (16,), (8, 4), 32)
    plan = make_plan(make_launch(bytes(128), maps=[tensor_map], shared_bytes=1000), _launcher.Zero(1))
    driver.reset(layout="m", failing_call=failing_call)
    with pytest.raises(RuntimeError) as raised:
        plan.run([OPERAND, SCRATCH], stream=0)
    message = f"{failing_call} failed with CUDA_ERROR_INVALID_VALUE (invalid argument): {subject}"
    assert str(raised.value) == message


def test_a_failed_load_is_tried_again(driver):
    plan = make_plan(make_launch())
    driver.reset(failing_call="cuModuleGetFunction")
    with pytest.raises(RuntimeError):
        plan.run([OPERAND, SCRATCH], stream=0)
    assert len(driver.calls("cuModuleUnload")) == 1
    driver.reset()
    plan.run([OPERAND, SCRATCH], stream=0)
    assert len(driver.calls("cuLaunchKernelEx")) == 1


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: _launcher.TensorMap(0, 0, "int8", (8,), (), (8,), 0), 'dtype is "int8"'),
        (lambda: _launcher.TensorMap(0, 0, "uint8", (8,), (), (8,), 96), "swizzle is 96"),
        (lambda: _launcher.TensorMap(0, 0, "uint8", (8, 8), (), (8, 8), 0), "got 2, 0 and 2"),
        (lambda: _launcher.TensorMap(0, 0, "uint8", (8,) * 6, (8,) * 5, (8,) * 6, 0), "got 6, 5 and 6"),
        (lambda: make_plan(_launcher.Zero(2)), "buffer 2 of 2"),
        (lambda: make_plan(make_launch(bytes(8), [_launcher.Pointer(0, 5)])), "buffer 5 of 2"),
        (lambda: make_plan(make_launch(bytes(8), [_launcher.Pointer(8, 0)])), "8 bytes at 8 of 8"),
        (lambda: make_plan(make_launch(bytes(16), [_launcher.Pointer(4, 0)])), "8 bytes at 4 of 16"),
        (lambda: make_plan(make_launch(bytes(128), maps=[make_map(64)])), "128 bytes at 64 of 128"),
        (lambda: make_plan(make_launch(bytes(256), maps=[make_map(32)])), "128 bytes at 32 of 256"),
        (lambda: make_plan(make_launch(bytes(4097))), "parameters are 4097 bytes; they may be up to 4096"),
        (lambda: make_plan().run([OPERAND], stream=0), "got 1 addresses for 2 buffers"),
    ],
)
def test_values_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_registry_keeps_the_first_plan():
    assert not _launcher.is_registered("a plan of this test")
    _launcher.register_plan("a plan of this test", make_plan())
    _launcher.register_plan("a plan of this test", make_plan())
    assert _launcher.is_registered("a plan of this test")


def test_handlers_run_a_registered_plan(driver, xla):
    driver.reset(layout="pp")
    pointers = [_launcher.Pointer(0, 0), _launcher.Pointer(8, 1)]
    _launcher.register_plan("handlers", make_plan(make_launch(bytes(16), pointers), _launcher.Zero(1)))
    assert xla.call("initialize", "handlers") == ""
    assert [line["call"] for line in driver.calls()] == ["cuModuleLoadData", "cuModuleGetFunction"]
    driver.reset(layout="pp")
    assert xla.call("execute", "handlers", stream=77) == ""
    launched, zeroed = driver.calls()  # nothing is loaded any more
    assert (launched["stream"], launched["parameters"]) == (77, [OPERAND, SCRATCH])
    assert (zeroed["address"], zeroed["bytes"]) == (SCRATCH, 256)


def test_handlers_are_compatible_with_command_buffers(xla):
    assert xla.traits("initialize") == xla.traits("execute") == 1


@pytest.mark.parametrize("stage", ["initialize", "execute"])
def test_handlers_resolve_a_plan_of_another_process(driver, xla, stage, monkeypatch):
    text = f"resolved by {stage}"
    resolved = []

    def resolve(text):
        resolved.append(text)
        _launcher.register_plan(text, make_plan(make_launch()))

    monkeypatch.setattr(call, "resolve", resolve)
    assert xla.call(stage, text) == ""
    assert xla.call(stage, text) == ""
    assert resolved == [text]


def test_handlers_report_what_goes_wrong_in_python(driver, xla, monkeypatch):
    def resolve(text):
        raise RuntimeError("a kernel that does not compile")

    monkeypatch.setattr(call, "resolve", resolve)
    error = xla.call("initialize", "of no process")
    assert error.startswith(f"{xla.INTERNAL}: jax_flash: RuntimeError: a kernel that does not compile")


def test_handlers_report_errors_of_the_driver(driver, xla):
    _launcher.register_plan("failing", make_plan(make_launch()))
    driver.reset(failing_call="cuLaunchKernelEx")
    error = xla.call("execute", "failing")
    message = "cuLaunchKernelEx failed with CUDA_ERROR_INVALID_VALUE (invalid argument): forward of some.cu"
    assert error == f"{xla.INTERNAL}: jax_flash: {message}"


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"operand_bytes": (512, 512)}, "number of operands: the call has 2 and its launch plan 1"),
        ({"result_bytes": ()}, "number of results: the call has 0 and its launch plan 1"),
        ({"operand_bytes": (511,)}, "bytes of operand 0: the call has 511 and its launch plan 512"),
        ({"result_bytes": (512,)}, "bytes of result 0: the call has 512 and its launch plan 256"),
    ],
)
def test_handlers_refuse_buffers_that_the_plan_was_not_made_for(driver, xla, sizes, message):
    _launcher.register_plan("sizes", make_plan(make_launch()))
    assert xla.call("execute", "sizes", **sizes) == f"{xla.INVALID_ARGUMENT}: jax_flash: {message}"
    assert driver.calls("cuLaunchKernelEx") == []


def test_without_a_driver_the_module_imports_and_says_what_is_missing():
    program = "from jax_flash.cuda import _launcher; _launcher.driver_version()"
    environment = os.environ | {"JAX_FLASH_LIBCUDA": "libno-such-driver.so"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "RuntimeError: there is no CUDA driver: libno-such-driver.so" in done.stderr
