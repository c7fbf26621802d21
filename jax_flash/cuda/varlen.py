"""score_mod of varlen sequences, whose kernels count queries and keys from the first packed token."""

import dataclasses

import jax

from jax_flash import _varlen_unpacking
from jax_flash._spec import AttentionSpec, Operands, captured_name, sizes
from jax_flash.functions.varlen import LOOKED_UP, on_varlen_tokens


def spec_of_tokens(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct]) -> AttentionSpec:
    """The spec as kernels have it, with a score_mod of packed tokens; that of other calls as it is."""
    function, n = spec.score_mod, sizes(shapes)
    if function is None or shapes.query_offsets is None:
        return spec
    return dataclasses.replace(spec, score_mod=on_varlen_tokens(function, n.T, n.S))


def of_varlen_tokens(spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """The same call with a score_mod of packed tokens; a call that needs none as it is."""
    function = spec.score_mod
    if function is None or operands.query_offsets is None:
        return spec, operands
    queries, keys = (axis.places() for axis in _varlen_unpacking.token_axes(spec, operands))
    found = {"batch": queries.sequence, "query": queries.position, "key": keys.position}
    arrays = {
        captured_name("score_mod", number): found[name]
        for number, name in enumerate(LOOKED_UP, len(function.shapes))
    }
    return spec_of_tokens(spec, operands), operands.replace(**arrays)
