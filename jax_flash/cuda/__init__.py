"""CUDA kernels for Hopper, compiled by NVRTC for the call at hand and run as XLA custom calls.

From here: `forward_plan.py` and `backward_plan.py` turn a call into a launch plan, `call.py` makes the
custom call of it, `compile.py` the machine code, and the module `_launcher` (cuda/launcher) runs it.
"""

import functools
import warnings
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_flash._device import Device, current
from jax_flash._spec import AttentionSpec, Gradients, Operands, shapes_of, sizes
from jax_flash.cuda import backward_plan, call, compile, dropout, fixed_point, forward_plan, scores
from jax_flash.cuda.launch_plan import LaunchPlan

name = "cuda"

MAX_HEAD_DIM = 256


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
    n = sizes(shapes)
    if reason := scores.unsupported(shapes) or dropout.unsupported(spec):
        return reason
    if shapes.query.dtype.name not in ("bfloat16", "float16"):
        return f"query's dtype is {shapes.query.dtype.name}; it may be bfloat16 or float16"
    for operand, head_dim in (("key", n.H), ("value", n.V)):
        if head_dim > MAX_HEAD_DIM:
            return f"{operand}'s head dim is {head_dim}; it may be up to {MAX_HEAD_DIM}"
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
    head_dim, value_dim = forward_plan.padded_head_dims(n)
    changed = scores.changed(spec, shapes)
    ahead = forward_plan.schedule(spec, shapes).tile
    back = backward_plan.tile(max(head_dim, value_dim), changed)
    dims = f"head dim {head_dim}" if n.H == n.V else f"head dims {head_dim} of keys and {value_dim} of values"
    return (
        f"sm_90 kernels for {dims}: forward {ahead.rows} queries × {ahead.keys} keys, "
        f"{ahead.stages} stages; backward {back.queries} × {back.keys}, {back.stages} stages"
    )


def forward(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """`out (B, T, N, V)` in query's dtype and the natural log-sum-exp `lse (B, N, T)`, float32."""
    n = sizes(operands)
    operands = _padded(operands)
    plan = forward_plan.plan_forward(spec, shapes_of(operands), current())
    arrays = operands.present() | forward_bounds(spec, operands)
    results = _call("jax_flash_forward", plan, dropout.arranged(plan, arrays))
    return _cut(results["out"], n.V), results["lse"]


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
) -> Gradients:
    """Gradients of what is differentiable; `d_lse (B, N, T)` is None where lse was not returned."""
    n = sizes(operands)
    operands = _padded(operands)
    plan = backward_plan.plan_backward(spec, shapes_of(operands), current())
    arrays = operands.present() | backward_bounds(spec, operands)
    arrays |= {"out": _padded_rows(out), "lse": lse, "d_out": _padded_rows(d_out)}
    if d_lse is not None:
        arrays["d_lse"] = d_lse
    bias_factor = None
    if fixed_point.adds_bias_up(spec, shapes_of(operands)):
        arrays["bias_factor"] = bias_factor = fixed_point.factor(spec, operands, lse, d_out, d_lse)
    results = _call("jax_flash_backward", plan, arrays)
    others = scores.gradients(spec, operands, results, bias_factor)
    d_query, d_key, d_value = results["d_query"], results["d_key"], results["d_value"]
    return Gradients(_cut(d_query, n.H), _cut(d_key, n.H), _cut(d_value, n.V), **others)


def forward_bounds(spec: AttentionSpec, operands: Operands) -> dict[str, jax.Array]:
    """By name what the forward kernel reads besides where what queries see is data."""
    return _bounds(forward_plan.plan_bounds(spec, shapes_of(operands), current()), operands)


def backward_bounds(spec: AttentionSpec, operands: Operands) -> dict[str, jax.Array]:
    """The same of the backward kernel."""
    return _bounds(backward_plan.plan_bounds(spec, shapes_of(operands), current()), operands)


def _bounds(plan: LaunchPlan | None, operands: Operands) -> dict[str, jax.Array]:
    return {} if plan is None else _call("jax_flash_bounds", plan, operands.present())


def _padded(operands: Operands) -> Operands:
    """The same call with head dims that are multiples of 8: TMA copies rows of whole 16 bytes."""
    query, key, value = map(_padded_rows, (operands.query, operands.key, operands.value))
    return operands.replace(query=query, key=key, value=value)


def _padded_rows(x: jax.Array) -> jax.Array:
    """Zeros, which add nothing to a score, and to the output and gradients columns that are cut off."""
    missing = -x.shape[-1] % 8
    return jnp.pad(x, [(0, 0)] * 3 + [(0, missing)]) if missing else x


def _cut(x: jax.Array, columns: int) -> jax.Array:
    return x if x.shape[-1] == columns else x[..., :columns]


def _call(target: str, plan: LaunchPlan, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The plan's results by name; `arrays` has its operands, and may have others."""
    results = call.call(target, plan, *(arrays[buffer.name] for buffer in plan.operands))
    return {buffer.name: result for buffer, result in zip(plan.results, results, strict=True)}
