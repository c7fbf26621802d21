"""What backward passes share, each against its definition in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import _gradients

B, T, N, V, S = 2, 7, 3, 5, 11


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def draw():
    return np.random.default_rng(0).standard_normal


@pytest.mark.parametrize("has_d_lse", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_lse_and_delta(draw, dtype, has_d_lse):
    out, d_out = draw((B, T, N, V)), draw((B, T, N, V))
    lse, d_lse = draw((B, N, T)), draw((B, N, T)) if has_d_lse else None
    lse[1, 2, 3] = -np.inf
    d_out[1, 3, 2] = np.inf  # out is 0 there, and 0 * inf is no number
    out[1, 3, 2] = 0
    expected = np.zeros((B, N, T))
    for b, n, t in np.ndindex(B, N, T):
        if (b, n, t) != (1, 2, 3):
            expected[b, n, t] = out[b, t, n] @ d_out[b, t, n] - (d_lse[b, n, t] if has_d_lse else 0)
    got_lse, delta = _gradients.lse_and_delta(*map(jnp.asarray, (out, lse, d_out)), d_lse, dtype)
    assert got_lse.dtype == delta.dtype == dtype
    tolerance = 10 * jnp.finfo(dtype).eps
    np.testing.assert_allclose(delta, expected, atol=tolerance)
    lse[1, 2, 3] = np.inf
    np.testing.assert_allclose(got_lse, lse, rtol=tolerance)


def test_delta_of_16_bits_is_summed_in_float32(draw):
    out, d_out = (jnp.asarray(draw((1, 1, 1, 4096)), jnp.bfloat16) for _ in range(2))
    _, delta = _gradients.lse_and_delta(out, jnp.zeros((1, 1, 1)), d_out, None)
    expected = np.sum(np.asarray(out, np.float64) * np.asarray(d_out, np.float64))
    np.testing.assert_allclose(delta, np.full((1, 1, 1), expected), rtol=1e-5)


@pytest.mark.parametrize("rows", [1, B])
def test_gradient_of_sinks_is_that_of_the_softmax(draw, rows):
    logits, value = jnp.asarray(draw((B, N, T, S))), jnp.asarray(draw((B, N, S, V)))
    d_out, d_lse = jnp.asarray(draw((B, T, N, V))), jnp.asarray(draw((B, N, T)))
    sinks = jnp.asarray(draw((rows, N)))

    def attend(sinks):
        every = jnp.broadcast_to(sinks, (B, N))[:, :, None, None] + jnp.zeros((B, N, T, 1))
        lse = jax.nn.logsumexp(jnp.concatenate([logits, every], -1), axis=-1)
        return jnp.einsum("bnts,bnsv->btnv", jnp.exp(logits - lse[..., None]), value), lse

    (out, lse), vjp = jax.vjp(attend, sinks)
    (expected,) = vjp((d_out, d_lse))
    lse, delta = _gradients.lse_and_delta(out, lse, d_out, d_lse, jnp.float64)
    got = _gradients.of_sinks(sinks, lse, delta)
    assert got.shape == sinks.shape and got.dtype == sinks.dtype
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_a_row_that_sees_nothing_gives_its_sink_no_gradient():
    lse, delta = jnp.full((1, 1, 2), jnp.inf), jnp.zeros((1, 1, 2))
    np.testing.assert_array_equal(_gradients.of_sinks(jnp.ones((1, 1)), lse, delta), [[0]])


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 1, 5), (1, 1, 1, 1), (2, 3, 4, 1)])
def test_sum_to_is_the_transpose_of_broadcasting(draw, shape):
    gradient = jnp.asarray(draw((2, 3, 4, 5)))
    (expected,) = jax.vjp(lambda x: jnp.broadcast_to(x, gradient.shape), jnp.zeros(shape))[1](gradient)
    got = _gradients.sum_to(gradient, shape)
    assert got.shape == shape
    np.testing.assert_allclose(got, expected, rtol=1e-13)


def test_sum_to_refuses_a_shape_that_does_not_broadcast():
    with pytest.raises(AssertionError):
        _gradients.sum_to(jnp.zeros((4, 3)), (2, 3))
