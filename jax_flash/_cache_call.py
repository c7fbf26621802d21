"""From what a caller passed to one call on a key-value cache, and back: as `_call.py` for attention."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import (
    _arguments,
    _cache_rows,
    _device,
    _dispatch,
    _function_arguments,
    _rotary,
    _settings,
    _validate,
)
from jax_flash._arguments import Names
from jax_flash._cache_spec import CacheOperands, CacheSizes, CacheSpec, QueryPositions, cache_sizes
from jax_flash._float8 import is_float8
from jax_flash._mask import UNBOUNDED, Window
from jax_flash._spec import AttentionSpec, accumulator
from jax_flash._validate import described, short
from jax_flash.masks.mask import check_sizes
from jax_flash.transforms import decoding


@dataclasses.dataclass
class CacheArguments:
    """A call whose cache is checked, and all else is as the caller passed it but for `window`.

    `names` holds the caller's names, by those of `CacheOperands`.
    """

    query: Any
    cache: dict[str, jax.Array | None]  # operands: key, value, lengths; and page_table, layer, batch_index
    names: Names
    _: dataclasses.KW_ONLY
    window: Window = UNBOUNDED
    new: tuple[jax.Array, jax.Array] | None = None  # keys and values to append, checked
    left_padding: Any = None
    scale: Any = None
    logits_soft_cap: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    rotary_interleaved: Any = False
    query_positions: QueryPositions = "own"
    query_offsets: jax.Array | None = None
    num_splits: Any = None
    return_residual: Any = False
    score_mod: Any = None
    mask_mod: Any = None


@dataclasses.dataclass(frozen=True)
class CacheCall:
    """A call that passed every check."""

    spec: CacheSpec
    operands: CacheOperands

    @property
    def shapes(self) -> CacheOperands[jax.ShapeDtypeStruct]:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.dtype(x.dtype)), self.operands)

    @property
    def is_empty(self) -> bool:
        """No query, or no place for a key."""
        n = cache_sizes(self.operands)
        return 0 in (n.B, n.T, n.S, n.N, _cache_rows.pages(self.operands))


@_settings.as_written
def prepare(arguments: CacheArguments) -> CacheCall:
    """Check the arguments and bring them to canonical form."""
    names = arguments.names
    query = _query(arguments)
    n = cache_sizes(CacheOperands(query, **_required(arguments.cache)))
    if n.N % n.K:
        raise ValueError(
            f"{names['query']} must have a multiple of the heads of {names['key']}; got {n.N} heads in "
            f"{names['query']} and {n.K} heads in {names['key']}"
        )
    scale, query = _arguments.scale(names["scale"], arguments.scale, 1 / math.sqrt(n.H), query)
    left, right = arguments.window.normalised(n.T, n.S)
    _check_mask(arguments.mask_mod, n)
    score_mod, _, of_functions = _function_arguments.operands(
        arguments.score_mod, None, (n.B,), (n.T, n.S, n.N), arguments.mask_mod
    )
    attention = AttentionSpec(
        scale=scale,
        left=left,
        right=right,
        logits_soft_cap=_arguments.soft_cap(names["logits_soft_cap"], arguments.logits_soft_cap),
        return_residual=_validate.flag(names["return_residual"], arguments.return_residual),
        score_mod=score_mod,
    )
    cos, sin = _rotary_tables(arguments, n.H)
    spec = CacheSpec(
        attention,
        rotary_interleaved=_validate.flag(names["rotary_interleaved"], arguments.rotary_interleaved)
        and cos is not None,
        query_positions="own" if cos is None else arguments.query_positions,
        num_splits=_num_splits(arguments),
    )
    new_key, new_value = arguments.new or (None, None)
    operands = CacheOperands(
        query,
        **_required(arguments.cache),
        left_padding=_left_padding(arguments, n.B, n.S),
        new_key=new_key,
        new_value=new_value,
        rotary_cos=cos,
        rotary_sin=sin,
        **_per_head(arguments, n.B, n.N),
        query_offsets=arguments.query_offsets,
    )
    return CacheCall(spec, CacheOperands.of(operands.present() | of_functions))


def _check_mask(mask_mod: Any, n: CacheSizes) -> None:
    """Raises ValueError if a mask of `jax_flash.masks` holds arrays of other sizes."""
    try:
        check_sizes(mask_mod, n.B, n.N, n.S, n.S)  # its indices are positions
    except ValueError as error:
        raise ValueError(
            f"mask_mod must be of B = {n.B} sequences, N = {n.N} heads and positions up to the cache's "
            f"capacity, T = S = {n.S}: {error}"
        ) from None


def _required(cache: dict[str, jax.Array | None]) -> dict[str, Any]:
    return {"value": None} | cache


def _query(arguments: CacheArguments) -> jax.Array:
    names, cache = arguments.names, arguments.cache
    key, lengths = cache["key"], cache["lengths"]
    assert key is not None and lengths is not None
    query = _validate.array(names["query"], arguments.query, "floating")
    B, H = lengths.shape[-1], key.shape[-1]
    is_varlen = arguments.query_offsets is not None
    if is_varlen:
        _validate.without_symbols(names["query"], "shape", query.shape)
    else:
        _validate.without_symbols(names["query"], "number of heads and head dim", query.shape[-2:])
    if query.ndim != 4 or query.shape[-1] != H or (query.shape[0] != B and not is_varlen):
        raise ValueError(
            f"{names['query']} must have shape (B, T, N, H) with B = {B} and H = {H} as the cache; "
            f"got {described(query)}"
        )
    if is_float8(key.dtype):
        if arguments.new is not None and arguments.new[0].dtype != query.dtype:
            raise TypeError(
                f"{names['new_key']} must have the dtype of {names['query']}, {query.dtype}; "
                f"got {arguments.new[0].dtype}"
            )
    elif query.dtype != key.dtype:
        raise TypeError(
            f"{names['query']} must have the dtype of {names['key']}, {key.dtype}; got {query.dtype}"
        )
    return query


def _rotary_tables(arguments: CacheArguments, head_dim: int) -> tuple[jax.Array | None, jax.Array | None]:
    names, cos, sin = arguments.names, arguments.rotary_cos, arguments.rotary_sin
    if cos is None and sin is None:
        return None, None
    if cos is None or sin is None:
        given, absent = ("rotary_cos", "rotary_sin") if sin is None else ("rotary_sin", "rotary_cos")
        raise ValueError(f"{names[given]} goes with {names[absent]}; got {names[absent]}=None")
    cos, sin = _rotary.tables(cos, sin, head_dim, names["rotary_cos"], names["rotary_sin"])
    dtype = accumulator(arguments.query.dtype)
    return cos.astype(dtype), sin.astype(dtype)


def _num_splits(arguments: CacheArguments) -> int | None:
    if arguments.num_splits is None:
        return None
    splits = _validate.integer(arguments.names["num_splits"], arguments.num_splits)
    if splits < 1:
        raise ValueError(
            f"{arguments.names['num_splits']} must be None or at least 1; got {short(arguments.num_splits)}"
        )
    return splits


def _left_padding(arguments: CacheArguments, B: int, S: int) -> jax.Array | None:
    if arguments.left_padding is None:
        return None
    name = arguments.names["left_padding"]
    padding = _validate.shaped_unconverted(name, arguments.left_padding, {"(B,)": (B,)}, "integer")
    return _validate.clipped(padding, S)


def _per_head(arguments: CacheArguments, B: int, N: int) -> dict[str, jax.Array]:
    names, operands = arguments.names, {}
    if arguments.alibi_slopes is not None:
        shapes = {"(N,)": (N,), "(B, N)": (B, N)}
        slopes = _validate.shaped(names["alibi_slopes"], arguments.alibi_slopes, shapes, "floating")
        slopes = slopes.astype(accumulator(arguments.query.dtype))
        operands["alibi_slopes"] = jnp.expand_dims(slopes, 0) if slopes.ndim == 1 else slopes
    if arguments.sinks is not None:
        sinks = _validate.shaped(names["sinks"], arguments.sinks, {"(N,)": (N,)}, "floating")
        operands["sinks"] = jnp.expand_dims(sinks.astype(accumulator(arguments.query.dtype)), 0)
    return operands


@_settings.as_written
def attend(call: CacheCall, implementation: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Run `call`: out, lse `(B, N, T)`, and the cache's key and value after the append."""
    names = _arguments.implementations(implementation)
    if call.is_empty:
        return _nothing(call)
    chosen = _dispatch.select(call.spec, call.shapes, names, _device.current())
    return decoding.attend(call.spec, chosen, call.operands)


def _nothing(call: CacheCall) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """The results where no query has a key to attend to."""
    n, query = cache_sizes(call.operands), call.operands.query
    out = jnp.zeros((*query.shape[:-1], n.V), query.dtype)
    lse = jnp.full((query.shape[0], n.N, n.T), -jnp.inf, accumulator(query.dtype))
    key, value = call.operands.key, call.operands.value
    if call.operands.new_key is not None and 0 not in (call.operands.new_key.size, key.size, n.S):
        key, value = decoding.append(call.spec, call.operands)
    return out, lse, key, value
