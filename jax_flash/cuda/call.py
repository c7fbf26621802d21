"""Launch plans as XLA custom calls."""

import concurrent.futures
import functools
import pathlib

import jax
import jax.numpy as jnp

from jax_flash.cuda import launch_plan, plan_check
from jax_flash.cuda.compile import compile_kernel, describe
from jax_flash.cuda.launch_plan import (
    Buffer,
    Kernel,
    Launch,
    LaunchPlan,
    Pointer,
    TensorMap,
    Zero,
)
from jax_flash.cuda.parameters import layout, pack

try:
    import jax_flash.cuda._launcher as _launcher
except ModuleNotFoundError:
    raise ImportError(
        f"jax_flash was imported from {pathlib.Path(__file__).parents[1]}, which lacks the compiled module "
        "jax_flash.cuda._launcher. If that is a source checkout, either work in another folder, where Python "
        "finds the installed package, or build the module in place with `pip install -e .`."
    ) from None

# The names that operations have in HLO and in profiles. All run the same launcher.
TARGETS = (
    *("jax_flash_forward", "jax_flash_backward", "jax_flash_bounds", "jax_flash_decode"),
    *("jax_flash_quantize", "jax_flash_arrange"),
)

# A call's state is its decoded plan. XLA has to know the type ahead of the handlers.
jax.ffi.register_ffi_type("jax_flash_plan", _launcher.state_type(), platform="CUDA")
for _target in TARGETS:
    jax.ffi.register_ffi_target(_target, _launcher.handlers(), platform="CUDA")

collecting = jax.make_user_context(default_value=None)
"""Within `collecting(collector)`, each plan that is traced goes to `collector.add(target, plan)`, and its
kernels are not compiled. A function is traced anew for each collector, as JAX's caches know of it."""


def call(target: str, plan: LaunchPlan, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Runs `plan` on `arrays`, its operands in order; returns its results in order.

    `target` is one of `TARGETS`. Kernels are compiled here, while the caller is traced, so that an
    error in one is raised where the call was made. A plan is made for these very shapes: mapping with
    `vmap` is refused, and must fold the mapped axis into the shapes before planning.

    Raises ValueError where `arrays` are not what `plan` was made for, CompileError, and
    NvrtcNotFoundError.
    """
    _check_operands(plan.operands, arrays)
    if collecting.value is None:
        _compile_all(plan)
    else:
        collecting.value.add(target, plan)
    results = [jax.ShapeDtypeStruct(b.shape, jnp.dtype(b.dtype)) for b in plan.results]
    custom_call = jax.ffi.ffi_call(target, results, input_output_aliases=plan.alias_indices)
    return tuple(custom_call(*arrays, plan=launch_plan.dump(plan)))


def resolve(text: str) -> _launcher.Plan:
    """The plan that `text`, a custom call's attribute, describes.

    The launcher calls this once for each call of a program that XLA loads. Another process may have traced
    it, so kernels are compiled here if they have to be, and the plan is checked.

    Raises ValueError where the plan is none that this package makes, CompileError, and NvrtcNotFoundError.
    """
    plan = launch_plan.load(text)
    plan_check.check(plan)
    return build(plan)


def build(plan: LaunchPlan) -> _launcher.Plan:
    """`plan` as the launcher takes it: kernels compiled, buffers numbered."""
    kernels = _compile_all(plan)
    number = {buffer.name: i for i, buffer in enumerate((*plan.operands, *plan.results))}

    def step(s: Launch | Zero) -> _launcher.Launch | _launcher.Zero:
        if not isinstance(s, Launch):
            return _launcher.Zero(number[s.buffer])
        parameters = s.kernel.parameters
        fields = list(zip(layout(parameters).slots, s.arguments, strict=True))
        return _launcher.Launch(
            kernels[s.kernel],
            s.grid,
            s.block,
            s.shared_bytes,
            s.cluster,
            s.overlap_previous,
            pack(parameters, [x if isinstance(x, int | float) else None for x in s.arguments]),
            [
                _launcher.Pointer(slot.offset, number[x.buffer])
                for slot, x in fields
                if isinstance(x, Pointer)
            ],
            [
                _launcher.TensorMap(
                    slot.offset,
                    number[x.buffer],
                    x.dtype,
                    x.sizes,
                    x.strides,
                    x.box,
                    x.swizzle,
                )
                for slot, x in fields
                if isinstance(x, TensorMap)
            ],
        )

    return _launcher.Plan(
        compute_capability=plan.compute_capability,
        operand_bytes=[buffer.bytes for buffer in plan.operands],
        result_bytes=[buffer.bytes for buffer in plan.results],
        steps=[step(s) for s in plan.steps],
    )


def _compile_all(plan: LaunchPlan) -> dict[Kernel, _launcher.Kernel]:
    kernels = list({launch.kernel: None for launch in plan.launches})
    if not kernels:
        return {}
    # NVRTC runs without the GIL.
    with concurrent.futures.ThreadPoolExecutor(len(kernels)) as threads:
        return dict(zip(kernels, threads.map(_launcher_kernel, kernels), strict=True))


@functools.cache
def _launcher_kernel(kernel: Kernel) -> _launcher.Kernel:
    # One object for all plans that launch it, as each object loads its own module.
    return _launcher.Kernel(compile_kernel(kernel).cubin, kernel.entry, describe(kernel))


def _check_operands(operands: tuple[Buffer, ...], arrays: tuple[jax.Array, ...]) -> None:
    got = [f"{jnp.dtype(array.dtype).name}{list(array.shape)}" for array in arrays]
    want = [f"{jnp.dtype(buffer.dtype).name}{list(buffer.shape)}" for buffer in operands]
    if got != want:
        names = ", ".join(buffer.name for buffer in operands)
        raise ValueError(f"the launch plan takes {names} as {want}; got {got}")
