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
OPERAND, SCRATCH = 0x1000, 0x2000  # addresses of the buffers
STAGES = {"instantiate": 0, "initialize": 2, "execute": 3}  # as XLA numbers them


class FakeDriver:
    """Loads the recording driver in this process, where it takes the place of libcuda."""

    def __init__(self, library: pathlib.Path):
        self._library = ctypes.CDLL(str(library))
        self._library.fake_log.restype = ctypes.c_char_p
        self._library.fake_reset.argtypes = (ctypes.c_char_p, ctypes.c_ulonglong, ctypes.c_char_p)
        self.reset()

    def reset(self, layout: str = "", context: int = 1, failing_call: str = "", device=(9, 0)) -> None:
        """Forgets the log; the next launches have parameters of `layout`, and `failing_call` fails. `device`
        is the compute capability of the device of every context."""
        self._library.fake_reset(layout.encode(), context, failing_call.encode())
        self._library.fake_device(*device)

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


class Site:
    """A call site of an executable, as XLA keeps it: the handlers are called with its state."""

    INVALID_ARGUMENT, INTERNAL = 3, 13  # error codes

    def __init__(self, library: ctypes.CDLL, text: str):
        self._library = library
        self._text = text.encode()
        self._state = ctypes.c_void_p()

    def call(self, stage: str, operand_bytes=(512,), result_bytes=(256,), stream=77, offset=0) -> str:
        """The error, as "code: message", or an empty text. Addresses are 4096, 8192, and so on, plus
        `offset`."""
        sizes = () if stage == "instantiate" else (*operand_bytes, *result_bytes)
        return self._library.call_handler(
            capsule_pointer(_launcher.handlers()[stage]),
            STAGES[stage],
            ctypes.c_uint64(stream),
            self._text,
            ctypes.byref(self._state),
            len(operand_bytes) if sizes else 0,
            len(result_bytes) if sizes else 0,
            (ctypes.c_uint64 * len(sizes))(*(0x1000 * (i + 1) + offset for i in range(len(sizes)))),
            (ctypes.c_int64 * len(sizes))(*sizes),
        ).decode()

    def delete(self) -> None:
        self._library.delete_state(capsule_pointer(_launcher.state_type()["type_info"]), self._state)


def capsule_pointer(capsule) -> ctypes.c_void_p:
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype = ctypes.c_void_p
    pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)
    return ctypes.c_void_p(pointer_of(capsule, None))


@pytest.fixture(scope="module")
def xla(tmp_path_factory) -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_library(tmp_path_factory.mktemp("fake"), "fake_xla.cc")))
    library.call_handler.restype = ctypes.c_char_p
    library.register_type(capsule_pointer(_launcher.state_type()["type_id"]))
    return library


@pytest.fixture
def site(driver, xla, monkeypatch):
    """Makes call sites of plans, instantiated; they end with the test."""
    plans = {}
    made = []
    monkeypatch.setattr(call, "resolve", lambda text: plans.pop(text))

    def make(*steps, **others) -> Site:
        plans["a plan"] = make_plan(*steps, **others)
        found = Site(xla, "a plan")
        assert found.call("instantiate") == ""
        made.append(found)
        return found

    yield make
    for each in made:
        each.delete()


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


def make_plan(*steps, compute_capability=(9, 0)) -> "_launcher.Plan":
    return _launcher.Plan(compute_capability, [512], [256], list(steps))


def test_driver_version(driver):
    assert _launcher.driver_version() == (12, 8)


def test_launch_configuration(driver, site):
    site(make_launch(shared_bytes=49152, cluster=2, overlap_previous=True)).call("execute", stream=77)
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


def test_no_attribute_that_the_launch_does_not_ask_for(driver, site):
    site(make_launch()).call("execute")
    (launched,) = driver.calls("cuLaunchKernelEx")
    assert "cluster" not in launched and "overlap" not in launched
    assert driver.calls("cuFuncSetAttribute") == []


def test_addresses_are_written_between_the_numbers(driver, site):
    numbers = struct.pack("<16xiIqf4x", -5, 2**32 - 1, -(2**40), 0.125)
    of_call = site(make_launch(numbers, [_launcher.Pointer(0, 1), _launcher.Pointer(8, 0)]))
    driver.reset(layout="ppiulf")
    for offset in (0, 64):
        assert of_call.call("execute", offset=offset) == ""
    first, second = (launched["parameters"] for launched in driver.calls("cuLaunchKernelEx"))
    assert first == [SCRATCH, OPERAND, -5, 2**32 - 1, -(2**40), 0.125]
    assert second == [SCRATCH + 64, OPERAND + 64, *first[2:]]


