"""Masks of jax_flash.masks, each with its definition in NumPy."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import masks
from jax_flash._block_kinds import Kind, MaskMod

B, N, T, S = 2, 3, 61, 83
HEIGHT, WIDTH = 7, 9


@dataclasses.dataclass(frozen=True)
class Case:
    """A mask and `defined(batch, head, query, key)`, of integer arrays that broadcast."""

    mask: masks.Mask
    defined: Callable[..., np.ndarray]
    T: int = T
    S: int = S

    def expected(self) -> np.ndarray:
        """bool `(B, N, T, S)`."""
        return np.broadcast_to(self.defined(*np.ogrid[:B, :N, : self.T, : self.S]), (B, N, self.T, self.S))


def dense(mask: MaskMod, B: int, N: int, T: int, S: int) -> np.ndarray:
    """A mask function's values, bool `(B, N, T, S)`."""
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        mask = jax.vmap(mask, axes)
    return np.asarray(jax.jit(mask)(*(jnp.arange(size, dtype=jnp.int32) for size in (B, N, T, S))))


def kinds_of(sees: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The kind of each block of a dense mask."""

    def counts(x: np.ndarray) -> np.ndarray:
        for axis, size in zip((-2, -1), block, strict=True):
            x = np.add.reduceat(x, np.arange(0, x.shape[axis], size), axis)
        return x

    seen, there = counts(sees.astype(int)), counts(np.ones_like(sees, int))
    return np.where(seen == there, Kind.FULL, np.where(seen > 0, Kind.PARTIAL, Kind.HIDDEN))


RANDOM = np.random.default_rng(0)
OFFSETS = np.array([22, -9])
PREFIXES = np.array([30, 0])
IDS = np.sort(RANDOM.integers(0, 5, (B, T)), axis=-1)
KEY_IDS = np.sort(RANDOM.integers(-1, 5, (B, S)), axis=-1)
UNSORTED = RANDOM.integers(0, 3, 64)
SEEN = RANDOM.random((N, T, S)) < 0.1
GLOBAL = RANDOM.random((B, S)) < 0.05
LAYOUT = RANDOM.random((N, 4, 11)) < 0.3
PARENTS = np.array([[-1, 0, 0, 1, 1, 2, -1, 6, 3], [-1, 0, 1, 2, 3, 4, 5, 6, 7]])
CONTEXTS = np.array([20, 3])


def ancestors(b: int, token: int) -> list[int]:
    found = []
    while token >= 0:
        found.append(token)
        token = PARENTS[b, token]
    return found


def in_tree(b: np.ndarray, h: np.ndarray, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    sees = np.zeros((B, 1, q.size, k.size), bool)
    for row, token in np.ndindex(B, q.size):
        context = CONTEXTS[row]
        sees[row, 0, token, :context] = True
        sees[row, 0, token, [context + x for x in ancestors(row, token)]] = True
    return sees


def in_neighborhood(kernel_size: tuple[int, int], dilation: tuple[int, int]) -> Callable[..., np.ndarray]:
    """Of each axis by itself: of the tokens at multiples of the dilation the kernel's number nearest."""

    def of_axis(size: int, kernel_size: int, dilation: int) -> np.ndarray:
        sees = np.zeros((size, size), bool)
        for i in range(size):
            group = range(i % dilation, size, dilation)
            first = min(max(group.index(i) - kernel_size // 2, 0), len(group) - kernel_size)
            sees[i, group[first : first + kernel_size]] = True
        return sees

    rows, columns = (of_axis(*x) for x in zip((HEIGHT, WIDTH), kernel_size, dilation, strict=True))
    return lambda b, h, q, k: rows[q // WIDTH, k // WIDTH] & columns[q % WIDTH, k % WIDTH]


def in_bigbird(mask: masks.BigBirdMask) -> Callable[..., np.ndarray]:
    def defined(b, h, q, k):
        row, column = q // mask.block_size, k // mask.block_size
        is_global = (row < mask.global_blocks) | (column < mask.global_blocks)
        is_drawn = (np.asarray(mask._table)[h % mask.heads, row] == column[..., None]).any(-1)
        return is_global | (abs(row - column) <= mask.window_blocks // 2) | is_drawn

    return defined


BIGBIRD = masks.BigBirdMask(90, block_size=8, random_blocks=2, heads=N, seed=3)
GRID = HEIGHT * WIDTH

CASES = {
    "full": Case(masks.FullMask(), lambda b, h, q, k: np.array(True)),
    "causal": Case(masks.CausalMask(), lambda b, h, q, k: q >= k),
    "bottom right": Case(masks.CausalMask(S - T), lambda b, h, q, k: q + S - T >= k),
    "negative offset": Case(masks.CausalMask(-5), lambda b, h, q, k: q - 5 >= k),
    "offset of rows": Case(masks.CausalMask(OFFSETS), lambda b, h, q, k: q + OFFSETS[b] >= k),
    "local": Case(masks.LocalMask(11, 4), lambda b, h, q, k: abs(q + 4 - k) <= 11),
    "to the left": Case(masks.LocalMask((7, None)), lambda b, h, q, k: q - 7 <= k),
    "to the right": Case(masks.LocalMask((-1, 3), OFFSETS), lambda b, h, q, k: k <= q + OFFSETS[b] + 3),
    "on both sides": Case(masks.LocalMask((20, 0)), lambda b, h, q, k: (q - 20 <= k) & (k <= q)),
    "unbounded": Case(masks.LocalMask(None), lambda b, h, q, k: np.array(True)),
    "huge": Case(masks.LocalMask(2**40, 2**29), lambda b, h, q, k: np.array(True)),
    "chunked": Case(masks.ChunkedCausalMask(10), lambda b, h, q, k: (q >= k) & (q // 10 == k // 10)),
    "chunked with offsets": Case(
        masks.ChunkedCausalMask(24, OFFSETS),
        lambda b, h, q, k: (q + OFFSETS[b] >= k) & ((q + OFFSETS[b]) // 24 == k // 24),
    ),
    "prefix": Case(masks.PrefixLMMask(30), lambda b, h, q, k: (k < 30) | (k <= q)),
    "prefixes": Case(masks.PrefixLMMask(PREFIXES, 22), lambda b, h, q, k: (k < PREFIXES[b]) | (k <= q + 22)),
    "dilated": Case(
        masks.DilatedMask((6, 2), 3, 5),
        lambda b, h, q, k: np.isin(q + 5 - k, [3 * m for m in range(-2, 7)]),
    ),
    "dilated to the left": Case(
        masks.DilatedMask((None, 0), 2), lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0)
    ),
    "strided": Case(
        masks.StridedMask(9, S - T),
        lambda b, h, q, k: (q + S - T >= k) & ((q + S - T - k <= 9) | ((q + S - T - k) % 9 == 0)),
    ),
    "fixed": Case(
        masks.FixedMask(12, 2, OFFSETS),
        lambda b, h, q, k: (q + OFFSETS[b] >= k) & (((q + OFFSETS[b]) // 12 == k // 12) | (k % 12 >= 10)),
    ),
    "global": Case(
        masks.GlobalMask(4, OFFSETS),
        lambda b, h, q, k: (k < 4) | ((q + OFFSETS[b] < 4) & (q + OFFSETS[b] >= 0)),
    ),
    "global tokens": Case(
        masks.GlobalMask(GLOBAL, 30),
        lambda b, h, q, k: GLOBAL[b, k] | np.where(q + 30 < S, GLOBAL[b, np.minimum(q + 30, S - 1)], False),
    ),
    "longformer": Case(
        masks.LongformerMask(3, GLOBAL[0], dilation=2),
        lambda b, h, q, k: GLOBAL[0][k] | GLOBAL[0][q] | np.isin(q - k, range(-6, 7, 2)),
    ),
    "bigbird": Case(BIGBIRD, in_bigbird(BIGBIRD), 90, 90),
    "neighborhood": Case(
        masks.NeighborhoodMask((HEIGHT, WIDTH), 3), in_neighborhood((3, 3), (1, 1)), GRID, GRID
    ),
    "dilated neighborhood": Case(
        masks.NeighborhoodMask([HEIGHT, WIDTH], (2, 3), (3, 2)), in_neighborhood((2, 3), (3, 2)), GRID, GRID
    ),
    "tree": Case(masks.TreeMask(PARENTS, CONTEXTS), in_tree, PARENTS.shape[1], 31),
    "numpy": Case(masks.NumpyMask(SEEN), lambda b, h, q, k: SEEN[h, q, k]),
    "documents": Case(masks.DocumentMask(IDS, KEY_IDS), lambda b, h, q, k: IDS[b, q] == KEY_IDS[b, k]),
    "unsorted": Case(masks.DocumentMask(UNSORTED), lambda b, h, q, k: UNSORTED[q] == UNSORTED[k], 64, 64),
    "layout": Case(masks.BlockLayoutMask(LAYOUT, (16, 8)), lambda b, h, q, k: LAYOUT[h, q // 16, k // 8]),
    "heads": Case(
        masks.MultiHeadMask(
            [masks.CausalMask(), lambda b, h, q, k: q == k, masks.LocalMask(2) & masks.FullMask()]
        ),
        lambda b, h, q, k: np.select([h == 0, h == 1], [q >= k, q == k], abs(q - k) <= 2),
    ),
    "and": Case(
        masks.DocumentMask(IDS, KEY_IDS) & masks.CausalMask(3),
        lambda b, h, q, k: (IDS[b, q] == KEY_IDS[b, k]) & (q + 3 >= k),
    ),
    "or, not": Case(
        (lambda b, h, q, k: q == 2 * k) | ~masks.LocalMask(30),
        lambda b, h, q, k: (q == 2 * k) | (abs(q - k) > 30),
    ),
}
