"""The shapes on which attention is compared. Programs for JAX and for PyTorch share them."""

# Batch, queries and keys, query heads, key heads, head dim; each full and causal.
SHAPES = (
    (4, 4096, 16, 16, 128),
    (1, 16384, 16, 16, 128),
    (4, 4096, 32, 32, 64),
    (4, 4096, 8, 8, 256),
    (4, 4096, 32, 8, 128),
    (16, 1024, 16, 16, 128),
)

FUNCTION_SHAPES = (
    (4, 4096, 16, 16, 128, True),
    (4, 4096, 16, 16, 128, False),
    (4, 4096, 32, 32, 64, True),
    (4, 4096, 8, 8, 256, True),
    (1, 16384, 32, 8, 128, True),
)
"""Those on which functions of scores and masks are: the same, and whether attention is causal."""

FURTHEST = 128
"""The distance beyond which a relative bias is the same."""


def has_one(name: str, texts: str) -> bool:
    """Whether a name has one of the texts, which commas separate. Any name has the empty one."""
    return any(text in name for text in texts.split(","))


def label(batch: int, length: int, heads: int, kv_heads: int, head_dim: int, causal: bool = False) -> str:
    """The name that `calls.Case` gives a case in 16 bits."""
    text = f"b{batch} s{length} h{heads}/{kv_heads} d{head_dim}"
    return f"{text} causal" if causal else text
