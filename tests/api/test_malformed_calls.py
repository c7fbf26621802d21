"""Malformed calls of every public function: the error names the argument as that function does, and shows it.

For each argument there is a kind (a flag, a number, floating arrays, …), and for each kind some dozens of
values that it refuses. A correct call with one of them in the argument's place must raise.
"""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from malformed_values import (
    ALIGNMENT,
    CONTEXT_PARALLEL,
    FLAG,
    FLOATING,
    HUGE,
    IMPLEMENTATION,
    KEY,
    LENGTHS,
    NO_ARGUMENT,
    NO_ARRAYS,
    NO_FUNCTIONS,
    NO_JAX_ARRAYS,
    NO_NUMBERS,
    NO_SIZES,
    RAGGED,
    RATE,
    SCALE,
    SOFT_CAP,
    UNPRINTABLE_INT,
    WINDOW,
    B,
    H,
    K,
    N,
    Odd,
    S,
    T,
    Unprintable,
    integers,
    of_other_dtypes,
    ones,
    per_head,
    per_logit,
    tensor,
    whole_numbers,
)

import jax_flash
import jax_flash.flax
from jax_flash import flash_attn

ERRORS = (TypeError, ValueError, NotImplementedError)

ATTENTION = {
    "query": tensor(B, T, N, H),
    "key": [*tensor(B, S, K, H), ones(B + 1, S, K, H), ones(B, S, 0, H), ones(S, K, H), ones(B, S, 3, H)],
    "value": [*tensor(B, S, K, H), ones(B, S + 1, K, H), ones(B, S, 1, H), ones(S, K, H)],
    "bias": per_logit((B, N, T, S), *FLOATING),
    "mask": per_logit((B, N, T, S), jnp.bool_),
    "scale": SCALE,
    "is_causal": FLAG,
    "local_window_size": [*WINDOW, -2, (-2, 0), (1, -HUGE), -(2**40)],
    "query_seq_lengths": LENGTHS,
    "key_value_seq_lengths": LENGTHS,
    "query_segment_ids": whole_numbers(B, T),
    "key_value_segment_ids": whole_numbers(B, S),
    "logits_soft_cap": SOFT_CAP,
    "alibi_slopes": [*per_head((N,)), ones(B + 1, N)],
    "sinks": [*per_head((N,)), ones(B, N)],
    "dropout_rate": RATE,
    "dropout_key": KEY,
    "deterministic": FLAG,
    "return_residual": FLAG,
    "score_mod": NO_FUNCTIONS,
    "block_mask": [*NO_FUNCTIONS, int, lambda b, h, q, k: q >= k],
    "quantization": [*NO_ARGUMENT, *NO_JAX_ARRAYS, "", "int8", "FP8", True],
    "quantization_key": [*KEY, jax.random.key(0)],
    "query_descale": [*NO_ARRAYS, ones(B, K)],  # which goes with arrays of 8 bits alone
    "key_descale": [*NO_ARRAYS, ones(B, K)],
    "value_descale": [*NO_ARRAYS, ones(B, K)],
    "out_dtype": [*NO_ARGUMENT, *NO_JAX_ARRAYS, jnp.float32, "bfloat16"],
    "implementation": IMPLEMENTATION,
    "alignment": ALIGNMENT,
    "context_parallel": CONTEXT_PARALLEL,
}
FLAX_ALONE = {"broadcast_dropout": [True, False, np.True_, 0, "text", Odd(), Unprintable()]}
DESCENDING = [0, 3, 2, 4]
OFFSETS = [
    None,
    *whole_numbers(3),
    integers(0),
    np.array([1, 2, 4]),
    jnp.array([0, 3, 2]),
    np.array(DESCENDING),
    np.array([0, 2, 2**40]),
    np.array([0, 2**32, 2**32 + 4]),
    np.array([0, 2, 2**64 - 1], np.uint64),
    jnp.array([0, -1, 4]),
]
VARLEN = {
    "query": tensor(T, N, H),
    "key": [*tensor(S, K, H), ones(S, K, H + 1), ones(B, S, K, H), ones(S, 3, H)],
    "value": [*tensor(S, K, H), ones(S + 1, K, H), ones(B, S, K, H), ones(S, 1, H)],
    "cu_seqlens_q": [*OFFSETS, np.array([0, 2, T + 1])],
    "cu_seqlens_kv": [*OFFSETS, jnp.array([0, 2, S + 1])],
    "max_seqlen_q": [None, *NO_SIZES, 1],
    "max_seqlen_kv": [None, *NO_SIZES, 2],
    **{
        name: ATTENTION[name]
        for name in (
            *("scale", "is_causal", "local_window_size", "logits_soft_cap", "alibi_slopes", "sinks"),
            *("dropout_rate", "dropout_key", "deterministic", "return_residual", "implementation"),
            *("score_mod", "block_mask", "quantization", "quantization_key"),
        )
    },
}
DOT_PRODUCT = {
    **{name: ATTENTION[name] for name in ("query", "key", "value", "mask", "scale", "is_causal")},
    "bias": per_logit((B, N, T, S), *FLOATING, jnp.integer),
    "query_seq_lengths": LENGTHS,
    "key_value_seq_lengths": LENGTHS,
    "local_window_size": [*WINDOW, -1, (-2, 1), (3, -4), (1, -HUGE)],
    "implementation": IMPLEMENTATION,
    "return_residual": FLAG,
    "dropout_rate": RATE,
    "dropout_key": KEY,
    "alignment": ALIGNMENT,
}

