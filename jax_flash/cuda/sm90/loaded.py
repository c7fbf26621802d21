"""The arrays that the forward kernel loads by TMA: of a call without a cache, or of a key-value cache."""

import dataclasses
import math

from jax_flash.cuda.launch_plan import Arguments, Buffer, Pointer, TensorMap
from jax_flash.cuda.parameters import Struct, struct
from jax_flash.cuda.sm90.tensor_maps import cache_map, rows_map

_PAGE_TABLE = struct(  # see cuda/kernels/sm90/forward/pages.cuh
    "PageTable",
    pages="const int*",  # (B, row_pages)
    row_pages="int32_t",  # pages that a batch row may have
    cache_pages="int32_t",  # pages of the cache, or of a layer of it
    head_step="int32_t",  # 2 if pages hold keys and values, whose heads alternate; 1 elsewhere
    ends="const int*",  # (B): how many keys a batch row has
)
_PACKED_QUERIES = struct(  # see cuda/kernels/sm90/forward/packed_queries.cuh
    "PackedQueries",
    slots="const QuerySlot*",  # each a tile of rows
    used_slots="const int*",  # how many come before those that are empty
    tokens="int32_t",  # T of the arrays of queries and results
)


@dataclasses.dataclass(frozen=True)
class Pages:
    """The pages of a cache. A table says which pages a batch row has."""

    table: Buffer  # (B, pages of a batch row)
    keys: int  # of a page
    count: int  # P
    hold_both: bool  # keys and values, whose heads alternate

    def box(self, block: int) -> int:
        """Keys that one TMA copy loads of blocks of so many keys: those of one page, and of one block."""
        return math.gcd(self.keys, block)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The arrays that the kernel loads, and what it is told of them.

    Of a cache, the plan has further buffers. `key_places` says to which row of `key` and `value` a batch row
    attends; with pages, to which layer, and `key_ends` where its keys end. If queries are packed, `slots` and
    `used_slots` say whose they are.
    """

    query: Buffer  # (B, T, N, H)
    key: Buffer  # (B, S, K, H); of a cache, (rows, S, K, H); with pages, ([L,] P, page, K, H)
    value: Buffer
    in_cache: bool = False
    has_hidden_values: bool = False  # values of keys before the first visible one may be NaN
    pages: Pages | None = None
    is_packed: bool = False

    def defines(self, block: int) -> tuple[tuple[str, int], ...]:
        """Defines of the kernel, for blocks of so many keys."""
        return (
            ("CACHE", int(self.in_cache)),
            ("HIDDEN_VALUES", int(self.has_hidden_values)),
            ("PAGE", self.pages.keys if self.pages else 0),
            ("BOX", self.pages.box(block) if self.pages else 0),
            ("PACKED", int(self.is_packed)),
        )

    def parameters(self) -> dict[str, Struct]:
        """Further fields of the kernel's parameters."""
        table = {"page_table": _PAGE_TABLE} if self.pages else {}
        return table | ({"packed": _PACKED_QUERIES} if self.is_packed else {})

    def arguments(self) -> Arguments:
        """Arguments of those fields, and of `key_places`."""
        arguments: dict = {"key_places": Pointer("key_places") if self.in_cache else None}
        if self.pages:
            arguments["page_table"] = {
                "pages": Pointer(self.pages.table.name),
                "row_pages": self.pages.table.shape[1],
                "cache_pages": self.pages.count,
                "head_step": 1 + self.pages.hold_both,
                "ends": Pointer("key_ends"),
            }
        if self.is_packed:
            arguments["packed"] = {
                "slots": Pointer("slots"),
                "used_slots": Pointer("used_slots"),
                "tokens": self.query.shape[1],
            }
        return arguments

    def block_map(self, buffer: Buffer, block: int) -> TensorMap:
        """The map by which `key` or `value` is loaded, in blocks of so many keys."""
        return cache_map(buffer, self.pages.box(block)) if self.pages else rows_map(buffer, block)
