"""score_mod of packed sequences, whose kernels count queries and keys from the first packed token."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_flash import _varlen_unpacking
from jax_flash._spec import AttentionSpec, Operands, captured_name, sizes
from jax_flash.functions.packed import PLACES, on_packed_tokens


def of_packed_tokens(spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """The same call with a score_mod of packed tokens; a call that needs none as it is."""
    function = spec.score_mod
    if function is None or operands.query_offsets is None:
        return spec, operands
    n = sizes(operands)
    queries, keys = _varlen_unpacking.token_axes(spec, operands)
    sequences, positions, _ = queries.places()
    places: dict[str, jax.Array] = {"batch": sequences, "query": positions, "key": keys.places()[1]}
    # Tokens of no sequence have indices too, which functions may look up.
    arrays = {
        captured_name("score_mod", number): jnp.maximum(places[name], 0)
        for number, name in enumerate(PLACES, len(function.shapes))
    }
    spec = dataclasses.replace(spec, score_mod=on_packed_tokens(function, n.T, n.S))
    return spec, operands.replace(**arrays)