def test_tensor_maps_are_encoded_once_and_take_the_addresses_of_each_run(driver, site):
    first = _launcher.TensorMap(0, 0, "bfloat16", (64, 3, 5), (128, 384), (64, 1, 4), 128)
    second = _launcher.TensorMap(128, 1, "float32", (8,), (), (8,), 0)
    of_call = site(make_launch(bytes(256), maps=[first, second]))
    assert of_call.call("initialize") == ""
    encoded = driver.calls("cuTensorMapEncodeTiled")
    assert [e["address"] for e in encoded] == [OPERAND, SCRATCH]
    want = {"type": 9, "sizes": [64, 3, 5], "strides": [128, 384], "box": [64, 1, 4]}
    want |= {"element_strides": [1, 1, 1], "swizzle": 3, "l2_promotion": 2}
    assert {key: encoded[0][key] for key in want} == want
    assert (encoded[1]["type"], encoded[1]["strides"], encoded[1]["swizzle"]) == (7, [], 0)

    driver.reset(layout="mm")
    for offset in (0, 64):
        assert of_call.call("initialize", offset=offset) == of_call.call("execute", offset=offset) == ""
    assert driver.calls("cuTensorMapEncodeTiled") == []
    assert all(e["aligned"] for e in driver.calls("cuTensorMapReplaceAddress"))
    ids = [e["id"] for e in encoded]
    assert [launched["parameters"] for launched in driver.calls("cuLaunchKernelEx")] == [
        [[ids[0], OPERAND + offset], [ids[1], SCRATCH + offset]] for offset in (0, 64)
    ]


def test_steps_run_in_order(driver, site):
    of_call = site(
        make_launch(kernel=make_kernel("before")), _launcher.Zero(1), make_launch(kernel=make_kernel("after"))
    )
    of_call.call("initialize")
    driver.reset()
    of_call.call("execute", stream=9)
    before, zero, after = driver.calls()
    assert (before["name"], after["name"]) == ("before", "after")
    assert zero == {"call": "cuMemsetD8Async", "address": SCRATCH, "value": 0, "bytes": 256, "stream": 9}


def test_modules_are_loaded_once_in_each_context(driver, site):
    kernel = make_kernel()
    of_call, other = site(make_launch(kernel=kernel)), site(make_launch(kernel=kernel))
    of_call.call("initialize")
    of_call.call("execute")
    other.call("execute")
    assert len(driver.calls("cuModuleLoadData")) == 1
    driver.reset(context=2)
    of_call.call("execute")
    of_call.call("execute")
    assert len(driver.calls("cuModuleLoadData")) == 1
    driver.reset(context=1)
    of_call.call("execute")
    assert driver.calls("cuModuleLoadData") == []


def test_initialize_loads_and_execute_only_launches(driver, site):
    of_call = site(make_launch(shared_bytes=1000), _launcher.Zero(1))
    assert driver.calls() == []
    assert of_call.call("initialize") == of_call.call("initialize") == ""
    loading = ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuFuncSetAttribute"]
    assert [line["call"] for line in driver.calls()] == loading
    driver.reset()
    assert of_call.call("execute") == ""
    assert [line["call"] for line in driver.calls()] == ["cuLaunchKernelEx", "cuMemsetD8Async"]


def test_shared_memory_is_raised_to_the_most_that_any_launch_needs(driver, site):
    kernel = make_kernel()
    for shared_bytes in (1000, 3000, 2000):
        site(make_launch(kernel=kernel, shared_bytes=shared_bytes)).call("initialize")
    max_dynamic_shared_bytes, preferred_carveout = 8, 9
    assert [(c["attribute"], c["value"]) for c in driver.calls("cuFuncSetAttribute")] == [
        (max_dynamic_shared_bytes, 1000),
        (preferred_carveout, 100),
        (max_dynamic_shared_bytes, 3000),
    ]


def test_large_clusters_are_allowed_once(driver, site):
    kernel = make_kernel()
    for cluster in (8, 16, 12):
        site(make_launch(kernel=kernel, cluster=cluster)).call("initialize")
    non_portable_cluster_size_allowed = 14
    calls = driver.calls("cuFuncSetAttribute")
    assert [(c["attribute"], c["value"]) for c in calls] == [(non_portable_cluster_size_allowed, 1)]


