"""Rotary position embeddings against their definition as products of complex numbers."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import flash_attn

B, T, N, H = 3, 11, 2, 16


def angles(positions: int, pairs: int) -> np.ndarray:
    return np.arange(positions)[:, None] * 10000.0 ** (-np.arange(pairs) / pairs)


def tables(positions: int = 64, pairs: int = H // 2, dtype=jnp.float32) -> tuple[jax.Array, jax.Array]:
    angle = angles(positions, pairs)
    return jnp.asarray(np.cos(angle), dtype), jnp.asarray(np.sin(angle), dtype)


def expected(x: np.ndarray, positions: np.ndarray, pairs: int, interleaved: bool) -> np.ndarray:
    """`x (*B, T, N, H)` in float64, with tokens at `positions (*B, T)`."""
    x = np.asarray(x, np.float64).copy()
    rotated = x[..., : 2 * pairs]
    real, imaginary = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else np.split(rotated, 2, -1)
    angle = np.take(angles(int(positions.max()) + 1, pairs), positions, axis=0)[..., None, :]
    turned = (real + 1j * imaginary) * np.exp(1j * angle)
    parts = (turned.real, turned.imag)
    x[..., : 2 * pairs] = (
        np.stack(parts, -1).reshape(rotated.shape) if interleaved else np.concatenate(parts, -1)
    )
    return x


def draw(*shape: int, dtype=jnp.float32, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("pairs", (1, 3, H // 2))
@pytest.mark.parametrize("batch", ((), (B,), (2, B)))
def test_is_a_rotation_by_the_angle_of_the_position(batch, pairs, interleaved):
    x = draw(*batch, T, N, H)
    got = jax_flash.apply_rotary(x, *tables(pairs=pairs), interleaved=interleaved)
    positions = np.broadcast_to(np.arange(T), (*batch, T))
    np.testing.assert_allclose(got, expected(x, positions, pairs, interleaved), rtol=1e-5, atol=1e-5)
    assert got.dtype == x.dtype


@pytest.mark.parametrize("offsets", (7, np.int32(7), np.array([0, 5, 50]), jnp.array([0, 5, 50], jnp.uint8)))
def test_offsets_are_positions_of_first_tokens(offsets):
    x = draw(B, T, N, H)
    got = jax_flash.apply_rotary(x, *tables(), offsets=offsets)
    positions = np.broadcast_to(np.asarray(offsets, int).reshape(-1, 1), (B, 1)) + np.arange(T)
    np.testing.assert_allclose(got, expected(x, positions, H // 2, False), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_sixteen_bits_are_rounded_once(dtype):
    x = draw(B, T, N, H, dtype=dtype)
    got = jax_flash.apply_rotary(x, *tables())
    right = expected(x.astype(jnp.float32), np.broadcast_to(np.arange(T), (B, T)), H // 2, False)
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(np.float32), right, rtol=jnp.finfo(dtype).eps, atol=1e-5)


def test_scores_depend_on_the_distance_alone():
    query, key = draw(1, 1, N, H), draw(1, 1, N, H, seed=1)

    def score(at, of):
        turned = (jax_flash.apply_rotary(x, *tables(), offsets=p) for x, p in ((query, at), (key, of)))
        return jnp.einsum("btnh,btnh->n", *turned)

    np.testing.assert_allclose(score(3, 1), score(42, 40), rtol=1e-4, atol=1e-5)


def test_gradients_turn_back():
    x, d = draw(B, T, N, H), draw(B, T, N, H, seed=1)
    cos, sin = tables()
    offsets = jnp.array([0, 5, 50])
    _, vjp = jax.vjp(lambda x: jax_flash.apply_rotary(x, cos, sin, offsets=offsets), x)
    (got,) = vjp(d)
    np.testing.assert_allclose(
        got, jax_flash.apply_rotary(d, cos, -sin, offsets=offsets), rtol=1e-6, atol=1e-6
    )
    # … and reach the tables.
    d_cos = jax.grad(lambda cos: jax_flash.apply_rotary(x, cos, sin).sum())(cos)
    assert (d_cos[:T] != 0).all() and (d_cos[T:] == 0).all()


def test_under_jit_and_vmap_with_traced_offsets():
    x, offsets = draw(B, T, N, H), jnp.array([0, 5, 50])
    rotate = jax.jit(jax.vmap(lambda x, first: jax_flash.apply_rotary(x, *tables(), offsets=first)))
    right = jax_flash.apply_rotary(x, *tables(), offsets=offsets)
    np.testing.assert_allclose(rotate(x, offsets), right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
@pytest.mark.parametrize("sharded", ("offsets", "tables", "both"))
@pytest.mark.parametrize("varlen", (False, True))
def test_offsets_and_tables_on_a_mesh(varlen, sharded, kind):
    """They may be sharded along their first axis."""
    batch = 4
    x = draw(batch * T, N, H) if varlen else draw(batch, T, N, H)
    offsets = jnp.array([0, 7, 40, 3], jnp.int32)

    def rotate(x, cos, sin, offsets):
        if not varlen:
            return jax_flash.apply_rotary(x, cos, sin, offsets=offsets)
        starts = np.arange(batch + 1, dtype=np.int32) * T
        return flash_attn.apply_rotary_emb(
            x, cos, sin, cu_seqlens=starts, max_seqlen=T, seqlen_offsets=offsets
        )

    def with_gradients(x, cos, sin, offsets):
        out, pullback = jax.vjp(lambda *differentiated: rotate(*differentiated, offsets), x, cos, sin)
        return out, *pullback(jnp.sin(out))

    want = jax.jit(with_gradients)(x, *tables(), offsets)
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    of_x = P(None, "heads") if varlen else P("batch", None, "heads")
    of_tables = P("batch") if sharded in ("tables", "both") else P()
    of_offsets = P("batch") if sharded in ("offsets", "both") else P()
    with jax.set_mesh(mesh):
        specs = (of_x, of_tables, of_tables, of_offsets)
        arguments = zip((x, *tables(), offsets), specs, strict=True)
        got = jax.jit(with_gradients)(
            *(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in arguments)
        )
    for found, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_positions_that_the_tables_lack_are_nan_or_raise():
    x = draw(B, T, N, H)
    got = jax_flash.apply_rotary(x, *tables(T + 1), offsets=jnp.array([1, 3, -1]))
    is_nan = np.isnan(np.asarray(got)).all((-1, -2))
    np.testing.assert_array_equal(is_nan[:2], [[False] * T, [False] * (T - 2) + [True] * 2])
    assert is_nan[2].all()
    message = f"offsets must leave {T} positions of the {T + 1} that cos and sin have; got 2 (int)"
    with pytest.raises(ValueError, match=re.escape(message)):
        jax_flash.apply_rotary(x, *tables(T + 1), offsets=2)


@pytest.mark.parametrize(
    "change,error,message",
    [
        (dict(x=draw(T, H)), ValueError, "x must have shape (*B, T, N, H); got float32 (11, 16)"),
        (dict(x=1.0), TypeError, "x must be an array"),
        (dict(x=jnp.ones((T, N, H), int)), TypeError, "x must have a floating dtype"),
        (
            dict(cos=jnp.ones((64, 9))),
            ValueError,
            "cos must have shape (positions, R / 2) with R from 2 to x's head dim, 16; got",
        ),
        (dict(cos=jnp.ones(64)), ValueError, "cos must have shape"),
        (
            dict(sin=jnp.ones((64, 4))),
            ValueError,
            "sin must have the shape of cos (64, 8); got float32 (64, 4)",
        ),
        (dict(interleaved=1), TypeError, "interleaved must be True or False"),
        (dict(offsets=-1), ValueError, "offsets must be at least 0; got -1"),
        (dict(offsets=0.5), TypeError, "offsets must be a Python integer"),
        (dict(offsets=jnp.zeros(B)), TypeError, "offsets must have an integer dtype"),
        (
            dict(offsets=jnp.zeros(B + 1, int)),
            ValueError,
            "offsets must have shape () = () or (*B,) = (3,); got",
        ),
    ],
)
def test_errors(change, error, message):
    cos, sin = tables()
    arguments = dict(x=draw(B, T, N, H), cos=cos, sin=sin) | change
    with pytest.raises(error, match=re.escape(message)):
        jax_flash.apply_rotary(**arguments)


class TestOfficialName:
    def test_rows(self):
        x, offsets = draw(B, T, N, H), jnp.array([0, 5, 50])
        got = flash_attn.apply_rotary_emb(x, *tables(pairs=3), True, seqlen_offsets=offsets)
        right = jax_flash.apply_rotary(x, *tables(pairs=3), interleaved=True, offsets=offsets)
        np.testing.assert_array_equal(got, right)

    @pytest.mark.parametrize("offsets", (0, 9, (4, 0, 20)))
    def test_varlen_sequences(self, offsets):
        lengths = (5, 0, 9)
        starts = np.cumsum((0, *lengths))
        x = draw(sum(lengths), N, H)
        by_sequence = np.broadcast_to(offsets, 3)
        array = jnp.asarray(offsets, jnp.int32) if isinstance(offsets, tuple) else offsets
        got = flash_attn.apply_rotary_emb(
            x, *tables(), seqlen_offsets=array, cu_seqlens=jnp.asarray(starts, jnp.int32), max_seqlen=9
        )
        for i, (begin, end) in enumerate(itertools.pairwise(starts)):
            right = jax_flash.apply_rotary(x[begin:end], *tables(), offsets=int(by_sequence[i]))
            np.testing.assert_allclose(got[begin:end], right, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize(
        "change,error,message",
        [
            (dict(inplace=True), NotImplementedError, "inplace must be False"),
            (
                dict(x=draw(T, N, H)),
                ValueError,
                "x must have shape (batch_size, seqlen, nheads, headdim); got",
            ),
            (
                dict(cu_seqlens=jnp.array([0, T])),
                ValueError,
                "x must have shape (total, nheads, headdim); got",
            ),
            (dict(seqlen_offsets=60), ValueError, "seqlen_offsets must leave 11 positions of the 64"),
        ],
    )
    def test_errors(self, change, error, message):
        cos, sin = tables()
        arguments = dict(x=draw(B, T, N, H), cos=cos, sin=sin) | change
        with pytest.raises(error, match=re.escape(message)):
            flash_attn.apply_rotary_emb(**arguments)


def test_tables_of_another_function_do_not_name_x():
    """A function on a cache has no argument x."""
    cache = jax_flash.KVCache.create(1, 8, N, H, jnp.float32)
    new = jnp.ones((1, 1, N, H))
    wide = jnp.ones((8, H // 2 + 1))
    with pytest.raises(ValueError, match=r"with R from 2 to .* head dim, 16; got") as raised:
        jax_flash.flash_attention_with_cache(new, cache, new, new, rotary_cos=wide, rotary_sin=wide)
    assert "x's" not in str(raised.value)


def test_what_offsets_may_be():
    x = draw(B, T, N, H)
    with pytest.raises(
        TypeError, match=r"offsets must be a Python integer, or an integer array of shape .*\[1\]"
    ):
        jax_flash.apply_rotary(x, *tables(), offsets=[1])
