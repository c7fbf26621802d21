"""The launch that rounds a call's queries, keys and values to e4m3, as `_float8.quantized` defines it."""

import math
from collections.abc import Mapping

import jax
import numpy as np

from jax_flash import _float8
from jax_flash._device import Device
from jax_flash._quantize_spec import QuantizeOperands, QuantizeSpec
from jax_flash._spec import Operands, sizes
from jax_flash.cuda.launch_plan import Buffer, Kernel, Launch, LaunchPlan, Pointer, element_type, launch
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
    **float8.RESULT_FIELDS,
    rotation_scale="float",
    signs_stride="int32_t",  # from batch row to batch row
    columns="int32_t",  # H before it was padded
    **float8.SIZE_FIELDS,
)

_POINTERS = (
    *("query", "key", "value", "signs", "query_lengths", "key_lengths"),
    *float8.RESULT_FIELDS,
)
_LENGTHS = {"query_lengths": "query_seq_lengths", "key_lengths": "key_value_seq_lengths"}


def _warps(head_dim: int) -> int:
    """Of a CTA. Rows of more than 128 columns have twice as many, so that a thread can keep all that it has
    of them in 128 registers, rotated, beside the next block's."""
    return 8 if head_dim <= 128 else 16


def _ctas_of_multiprocessor(head_dim: int) -> int:
    """As many as have registers for what their threads keep."""
    return 3 if head_dim <= 64 else 16 // _warps(head_dim)


def plan_quantize(shapes: Shapes, device: Device) -> LaunchPlan:
    """For operands of 16 bits whose head dims are multiples of 16, as `device` runs it.

    Operands are query, key and value, then rotation_signs and lengths that the call has. Results are the
    arrays that the forward kernel loads, and their scales.
    """
    n, signs = sizes(shapes), shapes.rotation_signs
    names = ["query", "key", "value", *(["rotation_signs"] if signs is not None else [])]
    names += [name for name in _LENGTHS.values() if getattr(shapes, name) is not None]
    operands = [Buffer(name, x.shape, x.dtype.name) for name in names for x in [getattr(shapes, name)]]
    results = {
        "query_out": Buffer("quantized_query", shapes.query.shape, "float8_e4m3fn"),
        "key_out": Buffer("quantized_key", shapes.key.shape, "float8_e4m3fn"),
        "value_out": Buffer("transposed_value", float8.transposed_shape(shapes), "float8_e4m3fn"),
        **{name: Buffer(name, x, "float32") for name, x in float8.descale_shapes(shapes).items()},
    }
    own = {name: name for name in ("query", "key", "value")} | {"signs": "rotation_signs"} | _LENGTHS
    main = _launch(
        device=device,
        dtype=shapes.query.dtype,
        head_dims=(n.H, n.V),
        signs=signs,
        pointers={name: Pointer(of) for name, of in own.items() if of in names}
        | {name: Pointer(buffer.name) for name, buffer in results.items()},
        sizes=float8.size_arguments(shapes),
    )
    return LaunchPlan(tuple(operands), tuple(results.values()), (main,))


def plan_quantize_rows(spec: QuantizeSpec, shapes: QuantizeOperands, device: Device) -> LaunchPlan:
    """For rows of 16 bits whose head dim is a multiple of 16: queries, keys or values by themselves.

    Operands are those of the call by their names. Results are the rows in e4m3, and their scales.
    """
    batch, rows, heads, dim = shapes.rows.shape
    key_heads = heads // spec.group
    blocks = _float8.descales_of(rows)
    results = {
        "query_out": Buffer("quantized", shapes.rows.shape, "float8_e4m3fn"),
        "query_descale": Buffer("descale", (batch, key_heads, blocks), "float32"),
    }
    own = {"query": "rows", "signs": "signs", "query_lengths": "lengths"}
    present = shapes.present()
    main = _launch(
        device=device,
        dtype=shapes.rows.dtype,
        head_dims=(dim, 0),
        signs=shapes.signs,
        pointers={name: Pointer(of) for name, of in own.items() if of in present}
        | {name: Pointer(buffer.name) for name, buffer in results.items()},
        sizes={"queries": rows, "keys": 0, "query_heads": heads, "key_heads": key_heads, "batch": batch},
    )
    operands = (Buffer(name, x.shape, x.dtype.name) for name, x in present.items())
    return LaunchPlan(tuple(operands), tuple(results.values()), (main,))


def _launch(
    device: Device,
    dtype: np.dtype,
    head_dims: tuple[int, int],
    signs: jax.ShapeDtypeStruct | None,
    pointers: Mapping[str, Pointer],
    sizes: Mapping[str, int],
) -> Launch:
    """The kernel's launch. Without keys the head dim of values is 0; pointers that aren't there are null."""
    head_dim, value_dim = head_dims
    columns = head_dim if signs is None else signs.shape[1]
    hadamard = 1 if signs is None else _float8.hadamard_size(columns)
    warps, ctas = _warps(max(head_dims)), _ctas_of_multiprocessor(max(head_dims))
    blocks, *_ = float8.grid(sizes)
    of_values = [("VALUE_DIM", value_dim), ("VALUE_KEYS", float8.keys_of_block(value_dim))]
    kernel = Kernel(
        source="sm90/quantize/quantize.cu",
        entry="quantize",
        arch=device.arch,
        defines=(
            ("ELEMENT", element_type(dtype)),
            ("HEAD_DIM", head_dim),
            ("HADAMARD", hadamard),
            ("WARPS", warps),
            ("CTAS", ctas),
            ("GROUPED", int(sizes["query_heads"] > sizes["key_heads"])),
            ("KEYS", int(value_dim > 0)),
            *(of_values if value_dim else []),
        ),
        parameters=_PARAMETERS,
    )
    return launch(
        kernel=kernel,
        grid=(min(blocks, ctas * device.sm_count), 1, 1),
        block=32 * warps,
        arguments={
            **dict.fromkeys(_POINTERS),
            **pointers,
            "rotation_scale": float(np.float32(1 / math.sqrt(hadamard))),
            "signs_stride": 0 if signs is None or signs.shape[0] == 1 else columns,
            "columns": columns,
            **sizes,
        },
    )
