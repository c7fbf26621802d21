"""A call on a key-value cache, through the same steps as one of attention: `vmap`, then sharded arrays.

A cache is changed in place where XLA owns it, so no step may copy it:

- `vmap` makes the mapped axis part of the sequences, or pages, that the cache holds. Indices into them move
  along. Only an axis beside one of layers has to be moved.
- A sharded call is partitioned by key heads, and by sequences if each has a place of its own in the cache.
  Devices share what they don't partition, and all write the same there.

It has no derivative.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec

from jax_flash import _cache_rows, _device
from jax_flash._cache_spec import CacheOperands, CacheSpec, cache_sizes
from jax_flash._spec import is_captured
from jax_flash.transforms import debugging, lowering, partitioning
from jax_flash.transforms.batching import of_no_calls
from jax_flash.transforms.layout import Arrays, Letters, Shards, mesh_axes
from jax_flash.transforms.lowering import PlannedCall
from jax_flash.transforms.varying import vary_alike

Results = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]
"""out and lse, and the cache's key and value after the append."""

APPEND: tuple[str, ...] = ()
"""In place of a call's implementations: it appends and attends to nothing, which is plain JAX everywhere."""


def attend(spec: CacheSpec, implementation: tuple[str, ...], operands: CacheOperands) -> Results:
    """Runs a checked call; `implementation` as in `autodiff.attend`."""
    call = PlannedCall(spec, implementation, _device.current())
    results = debugging.decoding(jax_flash_decode, spec.attention.return_residual, call, vary_alike(operands))
    return results["out"], results["lse"], results["key"], results.get("value")


def append(spec: CacheSpec, operands: CacheOperands) -> tuple[jax.Array, jax.Array | None]:
    """The cache's key and value with the new ones in them."""
    # The new keys stand for queries, of which there are none: they are partitioned alike.
    operands = operands.replace(batch_indices=None, head_indices=None, captured={})
    operands = vary_alike(operands.replace(query=operands.new_key))
    results = jax_flash_append(PlannedCall(spec, APPEND, _device.current()), operands)
    return results["key"], results.get("value")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)
def jax_flash_decode(call: PlannedCall[CacheSpec], operands: CacheOperands) -> Arrays:
    return _mappable(call, operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)
def jax_flash_append(call: PlannedCall[CacheSpec], operands: CacheOperands) -> Arrays:
    return _mappable(call, operands)


@jax_flash_decode.defjvp
@jax_flash_append.defjvp
def _no_derivative(call: PlannedCall[CacheSpec], primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "a call on a key-value cache has no derivative: jax_flash.flash_attention has one, of the same "
        "attention to keys and values that are given whole"
    )


def _mappable(call: PlannedCall[CacheSpec], operands: CacheOperands) -> Arrays:
    @custom_vmap
    def mappable(operands: CacheOperands) -> Arrays:
        return _partitioned(call, operands)

    @mappable.def_vmap
    def rule(size: int, in_batched: Any, operands: CacheOperands) -> Any:
        (is_mapped,) = in_batched
        if size == 0:
            results = of_no_calls(functools.partial(_partitioned, call), in_batched, operands)
            return results, jax.tree.map(lambda _: True, results)
        mapped = {name for name, mapped in is_mapped.present().items() if mapped}
        if any(map(_is_shared, mapped)) or operands.query_offsets is not None:
            results = _one_after_another(call, operands, mapped)
            return results, jax.tree.map(lambda _: True, results)
        fold = _Fold(operands, mapped, size)
        results = _mappable(call, fold.operands())
        results = {name: fold.unfolded(name, x) for name, x in results.items()}
        return results, {name: not (fold.shares_cache and name in _CACHE) for name in results}

    return mappable(operands)


_CACHE = ("key", "value")
_SHARED = {"layer", "rotary_cos", "rotary_sin", "sinks", "key_descale", "value_descale", "head_indices"}


def _is_shared(name: str) -> bool:
    """Whether all sequences of a call share the operand. If it is mapped, the calls run one after another."""
    return name in _SHARED or is_captured(name)


