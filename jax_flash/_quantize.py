"""`quantize`: queries, keys and values as e4m3 arrays with descales."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.typing import ArrayLike

from jax_flash import (
    _arguments,
    _device,
    _dispatch,
    _float8_arguments,
    _sequence_arguments,
    _settings,
    _validate,
)
from jax_flash._quantize_spec import QuantizeOperands, QuantizeSpec
from jax_flash.transforms import off_gpu, quantizing

Scales = Literal["block", "head", "tensor"]


class Quantized(NamedTuple):
    """Arguments of `flash_attention` by their names: arrays of dtype float8_e4m3fn, and their descales."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    query_descale: jax.Array
    key_descale: jax.Array
    value_descale: jax.Array


@dataclasses.dataclass(frozen=True)
class QuantizeCall:
    """The rounding of one of the three arrays, with the caller's batch axes. It passed every check."""

    spec: QuantizeSpec
    operands: QuantizeOperands

    @property
    def shapes(self) -> QuantizeOperands[jax.ShapeDtypeStruct]:
        """In canonical form."""
        batch_axes = self.operands.rows.ndim - 3

        def with_one_batch_axis(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((math.prod(x.shape[:batch_axes]), *x.shape[batch_axes:]), x.dtype)

        return jax.tree.map(with_one_batch_axis, self.operands)

    @property
    def is_empty(self) -> bool:
        return 0 in self.operands.rows.shape


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
    implementation: str | Sequence[str] | None = None,
) -> Quantized:
    """Query, key and value in e4m3, for `flash_attention` to compute in 8 bits.

        out = jax_flash.flash_attention(**jax_flash.quantize(query, key, value)._asdict(), is_causal=True)

    e4m3 numbers have 4 significant bits. A descale is what they are multiplied by, and rows are divided by:
    the smallest power of two that brings the largest element of a block of rows to 448 at most, the largest
    e4m3 number. Elements that aren't finite become NaN, and count for no descale.
    `flash_attention(..., quantization="fp8")` does the same, and has gradients.

    Args:
      query: `(*B, T, N, H)`, floating.
      key: `(*B, S, K, H)`, query's dtype.
      value: `(*B, S, K, V)`, query's dtype.
      scales: which rows share a descale. "block": each 128 rows of a key head, and of the query heads that
        use it. "head": all rows of them. "tensor": the whole array.
      incoherent: multiply query and key by the same random orthogonal matrix first, a Hadamard matrix times
        random signs. Their products stay as they are, and outliers are spread over the head dim. The head
        dim must be even; if it is no power of two, the matrix has blocks of the largest that divides it.
      quantization_key: a key for the signs; by default they are the same for all calls.
      query_seq_lengths: `(*B,)`, integer, in tokens: rows from there on are padding, and count for no
        descale.
      key_value_seq_lengths: likewise.
      implementation: "cuda" or "xla", or a sequence of them tried in order; None for the fastest that
        supports the call on this device. Both give the same numbers. "cuda" takes 16 bits and a descale
        for each block.

    Returns:
      The arrays in float8_e4m3fn, and their descales, float32 `(*B, K, ceil(T / 128))`,
      `(*B, K, ceil(S / 128))` and the same again; `(*B, K)` each without blocks.

    Raises:
      TypeError, ValueError: an argument doesn't fit.
      NotImplementedError: no implementation that was named can run the call; with the reason of each.

    References:
      FlashAttention-3, section 3.3 (https://arxiv.org/abs/2407.08608); QuIP
      (https://arxiv.org/abs/2307.13304).
    """
    calls = prepare(
        query, key, value, scales, incoherent, quantization_key, query_seq_lengths, key_value_seq_lengths
    )
    names = _arguments.implementations(implementation)
    specs, chosen, operands = zip(*((x.spec, _chosen(x, names), x.operands) for x in calls), strict=True)
    quantized, descales = zip(*_quantize(specs, chosen, operands), strict=True)
    return Quantized(*quantized, *(x if specs[0].scales == "block" else x[..., 0] for x in descales))


@_settings.as_written
def prepare(
    query: Any,
    key: Any,
    value: Any,
    scales: Any = "block",
    incoherent: Any = True,
    quantization_key: Any = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
) -> tuple[QuantizeCall, QuantizeCall, QuantizeCall]:
    """The checked calls, of query, key and value."""
    arrays = _arguments.query_key_value(query, key, value)
    by = _validate.one_of("scales", scales, ("block", "head", "tensor"))
    signs = None
    if _validate.flag("incoherent", incoherent):
        signs = _float8_arguments.signs(quantization_key, arrays[0].shape[-1])
    elif quantization_key is not None:
        raise ValueError("quantization_key goes with incoherent=True")
    *batch, T, _, _ = arrays[0].shape
    lengths = {
        name: None if x is None else _sequence_arguments.lengths(name, x, {"(*B,)": tuple(batch)}, most)
        for name, x, most in (
            ("query_seq_lengths", query_seq_lengths, T),
            ("key_value_seq_lengths", key_value_seq_lengths, arrays[1].shape[-3]),
        )
    }
    heads = arrays[1].shape[-2]

    def of_one(i: int) -> QuantizeCall:
        spec = QuantizeSpec(arrays[i].shape[-2] // max(heads, 1), by)
        own_signs = None if signs is None or i == 2 else signs.reshape((1,) * len(batch) + signs.shape)
        return QuantizeCall(spec, QuantizeOperands(arrays[i], own_signs, tuple(lengths.values())[min(i, 1)]))

    return of_one(0), of_one(1), of_one(2)


def _chosen(call: QuantizeCall, names: tuple[str, ...] | None) -> tuple[str, ...]:
    """The implementation to run, and what to run in its place on other platforms."""
    if call.is_empty:
        return (_dispatch.PORTABLE,)
    return _dispatch.select(call.spec, call.shapes, names, _device.current())


# Compiled as one program when called outside of `jit`.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _quantize(
    specs: tuple[QuantizeSpec, ...],
    chosen: tuple[tuple[str, ...], ...],
    calls: tuple[QuantizeOperands, ...],
) -> list[quantizing.Results]:
    return [_run(*call) for call in zip(specs, chosen, calls, strict=True)]


def _run(spec: QuantizeSpec, chosen: tuple[str, ...], operands: QuantizeOperands) -> quantizing.Results:
    if set(chosen) != {_dispatch.PORTABLE}:
        return quantizing.quantize(spec, chosen, operands)
    if chosen == _dispatch.PLANNED_OFF_GPU:
        operands = jax.tree.map(off_gpu.watched, operands)
    return quantizing.by_definition(spec, operands)
