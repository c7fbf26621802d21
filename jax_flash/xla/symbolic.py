"""Calls whose lengths are symbolic, as in an export for every length.

A loop over blocks needs blocks of a known size. So sequences whose length is symbolic are padded to whole
blocks of `BLOCK` positions, and lengths keep the padding out of the result.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash._axes import axes_of
from jax_flash._spec import AttentionSpec, Gradients, Operands, sizes

BLOCK = 256


def needs_padding(operands: Operands) -> bool:
    """Whether a length is symbolic and not yet a multiple of `BLOCK`."""
    size = sizes(operands)
    return any(_padding(length) != 0 for length in (size.T, size.S))


def forward(run: Callable[..., Any], spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """The results of `run`, the forward pass for lengths that are known or multiples of `BLOCK`."""
    out, lse = run(spec, _padded(operands))
    T = sizes(operands).T
    return jax.lax.slice_in_dim(out, 0, T, axis=1), jax.lax.slice_in_dim(lse, 0, T, axis=2)


def backward(
    run: Callable[..., Any],
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
) -> Gradients:
    """The results of `run`, the backward pass for lengths that are known or multiples of `BLOCK`."""
    lengths = {"T": sizes(operands).T}
    gradients = run(
        spec,
        _padded(operands),
        _pad(out, axes_of("out"), lengths),
        _pad(lse, axes_of("lse"), lengths, fill=-jnp.inf),  # of a row that sees no key
        _pad(d_out, axes_of("out"), lengths),
        None if d_lse is None else _pad(d_lse, axes_of("lse"), lengths),
    )
    present = operands.present()
    return Gradients.of(
        {
            name: jax.lax.slice(x, (0,) * x.ndim, present[name].shape)
            for name, x in gradients.present().items()
        }
    )


def _padding(length: Any) -> Any:
    """How far a symbolic length is from a multiple of `BLOCK`; 0 for one that is a multiple, or known."""
    if isinstance(length, int) or length % BLOCK == 0:
        return 0
    return BLOCK * ((length + BLOCK - 1) // BLOCK) - length


def _padded(operands: Operands) -> Operands:
    size = sizes(operands)
    lengths = {"T": size.T, "S": size.S}
    arrays = {name: _pad(x, axes_of(name), lengths) for name, x in operands.present().items()}
    for name, length in (("query_seq_lengths", size.T), ("key_value_seq_lengths", size.S)):
        if _padding(length) != 0 and name not in arrays:
            arrays[name] = jnp.broadcast_to(jnp.asarray(length, jnp.int32), (size.B,))
    return Operands.of(arrays)


def _pad(x: jax.Array, letters: Sequence[str], lengths: dict[str, Any], fill: float = 0) -> jax.Array:
    """`x` with each axis of symbolic length padded. `letters` are those of its axes behind the batch."""
    for axis, letter in enumerate(letters, start=x.ndim - len(letters)):
        missing = _padding(lengths.get(letter, 0))
        if missing != 0 and x.shape[axis] != 1:
            shape = (*x.shape[:axis], missing, *x.shape[axis + 1 :])
            x = jnp.concatenate([x, jnp.full(shape, fill, x.dtype)], axis)
    return x
