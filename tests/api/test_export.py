"""Programs that outlive the process that traced them: `jax.export`, and the compilation cache."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import transform_cases as cases
from jax.experimental import serialize_executable
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import _device, _slower
from jax_flash._spec import Operands

NORMAL = np.random.default_rng(0).normal(size=(3, 2, 6, 4, 8)).astype(np.float32)


def run_python(code, *args, **environment):
    """Runs `code` in a fresh process, and gives what it prints."""
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=pathlib.Path(__file__).parents[1] / "support",
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"} | environment,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def scalar(query, key, value):
    out, lse = jax_flash.flash_attention(
        query, key, value, is_causal=True, return_residual=True, implementation="xla"
    )
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))


LOAD_AND_RUN = """
import sys
import jax, jax.export
import numpy as np

exported = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
inputs = np.load(sys.argv[2])
function = exported.call
if sys.argv[4] == "grad":
    function = jax.grad(function, argnums=(0, 1, 2))
np.save(sys.argv[3], np.stack(function(*inputs)))
assert "jax_flash" not in sys.modules
"""


@pytest.mark.parametrize("where", ["gradient_inside", "gradient_outside"])
def test_exported_program_runs_in_a_fresh_process(tmp_path, where):
    """Where the gradient is taken of the exported function, its derivative is exported with it."""
    gradient = jax.jit(jax.grad(scalar, argnums=(0, 1, 2)))
    inside = where == "gradient_inside"
    exported = jax.export.export(gradient if inside else jax.jit(scalar), platforms=["cpu"])(*NORMAL)
    (tmp_path / "program").write_bytes(exported.serialize(vjp_order=0 if inside else 1))
    np.save(tmp_path / "inputs.npy", NORMAL)
    paths = [tmp_path / name for name in ("program", "inputs.npy", "results.npy")]
    run_python(LOAD_AND_RUN, *paths, "run" if inside else "grad")
    cases.assert_close(np.load(paths[-1]), np.stack(gradient(*NORMAL)))


def test_one_export_for_several_platforms():
    """With the automatic choice each platform gets its own implementation, and this one runs here."""

    def opaque_forward(spec, operands):
        out, lse = jax.eval_shape(lambda o: cases.plain_forward(spec, o), operands)
        return jax.ffi.ffi_call("on_gpu_alone", (out, lse))(operands.query)

    cases.add_implementation("exported", opaque_forward, cases.plain_backward)
    operands = cases.make_operands()
    differentiable, others = cases.split(operands)

    def automatic(operands):
        return cases.attend(operands, implementation=("exported", "plain"))

    with _device.assume(_device.H100):
        exported = jax.export.export(
            jax.jit(jax.value_and_grad(cases.loss(automatic))),
            platforms=["cuda", "cpu"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("on_gpu_alone")],
        )(differentiable, others)
    assert "on_gpu_alone" in exported.mlir_module()
    actual = jax.export.deserialize(exported.serialize()).call(differentiable, others)
    cases.assert_close(actual, jax.value_and_grad(cases.loss(cases.definition))(differentiable, others))


def test_export_for_a_gpu_that_the_machine_lacks():
    x = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)

    def export():
        step = jax.jit(lambda x: jax_flash.flash_attention(x, x, x))
        checks = [jax.export.DisabledSafetyCheck.custom_call("jax_flash_forward")]
        return jax.export.export(step, platforms=["cuda"], disabled_checks=checks)(x).mlir_module()

    with jax_flash.planned_for("sm_90a"):
        assert "custom_call @jax_flash_forward" in export()
        assert jax_flash.explain(x, x, x).picked == "cuda"
    _slower._told.clear()
    with (
        _device.assume(_device.CPU),
        pytest.warns(_slower.SlowerImplementationWarning, match="lowered for cuda"),
    ):
        assert "custom_call @jax_flash_forward" not in export()


@pytest.mark.parametrize(("device", "error"), [(None, TypeError), ("H100", ValueError), (90, TypeError)])
def test_planned_for_refuses_what_is_no_gpu(device, error):
    with pytest.raises(error), jax_flash.planned_for(device):
        pass


def sharded_operands():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    specs = {"query": P("x", None, "y"), "key": P("x", None, "y"), "value": P("x", None, "y")}
    present = cases.make_operands(N=8, K=4).present()
    return {n: jax.device_put(x, NamedSharding(mesh, specs.get(n, P()))) for n, x in present.items()}


def attend_and_differentiate(operands, implementation="plain"):
    def loss(differentiable, others):
        function = functools.partial(cases.attend, implementation=(implementation,))
        return cases.loss(function)(differentiable, others)

    return jax.value_and_grad(loss)(*cases.split(Operands(**operands)))


def test_export_over_several_devices():
    """The exported program partitions the call over the mesh of its arguments, without Python."""
    operands = sharded_operands()

    def exported(implementation):
        checks = [jax.export.DisabledSafetyCheck.custom_call("opaque")]
        function = jax.jit(functools.partial(attend_and_differentiate, implementation=implementation))
        program = jax.export.export(function, disabled_checks=checks)(operands)
        return jax.export.deserialize(program.serialize()).call

    cases.assert_close(jax.jit(exported("plain"))(operands), jax.jit(attend_and_differentiate)(operands))
    sharded = {name: operands[name].sharding for name in ("query", "key", "value")}

    def gradients(operands):
        _, gradients = exported("opaque")(operands)
        return {name: gradients[name] for name in sharded}

    # Lengths and ids are replicated, so each device takes its part.
    moved = cases.collectives(jax.jit(gradients, out_shardings=sharded), operands)
    assert moved <= {"all-reduce", "dynamic-slice"}


def test_executable_over_several_devices_is_pickled():
    operands = sharded_operands()
    compiled = jax.jit(attend_and_differentiate).lower(operands).compile()
    loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
    cases.assert_close(loaded(operands), compiled(operands))


COMPILE = """
import sys
import jax
import numpy as np
import jax_flash

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if "cache_hits" in name else None)

def scalar(x, scale=float(sys.argv[3])):
    return jax_flash.flash_attention(x, x, x, scale=scale, implementation="xla").sum()

x = np.linspace(0, 1, 2 * 4 * 2 * 8, dtype=np.float32).reshape(2, 4, 2, 8)
if sys.argv[2] == "sharded":
    # Without it the key holds the address of a Python object, which no other process shares.
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    x = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P("x")))
step = jax.jit(jax.grad(scalar)).lower(x)
hits.clear()
gradient = step.compile()(x)
print(len(hits), float(abs(np.asarray(gradient)).sum()))
"""


@pytest.mark.parametrize("placement", ["single", "sharded"])
def test_persistent_compilation_cache(tmp_path, placement):
    """The second process finds what the first compiled; another scale is another program."""
    first = run_python(COMPILE, tmp_path, placement, 0.5).split()
    second = run_python(COMPILE, tmp_path, placement, 0.5).split()
    other = run_python(COMPILE, tmp_path, placement, 0.25).split()
    assert [int(hits) for hits, _ in (first, second, other)] == [0, 1, 0]
    assert first[1] == second[1] != other[1]
