"""Results of attention to some of the keys, and how those of two sets of keys become one."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_flash.transforms.varying import vary_over, varying_axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Partial:
    """Attention to the keys that were seen so far, in float32 (float64 for float64 operands)."""

    out: jax.Array  # (*B, T, N, V)
    lse: jax.Array  # (*B, N, T); -inf where no key was seen

    @staticmethod
    def of_no_keys(query: jax.Array, value_dim: int) -> "Partial":
        *batch, T, N, _ = query.shape
        dtype = jnp.promote_types(query.dtype, jnp.float32)
        empty = Partial(jnp.zeros((*batch, T, N, value_dim), dtype), jnp.full((*batch, N, T), -jnp.inf, dtype))
        return vary_over(empty, varying_axes(query))

    def merged(self, out: jax.Array, lse: jax.Array) -> "Partial":
        """With the results of attention to other keys."""
        total = jnp.logaddexp(self.lse, lse)
        return Partial(
            self.out * _share(self.lse, total) + out.astype(self.out.dtype) * _share(lse, total), total
        )

    def with_sinks(self, sinks: jax.Array) -> "Partial":
        """With a logit `(*B|1, N)` that takes part in the sum of each row that sees a key."""
        sinks = sinks.astype(self.lse.dtype)[..., None]
        total = jnp.where(jnp.isneginf(self.lse), -jnp.inf, jnp.logaddexp(self.lse, sinks))
        return Partial(self.out * _share(self.lse, total), total)


def _share(lse: jax.Array, total: jax.Array) -> jax.Array:
    """The share of a row's sum `exp(total)` that `exp(lse)` is, as `(*B, T, N, 1)`."""
    share = jnp.where(jnp.isneginf(lse), 0, jnp.exp(lse - total))
    return share.swapaxes(-1, -2)[..., None]
