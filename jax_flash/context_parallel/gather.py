"""All-gather of keys and values: each device attends with its queries to all keys.

One ordinary call for each chunk of queries. Grouped heads make it cheap: keys and values are small beside
queries. The gathered ones are not kept for the backward pass, which gathers them again; out and lse are kept,
so attention runs once. The gradients of keys and values are added up in float32, by a reduce-scatter.

With zigzag and a causal mask, early queries see early keys alone. So these come first, and the late ones
beside the call of early queries.

For a narrow window nothing is gathered: `halo.py`.

It is how Llama 3 was trained on long contexts (https://arxiv.org/abs/2407.21783, section 3.3.2).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash._spec import Operands, functions_of
from jax_flash.context_parallel import sharded
from jax_flash.context_parallel.halo import edges_of, own_operands
from jax_flash.context_parallel.load_balance import Chunk, backwards, restored
from jax_flash.context_parallel.packed import Arrays, Packed
from jax_flash.context_parallel.sharded import Sharded, Spans
from jax_flash.transforms.lowering import axes_of


def attend(of: Sharded, ordinary: Callable[[Operands], Any], operands: Operands) -> Any:
    """`out (*B, T, N, V)` of this device's queries, and with `return_residual` also `lse (*B, N, T)`.

    Args:
      ordinary: runs an ordinary call of `of.local_spec`, and has a derivative.
      operands: typed alike (`varying.py`).
    """

    @functools.partial(
        jax.checkpoint,  # pyright: ignore[reportPrivateImportUsage]
        policy=jax.checkpoint_policies.save_only_these_names("jax_flash_out", "jax_flash_lse"),
    )
    def run(operands: Operands) -> Any:
        if _early_see_early(of):
            results = _early_then_late(of, ordinary, operands)
        else:
            keys = _gathered_keys(of, operands)
            results = [ordinary(_of_chunk(of, operands, keys, q)) for q in range(of.chunks)]
        if not of.spec.return_residual:
            return jnp.concatenate(results, axis=-3)
        out, lse = zip(*results, strict=True)
        return jnp.concatenate(out, axis=-3), jnp.concatenate(lse, axis=-1)

    return run(operands)


def _gathered_keys(of: Sharded, operands: Operands) -> Arrays:
    """All devices' keys and what goes with them, in their own order."""

    def whole(name: str, x: jax.Array) -> jax.Array:
        axis = sharded.axis_of(name, x, "S")
        x = gathered(of, axis, x)
        return restored(x, axis, of.order) if _is_reordered(of) else x

    return {name: whole(name, x) for name, x in sharded.key_side(operands).items()}


def _early_see_early(of: Sharded) -> bool:
    """Whether tokens are in zigzag, and no query of an early chunk sees a key of a late one."""
    is_causal = of.window.right is not None and of.window.right <= 0 and of.queries == of.keys
    # Blocks of a block mask need not end where early keys do.
    return of.chunks == 2 and is_causal and not of.has_lengths and functions_of(of.spec) is None


def _early_then_late(of: Sharded, ordinary: Callable[[Operands], Any], operands: Operands) -> list[Any]:
    """Results of both chunks of zigzag: early queries don't wait for late keys."""
    early, late = (_gathered_packed(of, _chunk_of_keys(of, operands, q)) for q in range(2))
    keys = early.unpacked()
    first = ordinary(_of_chunk(of, operands, keys, 0))
    # So XLA sends late keys beside the first call, and their gradients beside that of its backward pass.
    late, first = jax.lax.optimization_barrier((late, first))
    return [first, ordinary(_of_chunk(of, operands, _joined(of, keys, late.unpacked()), 1))]


def _chunk_of_keys(of: Sharded, operands: Operands, q: int) -> Packed:
    """Chunk `q` of this device's keys, and what goes with them."""
    span: Spans = {"S": (q * of.keys_per_chunk, of.keys_per_chunk)}
    return Packed.of({name: sharded.take(name, x, span) for name, x in sharded.key_side(operands).items()})


def _gathered_packed(of: Sharded, keys: Packed) -> Packed:
    """Those of all devices."""
    groups = zip(keys.stacked, keys.groups, strict=True)
    stacked = (gathered(of, sharded.axis_of(names[0], x, "S"), x) for x, names in groups)
    return dataclasses.replace(keys, stacked=tuple(stacked))


def _joined(of: Sharded, early: Arrays, late: Arrays) -> Arrays:
    """All keys, of early chunks and late ones as devices have them."""

    def joined(name: str) -> jax.Array:
        axis = sharded.axis_of(name, early[name], "S")
        return jnp.concatenate([early[name], backwards(late[name], axis, of.order.shards)], axis)

    return {name: joined(name) for name in early}


def _of_chunk(of: Sharded, operands: Operands, keys: Arrays, q: int) -> Operands:
    """The operands of the call for chunk `q` of this device's queries.

    Args:
      keys: that it sees, and what goes with them: the first ones of the sequence, in their own order.
    """
    t, s, parts = of.queries_per_chunk, keys["key"].shape[-3], dict(keys)
    for name, x in operands.present().items():
        if name not in keys:
            if "S" in axes_of(name) and _is_reordered(of):
                axis = sharded.axis_of(name, x, "S")
                x = x if x.shape[axis] == 1 else restored(x, axis, of.order)
            parts[name] = sharded.take(name, x, {"T": (q * t, t), "S": (0, s)})
    return of.placed(Operands.of(parts), of.order.chunk(of.device(), q, t), Chunk(0, 1, s))[0]


def _is_reordered(of: Sharded) -> bool:
    """Whether calls get keys in another order than the devices have them."""
    return of.chunks > 1 or of.has_lengths


def gathered_keys(of: Sharded) -> int:
    """How many keys of other devices a device gets."""
    edges = edges_of(of)
    own = of.keys // of.order.shards
    return of.keys - own if edges is None else sum(edge.rows for edge in edges)


def first_chunk(of: Sharded, operands: Operands) -> Operands:
    """The operands of the first call, as implementations are asked about them."""
    if edges_of(of) is not None:
        return own_operands(of, operands)
    if _early_see_early(of):
        keys = _gathered_packed(of, _chunk_of_keys(of, operands, 0)).unpacked()
    else:
        keys = _gathered_keys(of, operands)
    return _of_chunk(of, operands, keys, 0)


def gathered(of: Sharded, axis: int, x: jax.Array) -> jax.Array:
    """The shards of all devices, one behind the other along `axis`."""
    gather = _gathered if jnp.issubdtype(x.dtype, jnp.floating) else _all_gather
    return gather(of, axis, x)


def _all_gather(of: Sharded, axis: int, x: jax.Array) -> jax.Array:
    return of.by_shard(jax.lax.all_gather(x, of.axis_name, axis=axis, tiled=True), axis)


_gathered = jax.custom_vjp(_all_gather, nondiff_argnums=(0, 1))


def _gathered_forward(of: Sharded, axis: int, x: jax.Array) -> tuple[jax.Array, None]:
    return _all_gather(of, axis, x), None


def _gathered_backward(of: Sharded, axis: int, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    wide = of.by_place(cotangent.astype(jnp.promote_types(cotangent.dtype, jnp.float32)), axis)
    summed = jax.lax.psum_scatter(wide, of.axis_name, scatter_dimension=axis, tiled=True)
    return (summed.astype(cotangent.dtype),)


_gathered.defvjp(_gathered_forward, _gathered_backward)
