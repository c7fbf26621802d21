"""Every error of the public contract: raised when traced, it names the argument, what it was and may be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _arguments

B, T, S, N, K, H, V = 2, 4, 5, 4, 2, 8, 16


def arguments(**changes):
    """A correct call, with changes."""
    return {
        "query": jnp.ones((B, T, N, H)),
        "key": jnp.ones((B, S, K, H)),
        "value": jnp.ones((B, S, K, V)),
    } | changes


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


ERRORS = {
    # Kinds: what isn't an array, a number, a flag.
    "query is a list": (dict(query=[1.0]), TypeError, "query must be an array; got [1.0] (list)"),
    "key is None": (dict(key=None), TypeError, "key must be an array; got None"),
    "value is a string": (dict(value="v"), TypeError, "value must be an array; got 'v' (str)"),
    "bias is a number": (dict(bias=1.0), TypeError, "bias must be an array; got 1.0 (float)"),
    "mask is a flag": (dict(mask=True), TypeError, "mask must be an array; got True (bool)"),
    "scale is a string": (dict(scale="big"), TypeError, "scale must be a number; got 'big'"),
    "scale is a flag": (dict(scale=True), TypeError, "scale must be a number; got True"),
    "is_causal is a number": (dict(is_causal=1), TypeError, "is_causal must be True or False"),
    "deterministic is None": (dict(deterministic=None), TypeError, "deterministic must be True or False"),
    "return_residual is a string": (
        dict(return_residual="yes"),
        TypeError,
        "return_residual must be True or False, known when the call is traced; got 'yes' (str)",
    ),
    "window of a float": (
        dict(local_window_size=(1.5, 0)),
        TypeError,
        "local_window_size must be a Python integer, known when the call is traced; got 1.5 (float)",
    ),
    "window is a flag": (dict(local_window_size=True), TypeError, "local_window_size must be"),
    "dropout_key is a seed": (
        dict(dropout_rate=0.5, dropout_key=0),
        TypeError,
        "dropout_key must be a key, as from jax.random.key; got 0 (int); jax.random.key(0) makes one",
    ),
    "implementation is a number": (
        dict(implementation=3),
        TypeError,
        'implementation must be None, one of "cuda", "pallas", "xla" or a sequence of them; got 3 (int)',
    ),
    # Dtypes.
    "query of integers": (
        dict(query=zeros(B, T, N, H, dtype=jnp.int32)),
        TypeError,
        "query must have a floating dtype; got int32 (2, 4, 4, 8)",
    ),
    "query of 8-bit floats": (
        dict(query=zeros(B, T, N, H, dtype=jnp.float8_e5m2)),
        TypeError,
        "query must have a floating dtype of 16 bits at least, or float8_e4m3fn; "
        "got float8_e5m2 (2, 4, 4, 8)",
    ),
    "mixed dtypes": (
        dict(key=zeros(B, S, K, H, dtype=jnp.bfloat16)),
        TypeError,
        "query, key and value must have the same dtype; got float32, bfloat16 and float32",
    ),
    "bias of bools": (
        dict(bias=zeros(T, S, dtype=bool)),
        TypeError,
        "bias must have a floating dtype; got bool (4, 5)",
    ),
    "mask of floats": (
        dict(mask=zeros(T, S)),
        TypeError,
        "mask must have a bool dtype (mask != 0 for a mask of numbers; an additive mask goes into bias); "
        "got float32 (4, 5)",
    ),
    "alibi_slopes of integers": (
        dict(alibi_slopes=zeros(N, dtype=jnp.int32)),
        TypeError,
        "alibi_slopes must have a floating dtype; got int32 (4,)",
    ),
    "sinks of integers": (
        dict(sinks=zeros(N, dtype=jnp.int32)),
        TypeError,
        "sinks must have a floating dtype; got int32 (4,)",
    ),
    "lengths of floats": (
        dict(query_seq_lengths=zeros(B)),
        TypeError,
        "query_seq_lengths must have an integer dtype; got float32 (2,)",
    ),
    "key lengths of floats": (
        dict(key_value_seq_lengths=zeros(B)),
        TypeError,
        "key_value_seq_lengths must have an integer dtype; got float32 (2,)",
    ),
    "segment ids of floats": (
        dict(query_segment_ids=zeros(B, T), key_value_segment_ids=zeros(B, S)),
        TypeError,
        "query_segment_ids must have an integer dtype; got float32 (2, 4)",
    ),
    "dropout_key of floats": (
        dict(dropout_rate=0.5, dropout_key=zeros(2)),
        TypeError,
        "dropout_key must be a key, as from jax.random.key; got float32 (2,)",
    ),
    # Shapes.
    "query of two axes": (
        dict(query=zeros(N, H)),
        ValueError,
        "query must have shape (*B, T, N, H); got float32 (4, 8)",
    ),
    "key without batch": (
        dict(key=zeros(S, K, H)),
        ValueError,
        "key must have shape (*B, S, K, H) with *B = (2,) and H = 8 as in query (2, 4, 4, 8); "
        "got float32 (5, 2, 8)",
    ),
    "key of another batch": (dict(key=zeros(3, S, K, H)), ValueError, "got float32 (3, 5, 2, 8)"),
    "key of another head dim": (dict(key=zeros(B, S, K, 7)), ValueError, "got float32 (2, 5, 2, 7)"),
    "value of other keys": (
        dict(value=zeros(B, 6, K, V)),
        ValueError,
        "value must have shape (*B, S, K, V) with (*B, S, K) = (2, 5, 2) as in key; "
        "got float32 (2, 6, 2, 16)",
    ),
    "value of other heads": (dict(value=zeros(B, S, 1, V)), ValueError, "got float32 (2, 5, 1, 16)"),
    "heads that don't divide": (
        dict(query=zeros(B, T, 3, H)),
        ValueError,
        "query must have a multiple of the heads of key; got 3 heads in query and 2 heads in key",
    ),
    "no key heads": (
        dict(key=zeros(B, S, 0, H), value=zeros(B, S, 0, V)),
        ValueError,
        "key must have at least one head and a head dim of at least 1; got float32 (2, 5, 0, 8)",
    ),
    "head dim 0": (
        dict(value=zeros(B, S, K, 0)),
        ValueError,
        "value must have a head dim of at least 1; got float32 (2, 5, 2, 0)",
    ),
    "bias that doesn't broadcast": (
        dict(bias=zeros(T, 3)),
        ValueError,
        "bias must be broadcastable to (*B, N, T, S) = (2, 4, 4, 5); got float32 (4, 3)",
    ),
    "mask of too many axes": (
        dict(mask=zeros(1, 1, 1, 1, 1, dtype=bool)),
        ValueError,
        "mask must be broadcastable to (*B, N, T, S) = (2, 4, 4, 5); got bool (1, 1, 1, 1, 1)",
    ),
    "alibi_slopes of key heads": (
        dict(alibi_slopes=zeros(K)),
        ValueError,
        "alibi_slopes must have shape (N,) = (4,) or (*B, N) = (2, 4); got float32 (2,)",
    ),
    "sinks of the batch": (
        dict(sinks=zeros(B, N)),
        ValueError,
        "sinks must have shape (N,) = (4,); got float32 (2, 4)",
    ),
    "lengths of a scalar": (
        dict(query_seq_lengths=jnp.int32(3)),
        ValueError,
        "query_seq_lengths must have shape (*B,) = (2,); got int32 ()",
    ),
    "key lengths of another batch": (
        dict(key_value_seq_lengths=zeros(3, dtype=jnp.int32)),
        ValueError,
        "key_value_seq_lengths must have shape (*B,) = (2,); got int32 (3,)",
    ),
    "query segments of keys": (
        dict(
            query_segment_ids=zeros(B, S, dtype=jnp.int32), key_value_segment_ids=zeros(B, S, dtype=jnp.int32)
        ),
        ValueError,
        "query_segment_ids must have shape (*B, T) = (2, 4); got int32 (2, 5)",
    ),
    "key segments of queries": (
        dict(
            query_segment_ids=zeros(B, T, dtype=jnp.int32), key_value_segment_ids=zeros(B, T, dtype=jnp.int32)
        ),
        ValueError,
        "key_value_segment_ids must have shape (*B, S) = (2, 5); got int32 (2, 4)",
    ),
    "keys of dropout": (
        dict(dropout_rate=0.5, dropout_key=jax.random.split(jax.random.key(0))),
        ValueError,
        "dropout_key must be one key, not an array of them; got key<fry> (2,)",
    ),
    "a raw key of three words": (
        dict(dropout_rate=0.5, dropout_key=zeros(3, dtype=jnp.uint32)),
        ValueError,
        "dropout_key must have shape (2,), as from PRNGKey; got uint32 (3,)",
    ),
    # Values.
    "query segments alone": (
        dict(query_segment_ids=zeros(B, T, dtype=jnp.int32)),
        ValueError,
        "query_segment_ids goes with key_value_segment_ids; got the first alone",
    ),
    "key segments alone": (
        dict(key_value_segment_ids=zeros(B, S, dtype=jnp.int32)),
        ValueError,
        "key_value_segment_ids goes with query_segment_ids; got the first alone",
    ),
    "scale not finite": (
        dict(scale=float("inf")),
        ValueError,
        "scale must be finite in float32; got inf (float)",
    ),
    "negative window": (
        dict(local_window_size=(3, -2)),
        ValueError,
        "local_window_size must hold sizes of at least 0, or None or -1 for unbounded; got (3, -2)",
    ),
    "window of three": (
        dict(local_window_size=(1, 2, 3)),
        ValueError,
        "local_window_size must be None, an int or a pair (left, right); got (1, 2, 3)",
    ),
    "soft cap 0": (
        dict(logits_soft_cap=0.0),
        ValueError,
        "logits_soft_cap must be None or greater than 0; got 0.0",
    ),
    "dropout of all": (
        dict(dropout_rate=1.0),
        ValueError,
        "dropout_rate must be at least 0 and less than 1; got 1.0",
    ),
    "negative dropout": (dict(dropout_rate=-0.1), ValueError, "dropout_rate must be at least 0"),
    "dropout without a key": (
        dict(dropout_rate=0.1),
        ValueError,
        "dropout_key must be a key, as from jax.random.key, when dropout_rate is 0.1; got None",
    ),
    "unknown implementation": (
        dict(implementation="cudnn"),
        ValueError,
        'implementation must be None, one of "cuda", "pallas", "xla" or a sequence of them '
        "(None picks the fastest); got 'cudnn'",
    ),
    "unknown in a sequence": (dict(implementation=("xla", "cudnn")), ValueError, "got ('xla', 'cudnn')"),
    "no implementation": (dict(implementation=()), ValueError, "implementation must be None, one of"),
}


@pytest.mark.parametrize("row", ERRORS)
def test_error(row):
    changes, error, message = ERRORS[row]
    with pytest.raises(error) as raised:
        jax_flash.flash_attention(**arguments(**changes))
    assert message in str(raised.value)


@pytest.mark.parametrize("row", ERRORS)
def test_error_is_raised_while_tracing(row):
    changes, error, message = ERRORS[row]
    arrays, static = {}, {}
    for name, x in arguments(**changes).items():
        (arrays if isinstance(x, jax.Array) else static)[name] = x
    with pytest.raises(error) as raised:
        jax.eval_shape(lambda arrays: jax_flash.flash_attention(**arrays, **static), arrays)
    assert message in str(raised.value)


@pytest.mark.parametrize("row", ERRORS)
def test_explain_raises_the_same(row):
    changes, error, message = ERRORS[row]
    with pytest.raises(error) as raised:
        jax_flash.explain(**arguments(**changes))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("scale", True, "scale must have a floating or integer dtype; got bool"),
        (
            "logits_soft_cap",
            30.0,
            "logits_soft_cap must be a Python number, known when the call is traced.*static argument",
        ),
        ("dropout_rate", 0.1, "dropout_rate must be a Python number, known when the call is traced"),
        ("is_causal", True, "is_causal must be True or False, known when the call is traced"),
        ("local_window_size", 3, "local_window_size must be a Python integer, known when the call is traced"),
    ],
)
def test_a_traced_value_in_place_of_a_static_one(name, value, error):
    with pytest.raises(TypeError, match=error):
        jax.jit(lambda x: jax_flash.flash_attention(**arguments(**{name: x})))(value)


def test_an_unknown_argument():
    with pytest.raises(TypeError, match="num_heads"):
        jax_flash.flash_attention(**arguments(num_heads=4))


def test_a_shape_in_place_of_an_array():
    with pytest.raises(TypeError, match="query must be an array; got ShapeDtypeStruct"):
        jax_flash.flash_attention(**arguments(query=jax.ShapeDtypeStruct((B, T, N, H), jnp.float32)))


@pytest.mark.parametrize(
    "changes",
    [
        dict(query=np.ones((B, T, N, H), np.float32)),
        dict(scale=np.float32(0.5)),
        dict(scale=jnp.float32(0.5)),
        dict(is_causal=np.True_),
        dict(local_window_size=np.int64(3)),
        dict(local_window_size=[2, None]),
        dict(key_value_seq_lengths=np.array([3, 4])),
        dict(mask=np.True_),
        dict(dropout_rate=0.5, dropout_key=jax.random.PRNGKey(0)),
        dict(dropout_rate=0, dropout_key=jax.random.key(0)),
        dict(implementation=["cuda", "xla"]),
    ],
    ids=repr,
)
def test_what_is_accepted(changes):
    assert jax_flash.flash_attention(**arguments(**changes)).shape == (B, T, N, V)


@pytest.mark.parametrize(
    ("is_causal", "local_window_size", "expected"),
    [
        (False, None, (None, None)),
        (True, None, (None, 0)),
        (False, 3, (3, 3)),
        (True, 3, (3, 0)),
        (False, -1, (None, None)),
        (False, (2, -1), (2, None)),
        (False, (None, 4), (None, 4)),
        (True, (2, -1), (2, 0)),
        (False, (0, 0), (0, 0)),
    ],
)
def test_window(is_causal, local_window_size, expected):
    assert _arguments.window(is_causal, local_window_size) == expected