OFFICIAL = {
    "dropout_p": RATE,
    "softmax_scale": SCALE,
    "causal": FLAG,
    "window_size": WINDOW,
    "softcap": [*NO_NUMBERS, None, 1e-300],
    "alibi_slopes": [*per_head((N,)), ones(B + 1, N)],
    "deterministic": FLAG,
    "return_attn_probs": FLAG,
    "dropout_key": KEY,
}


def renamed(arguments, **names):
    return {own: arguments[name] for own, name in names.items()}


OFFICIAL_SEQUENCES = renamed(
    VARLEN,
    cu_seqlens_q="cu_seqlens_q",
    cu_seqlens_k="cu_seqlens_kv",
    max_seqlen_q="max_seqlen_q",
    max_seqlen_k="max_seqlen_kv",
)
ONE_OFFSETS = [x for x in OFFSETS if getattr(x, "shape", None) != (4,)] + [np.array([0, 2, T + 1])]
KV = [*tensor(B, S, 2, K, H), ones(B, S, 3, K, H), ones(B + 1, S, 2, K, H), ones(B, S, 2, K, H + 1)]
KV_TOKENS = [*tensor(S, 2, K, H), ones(S, 1, K, H), ones(S, 2, K, H + 1), ones(S, 2, 3, H)]


def numbers(*shape):
    """What is refused where any bools or numbers are taken."""
    allowed = (jnp.bool_, jnp.integer, jnp.floating)
    bad = [x for x in of_other_dtypes(shape, *allowed) if x.dtype != np.longdouble]
    return [None, *NO_ARRAYS, np.ma.masked_array(np.ones(shape)), *bad, np.ones(shape, ">f4")]


FLAX = {
    "query": [*numbers(B, T, N, H), jnp.ones((B, T, N, H), jnp.float8_e4m3fn), ones(B, T, N, 0), ones(2)],
    "key": [*numbers(B, S, K, H), jnp.ones((B, S, K, H), jnp.float8_e4m3fn), ones(B, S, K, 0), ones(S, K, H)],
    "value": [*numbers(B, S, K, H), jnp.ones((B, S, K, H), jnp.float8_e5m2), ones(B, S, K, 0), ones(S, K, H)],
    "bias": ATTENTION["bias"],
    "mask": [*numbers(B, N, T, S)[1:-1], ones(T, 3), ones(1, 1, B, N, T, S)],
    "broadcast_dropout": FLAG,
    "dropout_rng": KEY,
    "dropout_rate": RATE,
    "deterministic": FLAG,
    "dtype": [
        "text",
        b"1",
        3,
        1j,
        Odd(),
        {},
        "int32",
        jnp.int8,
        bool,
        object,
        np.complex64,
        jnp.float8_e4m3fn,
    ],
    "precision": [
        "text",
        b"1",
        3,
        1j,
        Odd(),
        {},
        True,
        ("default", 3),
        jax.lax.DotAlgorithmPreset.F64_F64_F64,
    ],
    "module": [Odd(), 3, "text"],
    "force_fp32_for_softmax": FLAG,
    "einsum_dot_general": [Odd(), 3, print],
    "qk_attn_weights_einsum": [Odd(), 3, print],
    "attn_weights_value_einsum": [Odd(), 3, print],
    "promote_dtype": [
        Odd(),
        3,
        "text",
    ],
    "is_causal": FLAG,
    **{
        name: ATTENTION[name]
        for name in (
            *(
                "scale",
                "local_window_size",
                "query_seq_lengths",
                "key_value_seq_lengths",
                "query_segment_ids",
            ),
            *("key_value_segment_ids", "logits_soft_cap", "alibi_slopes", "sinks", "implementation"),
        )
    },
}
PAD = {
    "hidden_states": [None, *NO_ARRAYS, ones(), ones(2), ones(T + 1, 3)],
    "indices": [None, *whole_numbers(T)],
    "batch": [None, *NO_SIZES, HUGE, 2**31],
    "seqlen": [None, *NO_SIZES, HUGE, 2**31],
}
TOKEN_MASK = [*NO_ARRAYS, *of_other_dtypes((B, T), jnp.bool_, jnp.integer), ones(B), integers(B, T + 1)]
UNPAD = {
    "hidden_states": [None, *NO_ARRAYS, ones(), ones(2)],
    "attention_mask": [None, *TOKEN_MASK],
    "unused_mask": TOKEN_MASK,
    "size": [*NO_SIZES, HUGE, UNPRINTABLE_INT, 2**31],
}
SHAPE = [None, *NO_ARGUMENT, 3, (), (1, 2), (1, 2, 3.0), (1, 2, True), (1, 2, "3"), (1, -2, 3), (1, None, 3)]
SHAPE += [(1, 2, HUGE), (1, 2, 1j), np.ones(3), RAGGED, "123"]
DROPOUT_MASK = {"key": [None, *KEY], "rate": RATE, "shape": SHAPE}

