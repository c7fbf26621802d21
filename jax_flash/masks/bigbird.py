"""Windows, global tokens and random keys, in blocks."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_flash import _validate
from jax_flash._validate import short
from jax_flash.masks.arguments import Array, element, frozen, positive, quotient, square_block_size
from jax_flash.masks.mask import Mask

_NO_BLOCK = -1
"""In the table of random blocks: a row of blocks has fewer left than are wanted."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BigBirdMask(Mask):
    """A window of blocks, global blocks and random blocks.

    Zaheer et al., "Big Bird: Transformers for Longer Sequences", 2020, section 2 (the ITC pattern) and
    appendix D (in blocks). T and S are both `length`, in blocks of `block_size`. A query block attends

    - to the key blocks at most `window_blocks // 2` away from it,
    - to the first `global_blocks` key blocks, which attend to all themselves,
    - to `random_blocks` others, drawn uniformly without replacement for each query block: to all if there
      aren't as many.

    The random blocks are a table of `heads * length / block_size * random_blocks` int32 numbers. Bounds
    decide all blocks if `block_size` is a multiple of theirs, 128. Else they say little of random blocks: all
    pairs of a large part of the plane are looked at.

    Attributes:
      length: of the sequence, queries and keys alike.
      block_size: in tokens.
      window_blocks: an odd number.
      global_blocks: how many blocks at the beginning are global. The paper's code has the last block too.
      random_blocks: for each query block; may be 0.
      heads: heads with random blocks of their own: N, or 1 for the same in all.
      seed: an int, or a key of `jax.random.key`, traced or not.

    Raises:
      TypeError: seed is neither; a size isn't an integer.
      ValueError: a size is too small; block_size is more than int32 holds; window_blocks is even.
    """

    length: int
    block_size: int = 128
    window_blocks: int = 3
    global_blocks: int = 1
    random_blocks: int = 3
    heads: int = 1
    seed: int | jax.Array = 0
    _table: Array = dataclasses.field(init=False, repr=False, compare=False)  # (heads, blocks, random_blocks)

    def __post_init__(self):
        sizes = {name: positive(name, getattr(self, name)) for name in _POSITIVE}
        sizes |= {name: _validate.size(name, getattr(self, name)) for name in _SIZES}
        sizes["block_size"] = square_block_size(self.block_size)
        if sizes["window_blocks"] % 2 == 0:
            raise ValueError(f"window_blocks must be odd; got {short(self.window_blocks)}")
        self._set(**sizes)
        self._set(_table=self._drawn(_key(self.seed)))

    def _drawn(self, key: jax.Array) -> Array:
        blocks = -(-self.length // self.block_size)
        shape = self.heads, blocks, self.random_blocks
        draw = functools.partial(_random_blocks, shape, self.window_blocks // 2, self.global_blocks)
        if isinstance(key, Tracer):
            return draw(key)
        with jax.ensure_compile_time_eval():
            return frozen(np.asarray(draw(key)), np.int32)

    def _sees(self, batch, head, query, key) -> jax.Array:
        row, column = quotient(query, self.block_size), quotient(key, self.block_size)
        sees = (row < self.global_blocks) | (column < self.global_blocks)
        sees |= jnp.abs(row - column) <= self.window_blocks // 2
        table = jnp.asarray(self._table)
        for number in range(self.random_blocks):
            sees |= element(table[..., number], head, row) == column
        return sees

    def check_sizes(self, B: int | None, N: int | None, T: int, S: int) -> None:
        if (T, S) != (self.length, self.length):
            raise ValueError(f"length is {self.length}; T and S must be that, and are {T} and {S}")
        if N is None and self.heads > 1:
            raise ValueError(f"N must be {self.heads}, as heads is {self.heads}; got None")
        if self.heads not in (1, N):
            raise ValueError(f"heads is {self.heads}; it must be 1 or N = {N}")


_POSITIVE = ("length", "window_blocks", "heads")
_SIZES = ("global_blocks", "random_blocks")


def _key(seed: Any) -> jax.Array:
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) and seed.shape == ():
        return seed
    try:
        number = _validate.integer("seed", seed)
    except TypeError:
        raise TypeError(
            f"seed must be an int or one key, as from jax.random.key; got {short(seed)}"
        ) from None
    with jax.ensure_compile_time_eval():
        return jax.random.key(number)


def _random_blocks(shape: tuple[int, int, int], reach: int, global_blocks: int, key: jax.Array) -> jax.Array:
    """Distinct key blocks of each query block, neither in its window nor global.

    By Floyd's algorithm (Bentley and Floyd, "A sample of brilliance", 1987), without a permutation of all
    blocks: of n blocks m are drawn in m steps. Step number j, from n - m to n - 1, draws from 0…j, and takes
    j itself if what it drew is taken.
    """
    _, blocks, wanted = shape
    row = jnp.arange(blocks, dtype=jnp.int32).reshape(1, -1)
    # Blocks in between are left out: of those that aren't global, the ones in the window.
    first = jnp.clip(row - reach, min(global_blocks, blocks), blocks)
    end = jnp.clip(row + reach + 1, first, blocks)
    left = blocks - min(global_blocks, blocks) - (end - first)
    taken: list[jax.Array] = []
    for step in range(wanted):
        j = left - wanted + step
        drawn = jax.random.randint(
            jax.random.fold_in(key, step), shape[:2], 0, jnp.maximum(j, 0) + 1, jnp.int32
        )
        is_taken = functools.reduce(jnp.logical_or, (drawn == x for x in taken), jnp.zeros_like(drawn, bool))
        taken.append(jnp.where(j < 0, _NO_BLOCK, jnp.where(is_taken, j, drawn)))
    ranks = jnp.stack(taken, axis=-1) if taken else jnp.zeros(shape, jnp.int32)
    found = ranks + min(global_blocks, blocks)
    found = jnp.where(found >= first[..., None], found + (end - first)[..., None], found)
    return jnp.where(ranks == _NO_BLOCK, _NO_BLOCK, found)
