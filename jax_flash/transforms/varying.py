"""Types under `jax.shard_map`: over which manual mesh axes an array may differ between devices.

With its replication check on, operands of one operation, a loop's carry and a custom call's results
must all say so alike. Outside of `shard_map` nothing varies, and these functions change nothing.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")


def varying_axes(tree: Any) -> frozenset[str]:
    """The manual mesh axes over which any of the arrays may differ between devices."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree)))


def vary_over(tree: Tree, axes: frozenset[str]) -> Tree:
    """The same arrays, each typed as varying over `axes` at least.

    The transpose of the cast is a sum over devices. It is one in float32 for 16-bit arrays too.
    """

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - varying_axes(x)))
        if not missing:
            return x
        is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        wide = x.astype(jnp.float32) if is_narrow else x
        return jax.lax.pcast(wide, missing, to="varying").astype(x.dtype)

    return jax.tree.map(cast, tree)


def type_as_varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The same array, typed as varying over `axes` at least; of a call that has no derivative."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(tree: Tree) -> Tree:
    """The same arrays, each typed as varying over every axis that any of them varies over."""
    return vary_over(tree, varying_axes(tree))
