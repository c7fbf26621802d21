"""Checks of the arguments that attention functions share, each under the name that its function gives it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_flash import _validate
from jax_flash._dispatch import IMPLEMENTATIONS
from jax_flash._mask import UNBOUNDED, Window
from jax_flash._validate import described, short

UNBOUNDED_SIDE = -1
"""As a side of `local_window_size`: no limit. None says the same."""
_NO_SOFT_CAP = 1e30
"""A larger cap changes no logit below 1e26, and the quotient of a logit and the cap may be 0 in float32."""


class Names:
    """A function's own names of its arguments, by those of `flash_attention` and `flash_attention_varlen`."""

    def __init__(self, **names: str):
        self._names = names

    def __getitem__(self, name: str) -> str:
        return self._names.get(name, name)

    def replace(self, **names: str) -> "Names":
        return Names(**self._names | names)

    def listed(self, *names: str) -> str:
        """These arguments, each once, as "query, key and value"."""
        *most, last = dict.fromkeys(self[name] for name in names)
        return f"{', '.join(most)} and {last}" if most else last


OWN_NAMES = Names()


def query_key_value(
    query: Any,
    key: Any,
    value: Any,
    names: Names = OWN_NAMES,
    given: tuple[Any, Any, Any] | None = None,
    kind: str = "floating",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three as arrays that fit each other: one floating dtype, `(*B, T, N, H)` and its kin.

    `given` is what the caller passed, with the shapes to show in errors, if it isn't these. `kind` is that of
    `_validate`.
    """
    query = _validate.array(names["query"], query, kind)
    key = _validate.array(names["key"], key, kind)
    value = _validate.array(names["value"], value, kind)
    query_given, key_given, value_given = given or (query, key, value)
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"{names.listed('query', 'key', 'value')} must have the same dtype; "
            f"got {query.dtype}, {key.dtype} and {value.dtype}"
        )
    if query.ndim < 3:
        raise ValueError(f"{names['query']} must have shape (*B, T, N, H); got {described(query_given)}")
    *batch, _, N, H = query.shape
    if key.ndim != query.ndim or list(key.shape[:-3]) != batch or key.shape[-1] != H:
        raise ValueError(
            f"{names['key']} must have shape (*B, S, K, H) with *B = {query_given.shape[:-3]} and H = {H} "
            f"as in {names['query']} {query_given.shape}; got {described(key_given)}"
        )
    if value.ndim != key.ndim or value.shape[:-1] != key.shape[:-1]:
        raise ValueError(
            f"{names['value']} must have shape (*B, S, K, V) with (*B, S, K) = {key_given.shape[:-1]} as in "
            f"{names['key']}; got {described(value_given)}"
        )
    K = key.shape[-2]
    if min(H, K) < 1:
        raise ValueError(
            f"{names['key']} must have at least one head and a head dim of at least 1; "
            f"got {described(key_given)}"
        )
    if value.shape[-1] < 1:
        raise ValueError(f"{names['value']} must have a head dim of at least 1; got {described(value_given)}")
    if N % K:
        raise ValueError(
            f"{names['query']} must have a multiple of the heads of {names['key']}; "
            f"got {N} heads in {names['query']} and {K} heads in {names['key']}"
        )
    return query, key, value


def window(is_causal: Any, local_window_size: Any) -> Window:
    """`is_causal` and `local_window_size` as one window around the diagonal."""
    left, right = window_pair("local_window_size", local_window_size)
    if min(left or 0, right or 0) < -1:
        raise ValueError(
            "local_window_size must hold sizes of at least 0, or None or -1 for unbounded; "
            f"got {short(local_window_size)}"
        )
    found = Window(*(None if side == UNBOUNDED_SIDE else side for side in (left, right)))
    return found.causal() if _validate.flag("is_causal", is_causal) else found


def window_pair(name: str, value: Any) -> Window:
    """A window of whole numbers of either sign, or None."""
    if value is None:
        return UNBOUNDED
    sides = value if isinstance(value, tuple | list) else (value, value)
    if len(sides) != 2:
        raise ValueError(f"{name} must be None, an int or a pair (left, right); got {short(value)}")
    return Window(*(None if side is None else _validate.integer(name, side) for side in sides))


def official_window(window_size: Any, causal: Any, keys: Any) -> Window:
    """The window of the `flash_attn` package: a side is unbounded if it is negative, or at least all keys.

    A side of all keys would hide some from the first queries, where queries outnumber keys. If `keys` is
    symbolic, no side is compared with it.
    """
    sides = window_pair("window_size", window_size)
    most = keys - 1 if isinstance(keys, int) else math.inf
    found = Window(*(side if side is not None and 0 <= side <= most else None for side in sides))
    return found.causal() if _validate.flag("causal", causal) else found


def scale(name: str, value: Any, default: float, query: jax.Array) -> tuple[float, jax.Array]:
    """The static scale, and query. A traced scale multiplies query, and the static one is 1."""
    if value is None:
        return default, query
    if not isinstance(value, Tracer):
        return _validate.number(name, value), query
    traced = _validate.shaped(name, value, {"()": ()}, "floating or integer")
    dtype = jnp.promote_types(query.dtype, jnp.float32)  # rounded once
    return 1.0, _scaled(query.astype(dtype), traced.astype(dtype)).astype(query.dtype)


@jax.custom_jvp
def _scaled(query: jax.Array, scale: jax.Array) -> jax.Array:
    """`query * scale`, whose derivative by the scale leaves out what isn't finite.

    A row of padding has a cotangent of 0, and 0 times NaN is NaN. The cotangent of a row that counts, and
    isn't finite, is NaN itself.
    """
    return query * scale


@_scaled.defjvp
def _scaled_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (query, scale), (d_query, d_scale) = primals, tangents
    finite = jnp.where(jnp.isfinite(query), query, jnp.zeros_like(query))
    return _scaled(query, scale), d_query * scale + finite * d_scale


def soft_cap(name: str, value: Any) -> float | None:
    """The cap of logits. Its reciprocal must be finite in float32. None if it is too large to matter."""
    if value is None:
        return None
    if isinstance(value, Tracer):
        raise TypeError(
            f"{name} must be a Python number, known when the call is traced; got the traced value {value}. "
            "Kernels are compiled for it: pass the number itself, or make it a static argument of `jit`"
        )
    cap = _validate.number(name, value)
    if cap <= 0:
        raise ValueError(f"{name} must be None or greater than 0; got {short(value)}")
    if cap < (least := float(np.finfo(np.float32).tiny)):
        raise ValueError(f"{name} must be at least {least:.3g}, or None for no cap; got {short(value)}")
    return None if cap > _NO_SOFT_CAP else cap


def dropout_rate(name: str, value: Any) -> float:
    rate = _validate.number(name, value)
    if not 0 <= rate < 1:
        raise ValueError(f"{name} must be at least 0 and less than 1; got {short(value)}")
    return rate


def dropout(rate: Any, key: Any, names: Names = OWN_NAMES) -> tuple[float, jax.Array | None]:
    """The rate, and the key if the rate needs one."""
    name = names["dropout_rate"]
    rate = dropout_rate(name, rate)
    if rate > 0 and key is None:
        # A Flax layer passes its rate by this name, but no key.
        advice = "; for a Flax layer, jax_flash.flax.dot_product_attention" if name == "dropout_rate" else ""
        raise ValueError(
            f"{names['dropout_key']} must be a key, as from jax.random.key, when {name} is {rate}; "
            f"got None{advice}"
        )
    checked = None if key is None else random_key(names["dropout_key"], key)
    return rate, checked if rate > 0 else None


def random_key(name: str, value: Any) -> jax.Array:
    """One key: a typed one, or the words of a raw one."""
    if not hasattr(value, "dtype"):
        advice = f"; jax.random.key({value}) makes one" if type(value) is int else ""
        raise TypeError(f"{name} must be a key, as from jax.random.key; got {short(value)}{advice}")
    key = _validate.array(name, value, "any")
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_typed and key.dtype != jnp.uint32:
        raise TypeError(f"{name} must be a key, as from jax.random.key; got {described(key)}")
    if key.ndim != (0 if is_typed else 1):
        raise ValueError(f"{name} must be one key, not an array of them; got {described(key)}")
    if not is_typed and key.shape != (wanted := jax.eval_shape(jax.random.PRNGKey, 0).shape):
        raise ValueError(f"{name} must have shape {wanted}, as from PRNGKey; got {described(key)}")
    return key


def implementations(implementation: Any) -> tuple[str, ...] | None:
    """The names to try in order, or None for the automatic choice."""
    if implementation is None:
        return None
    names = (implementation,) if isinstance(implementation, str) else implementation
    allowed = ", ".join(f'"{name}"' for name in IMPLEMENTATIONS)
    allowed = f"implementation must be None, one of {allowed} or a sequence of them"
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{allowed}; got {short(implementation)}")
    if not names or not set(names) <= set(IMPLEMENTATIONS):
        raise ValueError(f"{allowed} (None picks the fastest); got {short(implementation)}")
    return tuple(names)
