"""Checks of what a caller passed, made when a call is traced.

Every error names the argument, what it was and what it may be: `TypeError` for dtypes and kinds,
`ValueError` for shapes and values. What passes comes back in one form (an array, a float, a tuple).
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_flash._dispatch import IMPLEMENTATIONS

Window = tuple[int | None, int | None]
"""Keys seen to the left and to the right of the diagonal; None is unbounded."""

_KINDS = {
    "floating": ("a floating", jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64),
    "bool": ("a bool", jnp.bool_),
    "integer": ("an integer", jnp.integer),
    "bool or integer": ("a bool or integer", jnp.bool_, jnp.integer),
}


def array(name: str, value: Any, kind: str | None = None) -> jax.Array:
    """`value` as a JAX array; `kind` is a key of `_KINDS`, or None for any dtype."""
    if not isinstance(value, jax.Array):
        if not isinstance(value, np.ndarray | np.generic) and not hasattr(value, "__jax_array__"):
            raise TypeError(f"{name} must be an array; got {_short(value)}")
        value = jnp.asarray(value)
    if kind is not None:
        a_kind, *allowed = _KINDS[kind]
        if not any(jnp.issubdtype(value.dtype, dtype) for dtype in allowed):
            advice = " (an additive mask goes into bias)" if name == "mask" else ""
            if kind == "floating" and jnp.issubdtype(value.dtype, jnp.floating):
                advice = " of 16 bits at least"
            raise TypeError(f"{name} must have {a_kind} dtype{advice}; got {described(value)}")
    return value


def query_key_value(query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three of them as arrays that fit each other: one floating dtype, (*B, T, N, H) and its kin."""
    query = array("query", query, "floating")
    key = array("key", key, "floating")
    value = array("value", value, "floating")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"query, key and value must have the same dtype; got {query.dtype}, {key.dtype} and {value.dtype}"
        )
    if query.ndim < 3:
        raise ValueError(f"query must have shape (*B, T, N, H); got {described(query)}")
    *batch, _, N, H = query.shape
    if key.ndim != query.ndim or list(key.shape[:-3]) != batch or key.shape[-1] != H:
        raise ValueError(
            f"key must have shape (*B, S, K, H) with *B = {tuple(batch)} and H = {H} as in query "
            f"{query.shape}; got {described(key)}"
        )
    if value.ndim != key.ndim or value.shape[:-1] != key.shape[:-1]:
        raise ValueError(
            f"value must have shape (*B, S, K, V) with (*B, S, K) = {key.shape[:-1]} as in key; "
            f"got {described(value)}"
        )
    K = key.shape[-2]
    if min(K, H, value.shape[-1]) < 1:
        raise ValueError(
            "key and value must have at least one head and a head dim of at least 1; "
            f"got key {described(key)}, value {described(value)}"
        )
    if N % K:
        raise ValueError(
            f"query heads must be a multiple of key heads; got {N} query heads (query {query.shape}) "
            f"and {K} key heads (key {key.shape})"
        )
    return query, key, value


def broadcastable(name: str, value: Any, shape: Sequence[int], letters: str, kind: str) -> jax.Array:
    """`value` as an array that broadcasts to `shape`, of the same rank (axes of size 1 added in front)."""
    value = array(name, value, kind)
    lead = len(shape) - value.ndim
    if lead >= 0:
        value = reshaped(value, (1,) * lead + value.shape)
    if lead < 0 or any(n not in (1, wanted) for n, wanted in zip(value.shape, shape, strict=True)):
        raise ValueError(
            f"{name} must be broadcastable to {letters} = {tuple(shape)}; got {described(value)}"
        )
    return value


def shaped(name: str, value: Any, shapes: dict[str, tuple[int, ...]], kind: str) -> jax.Array:
    """`value` as an array whose shape is one of `shapes`, which are named by their letters."""
    value = array(name, value, kind)
    if value.shape not in shapes.values():
        allowed = " or ".join(f"{letters} = {shape}" for letters, shape in shapes.items())
        raise ValueError(f"{name} must have shape {allowed}; got {described(value)}")
    return value


