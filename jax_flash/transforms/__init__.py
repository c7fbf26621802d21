"""The transforms of JAX that a call goes through, from the outside in.

`autodiff.py` → `batching.py` → `partitioning.py` → `lowering.py`; each calls the next one alone.
"""
