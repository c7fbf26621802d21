"""Ulysses: from shards of the sequence to shards of the heads, ordinary attention, and back.

    before    device 0: tokens 0, all heads        device 1: tokens 1, all heads
    between   device 0: all tokens, heads 0        device 1: all tokens, heads 1

An all-to-all moves queries, keys and values there and the output back, 1 / n of each between any two devices.
In between each device runs one call on whole sequences in their own order, so every option means what it
means on one device, and work is even whatever the mask. Heads must divide. Key heads that don't are repeated.

DeepSpeed-Ulysses: https://arxiv.org/abs/2309.14509.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import _validate
from jax_flash._axes import axes_of, axis_of
from jax_flash._spec import Operands
from jax_flash.context_parallel.load_balance import reordered, restored
from jax_flash.context_parallel.sharded import Sharded


def attend(of: Sharded, ordinary: Callable[[Operands], Any], operands: Operands) -> Any:
    """`out (*B, T, N, V)` of this device's queries, and with `return_residual` also `lse (*B, N, T)`.

    Args:
      ordinary: runs an ordinary call of `of.spec`, and has a derivative.
      operands: typed alike (`varying.py`).
    """
    results = ordinary(by_heads(of, operands))
    if not of.spec.return_residual:
        return by_tokens(of, "out", results)
    out, lse = results
    return by_tokens(of, "out", out), by_tokens(of, "lse", lse)


def key_heads_sent(key_heads: int, shards: int) -> int:
    """How many key heads there are once they are repeated so that devices divide them."""
    return math.lcm(key_heads, shards)


def refusal(of: Sharded, operands: Operands) -> str | None:
    """Why a call of a device's operands can't be run, or None."""
    n, heads = of.order.shards, operands.query.shape[-2]
    if heads % n:
        return f"the {heads} query heads must be divisible by the {n} devices of the sequence"
    for name in ("bias", "mask"):
        x = getattr(operands, name)
        if x is not None and n > 1 and x.shape[-3] == 1 and x.shape[-2] != 1:
            return (
                f"{name} must have an axis of {heads} heads, or one row for all queries; each device would "
                f"gather all of {_validate.described(x)}"
            )
    return None


def by_heads(of: Sharded, operands: Operands) -> Operands:
    """The operands of all tokens, in their own order, for this device's heads."""
    K = operands.key.shape[-2]
    copies = key_heads_sent(K, of.order.shards) // K
    if copies > 1:
        operands = operands.replace(
            key=_repeated(operands.key, copies, axis=-2), value=_repeated(operands.value, copies, axis=-2)
        )
    return Operands.of({name: of_heads(of, name, x) for name, x in operands.present().items()})


def of_heads(of: Sharded, name: str, x: jax.Array) -> jax.Array:
    """An operand or result of this device's tokens and all heads, as that of all tokens and its heads."""
    letters, n = axes_of(name), of.order.shards
    if name in of.own_rows:
        x = _repeated(x, of.queries // n, axis=-2)  # a bias or mask of one row, for each query
    # A bias or mask has all keys already: it is sharded along its queries.
    along = "T" if "T" in letters else "S"
    tokens = axis_of(name, x, along) if along in letters else None
    if tokens is not None and x.shape[tokens] != (of.queries if along == "T" else of.keys) // n:
        tokens = None
    heads = next((axis_of(name, x, letter) for letter in "NK" if letter in letters), None)
    if heads is not None and x.shape[heads] == 1:
        heads = None
    if tokens is None and heads is not None:
        size = x.shape[heads] // n
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(of.axis_name) * size, size, heads)
    elif tokens is not None and heads is None:
        x = jax.lax.all_gather(x, of.axis_name, axis=tokens, tiled=True)
    elif tokens is not None:
        x = _all_to_all(of, x, heads, tokens)
    if tokens is not None:
        x = of.by_shard(x, tokens)
    for letter in "TS":
        if letter in letters and x.shape[axis := axis_of(name, x, letter)] != 1:
            x = _in_order(of, x, axis, of.queries if letter == "T" else of.keys)
    return x


def _in_order(of: Sharded, x: jax.Array, axis: int, tokens: int) -> jax.Array:
    """`x` with tokens in their own order; a bias or mask may have the keys of several such sequences."""
    if (count := x.shape[axis] // tokens) == 1:
        return restored(x, axis, of.order)
    parts = x.reshape(*x.shape[:axis], count, tokens, *x.shape[axis + 1 :])
    return restored(parts, axis + 1, of.order).reshape(x.shape)


def _repeated(x: jax.Array, copies: int, axis: int) -> jax.Array:
    """Each element of an axis several times. The gradient's sum over copies is in float32."""
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)) if is_float else x
    return jnp.repeat(wide, copies, axis).astype(x.dtype)


def by_tokens(of: Sharded, name: str, x: jax.Array) -> jax.Array:
    """A result for this device's heads as that for its tokens."""
    heads, tokens = (axis_of(name, x, letter) for letter in "NT")
    x = of.by_place(reordered(x, tokens, of.order), tokens)
    return _all_to_all(of, x, tokens, heads)


def _all_to_all(of: Sharded, x: jax.Array, split: int, joined: int) -> jax.Array:
    """Parts along axis `split` go to the devices, and those that come from them are joined along the other.

    They are an axis of their own meanwhile, the first one. XLA would transpose all of `x` twice otherwise; so
    it does once, where the heads are split or joined.
    """
    if any(axis is not None for axis in jax.typeof(x).sharding.spec):
        # Over an Explicit axis. A reshape must keep the parts of such an axis; this does without one.
        return jax.lax.all_to_all(x, of.axis_name, split_axis=split, concat_axis=joined, tiled=True)
    n, shape = of.order.shards, x.shape
    parts = x.reshape(*shape[:split], n, shape[split] // n, *shape[split + 1 :])
    parts = jax.lax.all_to_all(jnp.moveaxis(parts, split, 0), of.axis_name, split_axis=0, concat_axis=0)
    parts = jnp.moveaxis(parts, 0, joined)
    return parts.reshape(*parts.shape[:joined], n * parts.shape[joined + 1], *parts.shape[joined + 2 :])
