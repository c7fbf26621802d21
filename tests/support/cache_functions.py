"""A score_mod for calls on key-value caches of which only shapes are known."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_flash import _function_arguments
from jax_flash._cache_spec import CacheOperands, CacheSpec, cache_sizes


def with_function(spec: CacheSpec, shapes: CacheOperands) -> tuple[CacheSpec, CacheOperands]:
    """The call with a relative-position bias, a table of each head."""
    n = cache_sizes(shapes)
    table = jnp.zeros((n.N, 33))

    def score_mod(score, batch, head, query, key):
        return score + table[head, jnp.clip(query - key, 0, 32)]

    function, _, arrays = _function_arguments.operands(score_mod, None, (n.B,), (n.T, n.S, n.N))
    spec = dataclasses.replace(spec, attention=dataclasses.replace(spec.attention, score_mod=function))
    of_function = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
    return spec, CacheOperands.of(shapes.present() | of_function)
