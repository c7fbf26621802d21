"""The calls that decode.py measures, and what each has to reach."""

import dataclasses
import functools

import numpy as np

ELEMENT_BYTES = {"bfloat16": 2, "float8_e4m3fn": 1}
MEGABYTE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Call:
    """Attention of a step of decoding, or of a chunk of a prompt, to a key-value cache."""

    batch: int
    capacity: int  # keys that a sequence has room for
    heads: int
    kv_heads: int
    head_dim: int = 128
    queries: int = 1  # of each sequence; they are its last
    lengths: str = "full"
    page: int | None = None
    appended: int = 0  # of `key_lengths`
    rotary: bool = False
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    by_flash_attention: bool = False  # causal attention to the same keys, which isn't told of a cache
    packed: bool = False  # by `ragged_paged_attention`, which isn't told that queries are equally many

    @property
    def label(self) -> str:
        """The name of the call; measurements of other programs that have it are taken for the same call."""
        heads, dims = f"h{self.heads}/{self.kv_heads}", f"d{self.head_dim}/{self.head_dim}"
        label = f"decode b{self.batch} s{self.capacity} {heads} {dims} q{self.queries} {self.cache_dtype}"
        return label if self.lengths == "full" else f"{label} {self.lengths} lengths"

    @functools.cached_property
    def key_lengths(self) -> np.ndarray:
        """Keys of each sequence, the appended ones included.

        "full" caches lack 0, 1, 2, … keys, sequence by sequence; "uniform" lengths are drawn from 1 to the
        capacity; with "one long" length, the others have 256 to 1024 keys.
        """
        random = np.random.default_rng(0)
        if self.lengths == "full":
            lengths = self.capacity - np.arange(self.batch)
        elif self.lengths == "uniform":
            lengths = random.integers(1, self.capacity + 1, self.batch)
        else:
            lengths = random.integers(256, 1025, self.batch)
            lengths[self.batch // 2] = self.capacity
        return np.clip(lengths, max(self.appended, 1), self.capacity).astype(np.int32)

    @property
    def bytes_read(self) -> int:
        """Of the keys and values that sequences have."""
        return (
            int(self.key_lengths.sum()) * self.kv_heads * 2 * self.head_dim * ELEMENT_BYTES[self.cache_dtype]
        )

    @property
    def flops(self) -> int:
        """Of the products, over all pairs of a query and a key that it sees."""
        keys_of_last = self.key_lengths.astype(np.int64)[:, None]
        pairs = np.maximum(keys_of_last - np.arange(self.queries), 0).sum()
        return int(pairs) * self.heads * 4 * self.head_dim


@dataclasses.dataclass(frozen=True)
class Case:
    """Calls that are compared with each other, the first with all others. All read the same bytes."""

    group: str
    calls: dict[str, Call]  # by the name of the variant

    @property
    def base(self) -> str:
        return next(iter(self.calls))

    @property
    def label(self) -> str:
        return self.calls[self.base].label


def _case(group: str, *shape: int, **fields) -> Case:
    return Case(group, {"": Call(*shape, **fields)})


def _variants(group: str, base: Call, variants: dict[str, dict]) -> Case:
    return Case(group, {name: dataclasses.replace(base, **changes) for name, changes in variants.items()})


LARGE = Call(16, 8192, 32, 8)
SMALL = Call(1, 1024, 32, 8)
PAGES = (16, 64, 256, 1)
CHUNKS = (
    Call(1, 16384, 32, 8, queries=512),
    Call(4, 8192, 32, 8, queries=256),
    Call(1, 32768, 32, 8, queries=2048),
)
PREFILL = (
    {"no cache": {"by_flash_attention": True}, "cache": {}}
    | {f"pages of {page}": {"page": page} for page in PAGES}
    | {f"pages of {page}, packed": {"page": page, "packed": True} for page in PAGES[:3]}
)
SPECULATIVE = {f"{queries} queries": {"queries": queries} for queries in (1, 4, 8)}
APPENDED = {
    "attention": {},
    "append": {"appended": 1},
    "append rotary": {"appended": 1, "rotary": True},
}
GROUPS: dict[str, list[Case]] = {
    "contiguous": [
        _case("contiguous", 16, 8192, 32, 8),
        _case("contiguous", 1, 131072, 32, 8),
        _case("contiguous", 64, 2048, 32, 8),
        _case("contiguous", 8, 16384, 64, 8),
        _case("contiguous", 1, 1024, 32, 8),
        _case("contiguous", 1, 8192, 32, 8),
        _case("contiguous", 4, 32768, 32, 32),
        _case("contiguous", 32, 4096, 32, 8),
        _case("contiguous", 128, 512, 28, 4),
    ],
    "lengths": [
        _case("lengths", 64, 8192, 32, 8, lengths="uniform"),
        _case("lengths", 16, 32768, 32, 8, lengths="uniform"),
        _case("lengths", 64, 131072, 16, 2, lengths="one long"),
    ],
    "paged": [
        _variants("paged", LARGE, {"contiguous": {}} | {f"pages of {page}": {"page": page} for page in PAGES})
    ],
    "speculative": [_variants("speculative", base, SPECULATIVE) for base in (LARGE, SMALL)],
    "8 bits": [
        _case("8 bits", *shape, cache_dtype="float8_e4m3fn")
        for shape in ((16, 8192, 32, 8), (1, 131072, 32, 8), (64, 2048, 32, 8), (8, 16384, 64, 8))
    ],
    "append": [_variants("append", base, APPENDED) for base in (LARGE, SMALL)],
    "prefill": [_variants("prefill", base, PREFILL) for base in CHUNKS],
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A figure of our rows, and its limit: at least, or at most."""

    figure: str  # of a row
    at_least: float | None = None
    at_most: float | None = None
    least_bytes: int = 0  # read, of the calls that have this target
    variants: tuple[str, ...] = ()  # that have it; () for all

    def concerns(self, row: dict) -> bool:
        is_variant = not self.variants or row["variant"] in self.variants
        return is_variant and row["bytes"] >= self.least_bytes and self.figure in row

    def is_met(self, row: dict) -> bool:
        value = row[self.figure]
        return (self.at_least is None or value >= self.at_least) and (
            self.at_most is None or value <= self.at_most
        )

    def __str__(self):
        limit = f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"
        large = f", {self.least_bytes // MEGABYTE} MB and more" if self.least_bytes else ""
        return f"{self.figure} {limit}{large}"


TARGETS: dict[str, list[Target]] = {
    "contiguous": [
        Target("to_best_peer", at_least=1.0),
        Target("to_cudnn", at_least=0.97, least_bytes=256 * MEGABYTE),
        Target("to_copy", at_least=0.95, least_bytes=256 * MEGABYTE),
    ],
    "lengths": [Target("to_copy", at_least=1 / 1.08)],
    "paged": [Target("to_base", at_least=0.95, variants=tuple(f"pages of {page}" for page in PAGES[:3]))],
    "speculative": [Target("to_base", at_least=1 / 1.1, variants=tuple(SPECULATIVE)[1:])],
    "8 bits": [Target("to_copy", at_least=0.90)],
    "append": [Target("device_beyond_base_us", at_most=3.0, variants=("append rotary",))],
    "prefill": [
        Target("to_base", at_least=0.95, variants=("cache",)),
        Target("to_base", at_least=0.90, variants=tuple(f"pages of {page}" for page in PAGES[:3])),
    ],
}
"""What our CUDA kernels have to reach, by group."""
