"""Checks of single arguments, made when a call is traced.

Every error names the argument, what it was and what it may be: `TypeError` for dtypes and kinds, `ValueError`
for shapes and values. What passes comes back in one form (an array, a float, a tuple). `_arguments.py` checks
what is particular to attention.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

FLOAT32_MAX = float(np.finfo(np.float32).max)
INT32_MAX = 2**31 - 1

_FLOATING = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
# For each kind of array: its name, the dtypes it takes, and advice for who passed another one.
_KINDS: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "floating": ("a floating", _FLOATING, ""),
    "floating or e4m3": ("a floating", (*_FLOATING, jnp.float8_e4m3fn), ""),
    "integer": ("an integer", (jnp.integer,), ""),
    "mask": ("a bool", (jnp.bool_,), " (mask != 0 for a mask of numbers; an additive mask goes into bias)"),
    "floating or integer": ("a floating or integer", (*_FLOATING, jnp.integer), ""),
    "bool or integer": ("a bool or integer", (jnp.bool_, jnp.integer), ""),
    "bool or number": ("a bool, integer or floating", (jnp.bool_, jnp.integer, jnp.floating), ""),
    "any": ("a bool, numeric or key", (jnp.bool_, jnp.number, jax.dtypes.prng_key), ""),
}


def array(name: str, value: Any, kind: str) -> jax.Array:
    """`value` as a JAX array; `kind` is a key of `_KINDS`."""
    return _as_jax(name, unconverted(name, value, kind))


def unconverted(name: str, value: Any, kind: str) -> jax.Array | np.ndarray:
    """`value`, an array of that kind, still in NumPy if it was: JAX may narrow 64-bit numbers."""
    if not isinstance(value, jax.Array):
        if hasattr(value, "__jax_array__"):
            value = _as_jax(name, value)
        elif isinstance(value, np.generic):
            value = np.asarray(value)
        elif not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"{name} must be an array; got {short(value)}")
    if not _is_of_kind(value.dtype, kind):
        a_kind, _, advice = _KINDS[kind]
        if kind.startswith("floating") and _is_of_8_bits(value.dtype):
            advice = (
                " of 16 bits at least" if kind == "floating" else " of 16 bits at least, or float8_e4m3fn"
            )
        raise TypeError(f"{name} must have {a_kind} dtype{advice}; got {described(value)}")
    return value


def _is_of_8_bits(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1


@functools.cache
def _is_of_kind(dtype: Any, kind: str) -> bool:
    _, allowed, _ = _KINDS[kind]
    # NumPy counts timedelta64 among the integers.
    return getattr(dtype, "kind", None) != "m" and any(jnp.issubdtype(dtype, x) for x in allowed)


def has_shape(value: Any) -> bool:
    """Whether `value` is an array that JAX takes, or the shape of one."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return _is_of_kind(value.dtype, "any")
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        return False
    try:
        jax.typeof(value)
    except (TypeError, ValueError):
        return False
    return True


def _as_jax(name: str, value: Any) -> jax.Array:
    if isinstance(value, jax.Array):
        return value
    try:
        return jnp.asarray(value)
    except Exception as error:  # whatever `__jax_array__` raises; another byte order
        raise TypeError(f"{name} must be an array that JAX takes; got {short(value)}: {error}") from error


def floating_dtype(name: str, value: Any, kind: str = "floating") -> np.dtype:
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        raise TypeError(f"{name} must be a floating dtype; got {short(value)}") from None
    if not _is_of_kind(dtype, kind):
        raise TypeError(f"{name} must be a floating dtype; got {short(value)}")
    if dtype.itemsize == 8 and not jax.config.read("jax_enable_x64"):
        raise TypeError(f"{name} must have 32 bits at most without jax_enable_x64; got {short(value)}")
    return dtype


def known(x: jax.Array | np.ndarray) -> np.ndarray | None:
    """The values of `x`; None if they are traced, or on other hosts."""
    if not isinstance(x, jax.Array):
        return x
    if isinstance(x, Tracer) or not (x.is_fully_addressable or x.is_fully_replicated):
        return None
    # JAX keeps the copy, so each array is transferred once.
    with jax.transfer_guard_device_to_host("allow"):
        return np.asarray(x)


NO_INDEX = -1
"""Of no element: what indices below 0 are clipped to, where these say that there is nothing."""


def clipped(x: jax.Array | np.ndarray, most: int, least: int = 0) -> jax.Array:
    """Integers clipped to [least, most], as int32. They are clipped first, so that none wraps."""
    if x.dtype != jnp.int32:
        info = jnp.iinfo(x.dtype)
        least, most = max(least, int(info.min)), min(most, int(info.max))
    if not isinstance(x, jax.Array):
        return jnp.asarray(np.clip(x, least, most).astype(np.int32))
    return _clip(x, least, most)


def narrowed(x: jax.Array | np.ndarray, most: int, least: int = 0) -> jax.Array:
    """Integers as int32, where those below `least` mean `least`, and those above `most` mean `most`.

    An array of int32 stays as it is: clipping it would be a kernel of its own. Others are clipped, so that
    none wraps.
    """
    return x if isinstance(x, jax.Array) and x.dtype == jnp.int32 else clipped(x, most, least)