query, key, value = ones(B, T, N, H), ones(B, S, K, H), ones(B, S, K, H)
DROPOUT = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}
PLAIN = {"query": query, "key": key, "value": value, **DROPOUT}
SEGMENTS = {"query_segment_ids": integers(B, T), "key_value_segment_ids": integers(B, S)}
PACKED = {
    **{"cu_seqlens_q": np.array([0, 1, T]), "cu_seqlens_kv": jnp.array([0, 2, S])},
    **{"max_seqlen_q": 3, "max_seqlen_kv": 3},
}
QKV = {"q": query, "k": key, "v": value}
DROPS = {"dropout_p": 0.5, "dropout_key": jax.random.key(0)}
CU = {
    "cu_seqlens_q": np.array([0, 1, T]),
    "cu_seqlens_k": np.array([0, 2, S]),
    "max_seqlen_q": 3,
    "max_seqlen_k": 3,
}

# Of each function: a correct call, and what each argument refuses.
FUNCTIONS = {
    jax_flash.flash_attention: (PLAIN | SEGMENTS, ATTENTION | FLAX_ALONE),
    jax_flash.explain: (PLAIN | SEGMENTS, ATTENTION),
    jax_flash.dot_product_attention: (PLAIN, DOT_PRODUCT),
    jax_flash.flash_attention_varlen: (
        {"query": query[0], "key": key[0], "value": value[0], **DROPOUT, **PACKED},
        VARLEN,
    ),
    jax_flash.flax.dot_product_attention: (
        {
            **{"query": query, "key": key, "value": value, **SEGMENTS},
            **{"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
        },
        FLAX,
    ),
    jax_flash.dropout_mask: ({"key": jax.random.key(0), "rate": 0.5, "shape": (N, T, S)}, DROPOUT_MASK),
    flash_attn.flash_attn_func: (
        QKV | DROPS,
        renamed(ATTENTION, q="query", k="key", v="value") | OFFICIAL,
    ),
    flash_attn.flash_attn_kvpacked_func: (
        {"q": query, "kv": jnp.stack([key, value], 2)} | DROPS,
        {"q": ATTENTION["query"], "kv": KV} | OFFICIAL,
    ),
    flash_attn.flash_attn_qkvpacked_func: (
        {"qkv": ones(B, T, 3, N, H)} | DROPS,
        {"qkv": [*tensor(B, T, 3, N, H), ones(B, T, 2, N, H)]} | OFFICIAL,
    ),
    flash_attn.flash_attn_varlen_func: (
        {name: x[0] for name, x in QKV.items()} | DROPS | CU,
        {"block_table": NO_ARGUMENT, **renamed(VARLEN, q="query", k="key", v="value")}
        | OFFICIAL
        | OFFICIAL_SEQUENCES,
    ),
    flash_attn.flash_attn_varlen_kvpacked_func: (
        {"q": query[0], "kv": ones(S, 2, K, H)} | DROPS | CU,
        {"q": VARLEN["query"], "kv": KV_TOKENS} | OFFICIAL | OFFICIAL_SEQUENCES,
    ),
    flash_attn.flash_attn_varlen_qkvpacked_func: (
        {"qkv": ones(T, 3, N, H), "cu_seqlens": np.array([0, 1, T]), "max_seqlen": 3} | DROPS,
        {"qkv": tensor(T, 3, N, H), "cu_seqlens": ONE_OFFSETS, "max_seqlen": VARLEN["max_seqlen_q"]}
        | OFFICIAL,
    ),
    flash_attn.pad_input: (
        {"hidden_states": ones(T, 3), "indices": jnp.arange(T), "batch": B, "seqlen": T},
        PAD,
    ),
    flash_attn.unpad_input: (
        {"hidden_states": ones(B, T, 3), "attention_mask": integers(B, T) + 1, "size": 3},
        UNPAD,
    ),
}
NAMES = {function: f"{function.__module__}.{function.__name__}" for function in FUNCTIONS}
CASES = [(function, name) for function, (_, refused) in FUNCTIONS.items() for name in refused]
STATIC = (FLAG, SOFT_CAP, RATE)  # a scale may be traced


def told_as(value):
    """Texts of which the error must hold one: how it may show the value."""
    texts = [type(value).__name__, getattr(value, "__name__", "None")]
    if isinstance(value, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct):
        texts += [str(value.dtype), str(tuple(value.shape))]
        texts += [f"{heads} heads" for heads in value.shape[-2:-1]]
        if getattr(value.dtype, "kind", None) in ("i", "u"):
            texts.append(str(np.ravel(value).tolist()))
    if isinstance(value, tuple | list):
        texts += [f"({type(x).__name__})" for x in value]
        texts += [f"({len(value)},)", f"({len(value)}, 1)"]
    return texts


def flaw_of(function, arguments, name, value):
    """What is wrong with how the call is refused; None if nothing is."""
    try:
        function(**arguments | {name: value})
    except ERRORS as raised:
        flaw = flaw_of_message(function, name, value, str(raised))
        return flaw and f"{flaw}: {type(raised).__name__}: {raised}"
    except Exception as raised:
        return f"another error for {type(value)}: {type(raised).__name__}: {raised}"
    return f"accepted: {told_as(value)}"


def flaw_of_message(function, name, value, message):
    if not re.search(rf"\b{name}\b", message):
        return f"{name} isn't named"
    if "must" not in message and "goes with" not in message:
        return "no word of what it may be"
    if "got" not in message or not any(text in message for text in told_as(value)):
        return f"not shown as any of {told_as(value)}"
    every_name = {x for f in FUNCTIONS for x in inspect.signature(f).parameters}
    words = {"key", "value", "query", "dtype", "mask", "size", "shape", "batch", "seqlen", "rate", "scale"}
    foreign = every_name - words - set(inspect.signature(function).parameters)
    before_value = message.partition("got")[0]
    if any(re.search(rf"\b{x}\b", before_value) for x in foreign):
        return "it names an argument that the function doesn't have"
    return "the value isn't cut" if len(message) > 1500 else None


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


STATIC_CASES = [
    (function, name)
    for function, name in CASES
    if any(FUNCTIONS[function][1][name] is kind for kind in STATIC)
    or name.startswith(("max_seqlen", "local_window", "window", "softcap", "size", "batch", "seqlen"))
]


@pytest.mark.parametrize(("function", "name"), STATIC_CASES, ids=lambda x: NAMES.get(x, x))
def test_a_traced_value_of_a_static_argument(function, name):
    arguments, _ = FUNCTIONS[function]
    for value in (True, 1, 0.5):
        with pytest.raises(TypeError, match=rf"\b{name}\b.*known when the call is traced; got"):
            jax.eval_shape(lambda x: (function(**arguments | {name: x}), None)[1], value)


def traceable(value):
    return isinstance(value, jax.Array) and value.size


@pytest.mark.parametrize("seed", range(8))
def test_drawn_calls(seed):
    """Up to three arguments wrong at once, arrays traced or not: the error names one of them."""
    generator = np.random.default_rng(seed)
    for _ in range(50):
        function = list(FUNCTIONS)[generator.integers(len(FUNCTIONS))]
        arguments, refused = FUNCTIONS[function]
        names = generator.choice(list(refused), min(len(refused), 1 + generator.integers(3)), replace=False)
        wrong = {name: refused[name][generator.integers(len(refused[name]))] for name in names}
        changed = arguments | wrong
        is_traced = generator.random() < 0.5 and function is not jax_flash.explain
        traced = {name: x for name, x in changed.items() if is_traced and traceable(x) and name in wrong}
        others = {name: x for name, x in changed.items() if name not in traced}
        told = f"{NAMES[function]} with {names}"
        try:
            jax.eval_shape(lambda traced: (function(**traced, **others), None)[1], traced)  # noqa: B023
        except ERRORS as raised:
            assert any(re.search(rf"\b{name}\b", str(raised)) for name in names), f"{told}: {raised}"
        else:
            # Offsets and indices are data; what is wrong with their values shows if they are known.
            assert set(names) <= {name for name in traced if name.startswith("cu_seqlens")}, told
