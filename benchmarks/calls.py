"""The calls that forward.py and backward.py measure, in groups."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from cases import SHAPES

from jax_flash._spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False  # aligned to the last key
    window: int | None = None  # keys that a causal query sees at most, its own included
    dtype: str = "bfloat16"
    calls: int = 1  # each on the output of the one before

    def __str__(self):
        lengths = f"s{self.keys}" if self.queries == self.keys else f"t{self.queries} s{self.keys}"
        label = f"b{self.batch} {lengths} h{self.heads}/{self.kv_heads} d{self.head_dim}"
        if self.window is not None:
            label += f" window {self.window}"
        elif self.causal:
            label += " causal"
        if self.dtype != "bfloat16":
            label += f" {self.dtype}"
        return f"{label} ×{self.calls}" if self.calls > 1 else label

    def seen(self, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The keys `[begin, end)` that queries see; none where `end <= begin`."""
        diagonal = row + self.keys - self.queries
        begin = np.zeros_like(row) if self.window is None else np.maximum(diagonal - self.window + 1, 0)
        end = np.minimum(diagonal + 1, self.keys) if self.causal else np.full_like(row, self.keys)
        return begin, end

    @property
    def flops(self) -> int:
        """Of what is attended to, forward, in all calls."""
        begin, end = self.seen(np.arange(self.queries))
        pairs = int(np.maximum(end - begin, 0).sum())
        return 4 * self.calls * self.batch * self.heads * self.head_dim * pairs

    def inputs(self) -> list[jax.Array]:
        """Query, key and value. Random: on zeros the chip draws less power and runs faster."""
        return [
            jax.random.normal(jax.random.key(i), shape.shape, shape.dtype)
            for i, shape in enumerate(self.shapes())
        ]

    def spec(self) -> AttentionSpec:
        left = None if self.window is None else self.window - 1
        return AttentionSpec(scale=self.head_dim**-0.5, left=left, right=0 if self.causal else None)

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        query = (self.batch, self.queries, self.heads, self.head_dim)
        key = (self.batch, self.keys, self.kv_heads, self.head_dim)
        return [jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)) for shape in (query, key, key)]


def full_and_causal(*shape: int, **others) -> list[Case]:
    return [Case(*shape, causal=causal, **others) for causal in (False, True)]


def square(batch: int, length: int, heads: int, kv_heads: int, head_dim: int, **others) -> list[Case]:
    return full_and_causal(batch, length, length, heads, kv_heads, head_dim, **others)


GROUPS: dict[str, list[Case]] = {
    "default": [case for shape in SHAPES for case in square(*shape)],  # attention.py's
    "fp16": [case for shape in SHAPES for case in square(*shape, dtype="float16")],
    "head_dims": [
        case
        for head_dim in (80, 96, 160, 192)
        for case in square(4, 4096, round(2048 / head_dim), round(2048 / head_dim), head_dim)
    ],
    "windows": [
        case
        for shape in ((1, 16384, 16384, 16, 16, 128), (1, 16384, 16384, 32, 32, 64))
        for case in (Case(*shape), Case(*shape, causal=True, window=1024))
    ],
    "short": [
        case
        for head_dim in (64, 128)
        for length in (128, 257, 512, 1000)
        for case in square(round(16384 / length), length, 16, 16, head_dim)
    ],
    "odd": [
        *full_and_causal(4, 1000, 4096, 16, 16, 128),
        *full_and_causal(4, 4096, 1000, 16, 16, 128),
        *square(1, 4096, 8, 8, 64),
        *square(1, 4096, 8, 8, 128),
        *full_and_causal(16, 64, 4096, 32, 4, 128),
    ],
}
