"""A call on a key-value cache, through the same steps as one of attention: `vmap`, then sharded arrays.

A cache is changed in place where XLA owns it, so no step may copy it:

- `vmap` makes the mapped axis part of the sequences, or pages, that the cache holds. Indices into them move
  along. Only an axis beside one of layers has to be moved.
- A sharded call is partitioned by key heads, and by sequences if each has a place of its own in the cache.
  Devices share what they don't partition, and all write the same there.

It has no derivative.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jax_flash import _device
from jax_flash._cache_spec import CacheOperands, CacheSpec, cache_sizes
from jax_flash.transforms import lowering, partitioning
from jax_flash.transforms.layout import Arrays, Letters
from jax_flash.transforms.lowering import Call
from jax_flash.transforms.varying import vary_alike

Results = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]
"""out and lse, and the cache's key and value after the append."""


def attend(spec: CacheSpec, implementation: tuple[str, ...], operands: CacheOperands) -> Results:
    """Runs a checked call; `implementation` as in `autodiff.attend`."""
    call = Call(spec, implementation, _device.current())
    return jax_flash_decode(call, vary_alike(operands))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)
def jax_flash_decode(call: Call[CacheSpec], operands: CacheOperands) -> Results:
    return _mappable(call, operands)


@jax_flash_decode.defjvp
def _no_derivative(call: Call[CacheSpec], primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "attention on a key-value cache has no derivative: jax_flash.flash_attention has one, of the same "
        "attention to keys and values that are given whole"
    )


def _mappable(call: Call[CacheSpec], operands: CacheOperands) -> Results:
    @custom_vmap
    def mappable(operands: CacheOperands) -> Results:
        return _partitioned(call, operands)

    @mappable.def_vmap
    def rule(size: int, in_batched: Any, operands: CacheOperands) -> Any:
        (is_mapped,) = in_batched
        mapped = {name for name in operands.present() if getattr(is_mapped, name)}
        if mapped & _SHARED or operands.query_offsets is not None:
            results = _one_after_another(call, operands, mapped)
            return results, jax.tree.map(lambda _: True, results)
        fold = _Fold(operands, mapped, size)
        results = fold.unfolded(_mappable(call, fold.operands()))
        return results, (True, True, *(x is not None and not fold.shares_cache for x in results[2:]))

    return mappable(operands)


_SHARED = {"layer", "rotary_cos", "rotary_sin", "sinks"}
"""Operands that all sequences of a call share. If one is mapped, the mapped calls run one after another."""


def _one_after_another(call: Call[CacheSpec], operands: CacheOperands, mapped: set[str]) -> Results:
    rest = {"value": None} | operands.present()
    each = {name: rest.pop(name) for name in mapped}
    return jax.lax.map(lambda each: _mappable(call, CacheOperands(**rest, **each)), each)


