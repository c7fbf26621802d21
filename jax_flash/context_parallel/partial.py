"""Results of attention to some of the keys, and how those of several sets of keys become one.

It is the online softmax (https://arxiv.org/abs/1805.02867) over sets of keys: a set with results out and lse
counts as one key with the logit lse and the value out.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jax_flash.context_parallel import sharded
from jax_flash.context_parallel.sharded import Spans
from jax_flash.transforms.varying import vary_over, varying_axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Partial:
    """Attention to the keys that were seen so far, in float32 (float64 for float64 operands)."""

    accumulated: jax.Array  # (*B, T, N, V), the sum of exp(lse - top) * out over the sets of keys
    top: jax.Array  # (*B, N, T), the largest lse
    total: jax.Array  # (*B, N, T), the sum of exp(lse - top)

    @staticmethod
    def of(out: jax.Array, lse: jax.Array) -> "Partial":
        """After the first keys, with these results."""
        sees_nothing = lse == -jnp.inf
        top = jnp.where(sees_nothing, jnp.finfo(lse.dtype).min, lse)
        return Partial(out, top, (~sees_nothing).astype(lse.dtype))

    @staticmethod
    def of_no_keys(query: jax.Array, value_dim: int) -> "Partial":
        *batch, T, N, _ = query.shape
        dtype = jnp.promote_types(query.dtype, jnp.float32)
        rows = (*batch, N, T)
        # The maximum starts finite, so that no -inf meets a -inf in a row that sees nothing.
        top = jnp.full(rows, jnp.finfo(dtype).min, dtype)
        empty = Partial(jnp.zeros((*batch, T, N, value_dim), dtype), top, jnp.zeros(rows, dtype))
        return vary_over(empty, varying_axes(query))

    def combined(self, out: jax.Array, lse: jax.Array) -> "Partial":
        """With the results of attention to other keys."""
        top = jnp.maximum(self.top, lse)
        before, share = jnp.exp(self.top - top), jnp.exp(lse - top)
        accumulated = self.accumulated * _of_rows(before) + out.astype(before.dtype) * _of_rows(share)
        return Partial(accumulated, top, self.total * before + share)

    def results(self, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """out and lse. Sinks `(*B|1, N)` take part in the sum of each row that sees a key."""
        top, total = self.top, self.total
        sees_nothing = total == 0
        if sinks is not None:
            sinks = sinks.astype(top.dtype)[..., None]
            top = jnp.maximum(top, sinks)
            total = total * jnp.exp(self.top - top) + jnp.exp(sinks - top)
        total = jnp.where(sees_nothing, 1, total)
        lse = jnp.where(sees_nothing, -jnp.inf, top + jnp.log(total))
        return self.accumulated * _of_rows(jnp.exp(self.top - top) / total), lse

    def take(self, spans: Spans) -> "Partial":
        """Those of some rows."""
        return Partial(**{name: sharded.take(_AXES_OF[name], x, spans) for name, x in vars(self).items()})

    def put(self, rows: "Partial", spans: Spans) -> "Partial":
        """With others in the place of these rows."""
        new = vars(rows)
        return Partial(
            **{name: sharded.put(_AXES_OF[name], x, new[name], spans) for name, x in vars(self).items()}
        )


_AXES_OF = {"accumulated": "out", "top": "lse", "total": "lse"}
"""A result with the same axes."""


def _of_rows(x: jax.Array) -> jax.Array:
    """`(*B, N, T)` as `(*B, T, N, 1)`, to multiply rows of the output by."""
    return x.swapaxes(-1, -2)[..., None]
