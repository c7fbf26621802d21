"""A call of attention as a model makes it, for models.py."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from calls import Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One call: its shape, its mask, and where the shape is published.

    Padding and packing are of queries and keys alike, so with `lengths` or `documents` there are as many keys
    as queries. Each row of the batch has whole documents.
    """

    name: str  # on the command line and in results
    model: str  # in tables and charts
    source: str
    group: str
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    value_head_dim: int
    causal: bool = False  # aligned to the last key
    window: int | None = None  # keys that a causal query sees at most, its own included
    soft_cap: float | None = None
    lengths: tuple[int, ...] = ()  # tokens of each row of the batch; padding follows them
    documents: tuple[int, ...] = ()  # tokens of each document, one after another, row after row
    varlen: bool = False  # documents are told by offsets, otherwise by segment ids
    dtype: str = "bfloat16"

    def __post_init__(self):
        if not self.source:
            raise ValueError(f"{self.name} has no source")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: {self.heads} heads can't share {self.kv_heads} key heads evenly")
        if self.window is not None and not self.causal:
            raise ValueError(f"{self.name}: a window is of a causal call")
        if (self.lengths or self.documents) and self.queries != self.keys:
            raise ValueError(f"{self.name}: {self.queries} queries and {self.keys} keys share no lengths")
        if self.lengths and (len(self.lengths) != self.batch or not 0 < max(self.lengths) <= self.queries):
            raise ValueError(f"{self.name}: lengths {self.lengths} aren't of {self.batch} rows")
        ends = set(itertools.accumulate(self.documents))
        rows = {row * self.queries for row in range(1, self.batch + 1)}
        if self.documents and (self.lengths or max(ends) != max(rows) or not rows <= ends):
            raise ValueError(f"{self.name}: documents don't fill {self.batch} rows of {self.queries} tokens")
        if self.varlen and (self.batch > 1 or not self.documents):
            raise ValueError(f"{self.name}: varlen documents are in one row")

    @property
    def shape(self) -> str:
        """The call, in a table's words."""
        lengths = f"s{self.keys}" if self.queries == self.keys else f"t{self.queries} s{self.keys}"
        dims = f"d{self.head_dim}"
        if self.value_head_dim != self.head_dim:
            dims += f"/{self.value_head_dim}"
        words = [f"b{self.batch} {lengths} h{self.heads}/{self.kv_heads} {dims}"]
        if self.window is not None:
            words.append(f"window {self.window}")
        elif self.causal:
            words.append("causal")
        if self.soft_cap is not None:
            words.append(f"cap {self.soft_cap:g}")
        if self.lengths:
            words.append(f"{sum(self.lengths) / (self.batch * self.queries):.0%} tokens")
        if self.documents:
            words.append(f"{len(self.documents)} {'varlen' if self.varlen else 'segments'}")
        return " ".join(words)

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Queries and keys of each sequence. A query sees keys of its own sequence alone."""
        own = self.lengths or self.documents
        return [(length, length) for length in own] if own else [(self.queries, self.keys)] * self.batch

    @property
    def offsets(self) -> np.ndarray:
        """Where sequences start and end once padding is left out."""
        return np.cumsum([0] + [queries for queries, _ in self.sequences]).astype(np.int32)

    @property
    def longest(self) -> int:
        return max(queries for queries, _ in self.sequences)

    @property
    def segment_ids(self) -> np.ndarray:
        """The document of each token, `(batch, queries)`."""
        ids = np.repeat(np.arange(len(self.documents), dtype=np.int32), self.documents)
        return ids.reshape(self.batch, self.queries)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of one head."""
        return sum(
            Case(1, queries, keys, 1, 1, 1, self.causal, self.window).flops // 4
            for queries, keys in self.sequences
        )

    @property
    def flops(self) -> dict[str, int]:
        """Operations of each pass on visible pairs.

        Of the two products of the forward pass and the five of the backward pass, QKᵀ, dQ and dK have the
        head dim of keys and the others that of values.
        """
        pairs = 2 * self.heads * self.pairs
        forward = pairs * (self.head_dim + self.value_head_dim)
        backward = pairs * (3 * self.head_dim + 2 * self.value_head_dim)
        return {"forward": forward, "backward": backward}

    def shapes(self, packed: bool = False) -> list[jax.ShapeDtypeStruct]:
        """Query, key, value and the output's gradient: `(batch, length, heads, head dim)`, or packed."""
        if packed:
            leading = [(int(self.offsets[-1]),)] * 2
        else:
            leading = [(self.batch, length) for length in (self.queries, self.keys)]
        query, key = ((self.heads, self.head_dim), (self.kv_heads, self.head_dim))
        value, d_out = ((heads, self.value_head_dim) for heads in (self.kv_heads, self.heads))
        shapes = (leading[0] + query, leading[1] + key, leading[1] + value, leading[0] + d_out)
        return [jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)) for shape in shapes]

    def arrays(self) -> list[jax.Array]:
        """Random data for `shapes()`: on zeros the chip draws less power and runs faster.

        Padding has no gradient, as a loss that leaves it out gives it none.
        """
        *inputs, d_out = (
            jax.random.normal(jax.random.key(i), x.shape, x.dtype) for i, x in enumerate(self.shapes())
        )
        if self.lengths:
            is_token = jnp.arange(self.queries) < jnp.asarray(self.lengths)[:, None]
            d_out = jnp.where(is_token[..., None, None], d_out, 0)
        return [*inputs, d_out]

    def pack(self, x: jax.Array) -> jax.Array:
        """`x` `(batch, length, ...)` as `(tokens, ...)`, without padding."""
        flat = x.reshape(-1, *x.shape[2:])
        if not self.lengths:
            return flat
        tokens = [row * self.queries + np.arange(length) for row, length in enumerate(self.lengths)]
        return flat[np.concatenate(tokens)]
