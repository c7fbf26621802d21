"""`flash_attention` of arrays that are sharded along the sequence, under `jit` on simulated devices.

Meshes, calls, and how results are compared with those of one device.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import transform_cases as cases
from attention_case import Case, score_mod_of
from implementation_suite import Implementation
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_calls import token_axes

import jax_flash

KINDS = (AxisType.Auto, AxisType.Explicit)

# Axes of the mesh, and how arrays (B, T, N, H) are sharded over them.
MESHES = {
    "two": (dict(s=2), P(None, "s")),
    "four": (dict(s=4), P(None, "s")),
    "eight": (dict(s=8), P(None, "s")),
    "with_batch_and_heads": (dict(b=2, s=2, n=2), P("b", "s", "n")),
    "several_axes": (dict(x=2, y=2, n=2), P(None, ("x", "y"), "n")),
    "axes_out_of_order": (dict(x=2, b=2, y=2), P("b", ("y", "x"))),
}
OPTIONS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(9, 4)),
    "causal_window": dict(is_causal=True, local_window_size=(6, 0)),
    "soft_cap": dict(is_causal=True, logits_soft_cap=2.0),
}


def mesh_of(axes, kind):
    devices = jax.devices("cpu")[: int(np.prod(list(axes.values())))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=devices)


def put(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def with_gradients(function, *args):
    """The output, and the gradients for a cotangent that is its sine."""
    out, pullback = jax.vjp(function, *args)
    return out, *pullback(jnp.sin(out))


def check_values(function, args, mesh, specs):
    """The results on the mesh, where they are as on one device."""
    expected = jax.jit(functools.partial(with_gradients, function))(*args)
    sharded = [put(x, mesh, spec) for x, spec in zip(args, specs, strict=True)]
    with jax.set_mesh(mesh):
        actual = jax.jit(functools.partial(with_gradients, function))(*sharded)
    cases.assert_close(actual, expected)
    return actual


def check(function, args, mesh, specs, out_spec=None):
    """And the output is sharded as the first argument, gradients as the arguments."""
    actual = check_values(function, args, mesh, specs)
    specs = (specs[0] if out_spec is None else out_spec, *specs)
    for name, x, spec in zip(("out", "query", "key", "value"), actual, specs, strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), (name, x.sharding)


@dataclasses.dataclass
class ShardedJit(Implementation):
    """An implementation for `check`: `flash_attention` with arguments that are sharded over a mesh."""

    mesh: jax.sharding.Mesh
    batch: str | None = None
    heads: str | None = None
    context_parallel: str = "auto"

    implementation = "xla"

    def environment(self):
        return jax.set_mesh(self.mesh)

    def attend(self, arguments, **options):
        arguments = {name: self.sharded(name, x) for name, x in arguments.items()}
        if "score_table" in arguments:
            options["score_mod"] = score_mod_of(arguments.pop("score_table"))
        results = jax_flash.flash_attention(
            **arguments, **options, context_parallel=self.context_parallel, implementation="xla"
        )
        for x in jax.tree.leaves(results):
            if AxisType.Explicit in self.mesh.axis_types:
                assert jax.typeof(x).sharding.spec[-3 if x.ndim > 3 else 1] == "s"
        return jax.tree.map(lambda x: self.put(x, P()), results)

    def sharded(self, name, x):
        if not hasattr(x, "shape") or name == "dropout_key":
            return x
        spec = [None] * x.ndim
        for axis, is_sharded in token_axes(name, jnp.asarray(x)).items():
            spec[axis] = "s" if is_sharded else None
        if name in ("query", "key", "value"):
            spec[0], spec[2] = self.batch, self.heads
        return self.put(jnp.asarray(x), P(*spec))

    def put(self, x, spec):
        is_explicit = AxisType.Explicit in self.mesh.axis_types
        place = jax.sharding.reshard if is_explicit else jax.lax.with_sharding_constraint
        return place(x, NamedSharding(self.mesh, spec))


EVERYTHING = (
    "logits_soft_cap alibi_slopes sinks dropout segment_ids seq_lengths bias mask:BNTS deterministic".split()
)
CALLS = {
    "everything": dict(features=EVERYTHING, is_causal=True, local_window_size=(20, None)),
    "everything_in_bfloat16": dict(dtype="bfloat16", features=EVERYTHING, is_causal=True),
    "dropout": dict(features=["dropout"], is_causal=True),
    "segments": dict(features=["segment_ids"], is_causal=True),
    "lengths": dict(features=["seq_lengths"], is_causal=True),
    "lengths_of_keys": dict(features=["seq_lengths:key_value", "mask:B1TS"], S=64),
    "one_bias_row": dict(dtype="bfloat16", features=["bias:BN1S", "sinks"], residual="absent"),
    "one_bias_column": dict(features=["bias:1NT1", "mask:11TS"]),
    "longer_queries": dict(features=["alibi_slopes"], T=64, local_window_size=(None, 5)),
}


def case_of(name, dtype="float32", **options):
    return Case("sharded", **dict(dtype=dtype, T=32, S=32, N=4, K=2, H=8) | CALLS[name] | options)
