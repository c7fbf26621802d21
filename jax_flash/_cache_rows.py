"""Where the keys of each sequence lie in a cache, and how new ones are written there."""

import functools

import jax
import jax.numpy as jnp

from jax_flash import _float8, _rotary, _settings
from jax_flash._cache_spec import CacheOperands, CacheSpec, cache_sizes


def of_layer(operands: CacheOperands) -> CacheOperands:
    """The same call with lengths `(B,)` in [0, S] and descales `(K,)`, those of its layer."""
    key_descale, value_descale = operands.key_descale, operands.value_descale
    return operands.replace(
        lengths=longer(_own(operands, operands.lengths), 0, cache_sizes(operands).S),
        key_descale=None if key_descale is None else _own(operands, key_descale),
        value_descale=None if value_descale is None else _own(operands, value_descale),
    )


def lengths_after(operands: CacheOperands) -> jax.Array:
    """The lengths `(B,)` after the append."""
    n = cache_sizes(operands)
    return longer(_own(operands, operands.lengths), n.U, n.S)


# In a `jit`, where constants are: outside of one they are sent to the device, which a transfer guard refuses.
@functools.partial(jax.jit, static_argnums=(1, 2))
def longer(lengths: jax.Array, by: int, most: int) -> jax.Array:
    """Lengths after `by` more tokens, of which `most` have room."""
    return jnp.minimum(jnp.clip(lengths, 0, most) + by, most)


def _own(operands: CacheOperands, x: jax.Array) -> jax.Array:
    """The row of `x` for the call's layer; `x` if it has no axis of layers."""
    return x if x.ndim == 1 else row_of_layer(x, operands.layer)


@jax.jit
@_settings.as_written
def row_of_layer(x: jax.Array, layer: jax.Array) -> jax.Array:
    """Row `layer` of `x`; the first or the last one for a layer that isn't there."""
    return jax.lax.dynamic_index_in_dim(x, jnp.maximum(layer, 0), keepdims=False)


def page_table(operands: CacheOperands) -> tuple[jax.Array, int]:
    """A table `(B, pages)` and the size of its pages. A cache without pages is one page a sequence."""
    n = cache_sizes(operands)
    if operands.page_table is not None and n.page is not None:
        return operands.page_table, n.page
    rows = jnp.arange(n.B, dtype=jnp.int32) if operands.batch_index is None else operands.batch_index
    return rows[:, None], n.S


def pages(operands: CacheOperands) -> int:
    """How many pages the cache has, or sequences if it has no pages."""
    return operands.key.shape[-4]


def layer_is_there(operands: CacheOperands) -> jax.Array | bool:
    if operands.layer is None:
        return True
    return (operands.layer >= 0) & (operands.layer < operands.key.shape[0])


def append(spec: CacheSpec, operands: CacheOperands) -> tuple[jax.Array, jax.Array | None]:
    """The cache's key and value with the new ones in them. XLA does it in place where it owns the cache.

    `operands` are what `of_layer` returns.
    """
    if operands.new_key is None:
        return operands.key, operands.value
    n = cache_sizes(operands)
    positions = operands.lengths[:, None] + jnp.arange(n.U, dtype=jnp.int32)
    new_key = operands.new_key
    if operands.rotary_cos is not None:
        tables = operands.rotary_cos, operands.rotary_sin
        new_key = _rotary.rotated(new_key, *tables, positions, spec.rotary_interleaved)
    write = functools.partial(_write, operands, positions)
    if _float8.is_float8(operands.key.dtype):
        assert operands.value is not None
        new_key = _quantized(new_key, operands.key_descale)
        new_value = _quantized(operands.new_value, operands.value_descale)
        return write(operands.key, new_key), write(operands.value, new_value)
    if operands.value is None:
        rows = jnp.stack([new_key, operands.new_value], axis=3)
        return write(operands.key, rows.reshape(n.B, n.U, 2 * n.K, n.H)), None
    return write(operands.key, new_key), write(operands.value, operands.new_value)


def _quantized(rows: jax.Array, descale: jax.Array | None) -> jax.Array:
    """`rows (B, U, K, columns)` as a cache in e4m3 has them."""
    rows = rows.astype(jnp.float32)
    return _float8.converted(rows if descale is None else rows / descale[:, None])


def _write(operands: CacheOperands, positions: jax.Array, cache: jax.Array, rows: jax.Array) -> jax.Array:
    """`cache` with `rows (B, U, heads, columns)` at `positions (B, U)` of their sequences."""
    table, page = page_table(operands)
    # What has no place gets an index beyond the last page, which is dropped.
    found = jnp.take_along_axis(table, positions // page, axis=1, mode="fill", fill_value=-1)
    is_there = (found >= 0) & (found < pages(operands)) & layer_is_there(operands)
    index = (jnp.where(is_there, found, pages(operands)), positions % page)
    if operands.layer is not None:
        index = (operands.layer, *index)
    return cache.at[index].set(rows, mode="drop")
