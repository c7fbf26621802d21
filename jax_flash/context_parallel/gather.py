"""All-gather of keys and values: each device attends with its queries to all keys.

One collective, and one ordinary call for each chunk of queries. Grouped heads make it cheap: keys and values
are small beside queries. The gathered ones are not kept for the backward pass, which gathers them again; out
and lse are kept, so attention runs once. The gradients of keys and values are added up in float32, by a
reduce-scatter.

For a narrow window nothing is gathered: `halo.py`.

It is how Llama 3 was trained on long contexts (https://arxiv.org/abs/2407.21783, section 3.3.2).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash._spec import Operands
from jax_flash.context_parallel import sharded
from jax_flash.context_parallel.halo import edges_of, own_operands
from jax_flash.context_parallel.load_balance import Chunk, restored
from jax_flash.context_parallel.sharded import Sharded
from jax_flash.transforms import saved
from jax_flash.transforms.lowering import axes_of


def attend(of: Sharded, ordinary: Callable[[Operands], Any], operands: Operands) -> Any:
    """`out (*B, T, N, V)` of this device's queries, and with `return_residual` also `lse (*B, N, T)`.

    Args:
      ordinary: runs an ordinary call of `of.local_spec`, and has a derivative.
      operands: typed alike (`varying.py`).
    """

    @functools.partial(
        jax.checkpoint,  # pyright: ignore[reportPrivateImportUsage]
        policy=jax.checkpoint_policies.save_only_these_names(*saved.NAMES),
    )
    def run(operands: Operands) -> Any:
        results = [ordinary(call) for call in chunk_operands(of, operands)]
        if not of.spec.return_residual:
            return jnp.concatenate(results, axis=-3)
        out, lse = zip(*results, strict=True)
        return jnp.concatenate(out, axis=-3), jnp.concatenate(lse, axis=-1)

    return run(operands)


def chunk_operands(of: Sharded, operands: Operands) -> list[Operands]:
    """The operands of the call for each chunk of this device's queries, on all keys in their own order."""
    whole: dict[str, jax.Array] = {}
    for name, x in operands.present().items():
        if "S" in axes_of(name):
            axis = sharded.axis_of(name, x, "S")
            if sharded.goes_with_keys(name):
                x = gathered(of, axis, x)
            if x.shape[axis] != 1 and (of.chunks > 1 or of.has_lengths):
                x = restored(x, axis, of.order)
        whole[name] = x
    keys, t, shard = Chunk(0, 1, of.keys), of.queries_per_chunk, of.own_shard()

    def of_chunk(q: int) -> Operands:
        parts = {name: sharded.take(name, x, {"T": (q * t, t)}) for name, x in whole.items()}
        return of.placed(Operands.of(parts), of.order.chunk(shard, q, t), keys)[0]

    return [of_chunk(q) for q in range(of.chunks)]


def gathered_keys(of: Sharded) -> int:
    """How many keys of other devices a device gets."""
    edges = edges_of(of)
    own = of.keys // of.order.shards
    return of.keys - own if edges is None else sum(edge.rows for edge in edges)


def first_chunk(of: Sharded, operands: Operands) -> Operands:
    """The operands of the first call, as implementations are asked about them."""
    return own_operands(of, operands) if edges_of(of) is not None else chunk_operands(of, operands)[0]


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
