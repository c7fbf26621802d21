"""The attention functions that are measured: ours, and every other one that JAX can call.

Each takes query `(B, T, N, H)`, key and value `(B, S, K, H)`, `causal` (aligned to the last key) and `window`
(how many keys a causal query sees at most, its own included), and returns `(B, T, N, H)`. A contender that
isn't installed raises ImportError when it is called; one that can't do a case raises something. Either error
is a result. Variants of ours are measured only beside ours; the one with the residual returns that too.
"""

import functools
import importlib
import importlib.metadata

import jax
import jax.numpy as jnp


def _ours(query, key, value, causal, window=None, *, implementation, package="jax_flash", **options):
    attention = functools.partial(importlib.import_module(package).flash_attention, **options)
    return _called_as_jax_nn(attention, implementation, query, key, value, causal, window)


def cudnn(query, key, value, causal, window=None):
    _refuse_alignment_to_the_first_key(query, key, causal)
    return _called_as_jax_nn(jax.nn.dot_product_attention, "cudnn", query, key, value, causal, window)


def fa3_cu12(query, key, value, causal, window=None):
    """FlashAttention-3 as flash-attn3-jax builds it: for CUDA 12, and one head dim."""
    import flash_attn3_jax

    if query.shape[-1] != 128:
        raise NotImplementedError(f"built for head dim 128, not {query.shape[-1]}")
    return flash_attn3_jax.flash_mha(query, key, value, **_fa3_mask(causal, window))


def fa3_cu13(query, key, value, causal, window=None):
    """FlashAttention-3 as dew-flash-attn builds it, for CUDA 13."""
    import dew_flash_attn

    return dew_flash_attn.flash_mha(query, key, value, **_fa3_mask(causal, window))


def tokamax(query, key, value, causal, window=None):
    import tokamax as package

    _refuse_alignment_to_the_first_key(query, key, causal)
    return _called_as_jax_nn(package.dot_product_attention, "mosaic", query, key, value, causal, window)


def jax_mgpu(query, key, value, causal, window=None):
    """JAX's own example for Hopper in Pallas: float16 alone, no scale, no gradients of causal attention."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    if window is not None:
        raise NotImplementedError("it has no windows")
    _refuse_alignment_to_the_first_key(query, key, causal)
    block_kv, steps = 128 if query.shape[-1] <= 128 else 64, 2
    if key.shape[1] < steps * block_kv:
        raise NotImplementedError(f"it loads {steps} blocks of {block_kv} keys ahead, of {key.shape[1]}")
    backward_blocks = ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    config = attention_mgpu.TuningConfig(
        block_q=64,
        block_kv=block_kv,
        max_concurrent_steps=steps,
        causal=causal,
        **({} if causal else dict.fromkeys(backward_blocks, 64)),
    )
    inputs = (x.astype(jnp.float16) for x in (query, key, value))
    return attention_mgpu.attention(*inputs, config).astype(query.dtype)


def jax_triton(query, key, value, causal, window=None):
    """JAX's own in Pallas by the Triton lowering; ours goes that way where JAX_FLASH_PALLAS is "triton"."""
    from jax.experimental.pallas.ops.gpu import attention

    if window is not None:
        raise NotImplementedError("it has no windows")
    if query.shape[2] != key.shape[2]:
        raise NotImplementedError("it has no grouped heads")
    _refuse_alignment_to_the_first_key(query, key, causal)
    return attention.mha(query, key, value, None, sm_scale=query.shape[-1] ** -0.5, causal=causal)


def _called_as_jax_nn(attention, implementation, query, key, value, causal, window):
    return attention(
        query,
        key,
        value,
        is_causal=causal,
        local_window_size=_left_and_right(window),
        implementation=implementation,
    )


def _left_and_right(window):
    return None if window is None else (window - 1, 0)


def _fa3_mask(causal, window):
    """FA3 takes a window in place of causality: its causal kernels have no left side."""
    if window is None:
        return {"is_causal": causal}
    return {"is_causal": False, "window_size": _left_and_right(window)}


def _refuse_alignment_to_the_first_key(query, key, causal):
    if causal and query.shape[1] != key.shape[1]:
        raise NotImplementedError("its causal mask is aligned to the first key")


OURS = {
    f"jax_flash_{name}": functools.partial(_ours, implementation=name) for name in ("cuda", "pallas", "xla")
}
PEERS = {f.__name__: f for f in (cudnn, fa3_cu12, fa3_cu13, tokamax, jax_mgpu, jax_triton)}
BEFORE = {  # an earlier version of ours, where before.py has installed it
    f"jax_flash_before{suffix}": functools.partial(
        _ours, implementation="cuda", package="jax_flash_before", **options
    )
    for suffix, options in (("", {}), ("_deterministic", {"deterministic": True}))
}
CONTENDERS = {**OURS, **PEERS}
VARIANTS = {
    **BEFORE,
    "deterministic": functools.partial(_ours, implementation="cuda", deterministic=True),
    "with_residual": functools.partial(_ours, implementation="cuda", return_residual=True),
}
UNSCALED = ("jax_mgpu",)  # what these return is not comparable with the others' results

DISTRIBUTIONS = {
    "fa3_cu12": ("flash-attn3-jax",),
    "fa3_cu13": ("dew-flash-attn-cu13",),
    "tokamax": ("tokamax",),
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
}


def versions() -> dict[str, str]:
    """The version of every contender that is a package of its own and is installed."""
    found = {}
    for name, distributions in DISTRIBUTIONS.items():
        for distribution in distributions:
            try:
                found[name] = f"{distribution} {importlib.metadata.version(distribution)}"
            except importlib.metadata.PackageNotFoundError:
                continue
            break
    return found
