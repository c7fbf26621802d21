"""Dropout in the kernels: operands, defines and arguments (cuda/kernels/common/dropout.cuh)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_flash import _dropout
from jax_flash._spec import AttentionSpec
from jax_flash.cuda.launch_plan import Arguments, Buffer, LaunchPlan, Pointer
from jax_flash.cuda.parameters import struct

MAX_THRESHOLD = 0x7C00
"""The kernels compare hashes as magnitudes of float16. This is infinity, the largest of them."""

NAMES = ("dropout_rows", "dropout_columns")

PARAMETERS = struct(
    "Dropout",
    rows="const uint32_t*",  # hashes of rows, (B, N, T)
    # Hashes of columns; backward (B, S), forward (B, blocks of keys, keys) in the order of for_each_dropped.
    columns="const uint32_t*",
    threshold="uint32_t",  # the least hash that is kept, in both halves of the word
    factor="float",  # what kept probabilities are multiplied by
)


def unsupported(spec: AttentionSpec) -> str | None:
    """Why the kernels can't drop at this rate, or None."""
    if _dropout.threshold(spec.dropout_rate) > MAX_THRESHOLD:
        return f"dropout_rate is {spec.dropout_rate}; it may be up to {MAX_THRESHOLD / 2**15}"
    return None


def defines(spec: AttentionSpec) -> tuple[tuple[str, int], ...]:
    return (("DROPOUT", int(spec.dropout_rate > 0)),)


def factor(spec: AttentionSpec) -> float:
    """What kept probabilities are multiplied by."""
    return 1 / _dropout.keep_probability(spec.dropout_rate)


def buffers(spec: AttentionSpec, *shapes: tuple[int, ...]) -> tuple[Buffer, ...]:
    """The hashes of rows and columns, of these shapes; none without dropout."""
    if not spec.dropout_rate:
        return ()
    return tuple(Buffer(name, shape, "uint32") for name, shape in zip(NAMES, shapes, strict=True))


def arguments(spec: AttentionSpec) -> Arguments:
    """Arguments of `PARAMETERS`."""
    return {
        "rows": pointer(spec, "dropout_rows"),
        "columns": pointer(spec, "dropout_columns"),
        "threshold": _dropout.threshold(spec.dropout_rate) * 0x10001,
        "factor": factor(spec),
    }


def pointer(spec: AttentionSpec, name: str) -> Pointer | None:
    """A pointer to one of `NAMES`; null without dropout."""
    return Pointer(name) if spec.dropout_rate else None


def arranged(plan: LaunchPlan, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """`arrays` by name, with the hashes of columns in the order that the forward `plan` takes."""
    shapes = {buffer.name: buffer.shape for buffer in plan.operands}
    return {
        name: _in_blocks(x, shapes[name]) if name == "dropout_columns" else x for name, x in arrays.items()
    }


def _in_blocks(columns: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Hashes `(B, S)` as `shape`, `(B, blocks, keys)`, in the order in which the kernel reads them.

    A thread reads the hashes of its four columns in each 16 as one vector (`for_each_dropped` in
    dropout.cuh). So of each 16 keys 0, 1, 8 and 9 come first, then 2, 3, 10 and 11, and so on. Hashes beyond
    S are never used.
    """
    B, blocks, keys = shape
    padded = jnp.pad(columns, ((0, 0), (0, blocks * keys - columns.shape[1])))
    return padded.reshape(B, -1, 2, 4, 2).swapaxes(2, 3).reshape(shape)
