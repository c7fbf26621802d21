"""A call that the compiler partitions, in a program that may be serialised.

`custom_partitioning` puts the address of a Python object into the program. The compiler asks that object for
the computation of one device. JAX therefore refuses to export the program, and can't pickle its executable,
which keeps the object. `bind` wraps such a call in a primitive that lowers in one of two ways:

- for an export, to another computation, which needs no Python;
- else to the call itself. Pickling leaves the object out of the executable, which no longer needs it.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType


def bind(function: Callable[[Any], Any], exported: Callable[[AbstractMesh, Any], Any], inputs: Any) -> Any:
    """`function(inputs)`; and in an exported program `exported(mesh, inputs)`, with equal results.

    All axes of that mesh are automatic. It has none where the shardings of the program's arguments
    don't share a mesh, or there is one device.
    """
    call, shapes = jax.make_jaxpr(function, return_shape=True)(inputs)
    leaves, structure = jax.tree.flatten(inputs)

    def flat_exported(mesh: AbstractMesh, *leaves: Any) -> list[Any]:
        return jax.tree.leaves(exported(mesh, structure.unflatten(leaves)))

    results = _partitioned.bind(*leaves, call=call, exported=flat_exported)
    return jax.tree.structure(shapes).unflatten(results)


class _LeftOut:
    """Keeps an object alive with the executable that holds it, and is empty once it was pickled."""

    def __init__(self, kept: Any = None):
        self.kept = kept

    def __reduce__(self) -> Any:
        return _LeftOut, ()


_partitioned = Primitive("jax_flash_partitioned")
_partitioned.multiple_results = True
# JAX 0.12 calls a primitive high if its jaxpr has a `custom_vmap`, as that of varlen sequences, and asks it
# for a lower one. `lower_fun` does that already.
_partitioned.is_high = lambda *_, **__: False
_partitioned.def_impl(lambda *args, call, exported: jaxpr_as_fun(call)(*args))
_partitioned.def_abstract_eval(lambda *args, call, exported: call.out_avals)


def _lower(ctx: Any, *args: Any, call: Any, exported: Callable[..., Any]) -> Any:
    # JAX documents neither attribute. Without them such programs can't be serialised, and all else works.
    module = ctx.module_context
    if getattr(module.lowering_parameters, "for_export", False):
        mesh = _mesh(module.axis_context)
        return mlir.lower_fun(lambda *args: exported(mesh, *args), multiple_results=True)(ctx, *args)
    # The partitioner that Shardy replaced would end the process: it asks for a rule that isn't there.
    shardy = jax.config.jax_use_shardy_partitioner  # pyright: ignore[reportAttributeAccessIssue]
    if not shardy and getattr(module.axis_context, "num_devices", 1) > 1:
        raise NotImplementedError("jax_use_shardy_partitioner must be True for attention on several devices")
    keepalives = getattr(module, "keepalives", [])
    before = len(keepalives)
    results = mlir.lower_fun(jaxpr_as_fun(call), multiple_results=True)(ctx, *args)
    keepalives[before:] = map(_LeftOut, keepalives[before:])
    return results


mlir.register_lowering(_partitioned, _lower)


def _mesh(axis_context: Any) -> AbstractMesh:
    mesh = getattr(axis_context, "abstract_mesh", None)
    if mesh is None:
        return AbstractMesh((), ())
    automatic = (AxisType.Auto,) * len(mesh.axis_names)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=automatic)
