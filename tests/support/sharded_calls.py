"""Calls of `context_parallel_attention` on simulated devices, with the arguments of a call on one.

Arguments and results are whole and in the sequence's own order, so both kinds of call have one definition.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from attention_case import OPERAND_OF, Case, score_mod_of
from implementation_suite import Implementation
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash._axes import axes_of

AXIS = "sequence"


TWO_AXES = ("rows", "columns")


def sequence_mesh(shards, axis=AXIS):
    """Of so many shards; a pair of numbers makes a mesh of `TWO_AXES`."""
    sizes, names = (shards, TWO_AXES) if isinstance(shards, tuple) else ((shards,), (axis,))
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def axis_of_sequences(shards):
    return TWO_AXES if isinstance(shards, tuple) else AXIS


def token_axes(name, x):
    """The axes of tokens of an argument, counted from the end, and whether it is sharded along each.

    A bias or mask is sharded along its queries alone. An axis of size 1 stands for all tokens.
    """
    letters = "" if name == "dropout_key" else axes_of(OPERAND_OF.get(name, name))
    axes = {letter: letters.index(letter) - len(letters) for letter in "TS" if letter in letters}
    axes = {letter: axis for letter, axis in axes.items() if x.ndim >= -axis and x.shape[axis] != 1}
    return {axis: letter == "T" or "T" not in letters for letter, axis in axes.items()}


def reorder(x, axis, shards, kind):
    return x if kind is None else jax_flash.reorder_for_load_balance(x, axis, shards, kind)


def restore(x, axis, shards, kind):
    return x if kind is None else jax_flash.restore_order(x, axis, shards, kind)


def spec_of(name, x, mesh_axis=AXIS):
    spec = [None] * x.ndim
    for axis, is_sharded in token_axes(name, x).items():
        spec[axis] = mesh_axis if is_sharded else None
    return P(*spec)


def attend(arguments, shards, strategy, kind, return_residual=False, check_vma=True, **options):
    """The results for whole arguments, whole."""
    static = {name: x for name, x in arguments.items() if not hasattr(x, "shape")}
    arrays = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
    arrays = {name: x for name, x in arrays.items() if name not in static}
    mesh_axis, count = axis_of_sequences(shards), math.prod(np.atleast_1d(shards).tolist())
    for name, x in arrays.items():
        for axis in token_axes(name, x):
            x = reorder(x, axis, count, kind)
        arrays[name] = x

    def local(arrays):
        arrays = dict(arrays)
        if "score_table" in arrays:
            options["score_mod"] = score_mod_of(arrays.pop("score_table"))
        return jax_flash.context_parallel_attention(
            **arrays, **static, axis_name=mesh_axis, strategy=strategy, load_balance=kind,
            return_residual=return_residual, **options,
        )  # fmt: skip

    out_specs = P(*[None] * (arrays["query"].ndim - 3), mesh_axis)
    results = jax.shard_map(
        local,
        mesh=sequence_mesh(shards),
        in_specs=({name: spec_of(name, x, mesh_axis) for name, x in arrays.items()},),
        out_specs=(out_specs, out_specs) if return_residual else out_specs,
        check_vma=check_vma,
    )(arrays)
    axis = arrays["query"].ndim - 3
    return jax.tree.map(lambda x: restore(x, axis, count, kind), results)


def drawn_call(seed):
    """A call drawn at random: its case, and `ShardedCalls` to check it by."""
    random = np.random.default_rng(seed)

    def choose(*values):
        return values[random.integers(len(values))]

    def axes(name):
        return f"{name}:" + "".join(axis if random.random() < 0.7 else "1" for axis in "BNTS")

    lengths = choose("seq_lengths", "seq_lengths:alike", "seq_lengths:query", "seq_lengths:key_value")
    features = (
        "logits_soft_cap",
        "alibi_slopes",
        "sinks",
        "dropout",
        "segment_ids",
        "deterministic",
        "score_mod",
        lengths,
    )
    features = [x for x in (*features, axes("bias"), axes("mask")) if random.random() < 0.3]
    K = choose(1, 2, 3, 4, 8)
    T, S = (16 * choose(1, 2, 3, 5) for _ in range(2))
    case = Case(
        "fuzz",
        choose("float32", "bfloat16", "float16"),
        T=T,
        S=choose(T, S, T + 16),
        B=choose(1, 2, 3),
        N=K * choose(1, 2, 4),
        K=K,
        H=choose(4, 8, 24),
        V=choose(None, 12),
        is_causal=choose(False, True),
        local_window_size=choose(None, tuple(choose(None, 0, 1, 3, 20) for _ in range(2))),
        features=tuple(features),
        residual=choose("used", "unused", "absent"),
        seed=seed,
    )
    strategy, kind = choose("ring", "all_gather", "ulysses", "auto"), choose(None, "zigzag", "striped")
    return case, ShardedCalls(choose(2, 4, 8), strategy, kind)


@dataclasses.dataclass
class ShardedCalls(Implementation):
    """An implementation for `check`, by a strategy on so many devices."""

    shards: int
    strategy: str
    kind: str | None = None
    options: dict = dataclasses.field(default_factory=dict)

    implementation = "xla"

    def attend(self, arguments, **options):
        options = options | self.options
        return attend(arguments, self.shards, self.strategy, self.kind, **options)


def arrays(T=32, B=2, N=4, K=2, H=8):
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.normal(size=(B, T, heads, H)), jnp.float32) for heads in (N, K, K)]


def sharded_call(shards, check_vma=True, **options):
    """A function of whole query, key and value, in the order of `load_balance`."""
    return jax.shard_map(
        functools.partial(jax_flash.context_parallel_attention, axis_name=AXIS, **options),
        mesh=sequence_mesh(shards),
        in_specs=P(None, AXIS),
        out_specs=P(None, AXIS),
        check_vma=check_vma,
    )


def gradients(function, *args):
    return jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(function(*args))), argnums=(0, 1, 2)))(*args)


def with_gradients(function):
    return lambda *args: (function(*args), gradients(function, *args))


def program(function, *args):
    return jax.jit(with_gradients(function)).lower(*args).compile().as_text()


def count(text, operation):
    return len(re.findall(rf" {operation}(?:-start)?\(", text))
