"""Whether kernels keep what isn't finite from queries and keys that don't see it.

In products of blocks the zeros of pairs that don't see each other meet whatever the operands hold, and 0
times NaN is NaN. Plain JAX always guards against that. The kernels can guard against it in calls that hide
pairs. By default they don't: by Triton short calls take up to 5% longer with it, and what it costs in the
other kernels isn't measured yet (docs/tuning/).
"""

KERNELS = False
"""A setting for tests and measurements; read when a call is traced."""
