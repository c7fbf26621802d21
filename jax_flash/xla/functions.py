"""Functions of users in a block of logits, `(B, K, G, T, S)`: score_mod, and mask_mod by its blocks."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_flash._block_kinds import Kind
from jax_flash._cache_spec import CacheOperands
from jax_flash._spec import AttentionSpec, BlockMaskSpec, Operands, captured_name
from jax_flash.functions.static import StaticFunction


def indices(operands: Operands, rows: jax.Array, columns: jax.Array) -> dict[str, jax.Array]:
    """The arguments that functions share, of shapes that broadcast to the block's. None without a function.

    Args:
      operands: from `logits.heads_first`.
      rows: the queries, `(1, 1, 1, T, 1)`.
      columns: the keys, `(1, 1, 1, 1, S)`.
    """
    if operands.batch_indices is None or operands.head_indices is None:
        return {}
    return {
        "batch": operands.batch_indices.reshape(-1, 1, 1, 1, 1),
        "head": operands.head_indices[..., None, None],
        "query": rows,
        "key": columns,
    }


def score_mod(
    spec: AttentionSpec, operands: Operands, score: dict[str, jax.Array], by_jax: bool = False
) -> jax.Array:
    """What the function makes of a block's scores."""
    assert spec.score_mod is not None
    function = spec.score_mod.by_jax if by_jax else spec.score_mod
    return function(score, captured(spec.score_mod, "score_mod", operands))


def score_mod_gradients(
    spec: AttentionSpec,
    operands: Operands,
    score: dict[str, jax.Array],
    dx: jax.Array,
    masked: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The gradient of a block's scores, from that of what the function made of them; and the block's share of
    the gradients of captured arrays, by name. `masked` gives 0 to pairs that don't see each other."""
    function = spec.score_mod
    assert function is not None
    d_score, sums = function.pullback(score, captured(function, "score_mod", operands), dx, masked)
    return d_score, {captured_name("score_mod", number): x for number, x in sums.items()}


def visible(block_mask: BlockMaskSpec, operands: Operands, indices: dict[str, jax.Array]) -> jax.Array:
    """Which pairs see each other by a block mask: bool, broadcasts to the block."""
    kinds = operands.block_kinds
    assert kinds is not None
    query_size, key_size = block_mask.block_size
    rows, columns = indices["query"].reshape(-1) // query_size, indices["key"].reshape(-1) // key_size
    kind = jnp.take(jnp.take(kinds, rows, axis=-2), columns, axis=-1)
    if block_mask.mask_mod is None:
        return kind == Kind.FULL
    for name, differs in (("batch", block_mask.differs_by_batch), ("head", block_mask.differs_by_head)):
        if not differs:
            indices = indices | {name: jnp.zeros((1,) * 5, jnp.int32)}
    sees = block_mask.mask_mod(indices, captured(block_mask.mask_mod, "mask_mod", operands))
    return (kind == Kind.FULL) | (sees & (kind == Kind.PARTIAL))


def captured(function: StaticFunction, name: str, operands: Operands | CacheOperands) -> list[jax.Array]:
    """The arrays that a function captures, flat."""
    return [operands.captured[captured_name(name, number)] for number in range(len(function.shapes))]
