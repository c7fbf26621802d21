"""From what a caller passed to one call of an implementation, and back.

`prepare` checks `Arguments` and brings them to the one form that implementations take (`AttentionSpec`,
`Operands`). `attend` picks an implementation, runs it and gives the results the caller's shape.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import (
    _alignment,
    _arguments,
    _device,
    _dispatch,
    _dropout,
    _float8_arguments,
    _function_arguments,
    _sequence_arguments,
    _settings,
    _validate,
)
from jax_flash._arguments import OWN_NAMES, Names
from jax_flash._mask import UNBOUNDED, Window
from jax_flash._spec import AttentionSpec, Operands, accumulator, batch_axis_may_be_one, sizes
from jax_flash.context_parallel.strategy import AUTO, STRATEGIES
from jax_flash.transforms import autodiff


@dataclasses.dataclass(frozen=True)
class Varlen:
    """Varlen sequences: checked offsets `(P + 1,)` and longest lengths."""

    query_offsets: jax.Array
    key_value_offsets: jax.Array
    max_query_length: int
    max_key_value_length: int


@dataclasses.dataclass
class Arguments:
    """What a caller passed, unchecked but for `window` and `varlen`, by the names of `flash_attention`.

    `window` stands for is_causal and local_window_size: keys to the left and to the right of the diagonal,
    integers of either sign; None is unbounded. `float8` is there if the caller takes arrays of 8 bits.
    `names` holds the caller's own names, for errors.
    """

    query: Any
    key: Any
    value: Any
    bias: Any = None
    mask: Any = None
    _: dataclasses.KW_ONLY
    window: Window = UNBOUNDED
    scale: Any = None
    query_seq_lengths: Any = None
    key_value_seq_lengths: Any = None
    query_segment_ids: Any = None
    key_value_segment_ids: Any = None
    logits_soft_cap: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    dropout_rate: Any = 0.0
    dropout_key: Any = None
    deterministic: Any = False
    return_residual: Any = False
    score_mod: Any = None
    block_mask: Any = None
    quantization: Any = None
    quantization_key: Any = None
    float8: _float8_arguments.Float8 | None = None
    varlen: Varlen | None = None
    alignment: Any = _alignment.BOTTOM_RIGHT
    context_parallel: Any = AUTO
    names: Names = OWN_NAMES


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that passed every check.

    Its operands are canonical except that the caller's leading axes are still apart: merging them would
    gather an inner one that is sharded. Each device merges its own.
    """

    spec: AttentionSpec
    operands: Operands  # leading axes: those of `batch_shape`, or one of size 1 if it is empty
    batch_shape: tuple[int, ...]  # the caller's leading axes
    context_parallel: str = AUTO

    @property
    def shapes(self) -> Operands[jax.ShapeDtypeStruct]:
        """The canonical operands, with one batch axis, as shapes: what implementations are asked about."""
        axes = max(len(self.batch_shape), 1)
        batch = math.prod(self.batch_shape)

        def merged(name: str, x: jax.Array) -> jax.ShapeDtypeStruct:
            is_shared = batch_axis_may_be_one(name) and math.prod(x.shape[:axes]) == 1
            return jax.ShapeDtypeStruct((1 if is_shared else batch, *x.shape[axes:]), np.dtype(x.dtype))

        return Operands.of({name: merged(name, x) for name, x in self.operands.present().items()})

    @property
    def is_empty(self) -> bool:
        """Nothing to compute: no row, or no key for any row."""
        n = sizes(self.shapes)
        nothing_packed = self.operands.query_offsets is not None and (
            self.operands.query_offsets.shape[-1] < 2
            or 0 in (self.spec.max_query_length, self.spec.max_key_value_length)
        )
        return nothing_packed or 0 in (n.B, n.T, n.S, n.N)


