"""`vmap` over an axis of size 0: empty results of the usual shapes."""

import jax
import jax.numpy as jnp
import pytest

import jax_flash
from jax_flash import flash_attention

NONE = jnp.zeros((0, 1, 4, 2, 8))
CUT = jnp.array([0, 3, 4])
CACHE = jax_flash.KVCache.create(1, 8, 2, 8, jnp.float32)

CALLS = {
    "forward": lambda q: flash_attention(q, q, q, is_causal=True, return_residual=True),
    "gradients": jax.grad(lambda q: flash_attention(q, q, q).sum()),
    "8 bits": lambda q: flash_attention(*[q.astype(jnp.bfloat16)] * 3, quantization="fp8"),
    "varlen": lambda q: jax_flash.flash_attention_varlen(
        q[0], q[0], q[0], cu_seqlens_q=CUT, cu_seqlens_kv=CUT, max_seqlen_q=3, max_seqlen_kv=3
    ),
    "key not mapped": lambda q: flash_attention(q, NONE.sum(0), NONE.sum(0)),
    "cache": lambda q: jax_flash.flash_attention_with_cache(q, CACHE)[0],
    "cache with new keys": lambda q: jax_flash.flash_attention_with_cache(q, CACHE, q, q),
    "append": lambda q: CACHE.append(q, q),
}


@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_is_empty(name, is_jitted):
    mapped = jax.vmap(CALLS[name])
    results = (jax.jit(mapped) if is_jitted else mapped)(NONE)
    of_one = jax.eval_shape(CALLS[name], NONE.sum(0))
    for result, one in zip(jax.tree.leaves(results), jax.tree.leaves(of_one), strict=True):
        assert result.shape == (0, *one.shape)
        assert result.dtype == one.dtype
