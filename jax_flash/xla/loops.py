"""Loops over blocks: over the batch, a second run where results aren't finite, and carries for `shard_map`.

Inside of `shard_map` an array's type says over which mesh axes it varies, and a loop's carry must
come out with the type that it went in with. So all operands are made to vary over the same axes, and
what loops start from is made to vary as they do.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_flash._spec import Operands, batch_axis_may_be_one
from jax_flash.transforms.varying import vary_over, varying_axes
from jax_flash.xla import blocks


def full(shape: tuple[int, ...], fill, dtype, like: jax.Array) -> jax.Array:
    """`jnp.full`, varying over the mesh axes that `like` varies over."""
    return vary_over(jnp.full(shape, fill, dtype), varying_axes(like))


def over_batch(batch: blocks.Axis, attend: Callable, operands: Operands, others, carry):
    """Call `attend` on `batch.size` rows at a time, one call after another.

    Args:
      batch: how the leading axis is cut; its size divides its length.
      attend: `(operands, others, carry) -> (results, carry)`, on so many rows.
      operands: those whose leading axis is 1 for "every row" are handed to each call whole.
      others: a tree of arrays with a leading batch axis.
      carry: what one call hands to the next.

    Returns:
      The results of all calls joined along their leading axis, and the last carry.
    """
    if batch.count == 1:
        return attend(operands, others, carry)

    shared = shared_operands(operands)
    rows = (operands.replace(**dict.fromkeys(shared)), others)
    rows = jax.tree.map(lambda x: x.reshape(batch.count, batch.size, *x.shape[1:]), rows)

    def step(carry, rows):
        operands, others = rows
        results, carry = attend(operands.replace(**shared), others, carry)
        return carry, results

    carry, results = jax.lax.scan(step, carry, rows)
    return jax.tree.map(lambda x: x.reshape(batch.length, *x.shape[2:]), results), carry


def until_finite(run: Callable, isolate: Callable, arrays, *, judge: Callable):
    """`run(arrays)`; and where its results aren't finite, `run(isolate(arrays))` in its place.

    Args:
      judge: which of the results are looked at.
    """
    results = run(arrays)
    return again_unless_finite(lambda arrays: run(isolate(arrays)), arrays, results, judge(results))


def again_unless_finite(run: Callable, arrays, results, judged):
    """`results`, or `run(arrays)` if what is `judged` of them isn't finite.

    In products of blocks the zeros of pairs of a query and a key that it doesn't see meet what isn't finite,
    and 0 times NaN is NaN. That is rare, so it is the results that tell: to look at the arrays first would
    take longer than attention does where queries are few.
    """
    return jax.lax.cond(
        _all_finite(judged),
        lambda results, arrays: results,
        lambda results, arrays: run(arrays),
        results,
        arrays,
    )


def _all_finite(arrays):
    """Whether all numbers are finite, by their sums, which compile to faster loops."""
    sums = [jnp.sum(x, range(x.ndim - 1), jnp.promote_types(x.dtype, jnp.float32)) for x in arrays]
    return jnp.all(jnp.isfinite(jnp.stack([jnp.sum(x) for x in sums])))


def shared_operands(operands: Operands) -> dict[str, jax.Array]:
    """The operands with a leading axis of 1 that stands for every batch row, by name."""
    return {
        name: x for name, x in operands.present().items() if batch_axis_may_be_one(name) and x.shape[0] == 1
    }
