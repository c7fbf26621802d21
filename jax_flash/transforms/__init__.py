"""The transforms of JAX that a call goes through, from the outside in.

`autodiff.py` → `batching.py` → `partitioning.py` → `sharded_sequences.py` → `lowering.py`; each calls the
next one alone. Beside them, `layout.py` has the arithmetic of partitioning, `sequence_layout.py` the choice
of a strategy for sharded sequences, `serialising.py` how a partitioned call is exported, `locations.py` what
is left out of a partitioned program, `varying.py` the types of `shard_map`, and `off_gpu.py` the warning that
a GPU runs plain JAX.
"""
