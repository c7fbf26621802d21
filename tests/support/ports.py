"""What the tests in `ports/` share: plain attention, and how a port is compared with it.

A port is a model or an operation as users have it, written twice: with plain attention and with this package.
"""

from collections import Counter
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import transform_cases as cases

from jax_flash import _dispatch

cases.sys.modules["jax_flash.opaque"].supports = lambda *_: None


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def plain_attention(query, key, value, mask):
    """Attention by its definition: `query (B, T, N, H)`, `key (B, S, K, H)`, `mask (B|1, 1, T, S)`."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(mask, logits, -jnp.inf)), value)


def near(length, window):
    """The mask `(1, 1, length, length)` of a causal window: each query sees so many keys before its own."""
    i, j = np.ogrid[:length, :length]
    return jnp.asarray((j <= i) & (j >= i - window))[None, None]


def value_and_gradients(function):
    """`function` with its gradients: the result, and those of the sum of its sines for every argument."""

    @jax.jit
    def run(*arguments):
        out, pullback = jax.vjp(function, *arguments)
        return out, pullback(jax.tree.map(jnp.sin, out))

    return run


def compiled(function, *arguments):
    return value_and_gradients(function).lower(*arguments).compile()


def compiled_with_custom_calls(function, *arguments):
    """The compiled program, as text, in which attention is a custom call, as kernels are.

    Otherwise the compiler could partition attention by itself, and hide that nothing else did.
    """
    with mock.patch.object(_dispatch, "IMPLEMENTATIONS", ("opaque",)):
        return compiled(function, *arguments).as_text()


def attention_calls(program):
    """How many forward and backward passes the program has; a loop's body counts once."""
    return program.count('custom_call_target="opaque"')


def collectives(program):
    """How often each operation by which the program moves data between devices is in it."""
    names = [name for name in cases.COLLECTIVES if name != "dynamic-slice"]
    return Counter({name: program.count(f" {name}(") for name in names})


def assert_alike(ours, plain, *arguments):
    """Ours has the result and the gradients of plain attention.

    It moves data by no more operations of each kind, and gathers nothing.
    """
    expected = compiled(plain, *arguments)
    cases.assert_close(compiled(ours, *arguments)(*arguments), expected(*arguments), tolerance=1e-4)
    program = compiled_with_custom_calls(ours, *arguments)
    assert attention_calls(program) > 0
    moves, allowed = collectives(program), collectives(expected.as_text())
    assert moves <= allowed and not moves["all-gather"], (moves, allowed)
