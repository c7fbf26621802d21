"""Whether kernels keep what isn't finite from queries and keys that don't see it.

In products of blocks the zeros of pairs that don't see each other meet whatever the operands hold, and 0
times NaN is NaN. Plain JAX always guards against that, and so do the kernels, in calls that hide pairs.
`benchmarks/isolation.py` measures what it costs (docs/tuning/).
"""

import jax.numpy as jnp

from jax_flash._spec import Operands

KERNELS = True
"""Read when a call is traced. Off for measurements alone."""


def with_finite_values(operands: Operands) -> Operands:
    """The operands with 0 for what isn't finite in values, and NaN for the keys of such values.

    A query that sees such a key finds NaN among its logits, and to others the key is nothing.
    """
    is_finite = jnp.isfinite(operands.value)
    of_finite = jnp.all(is_finite, -1, keepdims=True)
    return operands.replace(
        key=jnp.where(of_finite, operands.key, jnp.full_like(operands.key, jnp.nan)),
        value=jnp.where(is_finite, operands.value, jnp.zeros_like(operands.value)),
    )
