"""CUDA kernels, compiled by NVRTC for the call at hand and run as XLA custom calls.

A family of kernels (`sm90/`) turns a call into launch plans. From a plan, `call.py` makes the custom call,
`compile.py` the machine code, and the module `_launcher` (cuda/launcher) runs it.
"""

import dataclasses
import functools
from collections.abc import Mapping
from types import ModuleType

import jax
import jax.numpy as jnp

from jax_flash import _float8, _varlen_unpacking
from jax_flash._device import Device, current
from jax_flash._spec import AttentionSpec, Gradients, Operands, shapes_of, sizes
from jax_flash.cuda import call, compile, dropout, fixed_point, mask_metadata, score_mod, sm90
from jax_flash.cuda.launch_plan import LaunchPlan
from jax_flash.cuda.varlen import of_varlen_tokens, spec_of_tokens

name = "cuda"

families = (sm90,)
"""The families of kernels, one for each generation of GPUs. `sm90/__init__.py` says what a family has."""


def supports(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device) -> str | None:
    """Why these kernels can't run the call on `device`, or None.

    Raises NvrtcNotFoundError, an ImportError, where they could if NVRTC were installed.
    """
    limit = device_limit(device) or score_mod.unsupported(spec, shapes) or dropout.unsupported(spec)
    limit = limit or family(device).unsupported(spec, shapes)
    if limit is None:
        require_nvrtc()
    return limit


def device_limit(device: Device) -> str | None:
    """Why no kernels run on `device`, or None."""
    if device.platform != "cuda":
        return f"it needs a CUDA GPU, and JAX's default device is {device.kind} ({device.platform})"
    if _family(device) is None:
        needed = " or ".join(f"a {family.GENERATION} GPU ({_capabilities(family)})" for family in families)
        return f"it needs {needed}, not {device.kind} {device.compute_capability}"
    return None


def _capabilities(family: ModuleType) -> str:
    versions = [f"{major}.{minor}" for major, minor in family.COMPUTE_CAPABILITIES]
    return f"compute capability {', '.join(versions)}"


def describe(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device) -> str:
    """The kernels' names and tile shapes for a call that `supports` accepts."""
    return family(device).describe(spec_of_tokens(spec, shapes), shapes)


def family(device: Device) -> ModuleType:
    """The kernels for `device`, whose architecture `supports` accepts."""
    found = _family(device)
    assert found is not None, device
    return found


def _family(device: Device) -> ModuleType | None:
    return next((f for f in families if device.compute_capability in f.COMPUTE_CAPABILITIES), None)


@functools.cache
def require_nvrtc() -> None:
    """Raises NvrtcNotFoundError where NVRTC is not installed. Once found, it is not looked for again."""
    compile.nvrtc_version()


