"""Whether kernels keep what isn't finite from queries and keys that don't see it.

In products of blocks the zeros of pairs that don't see each other meet whatever the operands hold, and 0
times NaN is NaN. Plain JAX always guards against that. The kernels can in calls that hide pairs. They don't
by default, as it isn't measured what that costs, but by Triton, where short calls take up to 5% longer
(docs/tuning/).
"""

KERNELS = False
"""A setting for tests and measurements; read when a call is traced."""
