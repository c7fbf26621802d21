"""What one attention call is: everything static in `AttentionSpec`, every array in `Operands`.

All implementations take exactly this pair, so a new feature is one field here, its meaning in
`_reference.py`, and its support in each implementation.

Letters, here and everywhere: `B` batch, `T` queries, `S` keys, `N` query heads, `K` key heads
(`N % K == 0`), `H` head dim of queries and keys, `V` head dim of values.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash.functions.static import StaticFunction


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Everything static about a call. Hashable, so that it keys every cache.

    The window is in keys relative to the diagonal aligned to the bottom right: query `i` sees keys
    `i + S - T - left <= j <= i + S - T + right`; None on a side is unbounded. Causal attention is
    `right == 0`, and has no field of its own.

    Wide results are float32 for operands in 16 bits too, for a caller that adds several up. With
    `wide_results="all"` these are the output and all gradients, as steps of a ring have them; with `"shared"`
    all gradients but the query's, for devices that have queries of their own and share the rest. In the
    backward pass out and its cotangent stay in query's dtype.

    With a `quantization`, the forward pass rounds query, key and value, as `_float8.py` says, and the
    backward pass is that of the operands as they are. Operands of 8 bits have no backward pass. The call has
    an `out_dtype` then.

    The two longest lengths are set in varlen calls only (`Operands.query_offsets`). Tokens of a sequence
    beyond them are padding.
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
    score_mod: StaticFunction | None = None
    block_mask: "BlockMaskSpec | None" = None
    wide_results: str | None = None
    quantization: str | None = None  # "fp8"
    out_dtype: str | None = None  # None: query's

    def wide(self, which: str = "all") -> "AttentionSpec":
        """The same call with wide results."""
        return dataclasses.replace(self, wide_results=which)

    def is_wide(self, name: str) -> bool:
        """Whether that result is wide: `"out"`, or the gradient of an operand of that name."""
        return self.wide_results == "all" or (self.wide_results == "shared" and name not in ("out", "query"))

    def result_dtype(self, name: str, dtype: Any) -> np.dtype:
        """Of a result as `is_wide` names it, for an operand of that dtype; for the output, query's."""
        dtype = np.dtype(self.out_dtype or dtype)
        return np.dtype(jnp.promote_types(dtype, jnp.float32)) if self.is_wide(name) else dtype


@dataclasses.dataclass(frozen=True)
class BlockMaskSpec:
    """What is static about a block mask; `Operands.block_kinds` has a kind for each of its blocks.

    Attributes:
      block_size: of queries and keys.
      mask_mod: says which pairs of a partial block see each other; None where no block is partial.
      differs_by_batch: whether batch rows have masks of their own. If not, mask_mod takes 0 for each row.
      differs_by_head: likewise for heads.
    """

    block_size: tuple[int, int]
    mask_mod: StaticFunction | None
    differs_by_batch: bool = False
    differs_by_head: bool = False


def functions_of(spec: AttentionSpec) -> str | None:
    """The arguments of a call that are functions of users, as text; None where it has none."""
    given = [name for name in ("score_mod", "block_mask") if getattr(spec, name) is not None]
    return " and ".join(given) or None


