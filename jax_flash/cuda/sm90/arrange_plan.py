"""The launch that brings arrays of a call in e4m3 to what the forward kernel takes (`float8.py`)."""

import jax

from jax_flash._device import Device
from jax_flash._spec import Operands, sizes
from jax_flash.cuda.launch_plan import Buffer, Kernel, LaunchPlan, Pointer, launch
from jax_flash.cuda.parameters import struct
from jax_flash.cuda.sm90 import float8

Shapes = Operands[jax.ShapeDtypeStruct]

_PARAMETERS = struct(
    "Parameters",
    query="const unsigned char*",  # (B, T, N, H)
    key="const unsigned char*",  # (B, S, K, H)
    value="const unsigned char*",  # (B, S, K, V)
    given_query_descale="const float*",  # (B, K, descales of a head), or null, as the next
    given_key_descale="const float*",
    given_value_descale="const float*",
    **float8.RESULT_FIELDS,  # a null query_out: the query stays as it is
    query_descales_of_head="int32_t",
    key_descales_of_head="int32_t",
    value_descales_of_head="int32_t",
    **float8.SIZE_FIELDS,
)

_ARRAYS = ("query", "key", "value")


def plan_arrange(shapes: Shapes, device: Device) -> LaunchPlan:
    """For arrays in e4m3 whose head dims are multiples of 16, as `device` runs it.

    Operands are query, if it has descales, key and value, and the descales that the call has. Results have
    the names of the operands for which the forward kernel takes them, but for "transposed_value". A query
    without descales is none of them, as it stays as it is.
    """
    n = sizes(shapes)
    descales = {name: getattr(shapes, f"{name}_descale") for name in _ARRAYS}
    names = [name for name in _ARRAYS if name != "query" or descales["query"] is not None]
    names += [f"{name}_descale" for name, x in descales.items() if x is not None]
    operands = tuple(Buffer(name, x.shape, x.dtype.name) for name in names for x in [getattr(shapes, name)])
    results = {
        "key_out": Buffer("arranged_key", shapes.key.shape, shapes.key.dtype.name),
        "value_out": Buffer("transposed_value", float8.transposed_shape(shapes), shapes.value.dtype.name),
        **{
            name: Buffer(f"arranged_{name}", shape, "float32")
            for name, shape in float8.descale_shapes(shapes).items()
        },
    }
    if descales["query"] is not None:
        results["query_out"] = Buffer("arranged_query", shapes.query.shape, shapes.query.dtype.name)
    warps = 4 if max(n.H, n.V) <= 64 else 8  # so that all threads have columns of values
    kernel = Kernel(
        source="sm90/quantize/arrange.cu",
        entry="arrange",
        arch=device.arch,
        defines=(
            ("HEAD_DIM", n.H),
            ("VALUE_DIM", n.V),
            ("VALUE_KEYS", float8.keys_of_block(n.V)),
            ("WARPS", warps),
        ),
        parameters=_PARAMETERS,
    )
    given = {name: Pointer(name) if name in names else None for name in _ARRAYS}
    given |= {f"given_{name}_descale": x and Pointer(f"{name}_descale") for name, x in descales.items()}
    size_arguments = float8.size_arguments(shapes)
    main = launch(
        kernel=kernel,
        grid=float8.grid(size_arguments),
        block=32 * warps,
        arguments={
            "query_out": None,
            **given,
            **{name: Pointer(buffer.name) for name, buffer in results.items()},
            **{f"{name}_descales_of_head": 0 if x is None else x.shape[2] for name, x in descales.items()},
            **size_arguments,
        },
    )
    return LaunchPlan(operands, tuple(results.values()), (main,))
