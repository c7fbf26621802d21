"""Checks of a cache and of what is appended to it, under the names that the caller's function gives them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import _cache_rows, _settings, _validate
from jax_flash._arguments import Names
from jax_flash._cache_spec import CacheOperands, CacheSpec, cache_sizes
from jax_flash._float8 import is_float8
from jax_flash._spec import AttentionSpec
from jax_flash._validate import described, short
from jax_flash.transforms import decoding


@dataclasses.dataclass(frozen=True)
class CacheArrays:
    """The arrays of a cache, of one layer or of all."""

    key: Any
    value: Any
    lengths: Any
    page_table: Any
    key_descale: Any = None
    value_descale: Any = None


@dataclasses.dataclass(frozen=True)
class CheckedCache:
    """A cache that passed every check, and the layer of it that a call uses."""

    key: jax.Array
    value: jax.Array
    lengths: jax.Array  # (B,) or (layers, B) int32
    page_table: jax.Array | None  # (B, pages) int32, of the call's layer
    layer: jax.Array | None  # () int32
    given_lengths: jax.Array  # as the caller has them
    key_descale: jax.Array | None = None  # (K,) or (layers, K) float32
    value_descale: jax.Array | None = None

    @property
    def operands(self) -> dict[str, jax.Array | None]:
        """By the names of `CacheOperands`."""
        names = ("key", "value", "lengths", "page_table", "layer", "key_descale", "value_descale")
        return {name: getattr(self, name) for name in names}

    def lengths_after(self, operands: CacheOperands) -> jax.Array:
        """The caller's lengths, where those of the call's layer count what it appends."""
        n = cache_sizes(operands)
        return _lengths_after(self.given_lengths, self.lengths, self.layer, n.U, n.S)


# In a `jit`, where constants are: outside of one they are sent to the device, which a transfer guard refuses.
@functools.partial(jax.jit, static_argnums=(3, 4))
@_settings.as_written
def _lengths_after(
    given: jax.Array, lengths: jax.Array, layer: jax.Array | None, by: int, most: int
) -> jax.Array:
    longer = _cache_rows.longer(lengths, by, most).astype(given.dtype)
    if layer is None:
        return longer
    # Element by element: one kernel. An index that may be out of range takes several.
    return jnp.where(jnp.arange(given.shape[0], dtype=layer.dtype)[:, None] == layer, longer, given)


def append(arrays: CacheArrays, key: Any, value: Any, layer: Any, names: Names) -> CacheArrays:
    """`arrays` with new keys and values."""
    checked = cache(arrays, layer, names)
    if key is None or value is None:
        raise TypeError(f"{names['new_key']} and {names['new_value']} must be arrays; got None")
    new_key, new_value = appended(key, value, checked, names)
    return _append(checked, new_key, new_value, arrays)


@_settings.as_written
def _append(
    checked: CheckedCache, new_key: jax.Array, new_value: jax.Array, arrays: CacheArrays
) -> CacheArrays:
    operands = CacheOperands(new_key, **checked.operands, new_key=new_key, new_value=new_value)
    key, value = checked.key, checked.value
    if 0 not in (new_key.size, key.size):
        key, value = decoding.append(CacheSpec(AttentionSpec(1.0)), operands)
    after = checked.lengths_after(operands)
    return dataclasses.replace(arrays, key=key, value=value, lengths=after)


def cache(arrays: CacheArrays, layer: Any, names: Names) -> CheckedCache:
    """The cache, if its arrays fit each other."""
    key = _validate.array(names["key"], arrays.key, "floating or e4m3")
    value = _validate.array(names["value"], arrays.value, "floating or e4m3")
    is_paged = arrays.page_table is not None
    shape = "(P, page, K, H)" if is_paged else "(B, S_max, K, H)"
    if key.ndim not in (4, 5):
        raise ValueError(
            f"{names['key']} must have shape {shape}, or that with layers in front; got {described(key)}"
        )
    if value.dtype != key.dtype:
        raise TypeError(
            f"{names['value']} must have the dtype of {names['key']}, {key.dtype}; got {value.dtype}"
        )
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(
            f"{names['value']} must have the shape of {names['key']}, {key.shape}, but for the head dim; "
            f"got {described(value)}"
        )
    if 0 in (*key.shape[-2:], value.shape[-1]) or (is_paged and key.shape[-3] == 0):
        raise ValueError(
            f"{names['key']} and {names['value']} must have at least one head, a head dim of at least 1, and "
            f"rows in their pages; got {described(key)} and {described(value)}"
        )
    rows = "page size" if is_paged else "capacity"
    for name, x in (("key", key), ("value", value)):
        _validate.without_symbols(names[name], f"{rows}, number of heads and head dim", x.shape[-3:])
    lead = key.shape[:-4]
    if lead == (0,):
        raise ValueError(f"{names['key']} must hold at least one layer; got none: {described(key)}")
    layer = _layer(layer, lead, names)
    if is_paged:
        table = _page_table(arrays.page_table, lead, key.shape[-4], layer, names)
        _validate.without_symbols(names["page_table"], "number of pages of a sequence", table.shape[1:])
        B, S = table.shape[0], table.shape[1] * key.shape[-3]
    else:
        table, (B, S) = None, key.shape[-4:-2]
    shapes = {"(layers, B)" if lead else "(B,)": (*lead, B)}
    lengths = _validate.shaped_unconverted(names["lengths"], arrays.lengths, shapes, "integer")
    narrowed = _validate.narrowed(lengths, min(S, _validate.INT32_MAX))
    # A loop's carry keeps its dtype, if each length that the cache may have fits it.
    fits = isinstance(lengths, jax.Array) and min(S, _validate.INT32_MAX) <= jnp.iinfo(lengths.dtype).max
    given = lengths if fits else narrowed
    descales = _descales(arrays, key, names)
    return CheckedCache(key, value, narrowed, table, layer, given, *descales)


def _descales(arrays: CacheArrays, key: jax.Array, names: Names) -> tuple[jax.Array | None, jax.Array | None]:
    """Of keys and of values, float32."""
    (*layers, _, _, K, _), found = key.shape[-5:] if key.ndim == 5 else key.shape, []
    shapes = {"(layers, K)" if layers else "(K,)": (*layers, K)}
    for name in ("key_descale", "value_descale"):
        given = getattr(arrays, name)
        if given is None:
            found.append(None)
            continue
        if not is_float8(key.dtype):
            raise ValueError(
                f"{names[name]} goes with a cache in float8_e4m3fn, and must be None for one in {key.dtype}; "
                f"got {short(given)}"
            )
        x = _validate.shaped(names[name], given, shapes, "floating")
        found.append(x.astype(jnp.float32))
    return found[0], found[1]


def _layer(layer: Any, lead: tuple[int, ...], names: Names) -> jax.Array | None:
    if layer is None:
        if lead:
            raise ValueError(
                f"layer must be the index of a layer, as {names['key']} holds {lead[0]} of them; got None"
            )
        return None
    if not lead:
        raise ValueError(f"layer must be None, as {names['key']} holds one layer; got {short(layer)}")
    given, is_array = layer, hasattr(layer, "dtype")
    if is_array:
        layer = _validate.shaped_unconverted("layer", layer, {"()": ()}, "integer")
        value = _validate.known(layer)
    else:
        try:
            value = _validate.integer("layer", layer)
        except TypeError:
            raise TypeError(f"layer must be an integer or an integer array (); got {short(layer)}") from None
    if value is not None and not 0 <= value < lead[0]:
        raise ValueError(
            f"layer must be in [0, {lead[0]}), the layers of {names['key']}; "
            f"got {value} ({type(given).__name__})"
        )
    if not is_array:
        return jax.device_put(np.int32(value))  # which a transfer guard allows
    return _validate.narrowed(layer, _validate.INT32_MAX, _validate.NO_INDEX)


def _page_table(
    table: Any, lead: tuple[int, ...], pages: int, layer: jax.Array | None, names: Names
) -> jax.Array:
    name = names["page_table"]
    table = _validate.unconverted(name, table, "integer")
    if table.ndim != 2 and not (table.ndim == 3 and table.shape[:1] == lead):
        of_layers = f", or ({lead[0]}, B, pages_per_sequence)" if lead else ""
        raise ValueError(f"{name} must have shape (B, pages_per_sequence){of_layers}; got {described(table)}")
    table = _validate.narrowed(table, pages, _validate.NO_INDEX)
    return table if table.ndim == 2 else _cache_rows.row_of_layer(table, layer)


def appended(key: Any, value: Any, checked: CheckedCache, names: Names) -> tuple[jax.Array, jax.Array]:
    """New keys and values that fit the cache."""
    B, (K, H) = checked.lengths.shape[-1], checked.key.shape[-2:]
    return fitting(key, value, B, K, H, checked.value.shape[-1], checked.key.dtype, names)


def fitting(
    key: Any, value: Any, B: int, K: int, H: int, V: int, dtype: Any, names: Names
) -> tuple[jax.Array, jax.Array]:
    """New keys `(B, U, K, H)` and values `(B, U, K, V)`; those for a cache in e4m3 have another dtype."""
    new: list[jax.Array] = []
    for name, x, columns, letter in (("new_key", key, H, "H"), ("new_value", value, V, "V")):
        x = _validate.array(names[name], x, "floating")
        if is_float8(dtype):
            if new and x.dtype != new[0].dtype:
                raise TypeError(
                    f"{names[name]} must have the dtype of {names['new_key']}, {new[0].dtype}; got {x.dtype}"
                )
        elif x.dtype != dtype:
            raise TypeError(f"{names[name]} must have the cache's dtype, {dtype}; got {x.dtype}")
        if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (B, K, columns):
            raise ValueError(
                f"{names[name]} must have shape (B, T_new, K, {letter}) with B = {B}, K = {K} and "
                f"{letter} = {columns} as the cache; got {described(x)}"
            )
        new.append(x)
    if new[0].shape[1] != new[1].shape[1]:
        raise ValueError(
            f"{names['new_value']} must have as many rows as {names['new_key']}, {new[0].shape[1]}; "
            f"got {described(new[1])}"
        )
    return new[0], new[1]
