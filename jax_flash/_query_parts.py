"""A call in which each part of the queries has a diagonal of its own, as a call for each part.

Implementations whose kernels know one diagonal split such calls. The forward pass of one begins with

    if _query_parts.are_several(operands):
        return _query_parts.forward(forward, spec, operands)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash._axes import axes_of, axis_of
from jax_flash._spec import AttentionSpec, Gradients, Operands, sizes


def count(operands: Operands) -> int:
    """How many parts there are, all of one length. `operands` may be shapes."""
    if operands.diagonal is None:
        return 1
    T, parts = sizes(operands).T, operands.diagonal.shape[1]
    assert parts == 1 or T % parts == 0, f"{parts} parts of {T} queries"
    return parts


def are_several(operands: Operands) -> bool:
    """Whether the call has parts."""
    return count(operands) > 1


def forward(run: Callable[..., Any], spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Runs `run`, an implementation's forward pass, on each part of the queries, and joins its results."""
    out, lse = zip(*(run(spec, part) for part in split(operands)), strict=True)
    return joined("out", out), joined("lse", lse)


def backward(
    run: Callable[..., Gradients],
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
) -> Gradients:
    """Runs `run`, an implementation's backward pass, on each part of the queries.

    Gradients of what the parts share are added up in float32, and rounded once.
    """
    results = {"out": out, "lse": lse, "d_out": d_out, "d_lse": d_lse}
    parts = []
    for index, part in enumerate(split(operands)):
        rows = (None if x is None else _part_of(name, x, index, operands) for name, x in results.items())
        parts.append(run(spec.wide(), part, *rows).present())
    present = operands.present()
    return Gradients.of(
        {
            name: total(name, present[name], [part[name] for part in parts]).astype(
                spec.result_dtype(name, present[name].dtype)
            )
            for name in parts[0]
        }
    )


def split(operands: Operands) -> list[Operands]:
    """The operands of the call for each part of the queries, which has one diagonal."""
    diagonals = operands.diagonal
    assert diagonals is not None
    assert operands.query_seq_lengths is operands.key_value_seq_lengths is operands.query_offsets is None
    parts = count(operands)
    length = sizes(operands).T // parts

    def part(index: int) -> Operands:
        arrays = {name: _part_of(name, x, index, operands) for name, x in operands.present().items()}
        # A part's own call is aligned at its last query, the whole one at the last of all.
        behind = (parts - 1 - index) * length
        return Operands.of(arrays | {"diagonal": diagonals[:, index : index + 1] - behind})

    return [part(index) for index in range(parts)]


def _part_of(name: str, x: jax.Array, index: int, operands: Operands) -> jax.Array:
    """A part of an operand, of a result or of its cotangent."""
    axis = _axis_of_queries(name.removeprefix("d_"), x)
    if axis is None:
        return x
    rows = sizes(operands).T // count(operands)
    return jax.lax.slice_in_dim(x, index * rows, (index + 1) * rows, axis=axis)


def joined(name: str, parts: Any) -> jax.Array:
    """What the parts of the queries give, one behind the other."""
    axis = _axis_of_queries(name, parts[0])
    assert axis is not None
    return jnp.concatenate(parts, axis)


def total(name: str, operand: jax.Array, parts: list[jax.Array]) -> jax.Array:
    """The gradient of an operand, from those of the operands of each part."""
    if _axis_of_queries(name, operand) is None:
        return functools.reduce(jnp.add, parts)
    return joined(name, parts)


def _axis_of_queries(name: str, x: jax.Array) -> int | None:
    """None also where a size of 1 stands for all queries."""
    if "T" not in axes_of(name):
        return None
    axis = axis_of(name, x, "T")
    return None if x.shape[axis] == 1 else axis