class _Fold:
    """The mapped calls as one call, of `size` times as many sequences."""

    def __init__(self, operands: CacheOperands, mapped: set[str], size: int):
        self.arrays, self.mapped, self.size = operands.present(), mapped, size
        # A cache that all share stays one, unless each call appends keys of its own.
        self.shares_cache = not mapped & {"key", "value"} and operands.new_key is None
        self.is_layered = operands.layer is not None
        of_one = {name: x.shape[name in mapped :] for name, x in self.arrays.items()}
        shapes = {
            name: jax.ShapeDtypeStruct(shape, self.arrays[name].dtype) for name, shape in of_one.items()
        }
        self.sizes = cache_sizes(CacheOperands(**{"value": None} | shapes))
        self.places = of_one["key"][self.is_layered]  # pages, or sequences, that the cache of one call has

    def operands(self) -> CacheOperands:
        kept = _SHARED | ({"key", "value"} if self.shares_cache else set())
        folded = {name: x if name in kept else self._folded(name) for name, x in self.arrays.items()}
        if not self.shares_cache:
            folded |= {
                name: self._moved(folded[name]) for name in ("batch_index", "page_table") if name in folded
            }
        elif self.sizes.page is None and "batch_index" not in folded:
            folded["batch_index"] = jnp.tile(jnp.arange(self.sizes.B, dtype=jnp.int32), self.size)
        return CacheOperands(**{"value": None} | folded)

    def _folded(self, name: str) -> jax.Array:
        x = self.arrays[name]
        if name not in self.mapped:
            x = jnp.broadcast_to(x, (self.size, *x.shape))
        if name == "alibi_slopes":
            x = jnp.broadcast_to(x, (self.size, self.sizes.B, self.sizes.N))
        if name in ("key", "value") and self.is_layered:
            x = jnp.moveaxis(x, 0, 1)
            return x.reshape(x.shape[0], -1, *x.shape[3:])
        return x.reshape(-1, *x.shape[2:])

    def _moved(self, indices: jax.Array) -> jax.Array:
        """`indices` of sequences or pages, as those of the folded cache."""
        each = indices.reshape(self.size, -1)
        first = jnp.arange(self.size, dtype=jnp.int32)[:, None] * self.places
        is_there = (each >= 0) & (each < self.places)
        return jnp.where(is_there, each + first, -1).reshape(indices.shape)

    def unfolded(self, results: Results) -> Results:
        def unfold(x: jax.Array) -> jax.Array:
            return x.reshape(self.size, -1, *x.shape[1:])

        def of_cache(x: jax.Array) -> jax.Array:
            if self.shares_cache:
                return x
            if not self.is_layered:
                return unfold(x)
            return jnp.moveaxis(x.reshape(x.shape[0], self.size, -1, *x.shape[2:]), 1, 0)

        out, lse, key, value = results
        return unfold(out), unfold(lse), of_cache(key), None if value is None else of_cache(value)


def _partitioned(call: Call[CacheSpec], operands: CacheOperands) -> Results:
    def local(inputs: Arrays) -> Arrays:
        operands = CacheOperands(**{"value": None} | inputs)
        out, lse, key, value = lowering.run(call, "forward", operands)
        results = {"out": out, "lse": lse, "key_after": key, "value_after": value}
        return {name: x for name, x in results.items() if x is not None}

    n = cache_sizes(operands)
    letters, inputs = _letters(operands), operands.present()
    out = (*operands.query.shape[:-1], n.V)
    results = {"out": out, "lse": (out[0], n.N, n.T), "key_after": operands.key.shape}
    if operands.value is not None:
        results["value_after"] = operands.value.shape
    computation = partitioning.Computation(local, call, letters, results, takes_key_heads=False)
    arrays = partitioning.partitioned(computation, inputs)
    return arrays["out"], arrays["lse"], arrays["key_after"], arrays.get("value_after")


def _letters(operands: CacheOperands) -> Letters:
    """The letters of all arrays. Of these, `b0`, `K` and `N` are partitioned."""
    # Sequences are apart if each has its own place in the cache; or if nothing is written, so that the cache
    # may be everywhere.
    has_own_place = operands.page_table is None and operands.batch_index is None
    b = "b0" if (has_own_place or operands.new_key is None) and operands.query_offsets is None else "B"
    # A device can't have a key head without its values.
    K, N = ("J", "M") if operands.value is None else ("K", "N")
    layers = () if operands.layer is None else ("L",)
    place = ("P", "page") if operands.page_table is not None else (b if has_own_place else "C", "S")
    letters = {
        "query": (b, "T", N, "H"),
        "key": (*layers, *place, K, "H"),
        "value": (*layers, *place, K, "V"),
        "lengths": (b,),
        "layer": (),
        "page_table": (b, "G"),
        "batch_index": (b,),
        "left_padding": (b,),
        "new_key": (b, "U", K, "H"),
        "new_value": (b, "U", K, "V"),
        "rotary_cos": ("Y", "R"),
        "rotary_sin": ("Y", "R"),
        "alibi_slopes": (b, N),
        "sinks": (b, N),
        "query_offsets": ("O",),
        "out": (b, "T", N, "V"),
        "lse": (b, N, "T"),
    }
    return letters | {"key_after": letters["key"], "value_after": letters["value"]}
