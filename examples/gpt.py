"""A GPT in Flax NNX whose attention is `jax_flash.flash_attention`.

Letters: `B` batch, `T` sequence length, `N` query heads, `K` key heads, `H` head dim, `D` width. A token is a
byte unless the configuration says otherwise: a vocabulary of 256 entries, and no tokenizer.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

import jax_flash


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The size of a model and how it computes.

    Parameters are float32 whatever `dtype` is; activations and attention are in `dtype`, softmax and loss in
    float32. `key_heads < heads` is grouped-query attention. `remat` recomputes each layer in the backward
    pass: less memory for about a third more work. `attention` takes the
    arguments of `jax.nn.dot_product_attention`, which can replace it.
    """

    layers: int
    heads: int
    key_heads: int
    width: int
    dtype: str = "float32"
    implementation: str | None = None
    remat: bool = False
    vocabulary: int = 256
    attention: Callable[..., jax.Array] = jax_flash.flash_attention

    def __post_init__(self):
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width must be an even multiple of heads, got width={self.width}, heads={self.heads}"
            )
        if self.heads % self.key_heads:
            raise ValueError(f"heads must be a multiple of key_heads, got {self.heads} and {self.key_heads}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def _linear(
    features_in: int, features_out: int, stddev: float, config: GPTConfig, rngs: nnx.Rngs
) -> nnx.Linear:
    return nnx.Linear(
        features_in,
        features_out,
        use_bias=False,
        kernel_init=nnx.initializers.normal(stddev),
        dtype=config.dtype,
        rngs=rngs,
    )


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of `x (B, T, heads, H)`, in float32, returned in `x`'s dtype."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequency
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x.dtype)


class Block(nnx.Module):
    """One layer: attention and a feed-forward part, each with a norm and a residual connection."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        width = config.width
        # The residual stream sums 2 * layers outputs: scaling each keeps its variance at one layer's (GPT-2).
        stddev, residual_stddev = 0.02, 0.02 / (2 * config.layers) ** 0.5
        self.config = config
        self.attention_norm = nnx.RMSNorm(width, dtype=config.dtype, rngs=rngs)
        qkv_features = (config.heads + 2 * config.key_heads) * config.head_dim
        self.qkv = _linear(width, qkv_features, stddev, config, rngs)
        self.attention_out = _linear(width, width, residual_stddev, config, rngs)
        self.feed_forward_norm = nnx.RMSNorm(width, dtype=config.dtype, rngs=rngs)
        self.up = _linear(width, 4 * width, stddev, config, rngs)
        self.down = _linear(4 * width, width, residual_stddev, config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        heads = self.qkv(self.attention_norm(x)).reshape(*x.shape[:2], -1, config.head_dim)
        query, key, value = jnp.split(heads, [config.heads, config.heads + config.key_heads], axis=2)
        attended = config.attention(
            rotate(query), rotate(key), value, is_causal=True, implementation=config.implementation
        )
        x = x + self.attention_out(attended.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.feed_forward_norm(x))))


class GPT(nnx.Module):
    """Tokens `(B, T)` to logits `(B, T, vocabulary)` in float32."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(
            config.vocabulary,
            config.width,
            embedding_init=nnx.initializers.normal(0.02),
            dtype=config.dtype,
            rngs=rngs,
        )

        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens)
        for block in self.blocks:
            graph, state = nnx.split(block)

            def layer(state: nnx.State, x: jax.Array, graph: nnx.GraphDef = graph) -> jax.Array:
                return nnx.merge(graph, state)(x)

            x = (jax.checkpoint(layer) if self.config.remat else layer)(state, x)
        return self.embedding.attend(self.norm(x)).astype(jnp.float32)


def mean_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per token of `logits (B, T, vocabulary)` against `targets (B, T)`."""
    log_likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -jnp.mean(log_likelihood)


def generate(
    model: GPT, key: jax.Array, prompt: bytes, length: int, window: int, temperature: float
) -> bytes:
    """`length` bytes that continue `prompt`, sampled at `temperature`.

    The model sees the last `window` bytes. Each new byte recomputes the whole window at one fixed shape. That
    costs more than a cache of keys and values, but needs no second code path through the model. Bytes to the
    right of the newest one are padding, which causal attention never sees.
    """
    graph, parameters = nnx.split(model)

    @jax.jit
    def run(parameters: nnx.State, tokens: jax.Array, count: jax.Array, keys: jax.Array) -> jax.Array:
        def step(carry: tuple[jax.Array, jax.Array], key: jax.Array):
            tokens, count = carry
            logits = nnx.merge(graph, parameters)(tokens[None])[0, count - 1]
            new = jax.random.categorical(key, logits / temperature)
            full = count == window
            tokens = jnp.where(full, jnp.roll(tokens, -1), tokens)
            count = jnp.where(full, count, count + 1)
            return (tokens.at[count - 1].set(new), count), new

        return jax.lax.scan(step, (tokens, count), keys)[1]

    prompt = prompt[-window:]
    tokens = jnp.zeros(window, jnp.int32).at[: len(prompt)].set(jnp.asarray(list(prompt), jnp.int32))
    return bytes(run(parameters, tokens, jnp.asarray(len(prompt)), jax.random.split(key, length)).tolist())
