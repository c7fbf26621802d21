"""Calls with functions of users, and what they must give: computed from the functions themselves, over whole
arrays, by plain JAX."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from seeds import seed_of

import jax_flash

FLOAT32 = float(jnp.finfo(jnp.float32).eps)
B, N, K = 2, 4, 2
T, S, H, V = 150, 170, 32, 16


def soft_cap(cap):
    return lambda score, b, h, q, k: cap * jnp.tanh(score / cap)


def alibi(slopes):
    return lambda score, b, h, q, k: score - slopes[h].astype(score.dtype) * jnp.abs(q - k) * 0.05


def relative_position(table):
    return lambda score, b, h, q, k: score + table[h, jnp.clip(q - k, -8, 8) + 8]


def of_rows(scales, shared):
    return lambda score, b, h, q, k: score * jax.nn.sigmoid(scales[b, q]) + shared * (k % 8)


def documents(embedding, gates):
    def function(score, b, h, q, k):
        own, other = (q + b) % 4, (k // 3) % 4
        near = embedding[own] @ embedding[other]
        return jnp.where(own == other, score + near, score * gates[own, other])

    return function


def hides(table):
    return lambda score, b, h, q, k: jnp.where(q < k, -jnp.inf, score + table[k % 5])


def alone(table):
    return lambda score, b, h, q, k: table[h, k % 7]


SCORE_MODS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "soft_cap": (soft_cap, ((),)),
    "alibi": (alibi, ((N,),)),
    "relative_position": (relative_position, ((N, 17),)),
    "of_rows": (of_rows, ((B, T), ())),
    "documents": (documents, ((4, 3), (4, 4))),
    "hides": (hides, ((5,),)),
    "alone": (alone, ((N, 7),)),
}
"""What makes each from arrays, and the shapes of these."""

IDS = np.sort(np.random.default_rng(0).integers(0, 4, (B, max(T, S))), axis=-1).astype(np.int32)
MASK_MODS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "causal": (lambda b, h, q, k: q >= k, 1, 1),
    "window": (lambda b, h, q, k: (q >= k) & (q - k < 40), 1, 1),
    "documents": (lambda b, h, q, k: jnp.asarray(IDS)[b, q] == jnp.asarray(IDS)[b, k], B, 1),
    "of heads": (lambda b, h, q, k: jnp.abs(q - k) <= 10 * h, 1, N),
    "of both": (lambda b, h, q, k: (k + b) % (h + 2) == 0, B, N),
    "nothing": (lambda b, h, q, k: k < 0, 1, 1),
    "few rows": (lambda b, h, q, k: (q > 120) & (k < 3), 1, 1),
}
"""Each with the batch rows and heads for which it differs."""


@dataclasses.dataclass(frozen=True)
class Case:
    score_mod: str | None = None
    mask_mod: str | None = None
    dtype: str = "float32"
    captured_dtype: str = "float32"
    block_size: Any = 32
    others: tuple[str, ...] = ()  # further options, of those that `options` knows

    def __str__(self):
        parts = [
            self.score_mod,
            self.mask_mod,
            self.dtype,
            self.captured_dtype,
            self.block_size,
            *self.others,
        ]
        return "-".join(str(x) for x in parts if x).replace(" ", "_")

    def inputs(self) -> dict[str, Any]:
        """Arrays by name; those that score_mod captures as a tuple, under its name."""
        generator = np.random.default_rng(seed_of(self))

        def normal(shape, dtype=self.dtype):
            return jnp.asarray(generator.standard_normal(shape), dtype)

        arrays: dict[str, Any] = {
            "query": normal((B, T, N, H)),
            "key": normal((B, S, K, H)),
            "value": normal((B, S, K, V)),
        }
        shapes = SCORE_MODS[self.score_mod][1] if self.score_mod else ()
        arrays["captured"] = tuple(normal(shape, self.captured_dtype) for shape in shapes)
        if "bias" in self.others:
            arrays["bias"] = normal((N, T, S))
        return arrays

    def options(self) -> dict[str, Any]:
        """The other arguments of the call."""
        options: dict[str, Any] = {}
        if "lengths" in self.others:
            options["query_seq_lengths"] = np.array([T, 71], np.int32)
            options["key_value_seq_lengths"] = np.array([53, S], np.int32)
        if "is_causal" in self.others:
            options["is_causal"] = True
        if "cap" in self.others:
            options["logits_soft_cap"] = 2.0
        if "sinks" in self.others:
            options["sinks"] = np.linspace(-1, 1, N, dtype=np.float32)
        if "dropout" in self.others:
            options |= {"dropout_rate": 0.3, "dropout_key": jax.random.key(5)}
        return options

    def block_mask(self):
        if self.mask_mod is None:
            return None
        function, rows, heads = MASK_MODS[self.mask_mod]
        return jax_flash.create_block_mask(function, rows, heads, T, S, block_size=self.block_size)

    def score(self, captured):
        return SCORE_MODS[self.score_mod][0](*captured) if self.score_mod else None

    def attend(self, inputs, block_mask, **others):
        """The call; `captured` apart, as the function has them."""
        arrays = dict(inputs)
        score_mod = self.score(arrays.pop("captured"))
        return jax_flash.flash_attention(
            **arrays,
            **self.options(),
            score_mod=score_mod,
            block_mask=block_mask,
            return_residual=True,
            **others,
        )

    def expected(self, inputs, dtype, shift=0):
        """out and lse by the functions' own values for all pairs, in float32 or float64.

        `shift` is added to the logits.
        """
        query, key, value = (inputs[name].astype(dtype) for name in ("query", "key", "value"))
        key, value = (jnp.repeat(x, N // K, axis=2) for x in (key, value))
        options = self.options()
        x = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest") * H**-0.5
        if "cap" in self.others:
            x = 2 * jnp.tanh(x / 2)
        pairs = [jnp.asarray(i, jnp.int32) for i in np.ogrid[:B, :N, :T, :S]]
        pairs = jnp.broadcast_arrays(*pairs)
        if self.score_mod:
            captured = inputs["captured"]  # whose dtype the function computes in, but for the definition
            x = self.modified(
                x, pairs, [x.astype(dtype) for x in captured] if dtype == jnp.float64 else captured
            )
        if "bias" in self.others:
            x = x + inputs["bias"].astype(dtype)
        x = x + shift
        batch, _, rows, columns = pairs
        sees = jnp.ones(x.shape, bool)
        if self.mask_mod:
            function, count, _ = MASK_MODS[self.mask_mod]
            for _ in range(4):
                function = jax.vmap(function)
            sees &= function(*(pairs[:2] if count > 1 else (batch * 0, pairs[1])), rows, columns)
        lengths = (
            options.get("query_seq_lengths", np.full(B, T)),
            options.get("key_value_seq_lengths", np.full(B, S)),
        )
        lengths = [jnp.asarray(n)[:, None, None, None] for n in lengths]
        sees &= (rows < lengths[0]) & (columns < lengths[1])
        if "is_causal" in self.others:
            sees &= columns <= rows + lengths[1] - lengths[0]
        x = jnp.where(sees, x, -jnp.inf)
        is_empty = jnp.all(jnp.isneginf(x), -1)
        top = jnp.where(is_empty, 0, jax.lax.stop_gradient(x.max(-1)))[..., None]
        e = jnp.where(jnp.isneginf(x), 0, jnp.exp(jnp.where(jnp.isneginf(x), 0, x - top)))
        total = e.sum(-1)
        if "sinks" in self.others:
            total = total + jnp.exp(options["sinks"][:, None] - top[..., 0])
        lse = jnp.where(is_empty, -jnp.inf, top[..., 0] + jnp.log(jnp.where(is_empty, 1, total)))
        p = e / jnp.where(is_empty, 1, total)[..., None]
        if "dropout" in self.others:
            kept = jax_flash.dropout_mask(options["dropout_key"], 0.3, (B, N, T, S))
            p = p * kept / (1 - round(0.3 * 2**15) / 2**15)
        out = jnp.einsum(
            "bnts,bsnv->btnv", p.astype(self.dtype).astype(dtype) if dtype == jnp.float32 else p, value
        )
        return out, lse.swapaxes(1, 2)

    def modified(self, x, pairs, captured):
        """Scores after score_mod."""
        function = self.score(tuple(captured))
        for _ in range(4):
            function = jax.vmap(function)
        return function(x, *pairs)

    def cotangents(self):
        generator = np.random.default_rng(1)
        d_out = jnp.asarray(generator.standard_normal((B, T, N, V)), self.dtype)
        return d_out, jnp.asarray(generator.standard_normal((B, T, N)), jnp.float32)


def with_gradients(attend, inputs, cotangents, **options):
    """out, lse and gradients of all inputs, as NumPy arrays. A row's lse of -inf has no cotangent.

    `options` are those of `jax.jit`.
    """

    @functools.partial(jax.jit, **options)
    def run(inputs, cotangents):
        (out, lse), vjp = jax.vjp(attend, inputs)
        d_out, d_lse = (x.astype(y.dtype) for x, y in zip(cotangents, (out, lse), strict=True))
        (gradients,) = vjp((d_out, d_lse))
        return {"out": out, "lse": lse, **gradients}

    return jax.tree.map(np.asarray, run(inputs, cotangents))


# How yardsticks are compiled, on the CPU: at once, as each runs only once, and with all roundings to 16 bits.
YARDSTICK = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}


@functools.partial(jax.jit, static_argnums=0, compiler_options=YARDSTICK)
def _sizes_of_sums(case, inputs, cotangents, signs):
    """Of the gradients of captured arrays: the root of the sum of the terms' squares, in float64.

    A sum of the terms with random signs has that standard deviation.
    """
    shift = jnp.zeros((B, N, T, S), jnp.float64)
    (out, lse), vjp = jax.vjp(lambda shift: case.expected(inputs, jnp.float64, shift), shift)
    (dx,) = vjp(tuple(x.astype(y.dtype) for x, y in zip(cotangents, (out, lse), strict=True)))
    key = jnp.repeat(inputs["key"], N // K, axis=2)
    x = jnp.einsum("btnh,bsnh->bnts", inputs["query"], key, precision="highest") * H**-0.5
    x = 2 * jnp.tanh(x / 2) if "cap" in case.others else x
    pairs = jnp.broadcast_arrays(*(jnp.asarray(i, jnp.int32) for i in np.ogrid[:B, :N, :T, :S]))
    _, vjp = jax.vjp(lambda captured: case.modified(x, pairs, captured), inputs["captured"])
    (drawn,) = jax.lax.map(lambda signs: vjp(dx * signs), signs)
    return [jnp.sqrt(jnp.mean(jnp.square(x), axis=0)) for x in drawn]


def check(case: Case, got, inputs, cotangents):
    """Compares a run with the definition in float64. Its error may be twice that of plain attention in the
    same dtype, and some roundings."""
    inputs, cotangents = jax.tree.map(np.asarray, (inputs, cotangents))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: x.astype(np.float64), inputs)
            definition = functools.partial(case.expected, dtype=jnp.float64)
            right = with_gradients(definition, wide, cotangents, compiler_options=YARDSTICK)
            sums = {}
            if inputs["captured"]:
                signs = np.random.default_rng(2).choice(np.array([-1, 1], np.int8), (8, B, N, T, S))
                sizes = _sizes_of_sums(case, wide, cotangents, signs)
                sums = {f"['captured'][{i}]": np.asarray(x) for i, x in enumerate(sizes)}
        plainly = functools.partial(case.expected, dtype=jnp.float32)
        plain = with_gradients(plainly, inputs, cotangents, compiler_options=YARDSTICK)
    unit = float(jnp.finfo(case.dtype).eps)
    names = jax.tree_util.tree_flatten_with_path(right)[0]
    for (path, expected), found, yardstick in zip(names, *map(jax.tree.leaves, (got, plain)), strict=True):
        name = jax.tree_util.keystr(path)
        assert found.shape == expected.shape, name
        assert np.array_equal(np.isneginf(found), np.isneginf(expected)), name
        found, expected, yardstick = (
            np.where(np.isneginf(x), 0, x).astype(np.float64) for x in (found, expected, yardstick)
        )
        assert np.all(np.isfinite(found)), name
        error, size = np.linalg.norm(found - expected), np.linalg.norm(expected)
        if name in sums:  # whose terms cancel
            size = np.linalg.norm(sums[name])
        allowed = 2 * np.linalg.norm(yardstick - expected) + (2 * unit + 8 * FLOAT32) * size
        assert error <= allowed, f"{name}: error {error:.3g} over {allowed:.3g}, of norm {size:.3g}"
