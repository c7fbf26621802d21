"""Generation with a `KVCache`: prefill of prompts, decoding token by token, and sampling.

Letters as in gpt.py: `B` batch, `T` sequence length; `K` key heads, `H` head dim.
"""

import dataclasses
import functools

import gpt
import jax
import jax.numpy as jnp
from flax import nnx

import jax_flash
from jax_flash import KVCache


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from logits."""

    temperature: float = 0.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Only the fewest most likely tokens whose probabilities add up to `top_p` can be drawn."""

    def __post_init__(self):
        if not self.temperature >= 0:  # NaN isn't either
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")


GREEDY = Sampling()


def top_p_mask(probabilities: jax.Array, p: float) -> jax.Array:
    """The smallest set of tokens whose probability reaches `p`.

    Args:
      probabilities: `(..., tokens)`, in descending order.
      p: a probability.

    Returns:
      A mask, `(..., tokens)`.
    """
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # The first token is always in the set, whatever rounding does to a small p.
    return (before < p) | (jnp.arange(probabilities.shape[-1]) == 0)


def sample(logits: jax.Array, sampling: Sampling, key: jax.Array) -> jax.Array:
    """Tokens `(B,)` int32 drawn from `logits (B, vocabulary)`."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_p == 1:
        return jax.random.categorical(key, logits).astype(jnp.int32)
    order = jnp.argsort(logits, axis=-1, descending=True)
    logits = jnp.take_along_axis(logits, order, axis=-1)
    is_kept = top_p_mask(jax.nn.softmax(logits), sampling.top_p)
    rank = jax.random.categorical(key, jnp.where(is_kept, logits, -jnp.inf))
    return jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0].astype(jnp.int32)


def empty_cache(config: gpt.GPTConfig, batch: int, max_length: int, dtype: str | None = None) -> KVCache:
    """A cache of all layers, of the model's dtype if no other is given."""
    dtype = dtype or config.dtype
    return KVCache.create(batch, max_length, config.key_heads, config.head_dim, dtype, layers=config.layers)


def _run(
    graph: nnx.GraphDef, parameters: nnx.State, cache: KVCache, tokens: jax.Array
) -> tuple[gpt.GPT, jax.Array, KVCache]:
    """The model, its last layer's output for `tokens (B, T)`, and the cache with their keys and values."""
    model: gpt.GPT = nnx.merge(graph, parameters)
    config, max_length = model.config, cache.key.shape[-3]
    angles = gpt.rotary_angles(jnp.arange(max_length), config.head_dim)
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    def attend(layer: int, cache: KVCache, query: jax.Array, key: jax.Array, value: jax.Array):
        return jax_flash.flash_attention_with_cache(
            query,
            cache,
            key,
            value,
            rotary_cos=cos,
            rotary_sin=sin,
            layer=layer,
            implementation=config.implementation,
        )

    x, cache = model.with_cache(tokens, cache, attend)
    return model, x, cache


@functools.partial(jax.jit, static_argnames=("graph", "sampling"), donate_argnames="cache")
def prefill(
    graph: nnx.GraphDef,
    parameters: nnx.State,
    cache: KVCache,
    prompts: jax.Array,
    lengths: jax.Array,
    sampling: Sampling,
    key: jax.Array,
) -> tuple[KVCache, jax.Array]:
    """Fill an empty cache with prompts and sample the token behind each.

    Args:
      graph, parameters: the model.
      cache: an empty cache; its memory is used again.
      prompts: `(B, T)` int32. What follows a prompt shorter than T may be any tokens.
      lengths: `(B,)` int32, of the prompts.
      sampling, key: how tokens are sampled.

    Returns:
      The cache with the prompts' keys and values, and the new tokens `(B,)`.
    """
    model, x, cache = _run(graph, parameters, cache, prompts)
    # Keys of padding lie beyond the lengths: nothing sees them, and new keys take their place.
    cache = dataclasses.replace(cache, lengths=jnp.broadcast_to(lengths, cache.lengths.shape))
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return cache, sample(model.logits(last), sampling, key)


@functools.partial(jax.jit, static_argnames=("graph", "sampling", "steps"), donate_argnames="cache")
def decode(
    graph: nnx.GraphDef,
    parameters: nnx.State,
    cache: KVCache,
    tokens: jax.Array,
    sampling: Sampling,
    key: jax.Array,
    steps: int,
) -> tuple[KVCache, jax.Array, jax.Array]:
    """`steps` more tokens of each sequence, in one compiled loop that changes the cache in place.

    Args:
      graph, parameters: the model.
      cache: keys and values of all tokens but the last one of each sequence; its memory is used again.
      tokens: `(B,)` int32, the last ones.
      sampling, key: how tokens are sampled.
      steps: how many.

    Returns:
      The cache, the last tokens `(B,)`, and all new ones `(B, steps)`.
    """

    def step(carry: tuple[KVCache, jax.Array], key: jax.Array):
        cache, tokens = carry
        model, x, cache = _run(graph, parameters, cache, tokens[:, None])
        tokens = sample(model.logits(x[:, 0]), sampling, key)
        return (cache, tokens), tokens

    (cache, tokens), new = jax.lax.scan(step, (cache, tokens), jax.random.split(key, steps))
    return cache, tokens, new.T


@functools.partial(jax.jit, static_argnames="graph")
def recompute(graph: nnx.GraphDef, parameters: nnx.State, tokens: jax.Array) -> jax.Array:
    """Logits `(B, T, vocabulary)` of all `tokens (B, T)` without a cache, as in training."""
    return nnx.merge(graph, parameters)(tokens)