def forward(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """`out (B, T, N, V)` and the natural log-sum-exp `lse (B, N, T)`.

    `out` is in its `spec.result_dtype`; lse is float32.
    """
    is_float8 = spec.quantization is not None or _float8.is_float8(operands.query.dtype)
    if is_float8 and operands.query_offsets is not None:
        return _varlen_unpacking.forward(forward, spec, operands)
    spec, operands = of_varlen_tokens(spec, operands)
    n = sizes(operands)
    if spec.quantization is not None:
        spec, operands, arrays = _quantized(spec, operands)
    else:
        operands = _padded(operands)
        arrays = forward_arrays(operands)
    plan = family(current()).plan_forward(spec, shapes_of(operands), current())
    arrays |= forward_metadata(spec, operands)
    arrays |= family(current()).forward_block_lists(spec, operands, arrays)
    results = _call("jax_flash_forward", plan, dropout.arranged(plan, arrays))
    return without_padding(results["out"], n.V), results["lse"]


def forward_arrays(operands: Operands) -> dict[str, jax.Array]:
    """The operands by the names of the forward kernel's buffers. A kernel transposes values in e4m3."""
    arrays = operands.present()
    if not _float8.is_float8(operands.query.dtype):
        return arrays
    plan = family(current()).plan_arrange(shapes_of(operands), current())
    results = _call("jax_flash_arrange", plan, arrays)
    return arrays | {name.removeprefix("arranged_"): x for name, x in results.items()}


def _quantized(
    spec: AttentionSpec, operands: Operands
) -> tuple[AttentionSpec, Operands, dict[str, jax.Array]]:
    """The call on e4m3 numbers, and the arrays that the forward kernel takes, by a kernel.

    It writes values as the forward kernel takes them, so the operands' value has their shape alone.
    """
    operands = _padded(operands, multiple=16)
    plan = family(current()).plan_quantize(shapes_of(operands), current())
    results = _call("jax_flash_quantize", plan, operands.present())
    changed = {"query": results.pop("quantized_query"), "key": results.pop("quantized_key")}
    changed["value"] = jnp.zeros(operands.value.shape, _float8.DTYPE)
    others = {name: x for name, x in operands.present().items() if name != "rotation_signs"}
    quantized = Operands.of(others | changed)
    out_dtype = operands.query.dtype.name
    spec = dataclasses.replace(spec, quantization=None, out_dtype=out_dtype)
    return spec, quantized, quantized.present() | results


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
) -> Gradients:
    """Gradients of the differentiable operands; `d_lse (B, N, T)` is None if lse was not returned."""
    spec, operands = of_varlen_tokens(spec, operands)
    n = sizes(operands)
    operands = _padded(operands)
    plan = family(current()).plan_backward(spec, shapes_of(operands), current())
    arrays = operands.present() | backward_metadata(spec, operands)
    arrays |= family(current()).backward_block_lists(spec, operands, arrays, current())
    arrays |= {"out": padded_rows(out), "lse": lse, "d_out": padded_rows(d_out)}
    if d_lse is not None:
        arrays["d_lse"] = d_lse
    bias_factor = None
    if fixed_point.adds_bias_up(spec, shapes_of(operands)):
        arrays["bias_factor"] = bias_factor = fixed_point.factor(spec, operands, lse, d_out, d_lse)
    results = _call("jax_flash_backward", plan, arrays)
    others = score_mod.gradients(spec, operands, results, bias_factor)
    d_query, d_key, d_value = results["d_query"], results["d_key"], results["d_value"]
    of_rows = {
        "query": without_padding(d_query, n.H),
        "key": without_padding(d_key, n.H),
        "value": without_padding(d_value, n.V),
    }
    return Gradients.of(of_rows | others)


def forward_metadata(spec: AttentionSpec, operands: Operands) -> dict[str, jax.Array]:
    """Mask metadata that the forward kernel reads, by name; empty if the mask is static."""
    plan = family(current()).plan_forward_metadata(spec, shapes_of(operands), current())
    return _metadata(plan, operands)


def backward_metadata(spec: AttentionSpec, operands: Operands) -> dict[str, jax.Array]:
    """Mask metadata that the backward kernel reads, by name; empty if the mask is static."""
    plan = family(current()).plan_backward_metadata(spec, shapes_of(operands), current())
    return _metadata(plan, operands)


def _metadata(plan: LaunchPlan | None, operands: Operands) -> dict[str, jax.Array]:
    if plan is None:
        return {}
    arrays = operands.present()
    if operands.diagonal is not None:
        parts = operands.diagonal.shape[1]
        shifts = jnp.broadcast_to(operands.diagonal, (operands.query.shape[0], parts))
        arrays["diagonal"] = jnp.clip(shifts, -mask_metadata.MAX_SHIFT, mask_metadata.MAX_SHIFT)
    # README names this target, as the export check of programs with lengths, varlen sequences or segments.
    return _call("jax_flash_bounds", plan, arrays)


def _padded(operands: Operands, multiple: int | None = None) -> Operands:
    """The same call with head dims that are multiples of 16 bytes, of which TMA copies whole ones."""
    rows = {name: getattr(operands, name) for name in ("query", "key", "value")}
    return operands.replace(**{name: padded_rows(x, multiple) for name, x in rows.items()})


def padded_rows(x: jax.Array, multiple: int | None = None) -> jax.Array:
    """Adds columns of zeros. They add nothing to scores; results lose theirs by `without_padding`."""
    missing = -x.shape[-1] % (multiple or 16 // x.dtype.itemsize)
    return jnp.pad(x, [(0, 0)] * 3 + [(0, missing)]) if missing else x


def without_padding(x: jax.Array, columns: int) -> jax.Array:
    return x if x.shape[-1] == columns else x[..., :columns]


def _call(target: str, plan: LaunchPlan, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Runs the plan and gives its results by name; `arrays` has its operands, and may have others."""
    results = call.call(target, plan, *(arrays[buffer.name] for buffer in plan.operands))
    return {buffer.name: result for buffer, result in zip(plan.results, results, strict=True)}
