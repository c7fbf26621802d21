"""What `jax_debug_nans` and `jax_debug_infs` look at: what a caller gets, and nothing on the way to it.

The lse of a row with nothing to attend to is -inf. And where JAX finds what it looks for, it runs the
function again, primitive by primitive, which has no end in a Pallas kernel, nor in a ring of devices outside
of `jit`. So functions run unchecked, and copies of their results are checked.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def forward(
    run: Callable[..., tuple[jax.Array, jax.Array]], returns_lse: bool, *args: Any
) -> tuple[jax.Array, jax.Array]:
    """`out, lse = run(*args)`; lse is checked where the caller gets it."""
    if not _looks():
        return run(*args)
    out, lse = _unchecked(run, *args)
    return jnp.copy(out), jnp.copy(lse) if returns_lse else lse


def checked(run: Callable[..., Any], *args: Any) -> Any:
    """`run(*args)`, as gradients, of which the caller gets all."""
    return jax.tree.map(jnp.copy, _unchecked(run, *args)) if _looks() else run(*args)


def decoding(run: Callable[..., dict[str, jax.Array]], returns_lse: bool, *args: Any) -> dict[str, jax.Array]:
    """`run(*args)`: out, lse and a cache, whose unused rows may hold anything."""
    if not _looks():
        return run(*args)
    results = _unchecked(run, *args)
    checked = ("out", "lse") if returns_lse else ("out",)
    return results | {name: jnp.copy(results[name]) for name in checked}


def _looks() -> bool:
    config: Any = jax.config
    return config.jax_debug_nans or config.jax_debug_infs


def _unchecked(run: Callable[..., Any], *args: Any) -> Any:
    with jax.debug_nans(False), jax.debug_infs(False):
        return run(*args)
