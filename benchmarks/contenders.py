"""The attention functions that are measured: ours, and every other one that JAX can call.

Each takes query `(B, T, N, H)`, key and value `(B, S, K, H)` and whether to mask causally, and returns
`(B, T, N, H)`. One that isn't installed raises ImportError when called, one that can't do a case whatever
it raises; both are results.
"""

import functools
import importlib.metadata

import jax
import jax.numpy as jnp


def _ours(query, key, value, causal, implementation):
    import jax_flash

    return jax_flash.flash_attention(query, key, value, is_causal=causal, implementation=implementation)


def cudnn(query, key, value, causal):
    return jax.nn.dot_product_attention(query, key, value, is_causal=causal, implementation="cudnn")


def fa3_cu12(query, key, value, causal):
    """FlashAttention-3 by the wheel flash-attn3-jax, which is built for one head dim."""
    import flash_attn3_jax

    if query.shape[-1] != 128:
        raise NotImplementedError(f"built for head dim 128, not {query.shape[-1]}")
    return flash_attn3_jax.flash_mha(query, key, value, is_causal=causal)


def fa3_cu13(query, key, value, causal):
    """FlashAttention-3 by the wheel dew-flash-attn-cu13."""
    import dew_flash_attn

    return dew_flash_attn.flash_mha(query, key, value, is_causal=causal)


def tokamax(query, key, value, causal):
    import tokamax as package

    return package.dot_product_attention(query, key, value, is_causal=causal, implementation="mosaic")


def jax_mgpu(query, key, value, causal):
    """JAX's own example for Hopper in Pallas: float16 alone, and no gradients of causal attention."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    backward_blocks = ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    config = attention_mgpu.TuningConfig(
        block_q=64,
        block_kv=128 if query.shape[-1] <= 128 else 64,
        max_concurrent_steps=2,
        causal=causal,
        **({} if causal else dict.fromkeys(backward_blocks, 64)),
    )
    inputs = (x.astype(jnp.float16) for x in (query, key, value))
    return attention_mgpu.attention(*inputs, config).astype(query.dtype)


OURS = {
    f"jax_flash_{name}": functools.partial(_ours, implementation=name) for name in ("cuda", "pallas", "xla")
}
PEERS = {f.__name__: f for f in (cudnn, fa3_cu12, fa3_cu13, tokamax, jax_mgpu)}
CONTENDERS = {**OURS, **PEERS}

DISTRIBUTIONS = {
    "fa3_cu12": ("flash-attn3-jax",),
    "fa3_cu13": ("dew-flash-attn-cu13",),
    "tokamax": ("tokamax",),
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
}


def versions() -> dict[str, str]:
    """Of every contender that is a distribution of its own and is installed."""
    found = {}
    for name, distributions in DISTRIBUTIONS.items():
        for distribution in distributions:
            try:
                found[name] = f"{distribution} {importlib.metadata.version(distribution)}"
            except importlib.metadata.PackageNotFoundError:
                continue
            break
    return found