def _one_after_another(call: PlannedCall[CacheSpec], operands: CacheOperands, mapped: set[str]) -> Arrays:
    rest = operands.present()
    each = {name: rest.pop(name) for name in mapped}
    return jax.lax.map(lambda each: _mappable(call, CacheOperands.of(rest | each)), each)


class _Fold:
    """The mapped calls as one call, of `size` times as many sequences."""

    def __init__(self, operands: CacheOperands, mapped: set[str], size: int):
        self.arrays, self.mapped, self.size = operands.present(), mapped, size
        # A cache that all share stays one, unless each call appends keys of its own.
        self.shares_cache = not mapped.intersection(_CACHE) and operands.new_key is None
        self.is_layered = operands.layer is not None
        of_one = {name: x.shape[name in mapped :] for name, x in self.arrays.items()}
        shapes = {
            name: jax.ShapeDtypeStruct(shape, self.arrays[name].dtype) for name, shape in of_one.items()
        }
        self.sizes = cache_sizes(CacheOperands.of(shapes))
        self.places = of_one["key"][self.is_layered]  # pages, or sequences, that the cache of one call has

    def operands(self) -> CacheOperands:
        kept = _CACHE if self.shares_cache else ()
        folded = {
            name: x if name in kept or _is_shared(name) else self._folded(name)
            for name, x in self.arrays.items()
        }
        if not self.shares_cache:
            folded |= {
                name: self._moved(folded[name]) for name in ("batch_index", "page_table") if name in folded
            }
        elif self.sizes.page is None and "batch_index" not in folded:
            folded["batch_index"] = jnp.tile(jnp.arange(self.sizes.B, dtype=jnp.int32), self.size)
        return CacheOperands.of(folded)

    def _folded(self, name: str) -> jax.Array:
        x = self.arrays[name]
        if name not in self.mapped:
            x = jnp.broadcast_to(x, (self.size, *x.shape))
        if name == "alibi_slopes":
            x = jnp.broadcast_to(x, (self.size, self.sizes.B, self.sizes.N))
        if self.is_layered and (name in _CACHE or (name == "lengths" and x.ndim == 3)):
            x = jnp.moveaxis(x, 0, 1)
            return x.reshape(x.shape[0], -1, *x.shape[3:])
        return x.reshape(-1, *x.shape[2:])

    def _moved(self, indices: jax.Array) -> jax.Array:
        """`indices` of sequences or pages, as those of the folded cache."""
        each = indices.reshape(self.size, -1)
        first = jnp.arange(self.size, dtype=jnp.int32)[:, None] * self.places
        is_there = (each >= 0) & (each < self.places)
        return jnp.where(is_there, each + first, -1).reshape(indices.shape)

    def unfolded(self, name: str, x: jax.Array) -> jax.Array:
        """That result of each of the calls; a cache that all share as it is."""
        if name not in _CACHE or not (self.shares_cache or self.is_layered):
            return x.reshape(self.size, -1, *x.shape[1:])
        if self.shares_cache:
            return x
        return jnp.moveaxis(x.reshape(x.shape[0], self.size, -1, *x.shape[2:]), 1, 0)


def _partitioned(call: PlannedCall[CacheSpec], operands: CacheOperands) -> Arrays:
    holds_both = operands.value is None
    appends = operands.new_key is not None
    caches = {"key": operands.key, "value": operands.value}

    def local(inputs: Arrays, _shards: Shards | None) -> Arrays:
        operands = CacheOperands.of(inputs)
        if holds_both:
            operands = operands.replace(key=_heads_apart(operands.key))
        results = {}
        if call.implementation == APPEND:
            key, value = _cache_rows.append(call.spec, _cache_rows.of_layer(operands))
        else:
            results["out"], results["lse"], key, value = lowering.run(call, "forward", operands)
        if not appends:
            return results
        return results | (
            {"key_after": _heads_together(key)} if holds_both else {"key_after": key, "value_after": value}
        )

    n = cache_sizes(operands)
    if holds_both:
        operands = operands.replace(key=_heads_together(operands.key))
    shapes = {}
    if appends:
        shapes = {f"{name}_after": x.shape for name, x in operands.present().items() if name in caches}
    if call.implementation != APPEND:
        out = (*operands.query.shape[:-1], n.V)
        shapes |= {"out": out, "lse": (out[0], n.N, n.T)}
    computation = partitioning.Computation(
        local, call, _letters(operands), shapes, takes_key_heads=False, repeats_results=appends
    )
    results = partitioning.partitioned(computation, operands.present())
    # Without an append, the caches are what they were.
    results = {name.removesuffix("_after"): x for name, x in results.items()}
    if appends and holds_both:
        results["key"] = _heads_apart(results["key"])
    results |= {name: _sharded_as(x, results[name]) for name, x in caches.items() if name in results}
    return {name: x for name, x in (caches | results).items() if x is not None}


