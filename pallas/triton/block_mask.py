"""Block masks in kernels by Triton: lists of the blocks that tiles visit, and which pairs see each other.

XLA makes a list for each tile (_block_lists.py), which includes causality, the window, lengths and segments
as far as whole blocks are hidden. In partial blocks kernels compute the mask function for each pair. Without
a mask function, as `BlockMask.from_blocks` has none, they look the kind of the pair's block up.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import _block_lists
from jax_flash._block_kinds import Kind
from jax_flash._mask import PositionMask, keys_of_queries
from jax_flash._spec import AttentionSpec, Operands, Sizes, sizes

LISTS = ("visited_blocks", "visited_counts")
"""What kernels get: `(B|1, N|1, tiles, blocks)` and `(B|1, N|1, tiles, 2)`, see `_block_lists.full_first`."""


def lists(
    spec: AttentionSpec,
    operands: Operands,
    tile: tuple[int, int],
    transposed: bool,
    segment_blocks: tuple[jax.Array, jax.Array] | None,
) -> dict[str, jax.Array]:
    """Those lists of a kernel.

    Args:
      tile: rows of a tile and columns of a block, queries and keys; exchanged with `transposed`.
      segment_blocks: for each tile the blocks [first, last) that may share a segment with it, `(B, tiles)`.
    """
    assert operands.block_kinds is not None
    lengths = operands.query_seq_lengths, operands.key_value_seq_lengths
    size = sizes(operands)
    of_positions = lengths, None if operands.diagonal is None else operands.diagonal[:, 0]
    found = _lists(spec, size, tile, transposed, operands.block_kinds, *of_positions, segment_blocks)
    return dict(zip(LISTS, found, strict=True))


# One program, so that its numbers are constants in it.
@functools.partial(jax.jit, static_argnums=range(4))
def _lists(
    spec: AttentionSpec,
    size: Sizes,
    tile: tuple[int, int],
    transposed: bool,
    kinds: jax.Array,
    lengths: tuple[jax.Array | None, jax.Array | None],
    diagonal: jax.Array | None,
    segment_blocks: tuple[jax.Array, jax.Array] | None,
) -> tuple[jax.Array, jax.Array]:
    assert spec.block_mask is not None
    of_pairs = tile[::-1] if transposed else tile
    low, high = _block_lists.pooled(kinds, spec.block_mask.block_size, (size.T, size.S), of_pairs)
    rows = (
        None if x is None else jnp.clip(x, 0, longest)[:, None]
        for x, longest in zip(lengths, (size.T, size.S), strict=True)
    )
    mask = keys_of_queries(spec, size, *rows, None if diagonal is None else diagonal[:, None])
    if transposed:
        low, high = (jnp.swapaxes(x, -1, -2) for x in (low, high))
        mask = mask.transposed()
    full, visited = _by_positions(mask, tile, low.shape[2:], segment_blocks)
    return _block_lists.full_first((low == Kind.FULL) & full, (high != Kind.HIDDEN) & visited)


def _by_positions(
    mask: PositionMask,
    tile: tuple[int, int],
    counts: tuple[int, int],
    segment_blocks: tuple[jax.Array, jax.Array] | None,
) -> tuple[jax.Array, jax.Array]:
    """Whether each of a tile's blocks is full, and whether it is visited, but for the block mask: bool
    `(B|1, 1, tiles, blocks)`."""
    tiles, blocks = counts
    rows, columns = tile
    found = mask.block_range(np.arange(tiles, dtype=np.int32) * rows, rows, columns)
    if segment_blocks is not None:
        found = found.within(*segment_blocks)
    block = jnp.arange(blocks, dtype=jnp.int32)

    def within(begin, end) -> jax.Array:
        begin, end = (jnp.broadcast_to(x, np.broadcast_shapes(np.shape(x), (1, tiles))) for x in (begin, end))
        return ((block >= begin[..., None]) & (block < end[..., None]))[:, None]

    return within(found.full_begin, found.full_end), within(found.first, found.last)


def is_full(kind: jax.Array) -> jax.Array:
    return kind.astype(jnp.int32) == Kind.FULL.value
