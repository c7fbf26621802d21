"""From what a caller passed, for shards of the sequences, to a checked call.

`_call.prepare` checks what is the same on shards. The rest speaks of whole sequences: window, lengths, the
keys of bias and mask, functions, block mask, and dropout, whose hashes are those of the tokens' positions.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import (
    _alignment,
    _arguments,
    _call,
    _dropout,
    _function_arguments,
    _sequence_arguments,
    _settings,
    _validate,
)
from jax_flash._call import Arguments, Call
from jax_flash._mask import Window
from jax_flash.context_parallel.load_balance import KINDS, LoadBalance, Order, check_divides
from jax_flash.context_parallel.sharded import LENGTHS, Sharded
from jax_flash.transforms.varying import varying_axes

OF_WHOLE_SEQUENCES: dict[str, Any] = {
    "bias": None,
    "mask": None,
    "query_seq_lengths": None,
    "key_value_seq_lengths": None,
    "dropout_rate": 0.0,
    "dropout_key": None,
    "score_mod": None,
    "block_mask": None,
}
"""The arguments that `_call.prepare` doesn't see, beside the window."""


@_settings.as_written
def prepare(arguments: Arguments, axis_name: Any, load_balance: Any) -> tuple[Sharded, Call]:
    """Check the arguments. The call's operands are this device's; lengths are those of whole sequences."""
    axes = _mesh_axes(axis_name)
    axis_name = tuple(axes) if len(axes) > 1 else axes[0]
    kind, shards = _kind(load_balance), _shards(axes)
    order = Order(kind if shards > 1 else None, shards)  # on one device all orders are alike
    whole = {name: getattr(arguments, name) for name in OF_WHOLE_SEQUENCES}
    alignment = _validate.one_of(
        "alignment", arguments.alignment, (_alignment.BOTTOM_RIGHT, _alignment.TOP_LEFT)
    )
    call = _call.prepare(
        dataclasses.replace(
            arguments, **OF_WHOLE_SEQUENCES, window=Window(), alignment=_alignment.BOTTOM_RIGHT
        )
    )
    operands, batch = call.operands, call.batch_shape
    t, N, s = operands.query.shape[-3], operands.query.shape[-2], operands.key.shape[-3]
    T, S = t * order.shards, s * order.shards
    check_divides("the queries of all devices", T, order)
    check_divides("the keys of all devices", S, order)

    given: dict[str, jax.Array] = {}
    for name, kind in (("bias", "floating"), ("mask", "mask")):
        if whole[name] is not None:
            of_keys, of_queries = (*batch, N, T, s), (*batch, N, t, S)
            x = _validate.array(name, whole[name], kind)
            if _is_along_keys(x, T, s, order.shards):
                letters = f"(*B, N, T, S / {order.shards}), all queries and a device's keys,"
                x = _validate.broadcastable(name, x, of_keys, letters, kind)
                x = _exchanged(x, axis_name)
            letters = (
                f"(*B, N, T, S / {order.shards}) = {of_keys}, all queries and a device's keys, or "
                f"(*B, N, T / {order.shards}, S)"
            )
            given[name] = _validate.broadcastable(name, x, of_queries, letters, kind)
    for name, most in zip(LENGTHS, (T, S), strict=True):
        if whole[name] is not None:
            given[name] = _sequence_arguments.lengths(name, whole[name], {"(*B,)": batch}, most)
    if not batch:
        given = {name: x[None] for name, x in given.items()}
    lengths = tuple(name for name in LENGTHS if name in given)
    if alignment == _alignment.TOP_LEFT and (T != S or lengths):
        raise NotImplementedError(
            'alignment must be "bottom_right" where there are lengths or not as many keys as queries; '
            f'got "{alignment}"'
        )
    score_mod, block_mask, of_functions = _function_arguments.operands(
        whole["score_mod"], whole["block_mask"], batch, (T, S, N)
    )
    given |= of_functions
    rate, key = _arguments.dropout(whole["dropout_rate"], whole["dropout_key"], arguments.names)
    if key is not None:
        given |= _dropout_hashes(key, axis_name, order, (*(batch or (1,)), N, t, s))

    left, right = arguments.window.normalised(T, S)
    spec = dataclasses.replace(
        call.spec, left=left, right=right, dropout_rate=rate, score_mod=score_mod, block_mask=block_mask
    )
    own_rows = frozenset(
        name
        for name in ("bias", "mask")
        if name in given and given[name].shape[-2] == 1 and not varying_axes(given[name]).isdisjoint(axes)
    )
    mesh = jax.typeof(operands.query).sharding.mesh
    of = Sharded(
        spec,
        axis_name,
        order,
        T,
        S,
        operands.alibi_slopes is not None,
        lengths,
        own_rows,
        automatic=tuple(name for name in mesh.auto_axes if mesh.shape[name] > 1),
    )
    return of, Call(spec, operands.replace(**given), batch)


def _is_along_keys(x: jax.Array, queries: int, own_keys: int, shards: int) -> bool:
    """Whether a bias or mask is sharded along its keys, `(…, T | 1, S / n)`, and not along its queries.

    One number for all queries and keys is sharded along neither.
    """
    if shards == 1 or x.ndim < 2 or x.shape[-1] != own_keys:
        return False
    return x.shape[-2] == queries or (x.shape[-2] == 1 and own_keys > 1)


def _exchanged(x: jax.Array, axis_name: Any) -> jax.Array:
    """A bias or mask that is sharded along its keys as one of this device's queries with all keys."""
    queries, keys = x.ndim - 2, x.ndim - 1
    if x.shape[queries] == 1:
        return jax.lax.all_gather(x, axis_name, axis=keys, tiled=True)
    return jax.lax.all_to_all(x, axis_name, queries, keys, tiled=True)


def _kind(load_balance: Any) -> LoadBalance | None:
    if load_balance is None:
        return None
    _validate.one_of("load_balance", load_balance, KINDS, or_none=True)
    return load_balance


def _mesh_axes(axis_name: Any) -> list[Any]:
    axes = list(axis_name) if isinstance(axis_name, tuple) else [axis_name]
    if isinstance(axis_name, list) or len(axes) not in (1, 2) or axes[1:] == axes[:1]:
        raise ValueError(
            f"axis_name must be a mesh axis, or a tuple of two; got {_validate.short(axis_name)}. "
            "A sequence that is sharded over more axes needs a mesh on which they are two"
        )
    return axes


def _shards(axes: list[Any]) -> int:
    try:
        return math.prod(jax.lax.axis_size(name) for name in axes)
    except (NameError, TypeError, ValueError):
        raise ValueError(
            "axis_name must be an axis of the surrounding jax.shard_map or jax.pmap; "
            f"got {_validate.short(tuple(axes) if len(axes) > 1 else axes[0])}"
        ) from None


def _dropout_hashes(
    key: jax.Array, axis_name: Any, order: Order, shape: tuple[int, ...]
) -> dict[str, jax.Array]:
    """Those of one device's tokens; `shape` is `(*B, N, T / n, S / n)`."""
    *batch, heads, queries, keys = shape
    device = jax.lax.axis_index(axis_name)
    rows, columns = (order.positions(device, tokens) for tokens in (queries, keys))
    rows, columns = _dropout.hashes_at(key, math.prod(batch), jnp.arange(heads), rows, columns)
    return {
        "dropout_rows": rows.reshape(*batch, heads, queries),
        "dropout_columns": columns.reshape(*batch, keys),
    }
