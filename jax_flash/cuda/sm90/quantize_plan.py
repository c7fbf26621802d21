"""The launch that rounds a call's queries, keys and values to e4m3, as `_float8.quantized` defines it."""

import math

import jax
import numpy as np

from jax_flash import _float8
from jax_flash._device import Device
from jax_flash._spec import Operands, sizes
from jax_flash.cuda.launch_plan import Buffer, Kernel, LaunchPlan, Pointer, element_type, launch
from jax_flash.cuda.parameters import struct
from jax_flash.cuda.sm90 import float8

Shapes = Operands[jax.ShapeDtypeStruct]

_PARAMETERS = struct(
    "Parameters",
    query="const ELEMENT*",  # (B, T, N, H)
    key="const ELEMENT*",  # (B, S, K, H)
    value="const ELEMENT*",  # (B, S, K, V)
    signs="const float*",  # (B | 1, columns)
    query_lengths="const int*",  # (B), or null, as the next
    key_lengths="const int*",
    query_out="unsigned char*",  # as query
    key_out="unsigned char*",
    value_out="unsigned char*",  # as value, or see `float8.transposed_shape`
    query_descale="float*",  # (B, K, blocks of T)
    key_descale="float*",  # (B, K, blocks of S), as the next
    value_descale="float*",
    rotation_scale="float",
    signs_stride="int32_t",  # from batch row to batch row
    columns="int32_t",  # H before it was padded
    queries="int32_t",  # T
    keys="int32_t",  # S
    query_heads="int32_t",  # N
    key_heads="int32_t",  # K
    batch="int32_t",  # B
)

_LENGTHS = {"query_lengths": "query_seq_lengths", "key_lengths": "key_value_seq_lengths"}


def _warps(head_dim: int) -> int:
    """Of a CTA. Rows of more than 128 columns have twice as many: a thread then keeps its columns of 8 rows,
    rotated, in 128 registers. With 16 rows it would take 255, which leaves room for half as many warps."""
    return 8 if head_dim <= 128 else 16


def plan_quantize(shapes: Shapes, device: Device, for_forward: bool = True) -> LaunchPlan:
    """For operands of 16 bits whose head dims are multiples of 16, as `device` runs it.

    Operands are query, key and value, then rotation_signs and lengths that the call has. Results are the
    arrays in e4m3, and their scales. With `for_forward` they are as the forward kernel loads them: values
    transposed, and a key whose value isn't finite is NaN.
    """
    n, dtype = sizes(shapes), shapes.query.dtype.name
    signs = shapes.rotation_signs
    columns = n.H if signs is None else signs.shape[1]
    hadamard = 1 if signs is None else _float8.hadamard_size(columns)
    names = ["query", "key", "value", *(["rotation_signs"] if signs is not None else [])]
    names += [name for name in _LENGTHS.values() if getattr(shapes, name) is not None]
    operands = [Buffer(name, x.shape, x.dtype.name) for name in names for x in [getattr(shapes, name)]]
    results = {
        "query_out": Buffer("quantized_query", shapes.query.shape, "float8_e4m3fn"),
        "key_out": Buffer("quantized_key", shapes.key.shape, "float8_e4m3fn"),
        "value_out": (
            Buffer("transposed_value", float8.transposed_shape(shapes), "float8_e4m3fn")
            if for_forward
            else Buffer("quantized_value", shapes.value.shape, "float8_e4m3fn")
        ),
        **{name: Buffer(name, x, "float32") for name, x in float8.descale_shapes(shapes).items()},
    }
    warps = _warps(max(n.H, n.V))
    kernel = Kernel(
        source="sm90/quantize/quantize.cu",
        entry="quantize",
        arch=device.arch,
        defines=(
            ("ELEMENT", element_type(dtype)),
            ("HEAD_DIM", n.H),
            ("VALUE_DIM", n.V),
            ("HADAMARD", hadamard),
            ("FOR_FORWARD", int(for_forward)),
            *([("VALUE_KEYS", float8.keys_of_block(n.V))] if for_forward else []),
            ("WARPS", warps),
        ),
        parameters=_PARAMETERS,
    )
    # Keys and values have CTAs of their own where they don't depend on each other.
    blocks = _float8.scales_of(n.T) + (1 if for_forward else 2) * _float8.scales_of(n.S)
    main = launch(
        kernel=kernel,
        grid=(n.B * n.K * blocks, 1, 1),
        block=32 * warps,
        arguments={
            **{name: Pointer(name) for name in ("query", "key", "value")},
            "signs": None if signs is None else Pointer("rotation_signs"),
            **{
                own: None if getattr(shapes, name) is None else Pointer(name)
                for own, name in _LENGTHS.items()
            },
            **{name: Pointer(buffer.name) for name, buffer in results.items()},
            "rotation_scale": float(np.float32(1 / math.sqrt(hadamard))),
            "signs_stride": 0 if signs is None or signs.shape[0] == 1 else columns,
            **{"columns": columns, "queries": n.T, "keys": n.S},
            **{"query_heads": n.N, "key_heads": n.K, "batch": n.B},
        },
    )
    return LaunchPlan(tuple(operands), tuple(results.values()), (main,))
