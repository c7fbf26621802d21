"""The shapes on which attention is compared, each full and causal."""

# Batch, queries and keys, query heads, key heads, head dim.
SHAPES = (
    (4, 4096, 16, 16, 128),
    (1, 16384, 16, 16, 128),
    (4, 4096, 32, 32, 64),
    (4, 4096, 8, 8, 256),
    (4, 4096, 32, 8, 128),
    (16, 1024, 16, 16, 128),
)
