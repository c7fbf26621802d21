"""What kernels find in memory that they have not written."""

import jax
import jax.numpy as jnp


def poison(nbytes: int) -> None:
    """Leaves NaN in the memory that the next computation is likely to get.

    JAX's allocator hands freed blocks out again: large ones are split from the end that was freed
    last, small ones are reused as they are.
    """
    sizes = [max(nbytes, 1 << 26)] + [max(nbytes >> shift, 256) for shift in range(4) for _ in range(3)]
    jax.block_until_ready([jnp.full(size // 4, jnp.nan, jnp.float32) for size in sizes])
