"""Batch rows of odd lengths, run by Mosaic GPU as varlen sequences that lie one behind the other.

Copies by TMA want rows in whole tiles of 8. To pad each batch row, XLA would copy Q, K and V, and cut the
results: it would move twice the bytes that attention itself moves. Packed, all batch rows are one. Its
length is a multiple of 8 where that of all rows together is, and no array is copied but lse. In return, a
tile at the border of two sequences meets the keys of both. So long rows are padded, which takes a small part
of their time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_flash._spec import AttentionSpec, Gradients, Operands, sizes

from . import limits

_TILE_ROWS = 8
_MOST_ROWS = 512  # at 197 and 257 packed ones are faster, at 1500 padded ones (docs/tuning/pallas.md)


def suits(operands: Operands) -> bool:
    """Whether a call that the Mosaic GPU kernels can run has rows to be padded, which packing spares."""
    B, T, S = (getattr(sizes(operands), name) for name in "BTS")
    if not all(isinstance(x, int) for x in (B, T, S)) or B == 1:
        return False
    of_rows = operands.query_offsets, operands.query_seq_lengths, operands.key_value_seq_lengths
    if any(x is not None for x in (*of_rows, operands.query_segment_ids)):
        return False
    if operands.sinks is not None and operands.sinks.shape[0] != 1:
        return False
    if max(T, S) > _MOST_ROWS or B * max(T, S) > limits.MAX_SEQUENCE:
        return False
    is_odd = T % _TILE_ROWS != 0 or S % _TILE_ROWS != 0
    return is_odd and B * T % _TILE_ROWS == 0 and B * S % _TILE_ROWS == 0


def are_alike(operands: Operands) -> bool:
    """Whether a varlen call's sequences are the rows of a call that was packed here. Their offsets are known
    then: they are a NumPy array."""
    return isinstance(operands.query_offsets, np.ndarray)


def packed_shapes(
    spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct]
) -> tuple[AttentionSpec, Operands[jax.ShapeDtypeStruct]]:
    """The call on one packed row."""
    packed = jax.eval_shape(lambda operands: _packed(spec, operands)[1], shapes)
    return _packed_spec(spec, shapes), packed


def forward(run: Callable[..., Any], spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Runs `run`, the forward pass, on one packed row."""
    n = sizes(operands)
    out, lse = run(*_packed(spec, operands))
    return out.reshape(n.B, n.T, *out.shape[2:]), lse.reshape(n.N, n.B, n.T).swapaxes(0, 1)


def backward(
    run: Callable[..., Gradients],
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
) -> Gradients:
    """Runs `run`, the backward pass, on one packed row."""

    def of_rows(x: jax.Array) -> jax.Array:  # (B, N, T)
        return x.swapaxes(0, 1).reshape(1, x.shape[1], -1)

    d_lse = None if d_lse is None else of_rows(d_lse)
    found = run(*_packed(spec, operands), _one(out), of_rows(lse), _one(d_out), d_lse)
    gradients = {
        name: getattr(found, name).reshape(getattr(operands, name).shape)
        for name in ("query", "key", "value")
    }
    return dataclasses.replace(found, **gradients)


def _packed(spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    n = sizes(operands)
    row = np.arange(n.B + 1, dtype=np.int32)[None]
    arrays = {name: _one(getattr(operands, name)) for name in ("query", "key", "value")}
    packed = operands.replace(**arrays, query_offsets=row * n.T, key_value_offsets=row * n.S)
    return _packed_spec(spec, operands), packed


def _packed_spec(spec: AttentionSpec, operands: Operands) -> AttentionSpec:
    n = sizes(operands)
    return dataclasses.replace(spec, max_query_length=n.T, max_key_value_length=n.S)


def _one(x: jax.Array) -> jax.Array:
    """`x (B, rows, heads, width)` with all rows in one batch row."""
    return x.reshape(1, -1, *x.shape[2:])
