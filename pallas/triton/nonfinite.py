"""How Triton kernels keep NaN and infinities from what doesn't depend on them.

Blocks hold pairs of a query and a key that it doesn't see. Their probabilities are 0, but in products of
blocks these zeros meet whatever the operands hold, and 0 times NaN is NaN. To guard against that in each
block would cost every call. So a kernel says of each row of its results whether something in it isn't finite,
and a second kernel computes the tiles of such rows once more, with what isn't finite left out of the products
of partial blocks. Mostly there are none, and it ends at once. It is a kernel of its own, as one for both
takes more registers and is slower even where all is finite.

Blocks come in the same order and with the same arithmetic, so that what is finite has the same bits as ever.
The number of stages is the same too: on an H200, one stage gave other last bits in calls with a bias.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from .memory import dot, load_vector
from .tiles import padded

_ROWS_OF_PROGRAM = 2048


def is_finite(x: jax.Array) -> jax.Array:
    return jnp.abs(x.astype(jnp.float32)) < jnp.inf


def finite(x: jax.Array) -> jax.Array:
    """`x` with 0 for what isn't finite."""
    return jnp.where(is_finite(x), x, jnp.zeros_like(x))


def spoiled_rows(*sums: jax.Array) -> jax.Array:
    """NaN for each row of matrices in which something isn't finite, 0 for others."""
    totals = [jnp.sum(x * 0.0, axis=1) for x in sums]
    return sum(totals[1:], totals[0])


def count_seen(visible: jax.Array, x: jax.Array) -> jax.Array:
    """For each row of `visible` and column of `x`, how many elements that aren't finite the row sees.

    Args:
      visible: which rows of `x` each row sees.
      x: 16-bit.
    """
    return dot(visible.astype(x.dtype), jnp.logical_not(is_finite(x)).astype(x.dtype))


def programs(rows: int) -> int:
    """How many programs `over_spoiled_tiles` takes for the rows of a head."""
    return pl.cdiv(rows, _ROWS_OF_PROGRAM)


def over_spoiled_tiles(spoiled, rows: int, tile_rows: int, body: Callable[[jax.Array], object]) -> None:
    """Runs `body(tile)` on those of this program's tiles that have spoiled rows.

    Args:
      spoiled: a ref (rows,) of `spoiled_rows`.
    """

    def some_are(first, count: int) -> jax.Array:
        return jnp.sum(load_vector(spoiled, first, count, rows=rows, other=0.0)) != 0.0

    count = min(_ROWS_OF_PROGRAM, padded(rows))
    first = pl.program_id(0) * count

    def step(i: jax.Array, carry: None) -> None:
        start = first + i * tile_rows

        @pl.when(some_are(start, tile_rows))
        def _():
            body(lax.div(start, np.int32(tile_rows)))

        return carry

    @pl.when(some_are(first, count))
    def _():
        lax.fori_loop(np.int32(0), np.int32(count // tile_rows), step, None)