Leaf = TypeVar("Leaf")
"""What an `Operands` holds: arrays, tracers, `jax.ShapeDtypeStruct`s, or a fact about each."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands(Generic[Leaf]):
    """The arrays of a call in canonical form: one leading batch axis, ranks fixed, absent ones None.

    Where `batch_axis_may_be_one`, a leading axis of 1 means "the same for every batch row".

    With offsets, a batch row holds P varlen sequences: sequence p the queries from `query_offsets[p]` up to
    `query_offsets[p + 1]`, and keys likewise, the offsets ascending from 0 at least to T and S at most. It
    attends to itself alone, with its own lengths in every alignment. All other tokens are padding, which
    attends to nothing. Both offsets are there or none, and then no bias, mask, lengths, segment ids or block
    mask. A score_mod takes p as its batch, and positions in the sequence.

    A `diagonal` moves what causality, the window and ALiBi are relative to: query `i` is aligned with key
    `i + S - T + diagonal`. So queries and keys may be parts of longer sequences, from any place on. Causal
    attention and windows then hide keys that the shapes alone don't say. Several diagonals, in ascending
    order, are those of as many parts of the queries, which are equally long. Then there are no lengths and no
    offsets.

    Functions of users (`AttentionSpec.score_mod`, `BlockMaskSpec.mask_mod`) take indices of the whole call.
    So where there is a function, each row and head brings its own index, which stays with it when the call
    is partitioned. The arrays that functions capture are in `captured`, by the names that `captured_name`
    gives, flat: their shapes are the function's own (`StaticFunction.shapes`).
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
    diagonal: Leaf | None = None  # (B|1, P) int32, by how many keys diagonals of P parts lie further right
    batch_indices: Leaf | None = None  # (B,) int32
    head_indices: Leaf | None = None  # (B|1, N) int32
    block_kinds: Leaf | None = None  # (B|1, N|1, blocks of T, blocks of S) int8, see `_block_kinds.py`
    query_descale: Leaf | None = None  # (B, K, blocks of T | 1) float32, see `_float8.py`
    key_descale: Leaf | None = None  # (B, K, blocks of S | 1) float32
    value_descale: Leaf | None = None  # (B, K, blocks of S | 1) float32
    rotation_signs: Leaf | None = None  # (B|1, H) float32, of the quantization
    captured: Mapping[str, Leaf] = dataclasses.field(default_factory=dict)  # (B|1, elements) each

    @staticmethod
    def of(arrays: Mapping[str, Any]) -> "Operands":
        """From operands by name, as `present` gives them."""
        return Operands(**with_captured(arrays))

    def present(self) -> dict[str, Leaf]:
        """The operands that are there, by name, in field order, and behind them those captured."""
        return present_of(self)

    def differentiable(self) -> dict[str, Leaf]:
        """The operands that have a gradient, by name."""
        return {name: x for name, x in self.present().items() if self._is_differentiable(name, x)}

    def _is_differentiable(self, name: str, x: Any) -> bool:
        if name in self.captured:
            return is_captured(name, "score_mod") and jnp.issubdtype(x.dtype, jnp.floating)
        return name in DIFFERENTIABLE

    def replace(self, **changes: Any) -> "Operands":
        """Other operands by name, captured ones among them."""
        return Operands.of(self.present() | changes)


DIFFERENTIABLE = ("query", "key", "value", "bias", "alibi_slopes", "sinks")
"""Fields that have a gradient. Arrays that a score_mod captures have one if they are floating."""

_BATCH_AXIS_MAY_BE_ONE = (
    *("bias", "mask", "alibi_slopes", "sinks", "diagonal", "head_indices", "block_kinds"),
    "rotation_signs",
)


def batch_axis_may_be_one(name: str) -> bool:
    """Whether an operand's leading axis may be 1 to mean "the same for every batch row"."""
    return name in _BATCH_AXIS_MAY_BE_ONE or is_captured(name)


def captured_name(function: str, number: int) -> str:
    """The operand that is an array which a function captures; the function is "score_mod" or "mask_mod"."""
    return f"{function}_{number}"


def is_captured(name: str, *functions: str) -> bool:
    """Whether an operand is captured by one of these functions; by any, where none is named."""
    return name.startswith(tuple(f"{function}_" for function in functions or ("score_mod", "mask_mod")))


def present_of(arrays: Any) -> dict[str, Any]:
    """The fields that are there, by name, in their order, and behind them the captured arrays."""
    fields = ((f.name, getattr(arrays, f.name)) for f in dataclasses.fields(arrays) if f.name != "captured")
    return {name: leaf for name, leaf in fields if leaf is not None} | dict(arrays.captured)


def with_captured(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by the fields that have them: those captured in one."""
    captured = {name: x for name, x in arrays.items() if is_captured(name)}
    return {name: x for name, x in arrays.items() if name not in captured} | {"captured": captured}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients(Generic[Leaf]):
    """Cotangents of the differentiable operands, each with its operand's shape, and its dtype or a wide one.

    None exactly where the operand is None. `captured` has those of differentiable captured arrays.
    """

    query: Leaf
    key: Leaf
    value: Leaf
    bias: Leaf | None = None
    alibi_slopes: Leaf | None = None
    sinks: Leaf | None = None
    captured: Mapping[str, Leaf] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(arrays: Mapping[str, Any]) -> "Gradients":
        """From gradients by their operands' names, as `present` gives them."""
        return Gradients(**with_captured(arrays))

    def present(self) -> dict[str, Leaf]:
        """The gradients that are there, by their operands' names."""
        return present_of(self)


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


def accumulator(dtype: Any) -> np.dtype:
    """The dtype in which attention on arrays of `dtype` computes, and of its log-sum-exp."""
    return np.dtype(np.float64 if dtype == jnp.float64 else np.float32)
