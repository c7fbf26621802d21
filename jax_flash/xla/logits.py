"""One block of logits: what forward and backward both recompute.

Inside of the loops query heads are grouped by the key head that they share, and heads stand before
positions, so that every product is a batch of contiguous matrices and keys are never repeated:

    query (B, K, G, T, H)   key (B, K, S, H)   value (B, K, S, V)   logits (B, K, G, T, S),  G = N / K
"""

import dataclasses

import jax
import jax.numpy as jnp

from jax_flash import _dropout
from jax_flash._mask import PositionMask, both
from jax_flash._spec import AttentionSpec, Operands, sizes
from jax_flash.xla import blocks, functions


@dataclasses.dataclass(frozen=True)
class Block:
    """Logits of one block of queries and keys, `(B, K, G, T, S)`."""

    x: jax.Array
    score: dict[str, jax.Array] | None  # what score_mod took: the score and its indices; None without one
    visible: jax.Array | None  # bool, broadcasts to x; None where every query sees every key
    capped: jax.Array | None  # tanh of the soft cap, in (−1, 1); None without one
    distance: jax.Array | None  # |j − i − diagonal|, which ALiBi multiplies by −slope, float
    kept: jax.Array | None  # bool, by dropout

    def masked(self, x: jax.Array, fill: float) -> jax.Array:
        """`x` of this block, with `fill` for the pairs of a query and a key that it doesn't see."""
        return x if self.visible is None else jnp.where(self.visible, x, fill)


def accumulator(operands: Operands) -> jnp.dtype:
    """The dtype of everything between the products: float32, or float64 for float64 operands."""
    return jnp.promote_types(operands.query.dtype, jnp.float32)


def by_group(x: jax.Array, key_heads: int) -> jax.Array:
    """`(B, N, *rest)` to `(B, K, G, *rest)`; a head axis of 1 stays, as `(B, 1, 1, *rest)`."""
    batch, heads, *rest = x.shape
    grouped = (1, 1) if heads == 1 else (key_heads, heads // key_heads)
    return x.reshape(batch, *grouped, *rest)


def by_head(x: jax.Array) -> jax.Array:
    """`(B, K, G, *rest)` back to `(B, N, *rest)`."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def heads_first(operands: Operands) -> Operands:
    """The same operands, laid out for the loops: shapes as this module's docstring says."""
    K = sizes(operands).K

    def group(x):
        return None if x is None else by_group(x, K)

    return operands.replace(
        query=by_group(operands.query.swapaxes(1, 2), K),
        key=operands.key.swapaxes(1, 2),
        value=operands.value.swapaxes(1, 2),
        bias=group(operands.bias),
        mask=group(operands.mask),
        alibi_slopes=group(operands.alibi_slopes),
        dropout_rows=group(operands.dropout_rows),
        head_indices=group(operands.head_indices),
        block_kinds=group(operands.block_kinds),
    )


def for_product(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Probabilities, or gradients of logits, as a product with operands of `dtype` takes them.

    They are rounded to the operands' dtype, but stay in float32 beside float16: with a million keys most of
    them lie below its normal numbers.
    """
    return x if dtype == jnp.float16 else x.astype(dtype)


def product(left: jax.Array, right: jax.Array, contract: tuple, dtype: jnp.dtype) -> jax.Array:
    """Matrix product of blocks, batched over their first two axes `(B, K)` and summed in `dtype`.

    `contract` holds the axes of `left`, and those of `right`, that are summed over. float32 is
    multiplied as float32 on accelerators too, unless `jax.default_matmul_precision` says otherwise.
    """
    chosen = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    precision = jax.lax.Precision.HIGHEST
    if left.dtype != right.dtype:  # one of them is float16, and so TF32 has digits enough
        left, right, precision = left.astype(dtype), right.astype(dtype), jax.lax.Precision.HIGH
    return jax.lax.dot_general(
        left,
        right,
        (contract, ((0, 1), (0, 1))),
        precision=precision if chosen is None else None,
        preferred_element_type=dtype,
    )


def block(
    spec: AttentionSpec,
    operands: Operands,
    mask: PositionMask,
    cut: blocks.Plan,
    query: jax.Array,
    key: jax.Array,
    query_block,
    key_block,
    by_jax: bool = False,
) -> Block:
    """The logits of `query` (block `query_block`) on `key` (block `key_block`).

    Args:
      operands: from `heads_first`.
      mask: from `blocks.position_mask`.
      query: `(B, K, G, block of T, H)`.
      key: `(B, K, block of S, H)`.
      by_jax: whether score_mod is to be what JAX differentiates.
    """
    dtype = accumulator(operands)

    def tile(x):
        """The block of a `(…, T|1, S|1)` operand."""
        return cut.keys.take(cut.queries.take(x, query_block, -2), key_block, -1)

    # Clipped, so that logits that overflow are a row's largest and no inf - inf. It also keeps the compiler
    # from fusing the scaling with the subtraction of the row's maximum: the maximum is rounded, so the
    # difference, which is to be 0 at most, would be as large as the rounding of the logits.
    limits = jnp.finfo(dtype)
    x = jnp.clip(product(query, key, ((4,), (3,)), dtype) * spec.scale, limits.min, limits.max)
    capped = None
    if spec.logits_soft_cap is not None:
        capped = jnp.tanh(x / spec.logits_soft_cap)
        x = spec.logits_soft_cap * capped
    rows = cut.queries.positions(query_block).reshape(1, 1, 1, -1, 1)
    columns = cut.keys.positions(key_block).reshape(1, 1, 1, 1, -1)
    indices = functions.indices(operands, rows, columns)
    score = None
    if spec.score_mod is not None:
        score = indices | {"score": x}
        x = jnp.broadcast_to(functions.score_mod(spec, operands, score, by_jax).astype(dtype), x.shape)
    if operands.bias is not None:
        x += tile(operands.bias).astype(dtype)

    mask = mask.with_axes(4)  # a number for each batch row meets logits
    distance = None
    if operands.alibi_slopes is not None:
        distance = jnp.abs(columns - rows - mask.diagonal).astype(dtype)
        x -= operands.alibi_slopes[..., None, None].astype(dtype) * distance

    visible = mask.visible(rows, columns)
    if operands.mask is not None:
        visible = both(visible, tile(operands.mask))
    if operands.query_segment_ids is not None:
        queries = cut.queries.take(operands.query_segment_ids, query_block, -1)
        keys = cut.keys.take(operands.key_value_segment_ids, key_block, -1)
        visible = both(visible, (queries[:, :, None] == keys[:, None, :])[:, None, None])
    if spec.block_mask is not None:
        visible = both(visible, functions.visible(spec.block_mask, operands, indices))
    fresh = cut.keys.fresh(key_block)
    if fresh is not None:
        visible = both(visible, fresh.reshape(1, 1, 1, 1, -1))

    kept = None
    if spec.dropout_rate:
        row_hashes = cut.queries.take(operands.dropout_rows, query_block, -1)
        column_hashes = cut.keys.take(operands.dropout_columns, key_block, -1)
        kept = _dropout.keep(row_hashes, column_hashes[:, None, None], spec.dropout_rate)
    return Block(x, score, visible, capped, distance, kept)
