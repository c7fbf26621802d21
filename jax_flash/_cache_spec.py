"""What one call on a key-value cache is: everything static in `CacheSpec`, every array in `CacheOperands`.

Such a call appends new keys and values to the cache of each sequence, rotated if there are rotary tables, and
then attends to all that the cache holds. `_reference_cache.py` defines it.

Letters beside those of `_spec.py`: `C` sequences that a cache holds, `P` pages, `U` new keys of each
sequence, `L` layers, `R` columns that rotary embeddings turn. `S` is the capacity of a cache in keys; of a
paged one, the size of a page times the pages that a sequence may have.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal

import jax

from jax_flash._spec import AttentionSpec, Leaf, present_of, with_captured

QueryPositions = Literal["own", "appended", "first"]
"""Where query t of T is rotated, if the cache holds n keys before the append: "own", at its own position, as
queries are the last T of the sequence; "appended", at n + t, as new key t is; "first", all at n."""


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Everything static about a call. Hashable.

    Of `attention`, the scale, the window, the soft cap, `score_mod` and `return_residual` are in use. The
    window's diagonal is aligned to the bottom right, with the lengths after the append. A `score_mod` takes
    positions in a sequence: that of a query is the key that it is aligned with.
    """

    operation: ClassVar[str] = "decoding"

    attention: AttentionSpec
    rotary_interleaved: bool = False
    query_positions: QueryPositions = "own"
    num_splits: int | None = None  # in how many parts at most a sequence's keys are attended to; None: any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheOperands(Generic[Leaf]):
    """The arrays of a call in canonical form: ranks fixed, absent ones None.

    Without `page_table`, key and value are `(C, S, K, H)` and `(C, S, K, V)`; sequence b of the call is
    sequence `batch_index[b]` of the cache, or b. With one, they are pages, `(P, page, K, H)` and
    `(P, page, K, V)`, and key j of sequence b is row `j % page` of page `page_table[b, j // page]`.

    Without `value`, pages of `key` hold both, `(P, page, 2·K, H)`: head 2k is key head k and head 2k + 1 its
    value.

    With `layer`, keys and values have one more leading axis, L, of which the call uses that one.

    A page that isn't in [0, P), a sequence that isn't in [0, C) or a layer that isn't in [0, L) counts as not
    there: its keys are hidden, and what would be appended to it is dropped. So is what is appended beyond S.

    With `query_offsets`, the query is `(1, T, N, H)` and holds B varlen sequences: sequence b has those from
    `query_offsets[b]` up to `query_offsets[b + 1]`. Queries beyond the last get 0. Nothing is appended then.

    With a `score_mod`, each sequence and head brings its index in the whole call, as in `Operands`.

    A cache may be in e4m3 beside queries and new keys of another dtype. Its numbers times the descales are
    keys and values; new ones are divided by them and rounded.
    """

    query: Leaf  # (B, T, N, H)
    key: Leaf  # ([L,] C, S, K, H), or ([L,] P, page, K, H)
    value: Leaf | None  # ([L,] C, S, K, V), or ([L,] P, page, K, V)
    lengths: Leaf  # ([L,] B) int32, keys of each sequence before the append; counts as clipped to [0, S]
    layer: Leaf | None = None  # () int32
    page_table: Leaf | None = None  # (B, pages) int32; an index outside of the pool is of no page
    batch_index: Leaf | None = None  # (B,) int32; not with page_table
    left_padding: Leaf | None = None  # (B,) int32, keys before it are hidden
    new_key: Leaf | None = None  # (B, U, K, H)
    new_value: Leaf | None = None  # (B, U, K, V)
    rotary_cos: Leaf | None = None  # (positions, R / 2) float32
    rotary_sin: Leaf | None = None  # (positions, R / 2) float32
    alibi_slopes: Leaf | None = None  # (B|1, N) float32
    sinks: Leaf | None = None  # (1, N) float32
    query_offsets: Leaf | None = None  # (B + 1,) int32, ascending, in [0, T]
    key_descale: Leaf | None = None  # ([L,] K) float32, of a cache in e4m3
    value_descale: Leaf | None = None  # likewise
    batch_indices: Leaf | None = None  # (B,) int32
    head_indices: Leaf | None = None  # (1, N) int32
    captured: Mapping[str, Leaf] = dataclasses.field(default_factory=dict)  # (1, elements) each

    @staticmethod
    def of(arrays: Mapping[str, Any]) -> "CacheOperands":
        """From operands by name, as `present` gives them."""
        return CacheOperands(**{"value": None} | with_captured(arrays))

    def present(self) -> dict[str, Leaf]:
        """The operands that are there, by name, in field order, and behind them those captured."""
        return present_of(self)

    def replace(self, **changes: Any) -> "CacheOperands":
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class CacheSizes:
    """The letters of one call."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    V: int
    U: int
    page: int | None

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.N // self.K


def cache_sizes(operands: CacheOperands) -> CacheSizes:
    _, T, N, H = operands.query.shape
    B = operands.lengths.shape[-1]
    *_, rows, K, _ = operands.key.shape
    V = H
    if operands.value is None:
        K //= 2
    else:
        V = operands.value.shape[-1]
    page, S = None, rows
    if operands.page_table is not None:
        page, S = rows, rows * operands.page_table.shape[1]
    U = 0 if operands.new_key is None else operands.new_key.shape[1]
    return CacheSizes(B, T, S, N, K, H, V, U, page)
