"""Launch plans that come with programs: those of this package pass, any other is refused with its reason."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from jax_flash._device import H100
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.cuda import call, launch_plan, plan_check
from jax_flash.cuda.launch_plan import Buffer, Pointer, TensorMap, Zero
from jax_flash.cuda.parameters import struct
from jax_flash.cuda.sm90.backward_plan import plan_backward
from jax_flash.cuda.sm90.forward_plan import plan_forward

pytestmark = pytest.mark.every_turn

QUERY = jax.ShapeDtypeStruct((2, 1000, 8, 128), jnp.bfloat16)
KEY = jax.ShapeDtypeStruct((2, 777, 2, 128), jnp.bfloat16)
OPERANDS = Operands(QUERY, KEY, KEY)
PLANS = [make(AttentionSpec(0.1, None, 0), OPERANDS, H100) for make in (plan_forward, plan_backward)]
FORWARD = PLANS[0]
COUNT = len(FORWARD.launches[0].arguments)


@pytest.mark.parametrize("plan", PLANS, ids=("forward", "backward"))
def test_own_plans_pass(plan):
    loaded = launch_plan.load(launch_plan.dump(plan))
    assert loaded == plan
    plan_check.check(loaded)


def with_launch(**changes):
    """The forward plan, changed in its launch."""
    (launch,) = FORWARD.launches
    changed = dataclasses.replace(launch, **changes)
    return dataclasses.replace(FORWARD, steps=(*FORWARD.steps[:-1], changed))


def with_kernel(**changes):
    return with_launch(kernel=dataclasses.replace(FORWARD.launches[0].kernel, **changes))


def with_argument(path, value):
    launch = FORWARD.launches[0]
    return with_launch(arguments=tuple((launch.by_path | {path: value}).values()))


def with_map(**changes):
    return with_argument("maps.key", dataclasses.replace(FORWARD.launches[0].by_path["maps.key"], **changes))


KEY_MAP: TensorMap = FORWARD.launches[0].by_path["maps.key"]
B, S, K, H = KEY.shape


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: with_kernel(source="/etc/evil.cu"), "'/etc/evil.cu' is no source among jax_flash's kernels"),
        (lambda: with_kernel(source="../launcher/plan.cu"), "'../launcher/plan.cu' is no source"),
        (lambda: with_kernel(source="sm90/../sm90/forward/forward.cu"), "is no source"),
        (lambda: with_kernel(source="sm90/forward/absent.cu"), "is no source"),
        (lambda: with_kernel(source="sm90/forward/traits.cuh"), "is no source"),
        (lambda: with_kernel(source=""), "is no source"),
        (lambda: with_kernel(entry="../../forward"), "'../../forward' is no name of a kernel"),
        (lambda: with_kernel(entry="forward\n"), "is no name of a kernel"),
        (lambda: with_kernel(entry=""), "is no name of a kernel"),
        (lambda: with_kernel(arch="sm_90a --x"), "an architecture is named as 'sm_90a'"),
        (lambda: with_kernel(defines=(("ELEMENT", "float x; evil()"),)), "it may be a name or a number"),
        (lambda: with_kernel(defines=(("A B", 1),)), "it may be a name or a number"),
        (lambda: with_kernel(defines=(("A", float("inf")),)), "it has a number Infinity"),
        (lambda: with_launch(grid=(0, 1, 1)), r"forward has a grid of \(0, 1, 1\) CTAs"),
        (lambda: with_launch(grid=(1, 65536, 1)), "has a grid of"),
        (lambda: with_launch(block=2048), "forward has CTAs of 2048 threads"),
        (lambda: with_launch(shared_bytes=-1), "takes -1 bytes shared"),
        (lambda: with_launch(shared_bytes=1 << 20), "takes 1048576 bytes shared"),
        (lambda: with_launch(cluster=0), "clusters of 0"),
        (lambda: with_launch(cluster=7), "clusters of 7"),
        (lambda: with_argument("out", Pointer("absent")), "out of forward is in 'absent', no buffer"),
        (lambda: with_map(buffer="absent"), "maps.key of forward is in 'absent', no buffer"),
        (lambda: with_map(sizes=(H, K, S + 1, B)), f"a tensor map of {2 * H * K * (S * B + 1)} bytes over"),
        (lambda: with_map(sizes=(H, K, S, B + 1)), "bytes over"),
        (lambda: with_map(strides=(2 * H, 2 * H * K, 2 * H * K * S + 16)), "bytes over"),
        (lambda: with_map(buffer="lse"), "a tensor map of bfloat16 over float32"),
        (lambda: with_map(dtype="float16"), "a tensor map of float16 over bfloat16"),
        (lambda: with_map(sizes=(H, K, S, 0)), "a tensor map of sizes"),
        (lambda: with_map(sizes=(H, K, S)), "a tensor map of 3 sizes, 3 strides and a box of 4"),
        (lambda: with_map(strides=(8, 2 * H * K, 2 * H * K * S)), "a tensor map of strides"),
        (lambda: with_map(strides=(-256, 2 * H * K, 2 * H * K * S)), "a tensor map of strides"),
        (lambda: with_map(box=(64, 1, 512, 1)), "a tensor map with a box"),
        (lambda: with_map(box=(128, 1, 64, 1)), "with rows of 256 bytes in its box, and a swizzle of 128"),
        (lambda: with_map(swizzle=96), "a swizzle of 96"),
        (
            lambda: dataclasses.replace(FORWARD, steps=(*FORWARD.steps, Zero("absent"))),
            "a step zeroes 'absent', which is no buffer",
        ),
        (
            lambda: dataclasses.replace(FORWARD, results=(*FORWARD.results, FORWARD.results[0])),
            "two buffers are named 'out'",
        ),
        (
            lambda: dataclasses.replace(FORWARD, results=(*FORWARD.results, Buffer("x", (-1,), "int32"))),
            r"buffer x has shape \(-1,\)",
        ),
        (
            lambda: dataclasses.replace(FORWARD, results=(*FORWARD.results, Buffer("x", (1,), "int9"))),
            "buffer x has dtype 'int9'",
        ),
        (
            lambda: dataclasses.replace(FORWARD, steps=()),
            "for one compute capability, and this is for \\[\\]",
        ),
    ],
)
def test_other_plans_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        call.resolve(launch_plan.dump(make()))


def test_kernels_for_several_devices_are_refused():
    other = with_kernel(arch="sm_80").launches[0]
    plan = dataclasses.replace(FORWARD, steps=(*FORWARD.steps, other))
    with pytest.raises(ValueError, match=r"this is for \[\(8, 0\), \(9, 0\)\]"):
        plan_check.check(plan)


def test_parameters_beyond_what_drivers_take_are_refused():
    many = struct("Parameters", **{f"x{i}": "int64_t" for i in range(513)})
    plan = with_launch(
        kernel=dataclasses.replace(FORWARD.launches[0].kernel, parameters=many), arguments=(0,) * 513
    )
    with pytest.raises(ValueError, match="forward takes 4104 bytes of parameters"):
        plan_check.check(plan)


def edited(edit) -> str:
    """The forward plan's text, edited as JSON."""
    value = json.loads(launch_plan.dump(FORWARD))
    edit(value)
    return json.dumps(value)


