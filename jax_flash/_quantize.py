"""`quantize`: queries, keys and values as e4m3 arrays with scales."""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash import _arguments, _float8, _float8_arguments, _sequences, _settings, _validate

Scales = Literal["block", "head", "tensor"]


class Quantized(NamedTuple):
    """Arguments of `flash_attention` by their names: arrays of dtype float8_e4m3fn, and their scales."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    query_descale: jax.Array
    key_descale: jax.Array
    value_descale: jax.Array


@_settings.as_written
def quantize(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    scales: Scales = "block",
    incoherent: bool = True,
    quantization_key: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
) -> Quantized:
    """Query, key and value in e4m3, for `flash_attention` to compute in 8 bits.

        out = jax_flash.flash_attention(**jax_flash.quantize(query, key, value)._asdict(), is_causal=True)

    e4m3 numbers have 4 significant bits. A scale is the smallest power of two that brings the largest element
    of a block of rows to 448 at most, the largest e4m3 number. Elements that aren't finite become NaN, and
    count for no scale. `flash_attention(..., quantization="fp8")` does the same, and has gradients.

    Args:
      query: `(*B, T, N, H)`, floating.
      key: `(*B, S, K, H)`, query's dtype.
      value: `(*B, S, K, V)`, query's dtype.
      scales: "block": one for each 128 rows of a key head, and of the query heads that use it. "head": one
        for all rows. "tensor": one for the whole array.
      incoherent: multiply query and key by the same random orthogonal matrix first, a Hadamard matrix times
        random signs. Their products stay as they are, and outliers are spread over the head dim. The head
        dim must be even; if it is no power of two, the matrix has blocks of the largest that divides it.
      quantization_key: a key for the signs; by default they are the same for all calls.
      query_seq_lengths: `(*B,)`, integer, in tokens: rows from there on are padding, and count for no scale.
      key_value_seq_lengths: likewise.

    Returns:
      The arrays in float8_e4m3fn, and their scales, float32 `(*B, K, ceil(T / 128))`,
      `(*B, K, ceil(S / 128))` and the same again; `(*B, K)` each without blocks.

    Raises:
      TypeError, ValueError: an argument doesn't fit.

    References:
      FlashAttention-3, section 3.3 (https://arxiv.org/abs/2407.08608); QuIP
      (https://arxiv.org/abs/2307.13304).
    """
    arrays = _arguments.query_key_value(query, key, value)
    by = _validate.one_of("scales", scales, ("block", "head", "tensor"))
    signs = None
    if _validate.flag("incoherent", incoherent):
        signs = _float8_arguments.signs(quantization_key, arrays[0].shape[-1])
    elif quantization_key is not None:
        raise ValueError("quantization_key goes with incoherent=True")
    *batch, T, _, _ = arrays[0].shape
    lengths = {
        name: None if x is None else _sequences.lengths(name, x, {"(*B,)": tuple(batch)}, most)
        for name, x, most in (
            ("query_seq_lengths", query_seq_lengths, T),
            ("key_value_seq_lengths", key_value_seq_lengths, arrays[1].shape[-3]),
        )
    }
    return _quantize(arrays, signs, tuple(lengths.values()), by)


# Compiled as one program when called outside of `jit`.
@functools.partial(jax.jit, static_argnums=3)
def _quantize(
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    signs: jax.Array | None,
    lengths: tuple[jax.Array | None, ...],
    by: str,
) -> Quantized:
    batch, heads = arrays[0].shape[:-3], arrays[1].shape[-2]

    def one_batch_axis(x: Any) -> Any:
        return None if x is None else x.reshape(math.prod(batch), *x.shape[len(batch) :])

    def with_batch(x: jax.Array) -> jax.Array:
        return x.reshape(*batch, *x.shape[1:])

    results = []
    for i, x in enumerate(map(one_batch_axis, arrays)):
        rows = one_batch_axis(lengths[min(i, 1)])
        valid = None if rows is None else jnp.arange(x.shape[1]) < rows[:, None]
        if signs is not None and i < 2:
            x = _float8.rotated(x, signs)
        results.append(_float8.rounded(x, heads, valid, by))
    quantized, scales = zip(*results, strict=True)
    return Quantized(
        *map(with_batch, quantized),
        *(with_batch(x if by == "block" else x[..., 0]) for x in scales),
    )
