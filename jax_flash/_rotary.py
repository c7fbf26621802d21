"""Rotary position embeddings (Su et al., "RoFormer", arXiv:2104.09864, section 3.4.2)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_flash import _settings, _validate
from jax_flash._validate import described, short

NO_POSITION = -1
"""Of tokens that aren't rotated: those whose sequence has a negative offset."""


def apply_rotary(
    x: ArrayLike, cos: ArrayLike, sin: ArrayLike, *, interleaved: bool = False, offsets: int | ArrayLike = 0
) -> jax.Array:
    """Rotates pairs of columns of queries or keys by angles that depend on their positions.

    A pair `(a, b)` at position p becomes `(a·cos − b·sin, b·cos + a·sin)`, with row p of `cos` and `sin`.
    It is computed in float32, or in x's dtype if that has more digits, and rounded once. Differentiable in x,
    cos and sin.

    Args:
      x: `(*B, T, N, H)`, floating.
      cos, sin: `(positions, R / 2)`, floating, of the angles; R is at most H. Columns from R on stay as
        they are.
      interleaved: column 2i is paired with column 2i + 1, as in GPT-J; by default column i is paired with
        column i + R / 2, as in GPT-NeoX and Llama.
      offsets: the position of the first token: an int, or integers `(*B,)`, one for each sequence.

    Returns:
      An array like x. A position that `cos` and `sin` don't have gives NaN; it raises where `offsets` is an
      int.

    Raises:
      TypeError, ValueError: an argument of another kind, dtype or shape.
    """
    x = _validate.array("x", x, "floating")
    if x.ndim < 3:
        raise ValueError(f"x must have shape (*B, T, N, H); got {described(x)}")
    return apply_rotary_rows(x, cos, sin, interleaved, offsets, "offsets")


def apply_rotary_rows(
    x: jax.Array, cos: Any, sin: Any, interleaved: Any, offsets: Any, offsets_name: str
) -> jax.Array:
    """`apply_rotary` of an array of three axes or more, for a function that names `offsets` as it likes."""
    cos, sin = tables(cos, sin, x.shape[-1], rotated_name="x")
    *batch, T, _, _ = x.shape
    first = _first_positions(offsets_name, offsets, {"()": (), "(*B,)": tuple(batch)}, T, cos.shape[0])
    return _rotate(x, cos, sin, first, None, _validate.flag("interleaved", interleaved))


def apply_rotary_varlen(
    x: jax.Array, cos: Any, sin: Any, interleaved: Any, offsets: Any, offsets_name: str, cu_seqlens: jax.Array
) -> jax.Array:
    """`apply_rotary` of varlen sequences: `x (ΣT, N, H)`, which start at `cu_seqlens (sequences + 1,)`."""
    cos, sin = tables(cos, sin, x.shape[-1], rotated_name="x")
    shapes = {"()": (), "(batch_size,)": (cu_seqlens.shape[0] - 1,)}
    first = _first_positions(offsets_name, offsets, shapes, 0, cos.shape[0])
    return _rotate(x, cos, sin, first, cu_seqlens, _validate.flag("interleaved", interleaved))