class _Shape(NamedTuple):
    """The sizes that other arguments must fit."""

    batch: tuple[int, ...]
    T: int
    S: int
    N: int

    def with_batch(self, x: jax.Array) -> jax.Array:
        """`x (*B, …)` with at least one batch axis."""
        return x if self.batch else jnp.expand_dims(x, 0)

    def for_all(self, x: jax.Array) -> jax.Array:
        """`x` with batch axes of size 1."""
        return _validate.reshaped(x, (1,) * max(len(self.batch), 1) + x.shape)


@_settings.as_written
def prepare(arguments: Arguments) -> Call:
    """Check the arguments and bring them to canonical form."""
    _check_symbolic(arguments)
    kind = "floating" if arguments.float8 is None else "floating or e4m3"
    query, key, value = _arguments.query_key_value(
        arguments.query, arguments.key, arguments.value, arguments.names, kind=kind
    )
    arguments = dataclasses.replace(arguments, query=query, key=key, value=value)
    arguments = _alignment.to_bottom_right(arguments)
    *batch, T, N, H = query.shape
    shape = _Shape(tuple(batch), T, key.shape[-3], N)
    rate, dropout_key = _arguments.dropout(arguments.dropout_rate, arguments.dropout_key, arguments.names)
    out_dtype, descales = _float8_arguments.of_arrays(arguments.float8, (query, key, value), arguments.scale)
    quantization, signs = _float8_arguments.quantization(arguments, query)
    scale, query = _arguments.scale(arguments.names["scale"], arguments.scale, 1 / math.sqrt(H), query)
    score_mod, block_mask, of_functions = _function_arguments.operands(
        arguments.score_mod, arguments.block_mask, shape.batch, (T, shape.S, N)
    )
    spec = _spec(arguments, shape, scale, rate)
    spec = dataclasses.replace(
        spec, score_mod=score_mod, block_mask=block_mask, quantization=quantization, out_dtype=out_dtype
    )
    operands = Operands(
        query=shape.with_batch(query),
        key=shape.with_batch(key),
        value=shape.with_batch(value),
        bias=_per_logit("bias", arguments.bias, "floating", shape),
        mask=_per_logit("mask", arguments.mask, "mask", shape),
        **_per_head(arguments, shape),
        **_per_sequence(arguments, shape),
        **_dropout_hashes(dropout_key, shape),
        **{name: shape.with_batch(x) for name, x in descales.items()},
        rotation_signs=None if signs is None else shape.for_all(signs),
    )
    context_parallel = _validate.one_of(
        "context_parallel", arguments.context_parallel, (AUTO, *sorted(STRATEGIES))
    )
    return Call(spec, operands.replace(**of_functions), shape.batch, context_parallel)


def _check_symbolic(arguments: Arguments) -> None:
    """Refuses symbolic sizes of an export, except those of the batch and lengths that aren't packed."""
    shapes = {name: getattr(getattr(arguments, name), "shape", ()) for name in ("query", "key", "value")}
    if arguments.varlen is None:
        what, shapes = "number of heads and head dim", {name: x[-2:] for name, x in shapes.items()}
    else:
        what, shapes = "shape", shapes | {"cu_seqlens_q": arguments.varlen.query_offsets.shape}
    for name, shape in shapes.items():
        _validate.without_symbols(arguments.names[name], what, shape)


def _spec(arguments: Arguments, shape: _Shape, scale: float, dropout_rate: float) -> AttentionSpec:
    names, varlen = arguments.names, arguments.varlen
    longest_query, longest_key_value = shape.T, shape.S
    if varlen is not None:
        longest_query = min(shape.T, varlen.max_query_length)
        longest_key_value = min(shape.S, varlen.max_key_value_length)
    # One form for one meaning, so that causal attention of a single row, as in decoding, needs no masking.
    left, right = arguments.window.normalised(longest_query, longest_key_value)
    return AttentionSpec(
        scale=scale,
        left=left,
        right=right,
        logits_soft_cap=_arguments.soft_cap(names["logits_soft_cap"], arguments.logits_soft_cap),
        dropout_rate=dropout_rate,
        deterministic=_validate.flag(names["deterministic"], arguments.deterministic),
        return_residual=_validate.flag(names["return_residual"], arguments.return_residual),
        max_query_length=None if varlen is None else longest_query,
        max_key_value_length=None if varlen is None else longest_key_value,
    )


