"""A GPT in Flax NNX whose attention is `jax_flash.flash_attention`.

Letters: `B` batch, `T` sequence length, `N` query heads, `K` key heads, `H` head dim, `D` width. A token is a
byte unless the configuration says otherwise: a vocabulary of 256 entries, and no tokenizer.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

import jax_flash

Cache = TypeVar("Cache")

INITIAL_STDDEV = 0.02
"""Standard deviation of parameters before training."""


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


@jax.custom_vjp
def _in_turn(state: nnx.State, x: jax.Array) -> tuple[nnx.State, jax.Array]:
    """A layer's parameters and input. Their gradients are all computed before those of the layer before.

    XLA may leave those of parameters for the end, and keep what they are computed from, of all layers.
    """
    return state, x


_in_turn.defvjp(
    lambda state, x: ((state, x), None), lambda _, gradients: jax.lax.optimization_barrier(gradients)
)


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


def rotary_angles(positions: jax.Array, head_dim: int) -> jax.Array:
    """The angles of a rotary position embedding: `positions (...)` to float32 `(..., H / 2)`."""
    half = head_dim // 2
    frequency = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return positions.astype(jnp.float32)[..., None] * frequency


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding of `x (B, T, heads, H)` at `positions (T,)`.

    It is computed in float32 and returned in `x`'s dtype.
    """
    angle = rotary_angles(positions, x.shape[-1])[:, None, :]
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x.dtype)


class Block(nnx.Module):
    """One layer: attention and a feed-forward part, each with a norm and a residual connection."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        width = config.width
        # The residual stream sums 2 * layers outputs: scaling each keeps its variance at one layer's (GPT-2).
        stddev, residual_stddev = INITIAL_STDDEV, INITIAL_STDDEV / (2 * config.layers) ** 0.5
        self.config = config
        self.attention_norm = nnx.RMSNorm(width, dtype=config.dtype, rngs=rngs)
        qkv_features = (config.heads + 2 * config.key_heads) * config.head_dim
        self.qkv = _linear(width, qkv_features, stddev, config, rngs)
        self.attention_out = _linear(width, width, residual_stddev, config, rngs)
        self.feed_forward_norm = nnx.RMSNorm(width, dtype=config.dtype, rngs=rngs)
        self.up = _linear(width, 4 * width, stddev, config, rngs)
        self.down = _linear(4 * width, width, residual_stddev, config, rngs)

    def heads(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query `(B, T, N, H)`, key and value `(B, T, K, H)` of `x (B, T, D)`, before rotation."""
        config = self.config
        heads = self.qkv(self.attention_norm(x)).reshape(*x.shape[:2], -1, config.head_dim)
        query, key, value = jnp.split(heads, [config.heads, config.heads + config.key_heads], axis=2)
        return query, key, value

    def output(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """The layer's output, given `attended (B, T, N, H)`."""
        x = x + self.attention_out(attended.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.feed_forward_norm(x))))

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = self.heads(x)
        positions = jnp.arange(x.shape[1])
        attended = self.config.attention(
            rotate(query, positions),
            rotate(key, positions),
            value,
            is_causal=True,
            implementation=self.config.implementation,
        )
        return self.output(x, attended)


class GPT(nnx.Module):
    """Tokens `(B, T)` to logits `(B, T, vocabulary)` in float32."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(
            config.vocabulary,
            config.width,
            embedding_init=nnx.initializers.normal(INITIAL_STDDEV),
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

            if self.config.remat:
                state, x = _in_turn(state, x)
                layer = jax.checkpoint(layer)
            x = layer(state, x)
        return self.logits(x)

    def with_cache(
        self, tokens: jax.Array, cache: Cache, attend: Callable[..., tuple[jax.Array, Cache]]
    ) -> tuple[jax.Array, Cache]:
        """The same layers, which also attend to the keys and values of earlier calls.

        Args:
          tokens: `(B, T)`, those that follow what `cache` holds.
          cache: the keys and values of all layers so far.
          attend: `attend(layer, cache, query, key, value)` adds `key` and `value`, which are not rotated yet,
            to layer number `layer` of the cache. It returns what `query` attends to, `(B, T, N, H)`, and the
            new cache.

        Returns:
          The last layer's output `(B, T, D)`, of which `logits` makes logits, and the new cache.
        """
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            attended, cache = attend(layer, cache, *block.heads(x))
            x = block.output(x, attended)
        return x, cache

    def logits(self, x: jax.Array) -> jax.Array:
        """The last layer's output `(..., D)` to logits `(..., vocabulary)` in float32."""
        return self.embedding.attend(self.norm(x)).astype(jnp.float32)


def mean_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per token of `logits (B, T, vocabulary)` against `targets (B, T)`."""
    log_likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -jnp.mean(log_likelihood)


def generate(
    model: GPT, key: jax.Array, prompt: bytes, length: int, window: int, temperature: float
) -> bytes:
    """`length` bytes that continue `prompt`, sampled at `temperature`.

    The model sees the last `window` bytes, as many as it was trained on. Each new byte recomputes the whole
    window at one fixed shape: as the window slides, all that it holds changes. `generate.py` keeps a cache
    instead. Bytes to the right of the newest one are padding, which causal attention never sees.
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
