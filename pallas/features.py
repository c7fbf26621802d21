"""Options of a call that change its scores, as far as they are static."""

from jax_flash._spec import AttentionSpec, Operands, sizes

OPERANDS = (
    "bias",
    "mask",
    "alibi_slopes",
    "query_seq_lengths",
    "key_value_seq_lengths",
    "query_segment_ids",
    "key_value_segment_ids",
    "dropout_rows",
    "dropout_columns",
    "diagonal",
)
"""The operands that modify or mask scores."""


def names(spec: AttentionSpec, shapes: Operands) -> list[str]:
    """The options that the call has, by the names of its arguments."""
    present = [name for name in (*OPERANDS, "sinks") if getattr(shapes, name) is not None]
    present = [name for name in present if not name.startswith("dropout") and name != "diagonal"]
    static = {
        "logits_soft_cap": spec.logits_soft_cap is not None,
        "dropout_rate": spec.dropout_rate != 0,
        "score_mod": spec.score_mod is not None,
        "block_mask": spec.block_mask is not None,
    }
    return present + [name for name, is_given in static.items() if is_given]


def has_score_mod(spec: AttentionSpec, shapes: Operands) -> bool:
    """Whether scores are modified or masked, other than by position."""
    return any(not name.endswith("_lengths") and name != "sinks" for name in names(spec, shapes))


def loads_of_a_score(spec: AttentionSpec, shapes: Operands) -> tuple[int, int]:
    """How many elements are loaded for each score: of bias and mask, and of arrays that functions look up."""
    functions = (spec.score_mod, None if spec.block_mask is None else spec.block_mask.mask_mod)
    looked_up = sum(function.lookups_of_a_score for function in functions if function is not None)
    return sum(x is not None and min(x.shape[2:]) > 1 for x in (shapes.bias, shapes.mask)), looked_up


def bias_gradient(shapes: Operands) -> str | None:
    """The form of the bias's gradient; None without a bias.

    "scores": each score has a bias of its own, so nothing is summed. "shared": it is summed over the heads or
    batch rows that share the bias. "queries" or "keys": it is first summed over the other of the two.
    """
    if shapes.bias is None:
        return None
    batch, heads, queries, keys = shapes.bias.shape
    if keys == 1:
        return "queries"
    if queries == 1:
        return "keys"
    size = sizes(shapes)
    return "scores" if (batch, heads) == (size.B, size.N) else "shared"