def _per_logit(name: str, x: Any, kind: str, shape: _Shape) -> jax.Array | None:
    if x is None:
        return None
    logits = (*shape.batch, shape.N, shape.T, shape.S)
    return shape.with_batch(_validate.broadcastable(name, x, logits, "(*B, N, T, S)", kind))


def _per_head(arguments: Arguments, shape: _Shape) -> dict[str, jax.Array]:
    operands = {}
    if arguments.alibi_slopes is not None:
        shapes = {"(N,)": (shape.N,), "(*B, N)": (*shape.batch, shape.N)}
        slopes = _validate.shaped("alibi_slopes", arguments.alibi_slopes, shapes, "floating")
        slopes = slopes.astype(accumulator(arguments.query.dtype))
        operands["alibi_slopes"] = shape.for_all(slopes) if slopes.ndim == 1 else slopes
    if arguments.sinks is not None:
        sinks = _validate.shaped("sinks", arguments.sinks, {"(N,)": (shape.N,)}, "floating")
        operands["sinks"] = shape.for_all(sinks.astype(accumulator(arguments.query.dtype)))
    return operands


def _per_sequence(arguments: Arguments, shape: _Shape) -> dict[str, jax.Array]:
    """Lengths, segment ids and offsets."""
    operands = {}
    for name, most in (("query_seq_lengths", shape.T), ("key_value_seq_lengths", shape.S)):
        x = getattr(arguments, name)
        if x is not None:
            operands[name] = _sequence_arguments.lengths(name, x, {"(*B,)": shape.batch}, most)
    queries, keys = arguments.query_segment_ids, arguments.key_value_segment_ids
    if queries is not None or keys is not None:
        ids = _sequence_arguments.segment_ids(queries, keys, (*shape.batch, shape.T), (*shape.batch, shape.S))
        operands["query_segment_ids"], operands["key_value_segment_ids"] = ids
    if arguments.varlen is not None:
        operands["query_offsets"] = arguments.varlen.query_offsets
        operands["key_value_offsets"] = arguments.varlen.key_value_offsets
    return {name: shape.with_batch(x) for name, x in operands.items()}


def _dropout_hashes(key: jax.Array | None, shape: _Shape) -> dict[str, jax.Array]:
    if key is None:
        return {}
    rows, columns = _dropout.hashes(key, math.prod(shape.batch), shape.N, shape.T, shape.S)
    batch = shape.batch or (1,)
    return {
        "dropout_rows": _validate.reshaped(rows, (*batch, shape.N, shape.T)),
        "dropout_columns": _validate.reshaped(columns, (*batch, shape.S)),
    }


@_settings.as_written
def attend(call: Call, implementation: Any) -> Any:
    """Run `call`: out `(*B, T, N, V)`, and with the residual also lse `(*B, T, N)`."""
    names = _arguments.implementations(implementation)
    if call.is_empty:
        return _nothing(call)
    chosen = _dispatch.select(call.spec, call.shapes, names, _device.current())
    results = autodiff.attend(call.spec, chosen, call.operands, call.context_parallel)
    if call.spec.return_residual:
        out, lse = results
        results = out, jnp.swapaxes(lse, -1, -2)
    return results if call.batch_shape else jax.tree.map(lambda x: x[0], results)


def _nothing(call: Call) -> Any:
    """The results where no row has a key to attend to."""
    n = sizes(call.shapes)
    dtype = call.spec.result_dtype("out", call.operands.query.dtype)
    out = jnp.zeros((*call.batch_shape, n.T, n.N, n.V), dtype)
    if not call.spec.return_residual:
        return out
    return out, jnp.full((*call.batch_shape, n.T, n.N), -jnp.inf, accumulator(call.operands.query.dtype))
