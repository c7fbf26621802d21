"""A MaxText-like operation: attention to two caches, merged by their log-sum-exps.

The first cache holds the prompts and is written once; the second holds the tokens that were decoded. Each is
attended to by itself, and neither is copied.
"""

import jax
import jax.numpy as jnp
import numpy as np
import ports
import pytest
import transform_cases as cases
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

B, PROMPT, DECODED, HEADS, KEY_HEADS, H = 4, 12, 6, 4, 2, 8
PROMPT_LENGTHS = np.array([12, 5, 1, 9], np.int32)
DECODED_LENGTHS = np.array([3, 6, 1, 0], np.int32)


def merged(outs, lses):
    """One output of several `(B, T, N, V)`, each of other keys, by their log-sum-exps `(B, T, N)`."""
    lse = jax.nn.logsumexp(jnp.stack(lses), axis=0)
    return sum(out * jnp.exp(part - lse)[..., None] for out, part in zip(outs, lses, strict=True))


def attention_to_two_caches(query, prompt, decoded):
    outs, lses = zip(
        *(
            jax_flash.flash_attention(query, *cache, key_value_seq_lengths=lengths, return_residual=True)
            for cache, lengths in ((prompt, PROMPT_LENGTHS), (decoded, DECODED_LENGTHS))
        ),
        strict=True,
    )
    return merged(outs, lses)


def plain_attention_to_both(query, prompt, decoded):
    key, value = (jnp.concatenate(pair, axis=1) for pair in zip(prompt, decoded, strict=True))
    lengths = (PROMPT, PROMPT_LENGTHS), (DECODED, DECODED_LENGTHS)
    mask = np.concatenate([np.arange(size) < of_row[:, None] for size, of_row in lengths], axis=1)
    return ports.plain_attention(query, key, value, jnp.asarray(mask)[:, None, None])


def arguments(sharding=None):
    prompt = ports.normal(1, B, PROMPT, KEY_HEADS, H), ports.normal(2, B, PROMPT, KEY_HEADS, H)
    decoded = ports.normal(3, B, DECODED, KEY_HEADS, H), ports.normal(4, B, DECODED, KEY_HEADS, H)
    arrays = ports.normal(0, B, 1, HEADS, H), prompt, decoded
    return arrays if sharding is None else jax.device_put(arrays, sharding)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_on_a_mesh(kind):
    """Gradients flow through the log-sum-exps too; a cache without keys takes no part."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        sharded = arguments(NamedSharding(mesh, P("data", None, "model")))
        program = ports.compiled_with_custom_calls(attention_to_two_caches, *sharded)
        assert ports.attention_calls(program) == 4
        assert not any(ports.collectives(program).values())
        actual = ports.value_and_gradients(attention_to_two_caches)(*sharded)
    expected = ports.value_and_gradients(plain_attention_to_both)(*arguments())
    cases.assert_close(actual, expected, tolerance=1e-4)
