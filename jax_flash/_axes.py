"""Which axes each array of a call has, after its batch axes; and its batch axes as one."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash._spec import Operands, batch_axis_may_be_one, is_captured

_AXES = {
    "query": "TNH",
    "key": "SKH",
    "value": "SKV",
    "bias": "NTS",
    "mask": "NTS",
    "alibi_slopes": "N",
    "sinks": "N",
    "query_seq_lengths": "",
    "key_value_seq_lengths": "",
    "query_segment_ids": "T",
    "key_value_segment_ids": "S",
    "query_offsets": "O",
    "key_value_offsets": "O",
    "dropout_rows": "NT",
    "dropout_columns": "S",
    "diagonal": "P",
    "batch_indices": "",
    "head_indices": "N",
    "block_kinds": "NIJ",
    "query_descale": "KC",
    "key_descale": "KD",
    "value_descale": "KD",
    "rotation_signs": "H",
    "out": "TNV",
    "lse": "NT",
}


def axes_of(name: str) -> Sequence[str]:
    """The axes of an array after its batch axes, in the letters of `_spec.py`.

    `O` is the offsets of varlen sequences, `P` the parts of the queries that have a diagonal, `I` and `J` the
    blocks of a block mask, `C` and `D` the blocks of queries and of keys that have a scale. The elements of a
    captured array have the array's name.
    """
    return (name,) if is_captured(name) else _AXES[name]


def axis_of(name: str, x: Any, letter: str) -> int:
    """Which axis of the array, with its batch axes, has that letter of `axes_of`."""
    return x.ndim - len(axes_of(name)) + axes_of(name).index(letter)


def batch_shape(operands: Operands) -> tuple[Any, ...]:
    """The batch axes of the call as a whole; in any one operand each may be 1."""
    leading = (x.shape[: x.ndim - len(axes_of(name))] for name, x in operands.present().items())
    return jnp.broadcast_shapes(*leading)  # NumPy's takes no symbolic shapes


def fold(operands: Operands, batch: tuple[int, ...]) -> Operands:
    """Canonical operands: the batch axes as one, expanded except where one row may stand for all."""

    def fold_one(name: str, x: jax.Array) -> jax.Array:
        core = x.shape[len(batch) :]
        leading = x.shape[: len(batch)]
        if batch_axis_may_be_one(name) and math.prod(leading) == 1:
            return x.reshape(1, *core)
        if leading != batch:
            x = jnp.broadcast_to(x, (*batch, *core))
        return x.reshape(-1, *core)

    return Operands.of({name: fold_one(name, x) for name, x in operands.present().items()})
