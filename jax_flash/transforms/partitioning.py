"""How a sharded `jit` partitions a call over a mesh. `layout.py` says along which axes.

There are four cases, by the types of the mesh's axes:

- Automatic: the compiler chooses the shardings. `custom_partitioning` gives it a Shardy rule, by which
  shardings propagate through the call, and a callback, which it asks for the computation of one device.
- Explicit: shardings are part of the arrays' types. They are known when the call is traced, and a `shard_map`
  partitions it.
- Automatic and explicit: the explicit axes are made automatic for this call, so that the compiler knows all.
- Manual, inside of the user's `shard_map`: arrays are one device's already. If the user left some axes
  automatic or explicit, the arrays are still to be partitioned over those. The compiler doesn't ask for
  the computation of one device there, so a nested `shard_map` partitions the call. How automatic axes
  partition the arrays is not known when the call is traced: `Layout.over_more` guesses.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import jax_flash
from jax_flash._axes import batch_shape
from jax_flash._spec import Gradients, Operands, shapes_of
from jax_flash.transforms import sequence_layout, serialising, sharded_sequences
from jax_flash.transforms.layout import (
    Arrays,
    Layout,
    Letters,
    MeshAxes,
    Shape,
    Shapes,
    Shards,
    Specs,
    letters_of,
    mesh_axes,
    sharding_rule,
)
from jax_flash.transforms.locations import without_locations
from jax_flash.transforms.lowering import PlannedCall
from jax_flash.transforms.varying import type_as_varying, vary_over, varying_axes

FINGERPRINT = "fingerprint"
"""The name of an input that stands for what the partitioned computation depends on besides arrays."""


def forward(call: PlannedCall, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """`out` and `lse`; see `lowering.forward`."""

    def local(inputs: Arrays, shards: Shards | None) -> Arrays:
        out, lse = sharded_sequences.forward(call, Operands.of(inputs), shards)
        return {"out": out, "lse": lse}

    *_, T, N, _ = operands.query.shape
    batch = batch_shape(operands)
    results = {"out": (*batch, T, N, operands.value.shape[-1]), "lse": (*batch, N, T)}
    arrays = _partitioned_attention(local, call, operands, {}, results)
    return arrays["out"], arrays["lse"]


def backward(
    call: PlannedCall,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
) -> Gradients:
    """Gradients of the differentiable operands; see `lowering.backward`."""
    rest = {"out": out, "lse": lse, "d_out": d_out}
    if d_lse is not None:
        rest["d_lse"] = d_lse

    # The program keeps it. So it has no array of this function, or `jax_check_tracer_leaks` would report it.
    def local(inputs: Arrays, shards: Shards | None) -> Arrays:
        rest = ("out", "lse", "d_out", "d_lse")
        operands = Operands.of({name: x for name, x in inputs.items() if name not in rest})
        return sharded_sequences.backward(call, operands, *map(inputs.get, rest), shards).present()

    results = {name: x.shape for name, x in operands.differentiable().items()}
    return Gradients.of(_partitioned_attention(local, call, operands, rest, results))


def _partitioned_attention(
    local: "Local", call: PlannedCall, operands: Operands, rest: Arrays, results: Shapes
) -> Arrays:
    inputs = operands.present() | rest
    letters = letters_of({name: x.shape for name, x in inputs.items()} | results)
    choose = None
    if sequence_layout.may_be_sharded(operands):
        choose = functools.partial(sequence_layout.choose, call, shapes_of(operands))
    return partitioned(Computation(local, call, letters, results, choose), inputs)


Local = Callable[[Arrays, Shards | None], Arrays]
"""Takes one device's inputs by name, and how sequences are sharded; returns its results by name."""


ChooseLayout = Callable[[Specs, Callable[[MeshAxes, MeshAxes], Layout]], Layout]
"""`sequence_layout.choose` for one call."""


@dataclasses.dataclass(frozen=True)
class Computation:
    """What is partitioned.

    There are a query and a key among the inputs. A result under the name of an input is its gradient. A
    subclass without a key says itself how it is laid out.
    """

    run: Local
    call: Any  # everything static that `run` depends on; its `repr` says all of it
    letters: Letters  # of inputs and results
    results: Shapes  # for whole inputs
    choose: ChooseLayout | None = None  # how sequences are partitioned; None: they are whole
    takes_key_heads: bool = True
    repeats_results: bool = False  # devices that share part of a result all compute it, and give the same

    def layout(self, mesh: dict[str, int], inputs: Arrays, specs: Specs) -> Layout:
        def of(queries: MeshAxes, keys: MeshAxes) -> Layout:
            return Layout.of(mesh, self.letters, inputs, specs, queries, keys, self.takes_key_heads)

        return of((), ()) if self.choose is None else self.choose(specs, of)

    def over_more(self, layout: Layout, mesh: dict[str, int], inputs: Arrays) -> Layout:
        return layout.over_more(mesh, inputs)

    def sharding_rule(self, mesh: dict[str, int], letters: Letters, inputs: Shapes) -> tuple[str, dict]:
        return sharding_rule(mesh, letters, inputs, self.results, self.choose is not None)

    def run_on_device(self, layout: Layout, inputs: Arrays, specs: Specs) -> Arrays:
        """Runs one device's part of the call; `specs` are those of whole inputs."""
        return layout.run(self.run, inputs, specs)

    def run_whole(self, inputs: Arrays) -> Arrays:
        return self.run(inputs, None)


