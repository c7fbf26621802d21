"""Whether kernels keep what isn't finite from queries and keys that don't see it.

In products of blocks the zeros of pairs that don't see each other meet whatever the operands hold, and 0
times NaN is NaN. Plain JAX always guards against that, and so do the kernels, in calls that hide pairs.
`benchmarks/isolation.py` measures what it costs (docs/tuning/).
"""

KERNELS = True
"""Read when a call is traced. Off for measurements alone."""
