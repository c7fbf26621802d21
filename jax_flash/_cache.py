"""Key-value caches: what sequences have attended to so far, in arrays of a fixed size."""

import dataclasses
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash import _cache_arguments, _validate
from jax_flash._arguments import Names
from jax_flash._cache_arguments import CacheArrays

NAMES = Names(
    key="cache.key",
    value="cache.value",
    key_descale="cache.key_descale",
    value_descale="cache.value_descale",
    lengths="cache.lengths",
    new_key="key",
    new_value="value",
)
PAGED_NAMES = NAMES.replace(key="cache.key_pages", value="cache.value_pages", page_table="cache.page_table")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no one truth value
class KVCache:
    """Keys and values of B sequences, each with room for S_max.

    A pytree, with all layers' caches in one more leading axis if it likes; functions then take `layer=`, the
    index of the one that they use, and a `scan` over layers changes the cache in place. Arrays are not
    checked here, but by the functions that take the cache.
    """

    key: jax.Array
    """`(B, S_max, K, H)`, or `(layers, B, S_max, K, H)`"""
    value: jax.Array
    """`(B, S_max, K, V)`, or `(layers, B, S_max, K, V)`"""
    lengths: jax.Array
    """`(B,)`, or `(layers, B)`, int32, in tokens. What lies beyond may be anything."""
    key_descale: jax.Array | None = None
    """`(K,)`, or `(layers, K)`, floating: what keys in float8_e4m3fn are multiplied by; None is 1."""
    value_descale: jax.Array | None = None
    """likewise, of values"""

    @staticmethod
    def create(
        batch: int,
        max_length: int,
        key_heads: int,
        head_dim: int,
        dtype: Any = jnp.bfloat16,
        *,
        value_dim: int | None = None,
        layers: int | None = None,
    ) -> "KVCache":
        """An empty cache, of zeros.

        Args:
          batch: B.
          max_length: S_max, in tokens.
          key_heads: K.
          head_dim: H, of keys.
          dtype: of keys and values, floating, or float8_e4m3fn: then queries and new keys have another dtype,
            new ones are rounded, and `dataclasses.replace` sets the descales.
          value_dim: V, the head dim of values; H by default.
          layers: of how many layers it holds caches, in a leading axis; None for one, without that axis.
        """
        place = (_size("batch", batch), _size("max_length", max_length))
        lead = () if layers is None else (_size("layers", layers, 1),)
        key, value = _zeros((*lead, *place), key_heads, head_dim, value_dim, dtype)
        return KVCache(key, value, jnp.zeros((*lead, place[0]), jnp.int32))

    def append(self, key: ArrayLike, value: ArrayLike, *, layer: ArrayLike | None = None) -> "KVCache":
        """The cache with more keys and values at the end of each sequence.

        Under `jit`, if the cache is donated or a loop's carry, it is changed in place.

        Args:
          key: `(B, T_new, K, H)`, the cache's dtype; of another floating one if that is float8_e4m3fn.
          value: `(B, T_new, K, V)`, key's dtype.
          layer: an int32 scalar, the layer whose cache it is; for a cache of all layers.

        Returns:
          a cache whose lengths are greater by T_new, at most S_max. What doesn't fit is dropped.

        Raises:
          TypeError, ValueError: an argument of another kind, dtype or shape.
        """
        arrays = _cache_arguments.append(self.arrays(), key, value, layer, NAMES)
        return self.with_arrays(arrays)

    def arrays(self) -> CacheArrays:
        return CacheArrays(self.key, self.value, self.lengths, None, self.key_descale, self.value_descale)

    def with_arrays(self, arrays: CacheArrays) -> "KVCache":
        return dataclasses.replace(self, key=arrays.key, value=arrays.value, lengths=arrays.lengths)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no one truth value