def counts(wanted: int, given: int) -> str:
    return f"forward takes {wanted} arguments, and this launch has {given}"


def launch_of(value) -> list:
    return value["LaunchPlan"][2][-1]["Launch"]


def parameters_of(value) -> list:
    return launch_of(value)[0]["Kernel"][4]["Struct"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "Expecting value"),
        ("[]", "not a launch plan: a tuple"),
        ("{}", "not a launch plan: it has a part without a name"),
        ('{"Pointer": ["x"]}', "not a launch plan: a Pointer"),
        ('{"os.system": ["x"]}', "it has a part os.system"),
        ('{"LaunchPlan": [[], []]}', "a LaunchPlan has the fields operands, results, steps, aliases"),
        ('{"LaunchPlan": [[], [], [{"Zero": [7]}], []]}', "Zero.buffer is 7"),
        ('{"LaunchPlan": [1, [], [], []]}', "LaunchPlan.operands is 1"),
        ('{"Buffer": ["x", [true], "int32"]}', r"Buffer.shape is \(True,\)"),
        ("[" * 100_000 + "]" * 100_000, "not a launch plan"),
        (edited(lambda v: launch_of(v).pop()), "a Launch has the fields"),
        (edited(lambda v: launch_of(v).__setitem__(1, [1, 1])), r"Launch.grid is \(1, 1\)"),
        (edited(lambda v: launch_of(v).__setitem__(2, "384")), "Launch.block is '384'"),
        (
            edited(lambda v: launch_of(v)[4].pop()),
            counts(COUNT, COUNT - 1),
        ),
        (
            edited(lambda v: launch_of(v)[4].append(0)),
            counts(COUNT, COUNT + 1),
        ),
        (edited(lambda v: launch_of(v)[4].__setitem__(3, 7)), "argument out of forward is 7"),
        (
            edited(lambda v: launch_of(v)[4].__setitem__(5, 2**31)),
            "argument queries of forward is 2147483648",
        ),
        (edited(lambda v: launch_of(v)[4].__setitem__(5, [1])), r"Launch.arguments is"),
        (edited(lambda v: launch_of(v)[4].__setitem__(19, float("nan"))), "it has a number NaN"),
        (
            edited(lambda v: parameters_of(v)[1].pop()),
            counts(COUNT - 1, COUNT),
        ),
        (edited(lambda v: parameters_of(v)[1].__setitem__(1, ["out", "char"])), "has type 'char'"),
        (edited(lambda v: parameters_of(v)[1].__setitem__(1, ["a; b", "int*"])), "'a; b' is no name"),
        (edited(lambda v: parameters_of(v)[1].__setitem__(1, ["out"])), "Struct.fields is"),
    ],
)
def test_text_that_is_no_plan_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        call.resolve(text)