# In a `jit`, where bounds are constants: outside of one they are sent to the device, which a transfer guard
# refuses.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _clip(x: jax.Array, least: int, most: int) -> jax.Array:
    return jnp.clip(x, least, most).astype(jnp.int32)


def broadcastable(name: str, value: Any, shape: Sequence[int], letters: str, kind: str) -> jax.Array:
    """`value` as an array that broadcasts to `shape`, of the same rank (axes of size 1 added in front)."""
    value = array(name, value, kind)
    lead = len(shape) - value.ndim
    if lead < 0 or any(n not in (1, wanted) for n, wanted in zip(value.shape, shape[lead:], strict=True)):
        raise ValueError(
            f"{name} must be broadcastable to {letters} = {tuple(shape)}; got {described(value)}"
        )
    return reshaped(value, (1,) * lead + value.shape)


Shapes = dict[str, tuple[int, ...]]
"""Shapes that an argument may have, by their letters."""


def shaped(name: str, value: Any, shapes: Shapes, kind: str) -> jax.Array:
    """`value` as an array whose shape is one of `shapes`."""
    return _as_jax(name, shaped_unconverted(name, value, shapes, kind))


def shaped_unconverted(name: str, value: Any, shapes: Shapes, kind: str) -> jax.Array | np.ndarray:
    """`unconverted`, with a shape that is one of `shapes`."""
    value = unconverted(name, value, kind)
    if value.shape not in shapes.values():
        allowed = " or ".join(f"{letters} = {shape}" for letters, shape in shapes.items())
        raise ValueError(f"{name} must have shape {allowed}; got {described(value)}")
    return value


def without_symbols(name: str, what: str, sizes: Sequence[Any]) -> None:
    """Refuses symbolic sizes, as of an export for every size."""
    if not all(isinstance(size, int) for size in sizes):
        raise ValueError(f"{name} must have a {what} without symbols; got {tuple(sizes)}")


def number(name: str, value: Any) -> float:
    """A static number, known when the call is traced, that is finite in float32."""
    result = value if type(value) is float else _as_float(name, value)
    if not abs(result) <= FLOAT32_MAX:
        raise ValueError(f"{name} must be finite in float32; got {short(value)}")
    return result


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, Tracer):
        raise TypeError(
            f"{name} must be a Python number, known when the call is traced; got the traced value {value}"
        )
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        is_number = value.ndim == 0 and _is_of_kind(value.dtype, "bool or number") and value.dtype != bool
    else:
        is_number = hasattr(type(value), "__float__") and not isinstance(value, bool)
    if not is_number:
        if isinstance(value, np.ndarray | jax.Array) and value.ndim:
            raise ValueError(f"{name} must have shape (); got {described(value)}")
        raise TypeError(f"{name} must be a number; got {short(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be finite in float32; got {short(value)}") from None
    except (TypeError, ValueError):  # as the object's own `__float__` raises
        raise TypeError(f"{name} must be a number; got {short(value)}") from None


def flag(name: str, value: Any) -> bool:
    """A static bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, known when the call is traced; got {short(value)}")
    return bool(value)


def one_of(name: str, value: Any, allowed: Sequence[str], *, or_none: bool = False) -> str:
    """One of a few words. With `or_none`, messages tell that None is allowed too: callers deal with it."""
    expected = "None or " * or_none + " or ".join(f'"{word}"' for word in allowed)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be {expected}; got {short(value)}")
    if value not in allowed:
        raise ValueError(f"{name} must be {expected}; got {short(value)}")
    return value


def integer(name: str, value: Any) -> int:
    """A static integer."""
    try:
        if isinstance(value, bool | np.bool_ | np.timedelta64 | Tracer):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be a Python integer, known when the call is traced; got {short(value)}"
        ) from None


def size(name: str, value: Any) -> int:
    """A static integer of at least 0."""
    result = integer(name, value)
    if result < 0:
        raise ValueError(f"{name} must be at least 0; got {short(value)}")
    return result


def listed(name: str, value: Any) -> Any:
    """A list of ints as an array, of NumPy where it can be; anything else as it is."""
    if not isinstance(value, tuple | list):
        return value
    if not value:
        return np.zeros(0, np.int32)
    convert = jnp.asarray if any(isinstance(x, jax.Array) for x in value) else np.asarray
    try:
        return convert(value)
    except Exception as error:  # ragged; of things that are no numbers
        raise TypeError(f"{name} must be an array or a list of integers; got {short(value)}") from error


def reshaped(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x` itself if it has that shape already: eagerly, a reshape costs as much as all the checks."""
    return x if x.shape == shape else jnp.reshape(x, shape)


def described(x: Any) -> str:
    """dtype and shape of an array, for an error."""
    return f"{x.dtype} {tuple(x.shape)}"


def short(value: Any) -> str:
    """Any value, for an error: its text, cut, and its type."""
    if isinstance(value, np.ndarray | jax.Array) and not isinstance(value, Tracer):
        return f"{described(value)} ({type(value).__name__})"
    try:
        text = repr(value)
    except Exception:  # an int of more digits than Python prints; an object's own `__repr__`
        text = object.__repr__(value)
    return f"{text[:80]}{'…' if len(text) > 80 else ''} ({type(value).__name__})"
