"""CUDA kernels for Hopper, compiled by NVRTC for the call at hand and run as XLA custom calls.

From here: `forward_plan.py` and `backward_plan.py` turn a call into a launch plan, `call.py` makes the
custom call of it, `compile.py` the machine code, and the module `_launcher` (cuda/launcher) runs it.
"""

import functools
import warnings
from collections.abc import Mapping

import jax

from jax_flash._device import Device, current
from jax_flash._spec import AttentionSpec, Gradients, Operands, shapes_of, sizes
from jax_flash.cuda import backward_plan, call, compile, dropout, forward_plan, scores
from jax_flash.cuda.launch_plan import LaunchPlan
from jax_flash.cuda.window import binding_window

name = "cuda"

MAX_HEAD_DIM = 256
_UNSUPPORTED_OPERANDS = (
    "query_seq_lengths",
    "key_value_seq_lengths",
    "query_segment_ids",
    "key_value_segment_ids",
)


def supports(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device) -> str | None:
    """Why these kernels can't run the call on `device`, or None."""
    if device.platform != "cuda":
        return f"it needs a CUDA GPU, and JAX's default device is {device.kind} ({device.platform})"
    if device.compute_capability is None or device.compute_capability[0] != 9:
        return (
            f"it needs a Hopper GPU (compute capability 9.0), not {device.kind} {device.compute_capability}"
        )
    if nvrtc_missing := _nvrtc_missing():
        return nvrtc_missing
    for operand in _UNSUPPORTED_OPERANDS:
        if getattr(shapes, operand) is not None:
            return f"{operand} is not supported"
    n = sizes(shapes)
    if reason := scores.unsupported(spec, shapes) or dropout.unsupported(spec):
        return reason
    if shapes.query.dtype.name not in ("bfloat16", "float16"):
        return f"query's dtype is {shapes.query.dtype.name}; it may be bfloat16 or float16"
    if n.H != n.V:
        return f"the head dims of key ({n.H}) and value ({n.V}) differ"
    if n.H % 8 != 0 or n.H > MAX_HEAD_DIM:
        return f"the head dim is {n.H}; it may be a multiple of 8 up to {MAX_HEAD_DIM}"
    limit = 2**29  # the kernels add up rows, keys and window sides in 32 bits
    if max(n.T, n.S) >= limit or n.B * n.N >= limit:
        return f"query and key sequences and batch times heads are limited to {limit}"
    return None


@functools.cache
def _nvrtc_missing() -> str | None:
    """What to install, where NVRTC is missing. Warns, once: as a Hopper GPU runs something slower then."""
    try:
        compile.nvrtc_version()
    except compile.NvrtcNotFoundError as error:
        warnings.warn(f"jax_flash's CUDA kernels can't be used on this GPU: {error}", stacklevel=2)
        return str(error)
    return None


def describe(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device) -> str:
    """The kernels' names and tile shapes for a call that `supports` accepts."""
    n = sizes(shapes)
    head_dim = forward_plan.padded_head_dim(n.H)
    changed = scores.changed(spec, shapes)
    ahead = forward_plan.tile(head_dim, binding_window(spec, n), n, changed)
    back = backward_plan.tile(head_dim, changed)
    return (
        f"sm_90 kernels for head dim {head_dim}: forward {ahead.rows} queries × {ahead.keys} keys, "
        f"{ahead.stages} stages; backward {back.queries} × {back.keys}, {back.stages} stages"
    )


def forward(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """`out (B, T, N, H)` in query's dtype and the natural log-sum-exp `lse (B, N, T)`, float32."""
    plan = forward_plan.plan_forward(spec, shapes_of(operands), current())
    results = _call("jax_flash_forward", plan, dropout.arranged(plan, operands.present()))
    return results["out"], results["lse"]


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
) -> Gradients:
    """Gradients of what is differentiable; `d_lse (B, N, T)` is None where lse was not returned."""
    plan = backward_plan.plan_backward(spec, shapes_of(operands), current())
    arrays = operands.present() | {"out": out, "lse": lse, "d_out": d_out}
    if d_lse is not None:
        arrays["d_lse"] = d_lse
    results = _call("jax_flash_backward", plan, arrays)
    others = scores.gradients(spec, operands, results)
    return Gradients(results["d_query"], results["d_key"], results["d_value"], **others)


def _call(target: str, plan: LaunchPlan, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The plan's results by name; `arrays` has its operands, and may have others."""
    results = call.call(target, plan, *(arrays[buffer.name] for buffer in plan.operands))
    return {buffer.name: result for buffer, result in zip(plan.results, results, strict=True)}