def partitioned(computation: Computation, inputs: Arrays) -> Arrays:
    """`computation.run_whole(inputs)`, partitioned."""
    mesh = _mesh_of(inputs)
    kinds = set(mesh.axis_types)
    if kinds <= {AxisType.Auto}:
        return _partition_by_compiler(computation, inputs)
    if kinds == {AxisType.Auto, AxisType.Explicit}:
        return _partition_as_automatic(computation, mesh, inputs)
    if kinds == {AxisType.Manual}:
        return computation.run_whole(inputs)
    return _partition_by_shard_map(computation, mesh, inputs)


def _mesh_of(inputs: Arrays) -> Any:
    """The mesh that the types of the inputs speak of.

    Arrays that are not on a mesh, as those of NumPy, count as replicated on that of `jax.set_mesh`.
    """
    meshes = (jax.typeof(inputs[name]).sharding.mesh for name in ("query", *inputs))
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())


def _partition_by_compiler(computation: Computation, inputs: Arrays) -> Arrays:
    """For automatic mesh axes, and where there is no mesh."""

    def whole(inputs: Arrays) -> Arrays:
        return computation.run_whole({name: x for name, x in inputs.items() if name != FINGERPRINT})

    def partition(_mesh: Any, args: tuple[Arrays], _results: Arrays) -> Any:
        inputs = {name: x for name, x in args[0].items() if name != FINGERPRINT}
        mesh = _finest_mesh(inputs["query"])
        specs = {name: _spec_on(mesh, x) for name, x in inputs.items()}
        layout = computation.layout(dict(mesh.shape), inputs, specs)
        in_specs = {name: layout.spec(name, x.shape) for name, x in inputs.items()}

        def run_on_device(inputs: Arrays) -> Arrays:
            inputs = {name: x for name, x in inputs.items() if name != FINGERPRINT}
            # Arrays are one device's. The compiler may ask under `jax.set_mesh`, whose mesh is not theirs.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return computation.run_on_device(layout, inputs, in_specs)

        specs = in_specs | {FINGERPRINT: PartitionSpec()}
        in_shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        out_shardings = {
            name: NamedSharding(mesh, layout.spec(name, x)) for name, x in computation.results.items()
        }
        return mesh, without_locations(run_on_device), out_shardings, (in_shardings,)

    # The compiler's caches don't see the partitioned computation: the program names it by an address alone.
    # So a constant in the program stands for all that it depends on.
    depends_on = repr((jax_flash.__version__, computation.call))
    inputs = inputs | {FINGERPRINT: np.uint32(zlib.crc32(depends_on.encode()))}
    letters = computation.letters | {FINGERPRINT: ()}
    shapes: dict[str, Shape] = {name: x.shape for name, x in inputs.items()}
    function = custom_partitioning(whole)
    function.def_partition(
        partition,
        sharding_rule=lambda mesh, *_: computation.sharding_rule(dict(mesh.shape), letters, shapes),
        decode_shardings=False,
    )

    def exported(mesh: AbstractMesh, inputs: Arrays) -> Arrays:
        del inputs[FINGERPRINT]
        if mesh.empty:
            return computation.run_whole(inputs)
        with jax.sharding.use_abstract_mesh(mesh):
            return _partition_by_shard_map(computation, mesh, inputs)

    return serialising.bind(function, exported, inputs)


def _partition_as_automatic(computation: Computation, mesh: Any, inputs: Arrays) -> Arrays:
    """For a mesh with automatic axes and explicit ones."""
    layout, specs = _layout_by_type(computation, mesh, inputs)
    out_specs = {name: layout.type_of(name, shape, specs) for name, shape in computation.results.items()}
    run: Any = jax.sharding.auto_axes(
        lambda inputs: _partition_by_compiler(computation, inputs),
        axes=mesh.explicit_axes,
        out_sharding={name: NamedSharding(mesh, spec) for name, spec in out_specs.items()},
    )
    return run(inputs)


