"""Checks of the arguments for arrays of 8 bits: descales, the output's dtype, and quantization."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_flash import _arguments, _float8, _validate

QUANTIZATIONS = ("fp8",)


@dataclasses.dataclass(frozen=True)
class Float8:
    """What the caller of a function that takes arrays of 8 bits passed beside them, unchecked."""

    query_descale: Any = None
    key_descale: Any = None
    value_descale: Any = None
    out_dtype: Any = None


def of_arrays(
    given: Float8 | None, arrays: tuple[jax.Array, jax.Array, jax.Array], scale: Any
) -> tuple[str | None, dict[str, jax.Array]]:
    """The output's dtype, None for query's; and descales `(*B, K, blocks | 1)` by name.

    Args:
      arrays: query, key and value, checked.
    """
    if given is None:
        return None, {}
    query, key, _ = arrays
    names = {name: getattr(given, name) for name in ("query_descale", "key_descale", "value_descale")}
    if not _float8.is_float8(query.dtype):
        for name, x in (names | {"out_dtype": given.out_dtype}).items():
            if x is not None:
                raise ValueError(
                    f"{name} goes with arrays of dtype float8_e4m3fn; query is {query.dtype}, "
                    f"and {name} must be None; got {_validate.short(x)}"
                )
        return None, {}
    if isinstance(scale, Tracer):
        raise TypeError(
            "scale must be a Python number where query is float8_e4m3fn "
            f"(multiply query_descale by a traced one); got the traced value {scale}"
        )
    *batch, queries, _, _ = query.shape
    keys, heads = key.shape[-3:-1]
    if not isinstance(queries, int) or not isinstance(keys, int):
        raise ValueError(f"lengths must not be symbolic where query is float8_e4m3fn; got {query.shape}")
    descales = {}
    for (name, x), rows in zip(names.items(), (queries, keys, keys), strict=True):
        if x is not None:
            blocks = _float8.descales_of(rows)
            shapes = {"(*B, K)": (*batch, heads), "(*B, K, blocks of 128)": (*batch, heads, blocks)}
            x = _validate.shaped(name, x, shapes, "floating").astype(jnp.float32)
            descales[name] = x if x.ndim == len(batch) + 2 else x[..., None]
    dtype = jnp.bfloat16 if given.out_dtype is None else given.out_dtype
    return np.dtype(_validate.floating_dtype("out_dtype", dtype)).name, descales


def quantization(arguments: Any, query: jax.Array) -> tuple[str | None, jax.Array | None]:
    """The checked argument, and the signs of incoherent processing `(H,)`."""
    if arguments.quantization is None:
        if arguments.quantization_key is not None:
            key = _arguments.random_key("quantization_key", arguments.quantization_key)
            got = _validate.described(key)
            raise ValueError(f'quantization_key goes with quantization="fp8"; without it got {got}')
        return None, None
    quantization = _validate.one_of("quantization", arguments.quantization, QUANTIZATIONS, or_none=True)
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        raise TypeError(
            f'query, key and value must be bfloat16 or float16 with quantization="fp8"; got {query.dtype}'
        )
    return quantization, signs(arguments.quantization_key, query.shape[-1])


def signs(key: Any, head_dim: int) -> jax.Array:
    """The signs `(H,)` of incoherent processing; those of a fixed key for None."""
    if _float8.hadamard_size(head_dim) == 1:
        raise ValueError(
            f"incoherent processing needs an even head dim; got {head_dim}. Pad query and key with a zero"
        )
    if key is None:
        return _float8.fixed_signs(head_dim)
    return _float8.random_signs(_arguments.random_key("quantization_key", key), head_dim)
