"""The arguments `score_mod`, `mask_mod` and `block_mask`: checked, and as a spec and operands have them."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import _validate
from jax_flash._block_mask import BlockMask
from jax_flash._spec import BlockMaskSpec, captured_name
from jax_flash.functions.static import StaticFunction, flat, static_masked_score, static_score_mod


def operands(
    score_mod: Any,
    block_mask: Any,
    batch: tuple[int, ...],
    lengths_and_heads: tuple[int, int, int],
    mask_mod: Any = None,
) -> tuple[StaticFunction | None, BlockMaskSpec | None, dict[str, jax.Array]]:
    """What the spec has of them, and their operands by name. A score_mod that changes nothing is left out.

    So are all of them where nothing is computed: arrays that they look up may have no element then.

    Args:
      mask_mod: becomes part of the score_mod, which gives -inf to what it hides.
      batch: the caller's leading axes. Operands have as many, or one of size 1 if there are none.
      lengths_and_heads: T, S and N.
    """
    function = block_mask_spec = kinds = None
    arrays: Any = ()
    _check_callable(score_mod, mask_mod)
    if block_mask is not None:
        kinds = _kinds(block_mask, batch, lengths_and_heads)
    if 0 in (*batch, *lengths_and_heads):
        return None, None, {}
    if score_mod is not None or mask_mod is not None:
        # One function of a score for both.
        both = mask_mod is not None
        function, arrays = static_masked_score(score_mod, mask_mod) if both else static_score_mod(score_mod)
        if function.changes_nothing:
            function, arrays = None, ()
    if function is None and block_mask is None:
        return None, None, {}
    *_, N = lengths_and_heads
    axes = max(len(batch), 1)
    found: dict[str, jax.Array] = {
        "batch_indices": jnp.arange(math.prod(batch), dtype=jnp.int32).reshape(batch or (1,)),
        "head_indices": jnp.arange(N, dtype=jnp.int32).reshape((1,) * axes + (N,)),
    }

    def captured(name: str, arrays: Any) -> dict[str, jax.Array]:
        """Of flat arrays."""
        return {
            captured_name(name, number): x.reshape((1,) * axes + x.shape[1:])
            for number, x in enumerate(arrays)
        }

    found |= captured("score_mod", map(flat, arrays))
    if block_mask is not None:
        assert kinds is not None
        block_mask_spec = BlockMaskSpec(
            block_mask.block_size, block_mask.mask_mod, kinds.shape[0] > 1, kinds.shape[1] > 1
        )
        rows = batch if kinds.shape[0] > 1 and batch else (1,) * axes
        found["block_kinds"] = kinds.reshape(*rows, *kinds.shape[1:])
        found |= captured("mask_mod", block_mask.captured)
    return function, block_mask_spec, found


def _check_callable(score_mod: Any, mask_mod: Any) -> None:
    for name, function, inputs in (("score_mod", score_mod, "score, "), ("mask_mod", mask_mod, "")):
        if function is not None and not callable(function):
            is_block_mask = isinstance(function, BlockMask)
            advice = "; pass the function that it was made of" if is_block_mask else ""
            raise TypeError(
                f"{name} must be None or a function of {inputs}batch, head, query_index and key_index; "
                f"got {_validate.short(function)}{advice}"
            )


def _kinds(block_mask: Any, batch: tuple[int, ...], lengths_and_heads: tuple[int, int, int]) -> jax.Array:
    """The kinds of a mask that fits the call."""
    T, S, N = lengths_and_heads
    if not isinstance(block_mask, BlockMask):
        advice = "; jax_flash.create_block_mask makes one of a mask function" if callable(block_mask) else ""
        raise TypeError(
            f"block_mask must be None or a jax_flash.BlockMask; got {_validate.short(block_mask)}{advice}"
        )
    rows, heads = block_mask.kinds.shape[:2]
    if block_mask.lengths != (T, S):
        raise ValueError(
            f"block_mask must be of T = {T} queries and S = {S} keys as query and key are; "
            f"got one of T, S = {block_mask.lengths}"
        )
    if rows not in (1, math.prod(batch)) or heads not in (1, N):
        raise ValueError(
            f"block_mask must be of 1 or {math.prod(batch)} batch rows and 1 or {N} heads; "
            f"got one of {rows} batch rows and {heads} heads"
        )
    depends_on = frozenset() if block_mask.mask_mod is None else block_mask.mask_mod.inputs
    for index, what, count, own in (
        ("batch", "batch rows", math.prod(batch), rows),
        ("head", "heads", N, heads),
    ):
        if own != count and index in depends_on:
            raise ValueError(
                f"block_mask must be made for {count} {what}, as its mask_mod depends on {index}; "
                "got one for 1"
            )
    return block_mask.kinds
