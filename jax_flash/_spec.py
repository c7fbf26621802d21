"""What one attention call is: everything static in `AttentionSpec`, every array in `Operands`.

All implementations take exactly this pair, so a new feature is one field here, its meaning in
`_reference.py`, and its support in each implementation.

Letters, here and everywhere: `B` batch, `T` queries, `S` keys, `N` query heads, `K` key heads
(`N % K == 0`), `H` head dim of queries and keys, `V` head dim of values.
"""

import dataclasses
from typing import Any, ClassVar, Generic, TypeVar

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Everything static about a call. Hashable, so that it keys every cache.

    The window is in keys relative to the diagonal aligned to the bottom right: query `i` sees keys
    `i + S - T - left <= j <= i + S - T + right`; None on a side is unbounded. Causal attention is
    `right == 0`, and has no field of its own.

    The two longest lengths are there where sequences are packed (`Operands.query_offsets`). What a sequence
    has beyond them counts as padding.
    """

    operation: ClassVar[str] = "attention"

    scale: float
    left: int | None = None
    right: int | None = None
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0
    deterministic: bool = False
    return_residual: bool = False
    max_query_length: int | None = None
    max_key_value_length: int | None = None


Leaf = TypeVar("Leaf")
"""What an `Operands` holds: arrays, tracers, `jax.ShapeDtypeStruct`s, or a fact about each."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands(Generic[Leaf]):
    """The arrays of a call in canonical form: one leading batch axis, ranks fixed, absent ones None.

    `BATCH_AXIS_MAY_BE_ONE` lists the fields whose leading axis may be 1 to mean "the same for every
    batch row".

    With offsets, a batch row holds P packed sequences: sequence p the queries from `query_offsets[p]` up to
    `query_offsets[p + 1]`, and keys likewise, the offsets ascending from 0 at least to T and S at most. It
    attends to itself alone, with its own lengths in every alignment. All other tokens are padding, which
    attends to nothing. Both offsets are there or none, and then no bias, mask, lengths or segment ids.

    A `diagonal` moves what causality, the window and ALiBi are relative to: query `i` is aligned with key
    `i + S - T + diagonal`. So queries and keys may be parts of longer sequences, from any place on. Causal
    attention and windows then hide keys that the shapes alone don't say.
    """

    query: Leaf  # (B, T, N, H)
    key: Leaf  # (B, S, K, H)
    value: Leaf  # (B, S, K, V)
    bias: Leaf | None = None  # (B|1, N|1, T|1, S|1) floating
    mask: Leaf | None = None  # (B|1, N|1, T|1, S|1) bool, True attends
    alibi_slopes: Leaf | None = None  # (B|1, N) float32
    sinks: Leaf | None = None  # (B|1, N) float32
    query_seq_lengths: Leaf | None = None  # (B,) int32
    key_value_seq_lengths: Leaf | None = None  # (B,) int32
    query_segment_ids: Leaf | None = None  # (B, T) int32
    key_value_segment_ids: Leaf | None = None  # (B, S) int32
    query_offsets: Leaf | None = None  # (B, P + 1) int32
    key_value_offsets: Leaf | None = None  # (B, P + 1) int32
    dropout_rows: Leaf | None = None  # (B, N, T) uint32, see `_dropout.py`
    dropout_columns: Leaf | None = None  # (B, S) uint32
    diagonal: Leaf | None = None  # (B|1,) int32, by how many keys every diagonal lies further to the right

    def present(self) -> dict[str, Leaf]:
        """The operands that are there, by name, in field order."""
        fields = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: leaf for name, leaf in fields if leaf is not None}

    def replace(self, **changes: Any) -> "Operands":
        return dataclasses.replace(self, **changes)


BATCH_AXIS_MAY_BE_ONE = ("bias", "mask", "alibi_slopes", "sinks", "diagonal")
DIFFERENTIABLE = ("query", "key", "value", "bias", "alibi_slopes", "sinks")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients(Generic[Leaf]):
    """Cotangents of the differentiable operands, each with its operand's shape and dtype.

    None exactly where the operand is None.
    """

    query: Leaf
    key: Leaf
    value: Leaf
    bias: Leaf | None = None
    alibi_slopes: Leaf | None = None
    sinks: Leaf | None = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The letters of one call."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    V: int

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.N // self.K


def sizes(operands: Operands) -> Sizes:
    B, T, N, H = operands.query.shape
    _, S, K, V = operands.value.shape
    return Sizes(B, T, S, N, K, H, V)


def shapes_of(operands: Operands) -> Operands:
    """The same operands as `jax.ShapeDtypeStruct`s: what `supports` and `plan` look at."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.dtype(x.dtype)), operands)