def _partition_by_shard_map(computation: Computation, mesh: Any, inputs: Arrays) -> Arrays:
    """For explicit mesh axes, and inside of a `shard_map` that leaves some axes automatic or explicit."""
    by_type, specs = _layout_by_type(computation, mesh, inputs)
    if by_type.shards is None:
        sequence_layout.check_unnamed(
            computation.call, (name for name in mesh.auto_axes if mesh.shape[name] > 1)
        )
    # A sharded head dim is gathered, and a sequence that the call doesn't take so, as on automatic axes.
    inputs = {name: _reshard(x, mesh, by_type.spec(name, x.shape)) for name, x in inputs.items()}
    more = {name: mesh.shape[name] for name in mesh.auto_axes}
    layout = computation.over_more(by_type, more, inputs)
    in_specs = {name: layout.spec(name, x.shape) for name, x in inputs.items()}
    out_specs = {name: layout.spec(name, shape) for name, shape in computation.results.items()}
    # JAX can't tell that devices which share part of a result all compute the same.
    is_checked = not computation.repeats_results or all(
        layout.used <= _axes_of(spec) for spec in out_specs.values()
    )

    def run_on_device(inputs: Arrays) -> Arrays:
        inputs = vary_over(inputs, layout.used) if is_checked else inputs
        return computation.run_on_device(layout, inputs, in_specs)

    # Over all mesh axes but those that `vmap` maps over, which it takes out of the types of arrays.
    run = jax.shard_map(
        run_on_device, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=is_checked
    )
    results = run(inputs)
    if not is_checked:  # their types then lack the axes of the user's `shard_map` that they vary over
        of_inputs = varying_axes(inputs)
        results = {name: type_as_varying(x, of_inputs) for name, x in results.items()}
    types = {name: by_type.type_of(name, shape, specs) for name, shape in computation.results.items()}
    return {name: _reshard(x, mesh, types[name]) for name, x in results.items()}


def _axes_of(spec: PartitionSpec) -> frozenset[str]:
    """The mesh axes that partition any axis of an array."""
    return frozenset().union(*(mesh_axes(spec, i) for i in range(len(spec))))


def _layout_by_type(
    computation: Computation, mesh: Any, inputs: Arrays
) -> tuple[Layout, dict[str, PartitionSpec]]:
    """The layout over the explicit mesh axes, and how each input is sharded over them by its type."""
    specs = {name: jax.typeof(x).sharding.spec for name, x in inputs.items()}
    sizes = {name: mesh.shape[name] for name in mesh.explicit_axes}
    return computation.layout(sizes, inputs, specs), specs


def _reshard(x: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    """`x`, typed as sharded by `spec` over the explicit axes of `mesh`."""
    if not mesh.explicit_axes:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _finest_mesh(x: Any) -> Mesh:
    """The devices of a partitioned program, in its order, along axes of prime size.

    Shardy may split the axes of the user's mesh. Whatever it picks, an axis is partitioned over some of
    these.
    """
    devices = list(x.sharding.devices_indices_map((x.sharding.num_devices,) * len(x.shape)))
    shape, rest = [], len(devices)
    for divisor in range(2, rest + 1):
        while rest % divisor == 0:
            shape.append(divisor)
            rest //= divisor
    return Mesh(np.array(devices).reshape(shape), tuple(f"p{i}" for i in range(len(shape))))


def _spec_on(mesh: Mesh, x: Any) -> PartitionSpec:
    """The sharding of `x` in terms of `mesh`; an axis that it can't express counts as replicated."""
    # Asked for a shape that every sharding divides, since it need not divide the real one.
    indices = x.sharding.devices_indices_map((mesh.size,) * len(x.shape))

    def axes_of(axis: int) -> MeshAxes:
        starts = np.array([indices[device][axis].start or 0 for device in mesh.devices.flat])
        starts = starts.reshape(mesh.devices.shape)
        steps = [np.take(starts, 1, i).flat[0] - starts.flat[0] for i in range(starts.ndim)]
        major_first = sorted((i for i, step in enumerate(steps) if step), key=lambda i: -steps[i])
        # The mesh axes express the sharding only if their parts are in order on the devices.
        part = mesh.size // math.prod(mesh.devices.shape[i] for i in major_first)
        expected = np.zeros_like(starts)
        for i in reversed(major_first):
            expected += part * np.indices(starts.shape)[i]
            part *= starts.shape[i]
        return tuple(mesh.axis_names[i] for i in major_first) if np.array_equal(starts, expected) else ()

    return PartitionSpec(*(axes_of(i) or None for i in range(len(x.shape))))
