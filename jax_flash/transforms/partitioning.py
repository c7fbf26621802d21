"""How a sharded `jit` splits a call: batch and heads partition freely, sequence and head dim don't.

With shardings left to the compiler (`AxisType.Auto`), `custom_partitioning` says so twice: a Shardy
rule, from which shardings propagate through the call, and a `partition` callback, which settles the
layout and gives the computation of one device. With shardings in the types (`AxisType.Explicit`)
the layout is known when the call is traced, and a `shard_map` over it does the same.

Query heads are a compound axis, key heads major and the queries of one group minor. A mesh axis
that does not divide the key heads divides groups: each device then takes the key heads that its
query heads attend to, and the gradients of keys and values are summed over that mesh axis. So is
every gradient whose operand lacks an axis that was partitioned, as that of a bias shared by heads.
"""

import dataclasses
import itertools
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_flash
from jax_flash._spec import DIFFERENTIABLE, Gradients, Operands
from jax_flash.transforms import lowering
from jax_flash.transforms.lowering import AXES, Call
from jax_flash.transforms.varying import vary_over

MeshAxes = tuple[str, ...]
Shape = tuple[int, ...]
Shapes = dict[str, Shape]
Specs = dict[str, PartitionSpec]

# Inputs and results by name. Every array is one of these: an operand or its gradient under the
# operand's own name, `out` and `lse`, or their cotangents.
Arrays = dict[str, Any]
LETTERS = AXES | {"d_out": AXES["out"], "d_lse": AXES["lse"]}
FINGERPRINT = "fingerprint"


