"""One step of serving on the device: packed tokens of many sequences, over a paged cache.

Letters as in gpt.py, and: `P` pages, `R` rows, one for each sequence that can run at once.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import gpt
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_flash

Pages = tuple[jax.Array, ...]
"""For each layer `(P, page, 2 K, H)`: head 2k is key head k, head 2k + 1 its values."""

FROM_LAST_STEP = -1
"""In place of a token: the one that the step before sampled for the row, which the host may not know yet."""


class RowWork(NamedTuple):
    """What a step computes for one row."""

    row: int
    tokens: Sequence[int]  # bytes of the prompt, or FROM_LAST_STEP alone
    first: int  # position of the first of them
    pages: Sequence[int]  # of the sequence
    samples: bool  # whether the last of the tokens gives a new one


class Batch(NamedTuple):
    """The arrays of a step of `T` tokens. Tokens that are not used have row -1 and no page."""

    tokens: np.ndarray  # (T,) int32
    rows: np.ndarray  # (T,) int32
    positions: np.ndarray  # (T,) int32, in their sequences
    token_pages: np.ndarray  # (T,) int32, the page that keeps the token's key and value; P for none
    lengths: np.ndarray  # (R,) int32, of the sequences, with these tokens
    page_table: np.ndarray  # (R, pages_per_sequence) int32
    offsets: np.ndarray  # (R + 1,) int32: row r has tokens offsets[r] up to offsets[r + 1]
    samples: np.ndarray  # (R,) bool


def empty_pages(config: gpt.GPTConfig, pages: int, page_size: int) -> Pages:
    shape = pages, page_size, 2 * config.key_heads, config.head_dim
    return tuple(jnp.zeros(shape, config.dtype) for _ in range(config.layers))


def pack(
    work: Sequence[RowWork], size: int, rows: int, pages: int, page_size: int, pages_per_sequence: int
) -> Batch:
    """The work of a step in arrays of `size` tokens and `rows` rows; tokens in the order of their rows."""
    batch = Batch(
        tokens=np.zeros(size, np.int32),
        rows=np.full(size, -1, np.int32),
        positions=np.zeros(size, np.int32),
        token_pages=np.full(size, pages, np.int32),
        lengths=np.zeros(rows, np.int32),
        page_table=np.full((rows, pages_per_sequence), -1, np.int32),
        offsets=np.zeros(rows + 1, np.int32),
        samples=np.zeros(rows, bool),
    )
    begin = 0
    for of_row in sorted(work, key=lambda of_row: of_row.row):
        row, count = of_row.row, len(of_row.tokens)
        packed = slice(begin, begin + count)
        positions = np.arange(of_row.first, of_row.first + count)
        batch.tokens[packed] = of_row.tokens
        batch.rows[packed] = row
        batch.positions[packed] = positions
        batch.token_pages[packed] = np.asarray(of_row.pages)[positions // page_size]
        batch.lengths[row] = of_row.first + count
        batch.page_table[row, : len(of_row.pages)] = of_row.pages
        batch.offsets[row + 1 :] = begin = begin + count
        batch.samples[row] = of_row.samples
    return batch


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="pages")
def run(
    graph: nnx.GraphDef, parameters: nnx.State, pages: Pages, last: jax.Array, batch: Batch
) -> tuple[Pages, jax.Array]:
    """Append the tokens of `batch` to the pages, attend, and take the most likely token of rows that sample.

    Args:
      graph, parameters: the model.
      pages: keys and values of all that came before; changed in place.
      last: `(R,)` int32, the newest token of each row.
      batch: what to compute.

    Returns:
      The pages, and the newest tokens, with the sampled ones.
    """
    model: gpt.GPT = nnx.merge(graph, parameters)
    config, page_size = model.config, pages[0].shape[1]
    tokens = jnp.where(batch.tokens == FROM_LAST_STEP, last[batch.rows], batch.tokens)
    places = batch.token_pages, batch.positions % page_size
    count = jnp.full(1, last.shape[0], jnp.int32)

    def attend(layer: int, pages: Pages, query: jax.Array, key: jax.Array, value: jax.Array):
        query, key = (gpt.rotate(x, batch.positions)[0] for x in (query, key))
        rows = jnp.stack([key, value[0]], axis=2).reshape(len(key), -1, config.head_dim)
        written = pages[layer].at[places].set(rows, mode="drop")
        attended = jax_flash.ragged_paged_attention(
            query,
            written,
            batch.lengths,
            batch.page_table,
            batch.offsets,
            count,
            sm_scale=config.head_dim**-0.5,
            implementation=config.implementation,
        )
        return attended[None], (*pages[:layer], written, *pages[layer + 1 :])

    x, pages = model.with_cache(tokens[None], pages, attend)
    newest = x[0, jnp.maximum(batch.offsets[1:] - 1, 0)]  # of each row
    sampled = jnp.argmax(model.logits(newest), axis=-1).astype(jnp.int32)
    return pages, jnp.where(batch.samples, sampled, last)