def number(name: str, value: Any) -> float:
    """A finite number that is static: known when the call is traced."""
    if isinstance(value, Tracer):
        raise TypeError(
            f"{name} must be a Python number, known when the call is traced; got the traced value {value}"
        )
    try:
        if isinstance(value, bool | np.bool_ | str):
            raise TypeError
        result = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number; got {_short(value)}") from None
    if not math.isfinite(result):
        raise ValueError(f"{name} must be finite; got {value!r}")
    return result


def flag(name: str, value: Any) -> bool:
    """A static bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, known when the call is traced; got {_short(value)}")
    return bool(value)


def integer(name: str, value: Any) -> int:
    """A static integer."""
    try:
        if isinstance(value, bool | np.bool_ | Tracer):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be a Python integer, known when the call is traced; got {_short(value)}"
        ) from None


def window(is_causal: Any, local_window_size: Any) -> Window:
    """`is_causal` and `local_window_size` as one window around the diagonal."""
    left, right = window_pair(local_window_size)
    if min(left or 0, right or 0) < -1:
        raise ValueError(
            "local_window_size must hold sizes of at least 0, or None or -1 for unbounded; "
            f"got {local_window_size!r}"
        )
    left, right = (None if side == -1 else side for side in (left, right))
    if flag("is_causal", is_causal):
        right = 0
    return left, right


def window_pair(local_window_size: Any, name: str = "local_window_size") -> Window:
    """`local_window_size` as (left, right): whole numbers of either sign, or None."""
    if local_window_size is None:
        return None, None
    sides = local_window_size
    if not isinstance(sides, tuple | list):
        sides = (sides, sides)
    if len(sides) != 2:
        raise ValueError(f"{name} must be None, an int or a pair (left, right); got {local_window_size!r}")
    left, right = (None if side is None else integer(name, side) for side in sides)
    return left, right


def soft_cap(logits_soft_cap: Any) -> float | None:
    if logits_soft_cap is None:
        return None
    cap = number("logits_soft_cap", logits_soft_cap)
    if cap <= 0:
        raise ValueError(f"logits_soft_cap must be None or greater than 0; got {logits_soft_cap!r}")
    return cap


def dropout(
    dropout_rate: Any, dropout_key: Any, rate_name: str = "dropout_rate"
) -> tuple[float, jax.Array | None]:
    """The rate, and the key where the rate needs one."""
    rate = number(rate_name, dropout_rate)
    if not 0 <= rate < 1:
        raise ValueError(f"{rate_name} must be at least 0 and less than 1; got {dropout_rate!r}")
    if rate == 0:
        return rate, None
    if dropout_key is None:
        raise ValueError(
            f"dropout_key must be a key, as from jax.random.key, when {rate_name} is {rate}; got None"
        )
    key = array("dropout_key", dropout_key)
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_typed and key.dtype != jnp.uint32:
        raise TypeError(f"dropout_key must be a key, as from jax.random.key; got {described(key)}")
    if key.ndim != (0 if is_typed else 1):
        raise ValueError(f"dropout_key must be one key, not an array of them; got {described(key)}")
    if not is_typed and key.shape != (wanted := jax.eval_shape(jax.random.PRNGKey, 0).shape):
        raise ValueError(f"dropout_key must have shape {wanted}, as from PRNGKey; got {described(key)}")
    return rate, key


def implementations(implementation: Any) -> tuple[str, ...] | None:
    """The names to try in order, or None for the automatic choice."""
    if implementation is None:
        return None
    names = (implementation,) if isinstance(implementation, str) else implementation
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"implementation must be None, one of {_allowed()} or a sequence of them; "
            f"got {_short(implementation)}"
        )
    if not names or not set(names) <= set(IMPLEMENTATIONS):
        raise ValueError(
            f"implementation must be None, one of {_allowed()} or a sequence of them; got {implementation!r}"
        )
    return tuple(names)


def reshaped(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x` itself where it has that shape already: eagerly, a reshape costs as much as all the checks."""
    return x if x.shape == shape else jnp.reshape(x, shape)


def described(x: jax.Array) -> str:
    """dtype and shape, for an error."""
    return f"{x.dtype} {tuple(x.shape)}"


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text[:80]}{'…' if len(text) > 80 else ''} ({type(value).__name__})"


def _allowed() -> str:
    return ", ".join(f'"{name}"' for name in IMPLEMENTATIONS)
