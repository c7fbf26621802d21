"""`attention_fn` for Flax's attention layers, linen and NNX alike.

    flax.linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=jax_flash.flax.dot_product_attention)
    flax.nnx.MultiHeadAttention(num_heads=8, ..., attention_fn=jax_flash.flax.dot_product_attention)

Flax itself is not imported.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_flash import _arguments, _device, _dropout, _validate
from jax_flash._alignment import TOP_LEFT
from jax_flash._arguments import Names
from jax_flash._call import Arguments, attend, prepare

_NAMES = Names(dropout_key="dropout_rng")


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Any] | None = None,
    qk_attn_weights_einsum: Callable[..., Any] | None = None,
    attn_weights_value_einsum: Callable[..., Any] | None = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
    *,
    scale: float | jax.Array | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_seq_lengths: ArrayLike | Sequence[int] | None = None,
    key_value_seq_lengths: ArrayLike | Sequence[int] | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array:
    """`dot_product_attention` of `flax.linen` and `flax.nnx`, computed by our implementations.

    Three things differ from Flax's own. The softmax is float32 whatever the dtype, as if
    `force_fp32_for_softmax` were always set. A row that the mask leaves nothing to attend to gives 0, where
    Flax averages all values. Dropout keeps other probabilities than Flax's for the same `dropout_rng`, at
    the same rate: those of `jax_flash.dropout_mask`.

    A layer passes its own arguments. What Flax has no argument for is bound with `functools.partial`, and
    means what it means in `jax_flash.flash_attention`, aligned to the top left: a window and the segment ids
    of packed documents need no mask of B × T × T. In linen, within the module that makes the layer:

        attention = functools.partial(
            dot_product_attention, query_segment_ids=ids, key_value_segment_ids=ids, local_window_size=(99, 0)
        )
        x = nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=attention)(x)

    An NNX layer is made once, before there are ids. It hands on its `mask` as it is, so that may be the ids:

        def attention(query, key, value, mask, **options):
            return dot_product_attention(
                query, key, value, query_segment_ids=mask, key_value_segment_ids=mask, **options
            )

    Letters: `*B` any leading batch axes, `T` queries, `S` keys, `N` query heads, `K` key heads
    (`N % K == 0`), `H` head dim of queries and keys, `V` head dim of values.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`.
      value: `(*B, S, K, V)`.
      bias: broadcastable to `(*B, N, T, S)`, floating. Added to the logits.
      mask: broadcastable to `(*B, N, T, S)`, bool or numbers; True, or other than 0, attends.
      broadcast_dropout: all batch rows and heads drop the same (query, key) pairs.
      dropout_rng: the key of dropout; needed when `dropout_rate > 0` and not `deterministic`.
      dropout_rate: the share of probabilities to drop, in [0, 1).
      deterministic: no dropout.
      dtype: what query, key and value are cast to; None for the dtype that they promote to.
      precision: None or `jax.lax.Precision.DEFAULT`. Any `jax.lax.Precision` in float16 and bfloat16, and on
        a CPU: there the products are as precise already.
      module: must be None: the attention weights, which it would sow, are never formed.
      force_fp32_for_softmax: has no effect, see above.
      einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: must be None: there are no such
        einsums to replace.
      promote_dtype: a function to call instead of `flax.nnx.nn.dtypes.promote_dtype`.
      is_causal: row i sees the keys `j <= i` (aligned to the top left, as in Flax).
      scale: of the logits; `1 / sqrt(H)` by default.
      local_window_size: `(left, right)`: row i sees `i - left <= j <= i + right`. None or -1 on a side is
        unbounded; an int w means `(w, w)`. Not for the one query of a layer that decodes, since its position
        isn't known.
      query_seq_lengths: `(*B,)`, integer, in tokens. Rows from there on give 0.
      key_value_seq_lengths: `(*B,)`, integer, in tokens. Keys from there on are masked out.
      query_segment_ids: `(*B, T)`, integer. A row sees the keys of its own segment alone; goes with
        key_value_segment_ids.
      key_value_segment_ids: `(*B, S)`, integer.
      logits_soft_cap: c in `c * tanh(logits / c)`, greater than 0; None for no cap.
      alibi_slopes: `(N,)` or `(*B, N)`, floating. `slope * |i - j|` is subtracted from the logits. Needs
        T = S.
      sinks: `(N,)`, floating: for each query head, a logit that takes part in the sum and has no value.
      implementation: as in `jax_flash.flash_attention`.

    Returns:
      `(*B, T, N, V)` in the dtype of the computation.

    Raises:
      TypeError: an argument is of the wrong dtype or kind.
      ValueError: an argument has a shape or value that doesn't fit.
      NotImplementedError: an argument asks for what can't be done without storing the attention weights,
        or no implementation that was named can run the call.
    """
    _validate.flag("force_fp32_for_softmax", force_fp32_for_softmax)
    _refuse(
        module=(
            module,
            "as with sow_weights=True",
            "the attention weights are never formed, so can't be sown",
        ),
        einsum_dot_general=(einsum_dot_general, "", "the attention weights come from no einsum"),
        qk_attn_weights_einsum=(
            qk_attn_weights_einsum,
            "as with qk_attn_weights_einsum_cls",
            "the attention weights come from no einsum",
        ),
        attn_weights_value_einsum=(
            attn_weights_value_einsum,
            "as with attn_weights_value_einsum_cls",
            "the output comes from no einsum",
        ),
    )
    query, key, value = _arguments.query_key_value(*_promoted((query, key, value), dtype, promote_dtype))
    _check_precision(precision, query.dtype)
    rate = _arguments.dropout_rate("dropout_rate", dropout_rate)
    if _validate.flag("deterministic", deterministic):
        rate = 0.0
    if rate > 0 and dropout_rng is None:
        raise ValueError(
            "dropout_rng must be a key where dropout_rate > 0 and deterministic is False; got None"
        )
    T, S = query.shape[-3], key.shape[-3]
    _check_positions(T, S, local_window_size, alibi_slopes)
    broadcast_dropout = _validate.flag("broadcast_dropout", broadcast_dropout)
    arguments = Arguments(
        query,
        key,
        value,
        bias,
        None if mask is None else _as_bool(_validate.unconverted("mask", mask, "bool or number")),
        window=_arguments.window(is_causal, local_window_size),
        scale=scale,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_rate=rate,
        dropout_key=dropout_rng,
        alignment=TOP_LEFT,
        names=_NAMES,
    )
    call = prepare(arguments)
    own = call.operands.dropout_rows
    if own is not None and broadcast_dropout:
        rows, columns = _dropout.hashes(dropout_rng, 1, 1, T, S)
        operands = call.operands.replace(
            dropout_rows=jnp.broadcast_to(rows[0], own.shape),
            dropout_columns=jnp.broadcast_to(columns[0], (*own.shape[:-2], S)),
        )
        call = dataclasses.replace(call, operands=operands)
    return attend(call, implementation)


def _check_positions(queries: int, keys: int, local_window_size: Any, alibi_slopes: Any) -> None:
    """Raise where an argument needs positions of queries that aren't those of keys."""
    if local_window_size is not None and queries == 1 < keys:
        raise ValueError(
            "local_window_size must be None where a layer decodes, one query with several keys, since the "
            f"query's position isn't known (a mask may hide keys); got {_validate.short(local_window_size)}"
        )
    if alibi_slopes is not None and queries != keys:
        raise ValueError(
            "alibi_slopes must be None where there are not as many keys as queries, since the queries' "
            f"positions aren't known (a bias may hold distances); got {_validate.short(alibi_slopes)} with "
            f"{queries} queries and {keys} keys"
        )


def _as_bool(mask: Any) -> jax.Array:
    return jnp.asarray(mask if mask.dtype == bool else mask != 0)


def _refuse(**arguments: tuple[Any, str, str]) -> None:
    """Raise for the first of `name=(value, where it comes from, why it can't be)` whose value isn't None."""
    for name, (value, origin, why) in arguments.items():
        if value is not None:
            got = type(value).__name__ + (f" ({origin})" if origin else "")
            raise NotImplementedError(f"{name} must be None, because {why}; got {got}")


def _promoted(arrays: tuple[Any, ...], dtype: Any, promote_dtype: Any) -> tuple[Any, Any, Any]:
    """The three arrays in the dtype of the computation, by the caller's function if there is one."""
    if dtype is not None:
        dtype = _validate.floating_dtype("dtype", dtype)
    if promote_dtype is None:
        return _promote(arrays, dtype)
    if not callable(promote_dtype):
        raise TypeError(f"promote_dtype must be None or a function; got {_validate.short(promote_dtype)}")
    promoted = promote_dtype(arrays, dtype=dtype)
    if not isinstance(promoted, tuple | list) or len(promoted) != 3:
        raise TypeError(f"promote_dtype must return three arrays; got {_validate.short(promoted)}")
    return tuple(promoted)


def _promote(arrays: tuple[Any, ...], dtype: Any) -> tuple[Any, Any, Any]:
    """The arrays in `dtype`; if it is None, in the floating dtype that they promote to together."""
    names = ("query", "key", "value")
    query, key, value = (
        _validate.array(name, x, "bool or number") for name, x in zip(names, arrays, strict=True)
    )
    if dtype is None:
        try:
            dtype = jnp.result_type(query, key, value)
        except jax.dtypes.TypePromotionError as error:
            got = f"{query.dtype}, {key.dtype} and {value.dtype}"
            raise TypeError(
                f"query, key and value must have dtypes that promote to one; got {got}: {error}"
            ) from error
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    return query.astype(dtype), key.astype(dtype), value.astype(dtype)


def _check_precision(precision: Any, dtype: Any) -> None:
    """Raise where `precision` asks for more, or other, than the matrix products do."""
    choices = [
        _precision(choice) for choice in (precision if isinstance(precision, tuple | list) else (precision,))
    ]
    if all(choice is jax.lax.Precision.DEFAULT for choice in choices):
        return
    # Products of 16-bit numbers are exact in float32, and CPUs multiply float32 in float32.
    exact = jnp.dtype(dtype).itemsize == 2 or _device.current().platform == "cpu"
    if exact and all(isinstance(choice, jax.lax.Precision) for choice in choices):
        return
    got = f"{_validate.short(precision)} with {jnp.dtype(dtype).name} on {_device.current().platform}"
    raise NotImplementedError(
        "precision must be None or jax.lax.Precision.DEFAULT (any jax.lax.Precision in float16 and "
        f"bfloat16, and on a CPU); got {got}"
    )


def _precision(choice: Any) -> jax.lax.Precision | jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset:
    """One of `jax.lax.PrecisionLike`, from its name if it was one."""
    if choice is None:
        return jax.lax.Precision.DEFAULT
    if isinstance(choice, jax.lax.Precision | jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        return choice
    if not isinstance(choice, str):
        raise TypeError(f"precision must be None or a jax.lax.Precision; got {_validate.short(choice)}")
    try:
        return jax.lax.Precision(choice)
    except ValueError:
        pass
    try:
        return jax.lax.DotAlgorithmPreset[choice]
    except KeyError:
        names = ", ".join(f'"{name.name.lower()}"' for name in jax.lax.Precision)
        raise ValueError(
            f"precision must be None, a jax.lax.Precision or one of {names}; got {_validate.short(choice)}"
        ) from None