class PagedKVCache:
    """Keys and values of B sequences in pages of a pool (PagedAttention, https://arxiv.org/abs/2309.06180).

    Key j of sequence b is row `j % page` of page `page_table[b, j // page]`. Pages may lie in any order, and
    sequences may share them, as long as none appends to a shared one. An index outside of the pool, such as
    -1, is no page: its keys are hidden, and what would be appended to it is dropped.

    A pytree, which may hold all layers as `KVCache` may; `page_table` can then be one for all layers.
    """

    key_pages: jax.Array
    """`(P, page, K, H)`, or `(layers, P, page, K, H)`"""
    value_pages: jax.Array
    """`(P, page, K, V)`, or `(layers, P, page, K, V)`"""
    page_table: jax.Array
    """`(B, pages_per_sequence)`, or `(layers, B, pages_per_sequence)`, int32, indices of pages"""
    lengths: jax.Array
    """`(B,)`, or `(layers, B)`, int32, in tokens"""
    key_descale: jax.Array | None = None
    """`(K,)`, or `(layers, K)`, floating: what keys in float8_e4m3fn are multiplied by; None is 1."""
    value_descale: jax.Array | None = None
    """likewise, of values"""

    @staticmethod
    def create(
        batch: int,
        pages: int,
        page_size: int,
        pages_per_sequence: int,
        key_heads: int,
        head_dim: int,
        dtype: Any = jnp.bfloat16,
        *,
        value_dim: int | None = None,
        layers: int | None = None,
    ) -> "PagedKVCache":
        """An empty cache, of zeros. Its table has no pages yet, but -1.

        Args:
          batch: B.
          pages: P, of the pool.
          page_size: in tokens.
          pages_per_sequence: how many a sequence may have.
          key_heads, head_dim, dtype, value_dim, layers: as of `KVCache.create`.
        """
        lead = () if layers is None else (_size("layers", layers, 1),)
        batch = _size("batch", batch)
        place = (_size("pages", pages), _size("page_size", page_size, 1))
        key, value = _zeros((*lead, *place), key_heads, head_dim, value_dim, dtype)
        table_shape = batch, _size("pages_per_sequence", pages_per_sequence)
        table = jnp.full(table_shape, _validate.NO_INDEX, jnp.int32)
        return PagedKVCache(key, value, table, jnp.zeros((*lead, batch), jnp.int32))

    def append(self, key: ArrayLike, value: ArrayLike, *, layer: ArrayLike | None = None) -> "PagedKVCache":
        """As `KVCache.append`. The pages that new keys go to must be in the table already."""
        arrays = _cache_arguments.append(self.arrays(), key, value, layer, PAGED_NAMES)
        return self.with_arrays(arrays)

    def arrays(self) -> CacheArrays:
        if self.page_table is None:
            raise TypeError(f"{PAGED_NAMES['page_table']} must be an integer array; got None")
        return CacheArrays(
            *(self.key_pages, self.value_pages, self.lengths, self.page_table),
            *(self.key_descale, self.value_descale),
        )

    def with_arrays(self, arrays: CacheArrays) -> "PagedKVCache":
        pages = {"key_pages": arrays.key, "value_pages": arrays.value}
        return dataclasses.replace(self, **pages, lengths=arrays.lengths)


for _kind in (KVCache, PagedKVCache):  # programs that take or return caches can be exported
    jax.export.register_pytree_node_serialization(
        _kind,
        serialized_name=f"jax_flash.{_kind.__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: (),
    )


def _size(name: str, value: Any, least: int = 0) -> int:
    size = _validate.size(name, value)
    if size < least:
        raise ValueError(f"{name} must be at least {least}; got {_validate.short(value)}")
    return size


def _zeros(
    place: tuple[int, ...], key_heads: int, head_dim: int, value_dim: int | None, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    dtype = _validate.floating_dtype("dtype", dtype, "floating or e4m3")
    heads, head_dim = _size("key_heads", key_heads, 1), _size("head_dim", head_dim, 1)
    value_dim = head_dim if value_dim is None else _size("value_dim", value_dim, 1)
    return jnp.zeros((*place, heads, head_dim), dtype), jnp.zeros((*place, heads, value_dim), dtype)
