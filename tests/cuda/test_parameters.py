"""Parameter structs of kernels: layout, C++ definition, and arguments by name."""

import subprocess

import pytest

from jax_flash.cuda import parameters
from jax_flash.cuda.launch_plan import Kernel, Launch, Pointer, TensorMap, launch
from jax_flash.cuda.parameters import Struct, layout, pack, struct

INNER = struct("Inner", flag="int32_t", stride="int64_t")
OUTER = struct(
    "Outer", map="TensorMap", first="float", inner=INNER, seed="uint32_t", again=INNER, data="const int2*"
)
MAP = TensorMap("x", "float32", (8,), (), (8,), 0)
ARGUMENTS = {
    "map": MAP,
    "first": 0.5,
    "inner": {"flag": -1, "stride": 2**40},
    "seed": 2**32 - 1,
    "again": {"flag": 0, "stride": 0},
    "data": Pointer("x"),
}


def make_launch(changes=(), **others) -> Launch:
    kernel = Kernel("some.cu", "some", "sm_90a", (), OUTER)
    return launch(kernel, (1, 1, 1), 32, ARGUMENTS | dict(changes) | others)


def test_layout_is_that_of_cpp():
    found = layout(OUTER)
    assert [(slot.path, slot.offset, slot.bytes) for slot in found.slots] == [
        ("map", 0, 128),
        ("first", 128, 4),
        ("inner.flag", 136, 4),
        ("inner.stride", 144, 8),
        ("seed", 152, 4),
        ("again.flag", 160, 4),
        ("again.stride", 168, 8),
        ("data", 176, 8),
    ]
    assert (found.bytes, found.alignment) == (256, 128)


def test_tensor_maps_lie_where_the_driver_takes_them():
    """CUDA 13 declares CUtensorMap as aligned to 128 bytes."""
    pointer_first = layout(struct("Parameters", data="const float*", map="TensorMap", count="int32_t"))
    assert [slot.offset for slot in pointer_first.slots] == [0, 128, 256] and pointer_first.bytes == 384


def test_the_cpp_definition_states_the_layout(tmp_path):
    """A compiler that lays the struct out otherwise stops at the header's own assertions."""
    (tmp_path / "ptx").mkdir()
    (tmp_path / "ptx" / "types.cuh").write_text(
        "#include <cstdint>\nstruct int2 { int x, y; };\n"
        "struct alignas(128) TensorMap { char bytes[128]; };\n"
    )
    text = parameters.header(OUTER)
    assert text.count("struct Inner {") == 1 and text.index("struct Inner {") < text.index("struct Outer {")

    def compiles(text: str) -> bool:
        command = ["g++", "-std=c++17", "-fsyntax-only", "-I.", "-x", "c++", "-"]
        return subprocess.run(command, cwd=tmp_path, input=text.encode(), capture_output=True).returncode == 0

    assert compiles(text)
    assert not compiles(text.replace("    float first;", "    double first;\n    float second;"))
    assert not compiles(text.replace("    int64_t stride;", "    int32_t stride;"))


def test_numbers_are_packed_at_their_offsets():
    packed = pack(OUTER, [None, 0.5, -1, 2**40, 2**32 - 1, 0, 0, None])
    assert len(packed) == 256
    assert packed[128:132] == b"\0\0\0\x3f" and packed[136:140] == packed[152:156] == b"\xff" * 4
    assert int.from_bytes(packed[144:152], "little") == 2**40
    assert packed[:128] == bytes(128) and packed[176:184] == bytes(8)


def test_arguments_go_by_name():
    in_order = make_launch()
    assert in_order.arguments == (MAP, 0.5, -1, 2**40, 2**32 - 1, 0, 0, Pointer("x"))
    assert in_order.by_path["inner.stride"] == 2**40
    assert make_launch(dict(reversed(ARGUMENTS.items()))) == in_order


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"more": 1}, r"arguments of some \(struct Outer\): it has no field more"),
        ({"inner": {"flag": 1}}, r"arguments of some\.inner \(struct Inner\): it lacks stride"),
        ({"inner": {"flag": 1, "strides": 1}}, "it lacks stride and has no field strides"),
        ({"inner": 3}, "some.inner is 3; it takes the fields of struct Inner"),
        ({"first": {"x": 1}}, "some.first is {'x': 1}; it is of type float"),
        ({"first": Pointer("x")}, "argument first of some is Pointer"),
        ({"seed": -1}, "argument seed of some is -1; it is of type uint32_t"),
        ({"seed": 2**32}, "argument seed of some is 4294967296"),
        ({"seed": 1.0}, "argument seed of some is 1.0"),
        ({"seed": True}, "argument seed of some is True"),
        ({"seed": None}, "argument seed of some is None"),
        ({"inner": {"flag": 2**31, "stride": 0}}, "argument inner.flag of some is 2147483648"),
        ({"data": 0}, r"argument data of some is 0; it is of type const int2\*"),
        ({"data": MAP}, "argument data of some is TensorMap"),
        ({"map": Pointer("x")}, "argument map of some is Pointer"),
        ({"map": None}, "argument map of some is None"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_launch(changes)


def test_missing_arguments_are_refused():
    kernel = Kernel("some.cu", "some", "sm_90a", (), OUTER)
    with pytest.raises(ValueError, match="it lacks again, data"):
        launch(kernel, (1, 1, 1), 32, {k: x for k, x in ARGUMENTS.items() if k not in ("data", "again")})
    with pytest.raises(ValueError, match="some takes 8 arguments, and this launch has 1"):
        Launch(kernel, (1, 1, 1), 32, 0, (MAP,))


def test_null_pointers_may_be_passed():
    assert make_launch(data=None).by_path["data"] is None


@pytest.mark.parametrize(
    "name, fields, message",
    [
        ("A", (("x", "int"),), "field x of struct A has type 'int'"),
        ("A", (("x", "float*; evil()"),), "has type"),
        ("A", (("x y", "float"),), "'x y' is no name of a struct or a field"),
        ("A;", (("x", "float"),), "'A;' is no name of a struct or a field"),
        ("A", (("x", "float"), ("x", "float")), "each of its own name"),
        ("A", (), "it needs some"),
    ],
)
def test_structs_that_cannot_be_are_refused(name, fields, message):
    with pytest.raises(ValueError, match=message):
        Struct(name, fields)
