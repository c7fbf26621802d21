"""What one call that rounds rows to e4m3 is: queries, keys or values by themselves.

`quantize` is three of them. As for attention, everything static is in the spec, and every array in operands.
"""

import dataclasses
from typing import ClassVar, Generic

import jax

from jax_flash._spec import Leaf


@dataclasses.dataclass(frozen=True)
class QuantizeSpec:
    """Everything static about a call. Hashable, so that it keys every cache."""

    operation: ClassVar[str] = "quantizing"

    group: int  # heads that share a descale, neighbours: of queries N / K, of keys and values 1
    scales: str = "block"  # which rows share a descale: `by` of `_float8.rounded`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizeOperands(Generic[Leaf]):
    """The arrays of a call in canonical form: one leading batch axis."""

    rows: Leaf  # (B, rows, heads, D)
    signs: Leaf | None = None  # (B|1, D) float32, of incoherent processing
    lengths: Leaf | None = None  # (B,) int32: rows from there on are padding

    def present(self) -> dict[str, Leaf]:
        """The operands that are there, by name."""
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: x for name, x in fields if x is not None}
