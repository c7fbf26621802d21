"""What a call does to scores beyond scale and window, as far as that is static."""

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
)
"""Of a call, those that kernels need in order to know what becomes of a score."""


def names(spec: AttentionSpec, shapes: Operands) -> list[str]:
    """All that there is, as arguments of a call are named."""
    there = [name for name in (*OPERANDS, "sinks") if getattr(shapes, name) is not None]
    cap = ["logits_soft_cap"] if spec.logits_soft_cap is not None else []
    dropout = ["dropout_rate"] if spec.dropout_rate else []
    return [name for name in there if not name.startswith("dropout")] + cap + dropout


def changes_scores(spec: AttentionSpec, shapes: Operands) -> bool:
    """Whether anything happens to scores besides what bounds the loops over them."""
    return any(not name.endswith("_lengths") and name != "sinks" for name in names(spec, shapes))


def loads_tiles(shapes: Operands) -> bool:
    """Whether an operand has a number for each score."""
    return any(x is not None and min(x.shape[2:]) > 1 for x in (shapes.bias, shapes.mask))


def bias_gradient(shapes: Operands) -> str | None:
    """What the bias's gradient is to be summed over: nothing, as there is a bias for each of the scores
    ("scores"), heads or batch rows that share it ("shared"), or keys or queries first ("queries" and "keys",
    which are what is left then)."""
    if shapes.bias is None:
        return None
    batch, heads, queries, keys = shapes.bias.shape
    if keys == 1:
        return "queries"
    if queries == 1:
        return "keys"
    size = sizes(shapes)
    return "scores" if (batch, heads) == (size.B, size.N) else "shared"
