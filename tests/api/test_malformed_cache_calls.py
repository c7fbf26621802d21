"""Malformed calls on key-value caches, as test_malformed_calls.py has them of all other functions."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from malformed_values import (
    FLAG,
    FLOATING,
    IMPLEMENTATION,
    NO_ARGUMENT,
    NO_ARRAYS,
    NO_INTEGERS,
    NO_NUMBERS,
    NO_SIZES,
    SCALE,
    SOFT_CAP,
    integers,
    of_other_dtypes,
    ones,
    per_head,
    tensor,
    whole_numbers,
)
from test_malformed_calls import ATTENTION, NO_FUNCTIONS, OFFICIAL, flaw_of

import jax_flash
from jax_flash import KVCache, flash_attn

B, T, S, N, K, H, R, PAGE = 2, 4, 12, 4, 2, 8, 3, 4

CACHE = KVCache(ones(B, S, K, H), ones(B, S, K, H), integers(B))
LAYERS = jax.tree.map(lambda x: jnp.stack([x, x]), CACHE)
TABLE = [*NO_ARRAYS, *of_other_dtypes((S, R), *FLOATING), ones(S, H), ones(S), ones(S, 0), ones(1, S, R)]
SPLITS = [*NO_INTEGERS, 0, -1]
LAYER = [
    *(x for x in NO_INTEGERS if not isinstance(x, jax.Array)),
    None,
    -1,
    2,
    integers(1),
    jnp.float32(0),
    jnp.int32(5),
]
NEW = [*tensor(B, T, K, H)[1:], ones(B, T, 1, H), ones(B, T, K, H + 1), ones(B + 1, T, K, H), ones(T, K, H)]


def is_table(x):
    return getattr(x, "ndim", 0) == 2 and x.dtype == jnp.int32 and x.shape[0] == B


WITH_CACHE = {
    "query": [*tensor(B, T, N, H), ones(B, T, 3, H), ones(B + 1, T, N, H)],
    "cache": [None, *NO_ARRAYS, CACHE.key],
    "key": [None, *NEW],
    "value": [None, *NEW],
    "score_mod": NO_FUNCTIONS,
    "mask_mod": NO_FUNCTIONS,
    "rotary_cos": [None, *TABLE],
    "rotary_sin": [None, *TABLE],
    "rotary_interleaved": FLAG,
    "layer": LAYER,
    "num_splits": SPLITS,
    **{
        name: ATTENTION[name]
        for name in (
            *("scale", "is_causal", "local_window_size", "logits_soft_cap", "alibi_slopes", "sinks"),
            *("return_residual", "implementation"),
        )
    },
}
RAGGED = {
    "q": [*tensor(T, N, H), ones(T, 3, H)],
    "kv_pages": [
        *tensor(5, PAGE, 2 * K, H, also=(jnp.float8_e4m3fn,)),
        ones(5, PAGE, 3, H),
        ones(5, 0, 2 * K, H),
    ],
    "kv_lens": [None, *whole_numbers(B)],
    "page_indices": [None, *(x for x in whole_numbers(B, 3) if not is_table(x))],
    "cu_q_lens": [None, *whole_numbers(B + 1), np.array([1, 1, 1])],
    "num_seqs": [None, *whole_numbers(1), np.array([-1]), np.array([B + 1])],
    "sm_scale": [None, *NO_NUMBERS],
    "sliding_window": SPLITS,
    "soft_cap": SOFT_CAP,
    "k_scale": NO_NUMBERS,
    "v_scale": NO_NUMBERS,
    "implementation": IMPLEMENTATION,
}
PER_SEQUENCE = [x for x in whole_numbers(B) if getattr(x, "shape", None) != ()]
WITH_KVCACHE = {
    "q": [*tensor(B, T, N, H), ones(B, T, 3, H), ones(T, N, H)],
    "k_cache": [*tensor(B, S, K, H), ones(S, K, H), ones(B, S, 3, H)],
    "v_cache": [*tensor(B, S, K, H), ones(S, K, H), ones(B, S + 1, K, H)],
    "k": [None, *NEW],
    "v": [None, *NEW],
    "rotary_cos": [None, *TABLE],
    "rotary_sin": [None, *TABLE],
    "cache_seqlens": [None, *(x for x in PER_SEQUENCE if x is not True and type(x) is not int)],
    "cache_batch_idx": [*whole_numbers(B), [1, 0, 1], [1.0, 0.0], ["1", "0"]],
    "cache_leftpad": [*whole_numbers(B), [1, 0, 1], [1.0, 0.0], [None, 1]],
    "block_table": [*NO_ARGUMENT, integers(B), integers(B + 1, 2), ones(B, 2), [[1], [0, 1]], [[1.0]]],
    "softmax_scale": SCALE,
    "causal": FLAG,
    "window_size": OFFICIAL["window_size"],
    "softcap": OFFICIAL["softcap"],
    "rotary_interleaved": FLAG,
    "alibi_slopes": [*per_head((N,)), ones(B + 1, N)],
    "num_splits": NO_SIZES,
    "return_softmax_lse": FLAG,
}
NEW_ROWS = {"key": ones(B, T, K, H), "value": ones(B, T, K, H)}
TABLES = {"rotary_cos": ones(S, R), "rotary_sin": ones(S, R)}
FUNCTIONS = {
    jax_flash.flash_attention_with_cache: (
        {"query": ones(B, T, N, H), "cache": LAYERS, **NEW_ROWS, "layer": 1, **TABLES},
        WITH_CACHE,
    ),
    jax_flash.ragged_paged_attention: (
        {
            "q": ones(T, N, H),
            "kv_pages": ones(5, PAGE, 2 * K, H),
            "kv_lens": integers(B),
            "page_indices": integers(B, 3),
            "cu_q_lens": integers(B + 1),
            "num_seqs": integers(1),
        },
        RAGGED,
    ),
    flash_attn.flash_attn_with_kvcache: (
        {
            "q": ones(B, T, N, H),
            "k_cache": CACHE.key,
            "v_cache": CACHE.value,
            "k": NEW_ROWS["key"],
            "v": NEW_ROWS["value"],
            "cache_seqlens": integers(B),
            **TABLES,
        },
        WITH_KVCACHE,
    ),
}
NAMES = {function: function.__name__ for function in FUNCTIONS}
CASES = [(function, name) for function, (_, refused) in FUNCTIONS.items() for name in refused]


def test_every_argument_has_a_kind():
    for function, (_, refused) in FUNCTIONS.items():
        assert set(inspect.signature(function).parameters) == set(refused), NAMES[function]


@pytest.mark.parametrize("function", FUNCTIONS, ids=NAMES.get)
def test_the_call_that_is_changed_is_correct(function):
    arguments, _ = FUNCTIONS[function]
    jax.eval_shape(lambda: (function(**arguments), None)[1])


@pytest.mark.parametrize(("function", "name"), CASES, ids=lambda x: NAMES.get(x, x))
def test_a_wrong_value(function, name):
    arguments, refused = FUNCTIONS[function]
    flaws = [flaw for bad in refused[name] if (flaw := flaw_of(function, arguments, name, bad))]
    assert not flaws, "\n".join(flaws)


@pytest.mark.parametrize("field", ["key", "value", "lengths"])
def test_a_wrong_array_of_a_cache(field):
    """The error names it as the cache's."""
    refused = {"key": tensor(2, B, S, K, H), "value": tensor(2, B, S, K, H), "lengths": whole_numbers(2, B)}[
        field
    ]
    for bad in refused:
        cache = dataclasses.replace(LAYERS, **{field: bad})
        with pytest.raises((TypeError, ValueError), match=rf"cache\.{field}|cache\.key"):
            jax_flash.flash_attention_with_cache(ones(B, T, N, H), cache, layer=0)
        with pytest.raises((TypeError, ValueError), match=rf"cache\.{field}|cache\.key"):
            cache.append(*NEW_ROWS.values(), layer=0)


def test_a_traced_value_of_a_static_argument():
    for function, name in (
        (jax_flash.flash_attention_with_cache, "num_splits"),
        (jax_flash.flash_attention_with_cache, "rotary_interleaved"),
        (jax_flash.ragged_paged_attention, "sliding_window"),
        (jax_flash.ragged_paged_attention, "k_scale"),
        (flash_attn.flash_attn_with_kvcache, "num_splits"),
        (flash_attn.flash_attn_with_kvcache, "return_softmax_lse"),
    ):
        arguments, _ = FUNCTIONS[function]
        for value in (True, 1, 0.5):
            with pytest.raises(TypeError, match=rf"\b{name}\b.*known when the call is traced; got"):
                jax.eval_shape(lambda x: (function(**arguments | {name: x}), None)[1], value)  # noqa: B023


def test_layers_of_other_integers():
    """Of any dtype; one that is traced isn't checked."""
    for layer in (np.int8(1), np.uint64(1), jnp.uint8(1), np.array(1)):
        out, _ = jax_flash.flash_attention_with_cache(ones(B, T, N, H), LAYERS, layer=layer)
        assert out.shape == (B, T, N, H)
