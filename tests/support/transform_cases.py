"""What the tests of derivative, batching and partitioning share.

`"plain"` is the definition of attention in the shape of an implementation: it compiles fast, and
leaves nothing to test but what stands above an implementation.

`"opaque"` is a custom call that knows nothing of attention, as kernels are for the compiler: the compiler can
partition `"plain"` by itself and hide that nothing else did. Its programs are compiled and read, never run.
"""

import dataclasses
import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import _reference
from jax_flash._spec import AttentionSpec, Gradients, Operands
from jax_flash.cuda import _launcher
from jax_flash.transforms import autodiff

SPEC = AttentionSpec(scale=0.5, right=1, return_residual=True)


def add_implementation(name, forward, backward):
    """Makes `name` an implementation, for the rest of the process."""
    module = types.ModuleType(f"jax_flash.{name}")
    module.name, module.forward, module.backward = name, forward, backward
    module.supports = lambda spec, shapes, device: None
    sys.modules[module.__name__] = module


def split(operands):
    """The operands that gradients are taken for, and the others, each by name."""
    present = operands.present()
    differentiable = operands.differentiable()
    return differentiable, {name: x for name, x in present.items() if name not in differentiable}


def plain_forward(spec, operands):
    assert operands.query.ndim == 4
    out, lse = _reference.reference(spec, operands)
    return out.astype(operands.query.dtype), lse


def plain_backward(spec, operands, out, lse, d_out, d_lse):
    differentiable, others = split(operands)
    _, vjp = jax.vjp(lambda x: plain_forward(spec, Operands.of(x | others)), differentiable)
    (gradients,) = vjp((d_out, jnp.zeros_like(lse) if d_lse is None else d_lse))
    return Gradients.of(gradients)


add_implementation("plain", plain_forward, plain_backward)


def opaque(function):
    """A custom call with the operands and results of `function(spec, *args)`."""

    def run(spec, *args):
        shapes, tree = jax.tree.flatten(jax.eval_shape(functools.partial(function, spec), *args))
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes]
        return tree.unflatten(jax.ffi.ffi_call("opaque", results)(*jax.tree.leaves(args)))

    return run


jax.ffi.register_ffi_target("opaque", {"execute": _launcher.handlers()["execute"]}, platform="cpu")
add_implementation("opaque", opaque(plain_forward), opaque(plain_backward))


def collectives(function, *args):
    """The names of the operations by which the compiled program moves data between devices."""
    text = jax.jit(function).lower(*args).compile().as_text()
    assert 'custom_call_target="opaque"' in text
    return {name for name in COLLECTIVES if f" {name}(" in text}


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "dynamic-slice")


def make_operands(B=4, T=6, S=5, N=4, K=2, H=4, V=3, bias=(1, 1, 1, 1), mask=True, seed=0):
    """Operands of every kind but dropout's; each leading 1 of `bias` as given."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return Operands(
        query=normal(B, T, N, H),
        key=normal(B, S, K, H),
        value=normal(B, S, K, V),
        bias=normal(*bias),
        mask=jnp.asarray(rng.random((1, 1, T, S)) < 0.8) if mask else None,
        alibi_slopes=normal(1, N),
        sinks=normal(1, N),
        query_seq_lengths=jnp.asarray(rng.integers(1, T + 1, B), jnp.int32),
        key_value_seq_lengths=jnp.asarray(rng.integers(1, S + 1, B), jnp.int32),
        query_segment_ids=jnp.asarray(rng.integers(0, 2, (B, T)), jnp.int32),
        key_value_segment_ids=jnp.asarray(rng.integers(0, 2, (B, S)), jnp.int32),
    )


def make_varlen_operands(B=4, sequences=3, **sizes):
    """Operands with varlen sequences: every kind that goes with them; and their spec."""
    operands = make_operands(B, mask=False, **sizes)
    rng = np.random.default_rng(1)
    offsets = {
        name: jnp.asarray(np.sort(rng.integers(0, x.shape[1] + 1, (B, sequences + 1))), jnp.int32)
        for name, x in (("query_offsets", operands.query), ("key_value_offsets", operands.key))
    }
    others = (
        "bias",
        "query_seq_lengths",
        "key_value_seq_lengths",
        "query_segment_ids",
        "key_value_segment_ids",
    )
    spec = dataclasses.replace(SPEC, max_query_length=4, max_key_value_length=operands.key.shape[1])
    return operands.replace(**dict.fromkeys(others), **offsets), spec


def attend(operands, spec=SPEC, implementation=("plain",), context_parallel="auto"):
    return autodiff.attend(spec, implementation, operands, context_parallel)


@functools.partial(jax.jit, static_argnames="spec")  # much faster than operation by operation
def definition(operands, spec=SPEC):
    out, lse = _reference.reference(spec, operands)
    return (out, lse) if spec.return_residual else out


def loss(function):
    """A scalar that depends on all results of `function`, over the two halves of `split`."""

    def scalar(differentiable, others):
        results = function(Operands(**differentiable, **others))
        return sum(jnp.sum(jnp.sin(jnp.where(jnp.isfinite(x), x, 0))) for x in jax.tree.leaves(results))

    return scalar


def gradients(function, operands):
    return jax.jit(jax.grad(loss(function)))(*split(operands))


def assert_close(actual, expected, tolerance=2e-5):
    actual, expected = jax.device_get(actual), jax.device_get(expected)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance), actual, expected
    )
