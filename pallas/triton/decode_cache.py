"""Blocks of the keys and values of one sequence, as a decoding kernel loads them from the cache."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton

from jax_flash._cache_spec import CacheSizes
from jax_flash._mask import both
from jax_flash._validate import NO_INDEX

from .decode_schedule import divided
from .decode_tiles import in_several_pages
from .memory import indices
from .tiles import padded


@dataclasses.dataclass(frozen=True)
class SequenceCache:
    """The cache of one key head of one sequence. `refs` has whole arrays, by the names of `CacheOperands`.

    Every index that is used for an address lies within its array; masks keep the others from being loaded.
    """

    refs: Mapping[str, Any]
    sizes: CacheSizes
    sequence: jax.Array
    head: jax.Array
    block_keys: int

    def is_there(self) -> jax.Array | bool:
        """Whether the call's layer exists, and in a cache without pages the place of the sequence."""
        found = True
        if "layer" in self.refs:
            found = _within(self._layer(), self.refs["key"].shape[0])
        if "batch_index" in self.refs:
            found = _and(found, _within(self._place(), self._places))
        return found

    def block(self, j: jax.Array, begin: jax.Array, end: jax.Array) -> tuple[Any, ...]:
        """Block `j`: keys (keys, H) and values (keys, V) in query's dtype, head dims padded; which keys are
        there, (keys,), and the keys' positions, (keys,).

        Keys outside of `[begin, end)` count as not there. Rows of keys that aren't there are 0, as the cache
        may hold NaN where a sequence has no key, and 0 times NaN is NaN.
        """
        positions = j * self.block_keys + lax.iota(jnp.int32, self.block_keys)
        is_there = (positions >= begin) & (positions < end)
        place, row, has_page = self._rows(j, positions, is_there)
        is_there = both(is_there, has_page)
        heads = (self.head, self.head)
        if self.refs.get("value") is None:
            heads = (self.head * 2, self.head * 2 + 1)
        widths = (self.sizes.H, self.sizes.V)
        arrays = (self.refs["key"], self.refs.get("value", self.refs["key"]))
        key, value = (
            self._load(ref, place, row, head, is_there, width)
            for ref, head, width in zip(arrays, heads, widths, strict=True)
        )
        return key, value, is_there, positions

    def _rows(self, j: jax.Array, positions: jax.Array, is_wanted: jax.Array) -> tuple[Any, Any, Any]:
        """Where keys lie: their page, or the sequence's place if the cache has no pages; their row there; and
        whether there is such a page, None if that is known."""
        page = self.sizes.page
        if page is None:
            place = jnp.clip(self._place(), 0, self._places - 1) if self._has_index else self.sequence
            return place, positions, None
        table = self.refs["page_table"]
        if not in_several_pages(self.sizes, self.block_keys):
            number = divided(j, page // self.block_keys)
            entry = triton.load(table.at[self.sequence, number])
        else:
            number = divided(positions, page)
            number = jnp.minimum(number, table.shape[1] - 1)
            entry = triton.load(table.at[self.sequence, number], mask=is_wanted, other=NO_INDEX)
        has_page = _within(entry, self._places)
        return jnp.where(has_page, entry, 0), positions - number * page, has_page

    def _load(self, ref: Any, place: Any, row: jax.Array, head: Any, is_there: jax.Array, width: int):
        if jnp.ndim(place):
            place = place[:, None]
        columns = indices(0, padded(width), 1)
        index = (place, row[:, None], head, columns)
        if "layer" in self.refs:
            index = (jnp.clip(self._layer(), 0, ref.shape[0] - 1), *index)
        mask = jnp.broadcast_to(is_there[:, None], (self.block_keys, padded(width)))
        if width != padded(width):
            mask = mask & (columns < width)
        rows = triton.load(ref.at[index], mask=mask, other=np.zeros((), ref.dtype))
        return rows.astype(self.refs["query"].dtype)  # e4m3 numbers stay as they are

    def descale(self, name: str) -> jax.Array:
        """What the key head's numbers are multiplied by. `name` is that of an operand, which is there."""
        return triton.load(self.refs[name].at[self.head])

    @property
    def _has_index(self) -> bool:
        return "batch_index" in self.refs

    @property
    def _places(self) -> int:
        """How many pages the cache has, or sequences if it has no pages."""
        return self.refs["key"].shape[-4]

    def _place(self) -> jax.Array:
        return triton.load(self.refs["batch_index"].at[self.sequence])

    def _layer(self) -> jax.Array:
        return triton.load(self.refs["layer"])


def _within(x: jax.Array, size: int) -> jax.Array:
    return (x >= 0) & (x < size)


def _and(a: jax.Array | bool, b: jax.Array) -> jax.Array:
    return b if a is True else a & b