def tables(
    cos: Any,
    sin: Any,
    head_dim: int,
    cos_name: str = "cos",
    sin_name: str = "sin",
    rotated_name: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`cos` and `sin` as arrays `(positions, R / 2)` that fit that head dim.

    `rotated_name` is the argument that has the head dim; None where there are several.
    """
    cos, sin = (_validate.array(*pair, "floating") for pair in ((cos_name, cos), (sin_name, sin)))
    if cos.ndim != 2 or not 1 <= 2 * cos.shape[1] <= head_dim:
        whose = "the" if rotated_name is None else f"{rotated_name}'s"
        raise ValueError(
            f"{cos_name} must have shape (positions, R / 2) with R from 2 to {whose} head dim, {head_dim}; "
            f"got {described(cos)}"
        )
    if sin.shape != cos.shape:
        raise ValueError(f"{sin_name} must have the shape of {cos_name} {cos.shape}; got {described(sin)}")
    return cos, sin


def _first_positions(name: str, offsets: Any, shapes: _validate.Shapes, T: Any, positions: Any) -> Any:
    """The position of each sequence's first token: None for 0, or int32 of one of `shapes`."""
    if hasattr(offsets, "ndim"):
        offsets = _validate.shaped_unconverted(name, offsets, shapes, "integer")
        return _validate.clipped(offsets, _validate.INT32_MAX // 2, NO_POSITION)
    if isinstance(offsets, list | tuple):
        allowed = " or ".join(shapes)
        raise TypeError(
            f"{name} must be a Python integer, or an integer array of shape {allowed}; got {short(offsets)}"
        )
    first = _validate.size(name, offsets)
    if isinstance(T, int) and isinstance(positions, int) and first + T > positions:
        raise ValueError(
            f"{name} must leave {T} positions of the {positions} that cos and sin have; got {short(offsets)}"
        )
    return None if first == 0 else jax.device_put(np.int32(first))


@_settings.as_written
@functools.partial(jax.jit, static_argnums=5)
def _rotate(
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    first: jax.Array | None,
    cu_seqlens: jax.Array | None,
    interleaved: bool,
) -> jax.Array:
    return rotated(x, cos, sin, _positions(x.shape[:-2], first, cu_seqlens), interleaved)


def rotated(
    x: jax.Array, cos: jax.Array, sin: jax.Array, positions: jax.Array, interleaved: bool
) -> jax.Array:
    """`x (*B, T, N, H)` rotated at `positions`, broadcastable to (*B, T); NaN where tables lack them."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    positions = jnp.where(positions < 0, cos.shape[0], positions)
    # (*B, T, 1, R / 2); `fill` gives NaN for positions that are not there.
    cos, sin = (_rows(table.astype(dtype), positions)[..., None, :] for table in (cos, sin))
    R = 2 * cos.shape[-1]
    pairs = x[..., :R].astype(dtype)
    a, b = (pairs[..., 0::2], pairs[..., 1::2]) if interleaved else jnp.split(pairs, 2, axis=-1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    if interleaved:
        together = jnp.stack(turned, axis=-1).reshape(pairs.shape)
    else:
        together = jnp.concatenate(turned, axis=-1)
    return jnp.concatenate([together.astype(x.dtype), x[..., R:]], axis=-1)


def _rows(table: jax.Array, indices: jax.Array) -> jax.Array:
    """Rows of a table; NaN for those that it lacks. Explicit mesh axes split them as they split indices."""
    of_indices, of_table = (jax.typeof(x).sharding for x in (indices, table))
    sharding = None
    if any((*of_indices.spec, *of_table.spec)):  # JAX then wants to be told
        mesh = of_table.mesh if of_indices.mesh.empty else of_indices.mesh
        sharding = NamedSharding(mesh, PartitionSpec(*of_indices.spec, *of_table.spec[1:]))
    return table.at[indices].get(mode="fill", out_sharding=sharding)


def _positions(shape: tuple[int, ...], first: jax.Array | None, cu_seqlens: jax.Array | None) -> jax.Array:
    """Of tokens `(*B, T)`; axes that they are alike along may have size 1."""
    *batch, T = shape
    tokens = jax.lax.broadcasted_iota(jnp.int32, (*(1 for _ in batch), T), len(batch))
    if cu_seqlens is None:
        if first is None:
            return tokens
        # A negative offset is no position, of any token.
        lead = first.reshape(*first.shape, *(1 for _ in range(len(shape) - first.ndim)))
        return jnp.where(lead < 0, NO_POSITION, tokens + lead)
    sequence = jnp.searchsorted(cu_seqlens, tokens, side="right") - 1
    sequence = jnp.clip(sequence, 0, max(cu_seqlens.shape[0] - 2, 0))
    positions = tokens - _rows(cu_seqlens, sequence)
    if first is None:
        return positions
    lead = first if first.ndim == 0 else _rows(first, sequence)
    return jnp.where(lead < 0, NO_POSITION, positions + lead)