def _sharded_as(given: jax.Array, x: jax.Array) -> jax.Array:
    """`x` sharded as `given`: on Explicit axes its type says how, and a loop's carry keeps its type."""
    sharding = jax.typeof(given).sharding
    is_alike = sharding.mesh.empty or jax.typeof(x).sharding == sharding
    return x if is_alike else jax.sharding.reshard(x, sharding)


def _heads_together(pages: jax.Array) -> jax.Array:
    """Pages that hold keys and values, `(P, page, 2 · K, H)`, as `(P, page, K, 2 · H)`.

    So they are partitioned: a device has the values of its key heads. There are two reshapes, as with
    Explicit axes JAX refuses one that both splits and merges.
    """
    *rest, heads, H = pages.shape
    sharding = jax.typeof(pages).sharding
    of_heads, of_columns = (mesh_axes(sharding.spec, pages.ndim - i) for i in (2, 1))
    kept = of_heads
    while heads // 2 % math.prod(map(sharding.mesh.shape.get, kept)):
        kept = kept[:-1]
    if kept != of_heads or of_columns:
        spec = PartitionSpec(*sharding.spec[: pages.ndim - 2], kept or None, None)
        pages = jax.sharding.reshard(pages, NamedSharding(sharding.mesh, spec))
    return pages.reshape(*rest, heads // 2, 2, H).reshape(*rest, heads // 2, 2 * H)


def _heads_apart(pages: jax.Array) -> jax.Array:
    """Pages `(P, page, K, 2 · H)` as `(P, page, 2 · K, H)`."""
    *rest, heads, both = pages.shape
    return pages.reshape(*rest, heads, 2, both // 2).reshape(*rest, 2 * heads, both // 2)


def _letters(operands: CacheOperands) -> Letters:
    """The letters of all arrays. Of these, `b0`, `K` and `N` are partitioned."""
    # Sequences are apart if each has its own place in the cache; or if nothing is written, so that the cache
    # may be everywhere.
    has_own_place = operands.page_table is None and operands.batch_index is None
    b = "b0" if (has_own_place or operands.new_key is None) and operands.query_offsets is None else "B"
    layers = () if operands.layer is None else ("L",)

    def of_layers(name: str) -> tuple[str, ...]:
        x = getattr(operands, name)
        return layers if x is not None and x.ndim == 2 else ()

    columns = "H" if operands.value is not None else "HV"
    place = ("P", "page") if operands.page_table is not None else (b if has_own_place else "C", "S")
    letters = {
        "query": (b, "T", "N", "H"),
        "key": (*layers, *place, "K", columns),
        "value": (*layers, *place, "K", "V"),
        "lengths": (*of_layers("lengths"), b),
        "layer": (),
        "page_table": (b, "W"),
        "batch_index": (b,),
        "left_padding": (b,),
        "new_key": (b, "U", "K", "H"),
        "new_value": (b, "U", "K", "V"),
        "rotary_cos": ("Y", "R"),
        "rotary_sin": ("Y", "R"),
        "alibi_slopes": (b, "N"),
        "sinks": (b, "N"),
        "query_offsets": ("O",),
        "key_descale": (*of_layers("key_descale"), "K"),
        "value_descale": (*of_layers("value_descale"), "K"),
        "batch_indices": (b,),
        "head_indices": (b, "N"),
        **{name: (b, name) for name in operands.captured},
        "out": (b, "T", "N", "V"),
        "lse": (b, "N", "T"),
    }
    return letters | {"key_after": letters["key"], "value_after": letters["value"]}
