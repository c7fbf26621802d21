"""Programs that decode with a key-value cache, and whether XLA changes that cache in place.

Each program takes and returns the cache first, as donation and loops have it.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash

LAYERS = 3
STEPS = 3


def step(cache, query, key, value, **options):
    """One step of decoding."""
    out, cache = jax_flash.flash_attention_with_cache(query, cache, key, value, **options)
    return cache, out


def over_layers(cache, query, key, value, **options):
    def body(cache, layer):
        return step(cache, query, key, value, layer=layer, **options)

    return jax.lax.scan(body, cache, jnp.arange(LAYERS))


def in_scan(cache, query, key, value, **options):
    def body(cache, _):
        return step(cache, query, key, value, **options)

    return jax.lax.scan(body, cache, None, length=STEPS)


def in_while(cache, query, key, value, **options):
    def body(state):
        i, (cache, _) = state
        return i + 1, step(cache, query, key, value, **options)

    first = (0, (cache, jnp.zeros(query.shape, query.dtype)))
    return jax.lax.while_loop(lambda state: state[0] < STEPS, body, first)[1]


def append(cache, query, key, value):
    return cache.append(key, value), query


def windowed(cache, query, key, value, **options):
    return step(cache, query, key, value, local_window_size=(9, 0), **options)


FORMS = {
    "jit": (step, None),
    "scan": (in_scan, None),
    "while_loop": (in_while, None),
    "scan over layers": (over_layers, LAYERS),
    "window": (windowed, None),
}
"""Programs that attend, and how many layers their cache has."""

UPDATES = ("scatter", "dynamic-update-slice", "dynamic_update_slice")
_IN_PLACE = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", *UPDATES}


def copied(compiled, cache, parts=1) -> list[str]:
    """Instructions that make an array as large as the cache, or a device's part of it, but in place."""
    least = min(x.size for x in jax.tree.leaves(cache) if x.ndim > 3) // parts
    found = []
    for line in compiled.as_text().splitlines():
        match = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = \w+\[([\d,]+)\]\S* ([\w\-]+)\(", line)
        if match and np.prod([int(x) for x in match[2].split(",")]) >= least:
            is_update = match[3] == "fusion" and any(name in match[1] for name in UPDATES)
            if match[3] not in _IN_PLACE and not is_update:
                found.append(line.strip()[:150])
    return found
