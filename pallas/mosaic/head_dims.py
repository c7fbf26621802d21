"""Head dims that the kernels by Mosaic GPU don't take, padded to ones that they do.

Columns of zeros change neither scores nor the other columns of results.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash._spec import Gradients, Operands, Sizes, sizes

_OF_INSTRUCTION = 16  # columns of keys that one matrix instruction sums over
_OF_COPY = 32  # in shared memory, rows of fewer columns are copied by more, narrower parts


def padded(width: int) -> int:
    """The head dim with which kernels run."""
    return width if width % _OF_INSTRUCTION == 0 else -(-width // _OF_COPY) * _OF_COPY


def padded_sizes(shapes: Operands[Any]) -> Sizes:
    size = sizes(shapes)
    return Sizes(size.B, size.T, size.S, size.N, size.K, padded(size.H), padded(size.V))


def pad(x: jax.Array) -> jax.Array:
    """(B, rows, heads, width) with the width that kernels take."""
    return padded_to(x, padded(x.shape[-1]))


def padded_to(x: jax.Array, multiple: int) -> jax.Array:
    """(B, rows, heads, width) with zeros up to a multiple of columns."""
    missing = -x.shape[-1] % multiple
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x


def pad_operands(operands: Operands[jax.Array]) -> Operands[jax.Array]:
    return operands.replace(query=pad(operands.query), key=pad(operands.key), value=pad(operands.value))


def cut_gradients(gradients: Gradients[jax.Array], size: Sizes) -> Gradients[jax.Array]:
    """Gradients of a call of this size, from those of the padded one."""
    return dataclasses.replace(
        gradients,
        query=gradients.query[..., : size.H],
        key=gradients.key[..., : size.H],
        value=gradients.value[..., : size.V],
    )
