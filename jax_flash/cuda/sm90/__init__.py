"""The kernels for Hopper (compute capability 9.0): which calls they take, and how a call is launched.

A family of kernels is a package with the names in `__all__`; `jax_flash.cuda.families` lists them.
"""

import jax

from jax_flash._device import Device
from jax_flash._spec import AttentionSpec, Operands, sizes
from jax_flash.cuda import score_mod
from jax_flash.cuda.launch_plan import Kernel
from jax_flash.cuda.sm90 import backward_plan, backward_tiles, forward_plan
from jax_flash.cuda.sm90.backward_plan import plan_backward, plan_backward_metadata
from jax_flash.cuda.sm90.forward_plan import plan_forward, plan_forward_metadata
from jax_flash.cuda.sm90.tensor_maps import padded_head_dims

__all__ = [
    "COMPUTE_CAPABILITIES",
    "describe",
    "kernels",
    "plan_backward",
    "plan_backward_metadata",
    "plan_forward",
    "plan_forward_metadata",
    "unsupported",
]

COMPUTE_CAPABILITIES = ((9, 0),)
MAX_HEAD_DIM = 256
_DTYPES = ("bfloat16", "float16")
_LIMIT = 2**29  # sums of rows, keys and window sides must fit 32 bits

Shapes = Operands[jax.ShapeDtypeStruct]


def kernels(spec: AttentionSpec, shapes: Shapes, device: Device) -> list[Kernel]:
    """Every kernel of attention that such calls may run, whatever their lengths and number of heads."""
    return forward_plan.kernels(spec, shapes, device) + backward_plan.kernels(spec, shapes, device)


def unsupported(spec: AttentionSpec, shapes: Shapes) -> str | None:
    """Why these kernels can't run the call, or None."""
    n = sizes(shapes)
    if shapes.query.dtype.name not in _DTYPES:
        return f"query's dtype is {shapes.query.dtype.name}; it may be {' or '.join(_DTYPES)}"
    for operand, head_dim in (("key", n.H), ("value", n.V)):
        if head_dim > MAX_HEAD_DIM:
            return f"{operand}'s head dim is {head_dim}; it may be up to {MAX_HEAD_DIM}"
    if max(n.T, n.S) >= _LIMIT or n.B * n.N >= _LIMIT:
        return f"query and key sequences and batch times heads are limited to {_LIMIT}"
    return None


def describe(spec: AttentionSpec, shapes: Shapes) -> str:
    """The kernels' names and tile shapes for a call that `unsupported` accepts."""
    n = sizes(shapes)
    head_dim, value_dim = padded_head_dims(n)
    ahead = forward_plan.configure(spec, shapes).tile
    back = backward_tiles.tile(max(head_dim, value_dim), score_mod.has_score_mod(spec, shapes))
    dims = f"head dim {head_dim}" if n.H == n.V else f"head dims {head_dim} of keys and {value_dim} of values"
    return (
        f"sm_90 kernels for {dims}: forward {ahead.rows} queries × {ahead.keys} keys, "
        f"{ahead.stages} stages; backward {back.queries} × {back.keys}, {back.stages} stages"
    )
