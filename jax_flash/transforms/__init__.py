"""The transforms of JAX that a call goes through, from the outside in.

`autodiff.py` → `batching.py` → `partitioning.py` → `sharded_sequences.py` → `lowering.py`. Calls on key-value
caches enter by `decoding.py`, which has their `vmap`, and go on with `partitioning.py` and `lowering.py`.

    layout            arithmetic of partitioning
    sequence_layout   choice of a strategy for sharded sequences
    serialising       how a partitioned call is exported
    locations         removes places in Python from a partitioned program
    varying           types under `shard_map`
    saved             what the forward pass saves for the backward pass
    debugging         what `jax_debug_nans` and `jax_debug_infs` check
    off_gpu           the warning that a GPU runs plain JAX
"""