def forward(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """`out` and `lse`; see `lowering.forward`."""

    def local(inputs: Arrays) -> Arrays:
        out, lse = lowering.forward(call, Operands(**inputs))
        return {"out": out, "lse": lse}

    *_, T, N, _ = operands.query.shape
    batch = lowering.batch_shape(operands)
    results = {"out": (*batch, T, N, operands.value.shape[-1]), "lse": (*batch, N, T)}
    arrays = _partitioned(local, call, operands.present(), results)
    return arrays["out"], arrays["lse"]


def backward(
    call: Call,
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

    def local(inputs: Arrays) -> Arrays:
        operands = Operands(**{name: x for name, x in inputs.items() if name not in rest})
        gradients = lowering.backward(call, operands, *map(inputs.get, ("out", "lse", "d_out", "d_lse")))
        return {name: x for name, x in vars(gradients).items() if x is not None}

    results = {name: x.shape for name, x in operands.present().items() if name in DIFFERENTIABLE}
    return Gradients(**_partitioned(local, call, operands.present() | rest, results))


def _partitioned(local: Callable[[Arrays], Arrays], call: Call, inputs: Arrays, results: Shapes) -> Arrays:
    mesh = jax.typeof(inputs["query"]).sharding.mesh
    if AxisType.Explicit in mesh.axis_types:
        return _partition_by_type(local, mesh, inputs, results)
    if AxisType.Manual in mesh.axis_types:
        # Inside `shard_map` arrays are local already. Should it leave some mesh axes automatic, an
        # opaque call is replicated over those: a partitioner has no say in a partly manual region.
        return local(inputs)

    def whole(inputs: Arrays) -> Arrays:
        return local({name: x for name, x in inputs.items() if name != FINGERPRINT})

    def partition(_mesh: Any, args: tuple[Arrays], _results: Arrays) -> Any:
        inputs = {name: x for name, x in args[0].items() if name != FINGERPRINT}
        mesh = _finest_mesh(inputs["query"])
        specs = {name: _spec_on(mesh, x) for name, x in inputs.items()}
        layout = Layout.of(dict(mesh.shape), inputs, specs)

        def lower(inputs: Arrays) -> Arrays:
            inputs = {name: x for name, x in inputs.items() if name != FINGERPRINT}
            return layout.run(local, inputs, {name: x.spec for name, x in in_shardings.items()})

        def sharding(name: str, shape: Shape) -> NamedSharding:
            return NamedSharding(mesh, layout.spec(name, shape))

        in_shardings = {name: sharding(name, x.shape) for name, x in inputs.items()}
        in_shardings[FINGERPRINT] = NamedSharding(mesh, PartitionSpec())
        out_shardings = {name: sharding(name, shape) for name, shape in results.items()}
        return mesh, lower, out_shardings, (in_shardings,)

    # The partitioned computation is not in the program that the compiler's caches key on, which
    # names it by an address alone; so what it depends on goes in as a constant.
    depends_on = repr((jax_flash.__version__, call))
    inputs = inputs | {FINGERPRINT: np.uint32(zlib.crc32(depends_on.encode()))}
    shapes = {name: x.shape for name, x in inputs.items()}
    function = custom_partitioning(whole)
    function.def_partition(
        partition,
        sharding_rule=lambda mesh, *_: sharding_rule(dict(mesh.shape), shapes, results),
        decode_shardings=False,
    )
    return function(inputs)


def _partition_by_type(
    local: Callable[[Arrays], Arrays], mesh: Any, inputs: Arrays, results: Shapes
) -> Arrays:
    axes = frozenset(mesh.explicit_axes)
    specs = {name: jax.typeof(x).sharding.spec for name, x in inputs.items()}
    layout = Layout.of({name: mesh.shape[name] for name in mesh.explicit_axes}, inputs, specs)
    in_specs = {name: layout.spec(name, x.shape) for name, x in inputs.items()}
    out_specs = {name: layout.spec(name, shape) for name, shape in results.items()}
    # A sharded sequence or head dim is gathered here, as it is in a `jit` with automatic shardings.
    inputs = {name: _reshard(x, mesh, in_specs[name]) for name, x in inputs.items()}
    run = jax.shard_map(
        lambda inputs: layout.run(local, vary_over(inputs, layout.used), in_specs),
        mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, axis_names=axes,
    )  # fmt: skip
    # A gradient is typed as its operand was.
    return {name: _reshard(x, mesh, specs.get(name, out_specs[name])) for name, x in run(inputs).items()}


def _reshard(x: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def sharding_rule(mesh: dict[str, int], inputs: Shapes, results: Shapes) -> tuple[str, dict[str, Any]]:
    """The Shardy rule of a call, and the options of `def_partition` that go with it.

    Factors: `b0`, `b1`, … the batch axes, `k` key heads, `g` the query heads of a group; all others
    need replication. An axis of size 1 is a factor of its own, for it does not partition along.

    Where some mesh axis does not divide the key heads, query heads are one factor `n` of their own
    instead of `(k g)`. Linked, they would pass on to keys and values a part of that mesh axis, and
    gradients would come out sharded otherwise than what they are gradients of.
    """
    query_heads = inputs["query"][-2]
    key_heads = inputs["key"][-2]
    heads = ["k", "g"]
    if query_heads == key_heads:
        heads = ["k"]
    elif key_heads == 1 or any(key_heads % size for size in mesh.values()):
        heads = ["n"]
    singles = (f"one{i}" for i in itertools.count())
    replicated: dict[str, None] = {}  # a set in order of first appearance, which Shardy asks for

    def factor(letter: str, size: int) -> str:
        if size > 1 and letter == "N":
            return heads[0] if len(heads) == 1 else f"({' '.join(heads)})"
        if size > 1 and (letter == "K" or letter.startswith("b")):
            return letter.lower()
        name = letter.lower() if size > 1 else next(singles)
        replicated.setdefault(name)
        return name

    def mapping(name: str, shape: Shape) -> str:
        if name == FINGERPRINT:
            return ""
        letters = LETTERS[name]
        batch = [f"b{i}" for i in range(len(shape) - len(letters))]
        return " ".join(map(factor, [*batch, *letters], shape))

    # Dictionaries are flattened by sorted name.
    left, right = (", ".join(mapping(*item) for item in sorted(x.items())) for x in (inputs, results))
    options: dict[str, Any] = {"need_replication_factors": tuple(replicated)}
    if len(heads) > 1:
        options["g"] = query_heads // key_heads
    return f"{left} -> {right}", options


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh axes that one call is partitioned over."""

    mesh: dict[str, int]  # sizes of the mesh axes
    batch: tuple[MeshAxes, ...]  # for each batch axis
    key_heads: MeshAxes  # divide the key heads, and the query heads with them
    group: MeshAxes  # divide the query heads that are left of each key head
    query_heads_per_key_head: int

    @staticmethod
    def of(mesh: dict[str, int], inputs: Arrays, specs: Specs) -> "Layout":
        """The layout that the inputs suggest, query's shardings before the others'.

        Mesh axes that don't divide an axis evenly, and those on an axis that does not partition,
        are left out: there every device does the same work.
        """
        query, key = inputs["query"].shape, inputs["key"].shape
        batch_rank = len(query) - len(LETTERS["query"])
        taken: set[str] = set()

        def choose(size: int, candidates: list[tuple[str, int]]) -> MeshAxes:
            for name, axis in candidates:
                if inputs[name].shape[axis] == 1:
                    continue
                axes = _axes_at(specs[name], axis)
                if axes and not taken.intersection(axes) and size % math.prod(map(mesh.get, axes)) == 0:
                    taken.update(axes)
                    return axes
            return ()

        order = ["query", *(name for name in inputs if name != "query")]
        batch = tuple(
            choose(
                max(x.shape[i] for name, x in inputs.items() if i < len(x.shape) - len(LETTERS[name])),
                [(name, i) for name in order],
            )
            for i in range(batch_rank)
        )
        heads = choose(
            query[-2],
            [
                (name, len(inputs[name].shape) - len(LETTERS[name]) + LETTERS[name].index(letter))
                for letter in "NK"
                for name in order
                if letter in LETTERS[name]
            ],
        )
        # Keys and values keep the sharding that they have as far as query heads share it. Dividing
        # them further would cost nothing, but then their gradients would have to be gathered.
        given = _axes_at(specs["key"], len(key) - 2)
        key_heads = heads
        while key_heads and (given[: len(key_heads)] != key_heads or key[-2] % _size(mesh, key_heads)):
            key_heads = key_heads[:-1]
        return Layout(mesh, batch, key_heads, heads[len(key_heads) :], query[-2] // key[-2])

    @property
    def used(self) -> frozenset[str]:
        return frozenset(itertools.chain(*self.batch, self.key_heads, self.group))

    def spec(self, name: str, shape: Shape) -> PartitionSpec:
        """How the array of that name and (whole) shape is partitioned."""
        letters = LETTERS[name]
        heads = {"N": self.key_heads + self.group, "K": self.key_heads}
        axes = [*self.batch, *(heads.get(letter, ()) for letter in letters)]
        return PartitionSpec(*(a if a and size > 1 else None for a, size in zip(axes, shape, strict=True)))

    def run(self, local: Callable[[Arrays], Arrays], inputs: Arrays, specs: Specs) -> Arrays:
        """Runs `local` on one device's part of the inputs, with the mesh axes in use manual.

        `specs` are those of the (whole) inputs. A result under an input's name is its gradient.
        """
        key_heads = inputs["key"].shape[-2]
        heads = self._key_heads_needed(inputs["query"].shape[-2], key_heads)
        if heads is not None:
            inputs = inputs | {name: jnp.take(inputs[name], heads, axis=-2) for name in ("key", "value")}
        results = local(inputs)
        # In the results' order: all processes of a program must enter its collectives in the same one.
        for name, x in results.items():
            if name not in inputs:
                continue
            if heads is not None and name in ("key", "value"):
                whole = jnp.zeros((*x.shape[:-2], key_heads, x.shape[-1]), x.dtype)
                x = whole.at[..., heads, :].add(x)
            partitioned = set(itertools.chain(*(_axes_at(specs[name], i) for i in range(len(specs[name])))))
            lacking = tuple(sorted(self.used - partitioned))
            results[name] = jax.lax.psum(x, lacking) if lacking else x
        return results

    def _key_heads_needed(self, query_heads: int, key_heads: int) -> jax.Array | None:
        """Which of its key heads a device takes; None for all of them, each with a whole group.

        Where a device's query heads neither make up whole groups nor lie in one, the key heads are
        repeated for each query head.
        """
        if not self.group or key_heads == 1:
            return None
        group = self.query_heads_per_key_head
        first = jax.lax.axis_index(self.group) * query_heads
        if query_heads % group == 0:
            return first // group + jnp.arange(query_heads // group)
        if group % query_heads == 0:
            return (first // group)[None]
        return (first + jnp.arange(query_heads)) // group


def _finest_mesh(x: Any) -> Mesh:
    """The devices of a partitioned program, in its order, along axes of prime size.

    Whatever mesh the user has, and whichever parts of its axes Shardy has picked, a partitioned
    axis is partitioned over some of these.
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
    # On a stand-in that every sharding divides, so that the real shape need not.
    indices = x.sharding.devices_indices_map((mesh.size,) * len(x.shape))

    def axes_of(axis: int) -> MeshAxes:
        starts = np.array([indices[device][axis].start or 0 for device in mesh.devices.flat])
        starts = starts.reshape(mesh.devices.shape)
        steps = [np.take(starts, 1, i).flat[0] - starts.flat[0] for i in range(starts.ndim)]
        major_first = sorted((i for i, step in enumerate(steps) if step), key=lambda i: -steps[i])
        # They must count up through the parts in order, so that they give every device's part.
        part = mesh.size // math.prod(mesh.devices.shape[i] for i in major_first)
        expected = np.zeros_like(starts)
        for i in reversed(major_first):
            expected += part * np.indices(starts.shape)[i]
            part *= starts.shape[i]
        return tuple(mesh.axis_names[i] for i in major_first) if np.array_equal(starts, expected) else ()

    return PartitionSpec(*(axes_of(i) or None for i in range(len(x.shape))))


def _axes_at(spec: PartitionSpec, axis: int) -> MeshAxes:
    axes = spec[axis] if axis < len(spec) else None
    if axes is None or axes is PartitionSpec.UNCONSTRAINED:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _size(mesh: dict[str, int], axes: MeshAxes) -> int:
    return math.prod(mesh[name] for name in axes)
