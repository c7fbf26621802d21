"""Launch plans as custom calls: traced, lowered and exported for CUDA with no GPU."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec

from jax_flash.cuda import _launcher, call, compile, launch_plan
from jax_flash.cuda.compile import CompileError
from jax_flash.cuda.launch_plan import (
    Buffer,
    Kernel,
    LaunchPlan,
    Pointer,
    TensorMap,
    Zero,
)
from jax_flash.cuda.parameters import struct

pytestmark = pytest.mark.every_turn

SOURCE = """
#include "parameters.cuh"
extern "C" __global__ void double_it(const __grid_constant__ Parameters parameters) {
    parameters.doubled[parameters.n] = FACTOR;
}
"""
PARAMETERS = struct("Parameters", rows="TensorMap", doubled="float*", n="int32_t")
TYPES = compile.kernels_folder() / "ptx" / "types.cuh"
ROWS = jax.ShapeDtypeStruct((4, 8), jnp.float32)


@pytest.fixture(autouse=True)
def sources(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "double.cu").write_text(SOURCE)
    (tmp_path / "ptx").mkdir()
    shutil.copy(TYPES, tmp_path / "ptx")
    monkeypatch.setattr(compile, "kernels_folder", lambda: tmp_path)
    return tmp_path


def make_plan(factor: int | str = 2) -> LaunchPlan:
    """One of every kind of step and parameter."""
    launch = launch_plan.launch(
        kernel=Kernel("double.cu", "double_it", "sm_90a", (("FACTOR", factor),), PARAMETERS),
        grid=(2, 1, 1),
        block=32,
        shared_bytes=1024,
        arguments={
            "rows": TensorMap("rows", "float32", (8, 4), (32,), (8, 4), 32),
            "doubled": Pointer("doubled"),
            "n": 32,
        },
    )
    return LaunchPlan(
        operands=(Buffer("rows", (4, 8), "float32"),),
        results=(Buffer("doubled", (4, 8), "bfloat16"), Buffer("scratch", (256,), "uint8")),
        steps=(Zero("scratch"), launch, dataclasses.replace(launch, cluster=2, overlap_previous=True)),
    )


def doubled(rows: jax.Array) -> jax.Array:
    return call.call("jax_flash_forward", make_plan(), rows)[0]


def test_dump_and_load_are_inverse():
    plan = make_plan()
    assert launch_plan.load(launch_plan.dump(plan)) == plan
    assert launch_plan.dump(launch_plan.load(launch_plan.dump(plan))) == launch_plan.dump(plan)


def test_results_have_the_shapes_of_the_plan():
    out, scratch = jax.eval_shape(lambda x: call.call("jax_flash_backward", make_plan(), x), ROWS)
    assert (out.shape, out.dtype) == ((4, 8), jnp.bfloat16)
    assert (scratch.shape, scratch.dtype) == ((256,), jnp.uint8)


@pytest.mark.parametrize("target", call.TARGETS)
def test_lowers_to_a_custom_call_of_its_name(target):
    exported = jax.export.export(
        jax.jit(lambda x: call.call(target, make_plan(), x)),
        platforms=["cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(target)],
    )(ROWS)
    module = exported.mlir_module()
    assert re.search(rf"custom_call @{target}\(", module)
    assert "double.cu" in module
    assert len(module) < 8000  # the plan travels in the program, and the machine code does not


def test_tracing_compiles_the_kernels(monkeypatch):
    compiled = []
    monkeypatch.setattr(call, "_launcher_kernel", compiled.append)
    plan = make_plan(factor=3)
    jax.eval_shape(lambda x: call.call("jax_flash_forward", plan, x), ROWS)
    assert compiled == [plan.launches[0].kernel]


def test_resolve_makes_a_plan_of_its_text():
    assert isinstance(call.resolve(launch_plan.dump(make_plan(factor=4))), _launcher.Plan)


PROGRAM = """if True:
    import gc, jax, jax.numpy as jnp
    from jax_flash.cuda import _launcher, launch_plan
    from jax_flash.cuda.sm90.forward_plan import plan_forward
    from jax_flash._device import H100
    from jax_flash._spec import AttentionSpec, Operands

    jax.devices()  # XLA's CPU client would take handlers that wait for it ahead of their types
    jax.ffi.register_ffi_type("plan", _launcher.state_type(), platform="cpu")
    jax.ffi.register_ffi_target("attend", _launcher.handlers(), platform="cpu")
    query = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    plan = plan_forward(AttentionSpec(0.1), Operands(query, query, query), H100)
    results = [jax.ShapeDtypeStruct(b.shape, jnp.dtype(b.dtype)) for b in plan.results]

    def compiled(text):
        def layers(query, key, value):
            for _ in range(3):
                query, _ = jax.ffi.ffi_call("attend", results)(query, key, value, plan=text)
            return query
        return jax.jit(layers).lower(query, query, query).compile()

    executable = compiled(launch_plan.dump(plan))
    print("compiled:", _launcher.Plan.alive())
    operand = jnp.zeros(query.shape, query.dtype)
    try:
        jax.block_until_ready(executable(operand, operand, operand))
    except Exception as error:
        print("run:", str(error).splitlines()[-1])
    del executable
    gc.collect()
    print("deleted:", _launcher.Plan.alive())
    try:
        compiled(launch_plan.dump(plan).replace("sm90/forward/", "/etc/"))
    except Exception as error:
        print("refused:", error)
"""


def test_xla_keeps_a_plan_for_each_call_of_an_executable():
    """By XLA's CPU client, which instantiates as the one for CUDA does, and has no stream to run on."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines() == [
        "compiled: 3",
        "run: Failed to get platform stream: XLA FFI GPU context is not available",
        "deleted: 0",
        "refused: INVALID_ARGUMENT: jax_flash: the launch plan can't run: '/etc/forward.cu' is no source "
        "among jax_flash's kernels",
    ], done.stderr


def test_a_kernel_that_does_not_compile_fails_where_it_was_called():
    with pytest.raises(CompileError, match=r"double_it of double\.cu for sm_90a \(FACTOR=unheard_of\)"):
        jax.eval_shape(lambda x: call.call("jax_flash_forward", make_plan("unheard_of"), x), ROWS)


def test_plans_share_the_kernels_that_they_have_in_common():
    assert len(call._compile_all(make_plan())) == 1
    (kernel,) = call._compile_all(make_plan()).values()
    smaller = dataclasses.replace(make_plan(), steps=make_plan().launches[:1])
    assert list(call._compile_all(smaller).values()) == [kernel]


@pytest.mark.parametrize(
    "operand, got",
    [
        (jax.ShapeDtypeStruct((4, 9), jnp.float32), r"float32\[4, 9\]"),
        (jax.ShapeDtypeStruct((4, 8), jnp.float16), r"float16\[4, 8\]"),
    ],
)
def test_operands_that_the_plan_was_not_made_for_are_refused(operand, got):
    with pytest.raises(ValueError, match=rf"takes rows as \['float32\[4, 8\]'\]; got \['{got}'\]"):
        jax.eval_shape(doubled, operand)


def test_vmap_is_refused():
    with pytest.raises(NotImplementedError, match="vmap"):
        jax.eval_shape(jax.vmap(doubled), jax.ShapeDtypeStruct((3, 4, 8), jnp.float32))


def test_traces_inside_shard_map():
    mesh = Mesh(jax.devices()[:2], ("data",))
    spec = PartitionSpec("data")
    sharded = jax.shard_map(doubled, mesh=mesh, in_specs=spec, out_specs=spec)
    out = jax.eval_shape(sharded, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert out.shape == (8, 8)