def test_many_threads_prepare_a_plan_once(driver, site):
    of_call = site(make_launch(shared_bytes=1000))
    threads = [threading.Thread(target=of_call.call, args=("execute",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.calls("cuModuleLoadData")) == 1
    assert len(driver.calls("cuLaunchKernelEx")) == 8


@pytest.mark.parametrize("stage", ["initialize", "execute"])
def test_a_device_of_another_compute_capability_is_refused(driver, site, stage):
    of_call = site(make_launch())
    driver.reset(device=(8, 0))
    message = (
        "the program was traced for a device of compute capability 9.0, and this one, Fake GPU, has 8.0; "
        "trace it again on this device"
    )
    assert of_call.call(stage) == f"{Site.INVALID_ARGUMENT}: jax_flash: {message}"
    assert driver.calls() == []
    driver.reset(device=(9, 0))
    assert of_call.call(stage) == ""


def test_plans_end_with_their_executables(driver, xla, monkeypatch):
    before = _launcher.Plan.alive()
    monkeypatch.setattr(call, "resolve", lambda text: make_plan(make_launch()))
    sites = [Site(xla, f"plan {i}") for i in range(50)]
    for each in sites:
        assert each.call("instantiate") == each.call("initialize") == each.call("execute") == ""
    assert _launcher.Plan.alive() == before + 50
    for each in sites:
        each.delete()
    assert _launcher.Plan.alive() == before


@pytest.mark.parametrize(
    "failing_call, subject",
    [
        ("cuCtxGetId", "no CUDA context is current"),
        ("cuDeviceGetAttribute", "asking for the compute capability"),
        ("cuModuleLoadData", "forward of some.cu"),
        ("cuModuleGetFunction", "forward of some.cu"),
        ("cuFuncSetAttribute", "forward of some.cu, 1000 bytes of dynamic shared memory"),
        ("cuTensorMapEncodeTiled", "forward of some.cu"),
        ("cuTensorMapReplaceAddress", "forward of some.cu"),
        ("cuLaunchKernelEx", "forward of some.cu"),
        ("cuMemsetD8Async", "zeroing buffer 1"),
    ],
)
def test_errors_name_the_call_the_error_and_the_kernel(driver, site, failing_call, subject):
    tensor_map = _launcher.TensorMap(0, 0, "float16", (8, 4), (16,), (8, 4), 32)
    of_call = site(make_launch(bytes(128), maps=[tensor_map], shared_bytes=1000), _launcher.Zero(1))
    driver.reset(layout="m", failing_call=failing_call)
    message = f"{failing_call} failed with CUDA_ERROR_INVALID_VALUE (invalid argument): {subject}"
    assert of_call.call("execute") == f"{Site.INTERNAL}: jax_flash: {message}"


def test_a_failed_load_is_tried_again(driver, site):
    of_call = site(make_launch())
    driver.reset(failing_call="cuModuleGetFunction")
    assert of_call.call("initialize") != ""
    assert len(driver.calls("cuModuleUnload")) == 1
    driver.reset()
    assert of_call.call("execute") == ""
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
        (lambda: _launcher.Plan((9, 0), [1] * 65, [], []), "up to 64 buffers; got 65"),
    ],
)
def test_values_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_handlers_are_compatible_with_command_buffers(xla):
    handlers = _launcher.handlers()
    assert set(handlers) == set(STAGES)
    for stage in handlers:
        assert xla.handler_traits(capsule_pointer(handlers[stage])) == 1


@pytest.mark.parametrize(
    "raised, error",
    [
        (RuntimeError("a kernel that does not compile"), "jax_flash: RuntimeError: a kernel that does not"),
        (ValueError("what is no plan"), "jax_flash: what is no plan"),
    ],
)
def test_handlers_report_what_goes_wrong_in_python(driver, xla, monkeypatch, raised, error):
    def resolve(text):
        raise raised

    monkeypatch.setattr(call, "resolve", resolve)
    code = Site.INVALID_ARGUMENT if isinstance(raised, ValueError) else Site.INTERNAL
    assert Site(xla, "any").call("instantiate").startswith(f"{code}: {error}")


@pytest.mark.parametrize("stage", ["initialize", "execute"])
@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"operand_bytes": (512, 512)}, "number of operands: the call has 2 and its launch plan 1"),
        ({"result_bytes": ()}, "number of results: the call has 0 and its launch plan 1"),
        ({"operand_bytes": (511,)}, "bytes of operand 0: the call has 511 and its launch plan 512"),
        ({"result_bytes": (512,)}, "bytes of result 0: the call has 512 and its launch plan 256"),
    ],
)
def test_handlers_refuse_buffers_that_the_plan_was_not_made_for(driver, site, stage, sizes, message):
    of_call = site(make_launch())
    assert of_call.call(stage, **sizes) == f"{Site.INVALID_ARGUMENT}: jax_flash: {message}"
    assert driver.calls() == []


def test_without_a_driver_the_module_imports_and_says_what_is_missing():
    program = "from jax_flash.cuda import _launcher; _launcher.driver_version()"
    environment = os.environ | {"JAX_FLASH_LIBCUDA": "libno-such-driver.so"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "RuntimeError: there is no CUDA driver: libno-such-driver.so" in done.stderr
