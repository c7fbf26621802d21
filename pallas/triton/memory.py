"""Loads and stores of tiles whose rows or columns may reach beyond the array.

Triton wants powers of two, so a head dim is padded to the next one, and the last tile of a sequence may hang
over its end. What lies outside reads as zero, or as said, and is never written.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jax_flash._mask import both


def indices(start, count: int, axis: int) -> jax.Array:
    """`start .. start + count` as int32 along `axis` of a matrix, the other axis being 1."""
    shape = (count, 1) if axis == 0 else (1, count)
    return start + lax.broadcasted_iota(jnp.int32, shape, axis)


def _inside(start, count: int, rows: int | None, padded_width: int, width: int) -> jax.Array | None:
    inside = None
    if rows is not None:
        inside = jnp.broadcast_to(indices(start, count, 0) < rows, (count, padded_width))
    if width != padded_width:
        columns = jnp.broadcast_to(indices(0, padded_width, 1) < width, (count, padded_width))
        inside = columns if inside is None else inside & columns
    return inside


def load(ref, start, count: int, *, width: int, rows: int | None = None, head=None, batch=None) -> jax.Array:
    """Rows `[start, start + count)` of a ref `(rows, width)`, or of one head of `(rows, heads, width)`, or of
    one batch row besides, of `(batch, rows, heads, width)`.

    Columns at `width` and beyond read as zero, and so do rows at `rows` and beyond where it is given.
    """
    padded_width = ref.shape[-1]
    inside = _inside(start, count, rows, padded_width, width)
    index = pl.ds(start, count) if head is None else (pl.ds(start, count), head)
    tile = ref.at[index] if batch is None else ref.at[batch, *index]
    return triton.load(tile, mask=inside, other=None if inside is None else 0.0)


def store(
    ref, start, tile: jax.Array, *, width: int, rows: int | None = None, where: jax.Array | None = None
) -> None:
    """The counterpart of `load`: writes `tile`, in the ref's dtype, within `rows` and `width`; only those of
    its elements that `where` names, if given."""
    count, padded_width = tile.shape
    inside = both(_inside(start, count, rows, padded_width, width), where)
    triton.store(ref.at[pl.ds(start, count)], tile.astype(ref.dtype), mask=inside)


def store_block(ref, first, start, tile: jax.Array, *, rows: int | None, columns: int | None) -> None:
    """Writes `tile` from row `first` and column `start` on, in the ref's dtype, within `rows` and `columns`
    where they are given."""
    inside = None
    for begin, count, axis, end in ((first, tile.shape[0], 0, rows), (start, tile.shape[1], 1, columns)):
        if end is not None:
            within = jnp.broadcast_to(indices(begin, count, axis) < end, tile.shape)
            inside = within if inside is None else inside & within
    block = ref.at[pl.ds(first, tile.shape[0]), pl.ds(start, tile.shape[1])]
    triton.store(block, tile.astype(ref.dtype), mask=inside)


def load_vector(
    ref, start, count: int, *, rows: int | None, other: float, head=None, batch=None
) -> jax.Array:
    """Entries `[start, start + count)` of a ref `(rows,)`, or of one head of `(heads, rows)`, or of one batch
    row besides, of `(batch, heads, rows)`.

    Entries at `rows` and beyond read as `other`, where `rows` is given.
    """
    index = tuple(i for i in (batch, head) if i is not None)
    entries = ref.at[*index, pl.ds(start, count)]
    if rows is None:
        return triton.load(entries)
    inside = start + lax.iota(jnp.int32, count) < rows
    return triton.load(entries, mask=inside, other=other)


def store_vector(ref, start, entries: jax.Array, *, rows: int | None, head=None) -> None:
    """Writes `entries` from `start` on, of one head where the ref has more, within `rows` where given."""
    (count,) = entries.shape
    inside = None if rows is None else start + lax.iota(jnp.int32, count) < rows
    place = ref.at[pl.ds(start, count)] if head is None else ref.at[head, pl.ds(start, count)]
    triton.store(place, entries, mask=inside)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a @ b` of 16-bit tiles in float32, whatever `jax_default_matmul_precision` says."""
    return _dot_general(a, b, 0)


def dot_transposed(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a @ b.T` of 16-bit tiles in float32."""
    return _dot_general(a, b, 1)


def _dot_general(a: jax.Array, b: jax.Array, contracted: int) -> jax.Array:
    return lax.dot_general(
        a,
        b,
        (((1,), (contracted,)), ((), ())),
        precision=lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
