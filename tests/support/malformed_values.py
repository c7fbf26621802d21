"""Values that arguments of a kind refuse: of a flag, a number, lengths, floating arrays …"""

import jax
import jax.numpy as jnp
import numpy as np

B, T, S, N, K, H = 2, 4, 5, 4, 2, 8
"""Of the calls that are changed."""


class Odd:
    """An object that JAX and NumPy know nothing of."""

    def __repr__(self):
        return "an odd object"


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


class Misleading:
    """Says that it is an array, and isn't."""

    def __jax_array__(self):
        raise RuntimeError("no array")


# Arrays come from NumPy: JAX compiles a program for each shape of its own, and there are hundreds of shapes.


def filled(shape, dtype, value=0):
    return jax.device_put(np.full(shape, value, jnp.dtype(dtype)))


def ones(*shape, dtype=jnp.float32):
    return filled(shape, dtype, 1)


def integers(*shape):
    return filled(shape, jnp.int32)


HUGE = 10**400
UNPRINTABLE_INT = 10**5000  # Python refuses to print so many digits
NO_ARGUMENT = ["text", b"1", bytearray(b"1"), {}, {1}, Odd(), Unprintable(), Misleading(), int, 1j, range(2)]
NO_JAX_ARRAYS = [
    np.array("text"),
    np.array([b"1", b"2"]),
    np.array([1, 2], object),
    np.array([np.ones(2), np.ones(3)], object),
    np.array(["2020-01-01"], "datetime64[D]"),
    np.array([1, 2], "timedelta64[s]"),
    np.zeros(2, [("a", np.int32), ("b", np.float32)]),
    np.zeros(2, "V4"),
    np.datetime64("2020-01-01"),
    np.timedelta64(1, "s"),
    np.str_("text"),
    np.bytes_(b"1"),
]
RAGGED = [[1, 2], [3]]
NO_ARRAYS = [*NO_ARGUMENT, *NO_JAX_ARRAYS, True, 3, 1.0, HUGE, jnp.float32, RAGGED, [[1.0]], (1, 2)]
NO_NUMBERS = [
    *NO_ARGUMENT,
    *NO_JAX_ARRAYS,
    [1.0],
    (1.0,),
    RAGGED,
    True,
    np.True_,
    jnp.array(True),
    np.ones(1),
    np.ones((2, 2)),
    jnp.ones(1),
    np.complex64(1),
    jax.random.key(0),
    HUGE,
    -HUGE,
    UNPRINTABLE_INT,
    float("nan"),
    float("inf"),
    -float("inf"),
    np.float64(1e300),
    np.float32("nan"),
    jnp.float32("inf"),
]
NO_INTEGERS = [
    *NO_ARGUMENT,
    *NO_JAX_ARRAYS,
    [1],
    True,
    np.True_,
    1.0,
    float("nan"),
    float("inf"),
    np.float32(1),
    jnp.float32(1),
    np.array([1]),
    jnp.array(True),
    jnp.array([1, 2]),
]
NO_SIZES = [*NO_INTEGERS, -1, -HUGE, -UNPRINTABLE_INT, np.int64(-3)]


def _keys(shape):
    return jax.random.wrap_key_data(np.zeros((*shape, 2), np.uint32))


def of_other_dtypes(shape, *allowed):
    """Arrays of that shape, of every dtype but those that are subtypes of `allowed`."""
    dtypes = ("bool", "int8", "int32", "uint32", "float8_e4m3fn", "float8_e5m2", "float32", "bfloat16")
    arrays = [filled(shape, dtype) for dtype in (*dtypes, "complex64")]
    arrays += [np.zeros(shape, dtype) for dtype in ("int64", "float64", "longdouble", "complex128")]
    arrays.append(_keys(shape))
    return [x for x in arrays if not any(jnp.issubdtype(x.dtype, dtype) for dtype in allowed)]


FLOATING = (jnp.float16, jnp.bfloat16, jnp.float32, np.float64)


def reshaped(shape, dtype):
    """Arrays whose rank is too low or too high, or whose last axis is wrong."""
    shapes = [(1, 1, 1, *shape), (*shape, 1), (*shape[:-1], 0), (*shape[:-1], shape[-1] + 1)]
    return [filled(bad, dtype) for bad in (*shapes, shape[-1:] * 2 if len(shape) == 1 else shape[-1:])]


def tensor(*shape, also=()):
    """What query and its like refuse, if they take no dtypes but floating ones and those `also`."""
    axes = [(), (2,), (1, *shape, 1), (*shape[:-1], 0)]
    return [None, *NO_ARRAYS, *of_other_dtypes(shape, *FLOATING, *also), *(ones(*bad) for bad in axes)]


def per_logit(shape, *allowed):
    bad = [(*shape[:-1], shape[-1] + 1), (1, 1, *shape), (*shape[:-1], 0)]
    return [*NO_ARRAYS, *of_other_dtypes(shape, *allowed), *(filled(s, allowed[0]) for s in bad)]


def per_head(shape):
    return [*NO_ARRAYS, *of_other_dtypes(shape, *FLOATING), *reshaped(shape, jnp.float32), ones(), ones(K)]


def whole_numbers(*shape):
    bad = [*NO_ARRAYS, *of_other_dtypes(shape, jnp.integer), *reshaped(shape, jnp.int32), integers()]
    return [x for x in bad if not isinstance(x, tuple)]


LENGTHS = [*whole_numbers(B), [HUGE, 1], [1.0, 2.0], [True, False], ["1", "2"], [None, 1], [1, 2, 3], []]
FLAG = [*NO_ARGUMENT, *NO_JAX_ARRAYS, None, 0, 1, 1.0, "True", [True], np.array(True), jnp.array(True), HUGE]
SCALE = NO_NUMBERS
SOFT_CAP = [*NO_NUMBERS, 0, 0.0, -1.0, 1e-300, -HUGE]
RATE = [*NO_NUMBERS, None, 1, 1.0, -0.1, 2, jnp.float32(1), np.float64(-1)]
PAIRS = [
    (1,),
    (1, 2, 3),
    (),
    (1, "2"),
    (1.5, 0),
    (True, 1),
    (1, 1j),
    ([1], 2),
    (float("nan"), 1),
    np.ones(2, int),
]
WINDOW = [*NO_INTEGERS, *PAIRS]
KEY = [
    *NO_ARRAYS,
    0,
    *of_other_dtypes((2,), jnp.uint32),
    jax.random.split(jax.random.key(0)),
    jnp.zeros(3, jnp.uint32),
    jnp.zeros((1, 2), jnp.uint32),
    jax.ShapeDtypeStruct((), jnp.float32),
]
NO_FUNCTIONS = [*(x for x in NO_ARGUMENT if x is not int), *NO_JAX_ARRAYS, True, 3, ones(B, T), HUGE]
ALIGNMENT = [None, *NO_ARGUMENT, *NO_JAX_ARRAYS, "", "top left", ("top_left",)]
CONTEXT_PARALLEL = [None, *NO_ARGUMENT, *NO_JAX_ARRAYS, "", "Ring", "all-gather", ("ring",)]
IMPLEMENTATION = [
    *(x for x in NO_ARGUMENT if x != "text"),
    *NO_JAX_ARRAYS,
    "cudnn",
    "CUDA",
    "",
    (),
    [],
    3,
    True,
    ("xla", None),
    ["xla", "text"],
    {"xla"},
]
