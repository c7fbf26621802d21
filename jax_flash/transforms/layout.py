"""Along which of its axes a call is partitioned, and over which axes of the mesh.

Batch and heads partition freely, the head dim doesn't. Query heads are a compound axis, key heads major and
the query heads of a group minor. A mesh axis that does not divide the key heads divides groups: each device
then takes the key heads that its query heads attend to, and the gradients of keys and values are summed over
that mesh axis. So is every gradient whose operand lacks an axis that is partitioned, as that of a bias which
heads share.

Queries are partitioned along the sequence as `query` is, and keys over the same mesh axes or not at all.
`sequence_layout.py` says which calls take that, and `sharded_sequences.py` runs them.

`sharding_rule` says to the compiler along which axes shardings may propagate through a call. A `Layout` is
what a call with given shardings becomes: the part of every array on each device, and how a device runs it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_flash._axes import axes_of
from jax_flash.context_parallel.strategy import Strategy

MeshAxes = tuple[str, ...]
Shape = tuple[int, ...]
Shapes = dict[str, Shape]
Specs = dict[str, PartitionSpec]

Arrays = dict[str, Any]
"""Inputs or results by name. Every array is an operand or its gradient under the operand's own name, `out` or
`lse`, or the cotangent of one of these."""

Letters = dict[str, tuple[str, ...]]
"""The letters of all axes of each array, of inputs and results: batch axes are `b0`, `b1`, …"""


_COTANGENTS = {"d_out": "out", "d_lse": "lse"}


_ALL_KEYS = "A"
"""The letter of keys in an array that has queries too: bias and mask are partitioned along queries alone."""


def letters_of(shapes: Shapes) -> Letters:
    """Those of the arrays of `flash_attention`."""

    def letters(name: str, shape: Shape) -> tuple[str, ...]:
        own = axes_of(_COTANGENTS.get(name, name))
        if "T" in own:
            own = [_ALL_KEYS if letter == "S" else letter for letter in own]
        return (*(f"b{i}" for i in range(len(shape) - len(own))), *own)

    return {name: letters(name, shape) for name, shape in shapes.items()}


def sharding_rule(
    mesh: dict[str, int],
    letters: Letters,
    inputs: Shapes,
    results: Shapes,
    sequences: bool = False,
    key_heads: int | None = None,
) -> tuple[str, dict[str, Any]]:
    """The Shardy rule of a call, and the options of `def_partition` that go with it.

    Factors: `b0`, `b1`, … the batch axes, `k` key heads, `g` the query heads of a group; with `sequences`,
    `t` queries and `s` keys; all others need replication. An axis of size 1 is a factor of its own, since it
    is not partitioned.

    If some mesh axis does not divide the key heads, query heads are one factor `n` of their own instead of
    `(k g)`. As `(k g)` they would pass part of that mesh axis on to keys and values, and gradients would
    come out sharded otherwise than their operands. A scalar has no factors. `key_heads` are those of a call
    that has no keys.
    """
    query_heads = inputs["query"][-2]
    key_heads = inputs["key"][-2] if key_heads is None else key_heads
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
        if size > 1 and (letter == "K" or letter.startswith("b") or (sequences and letter in ("T", "S"))):
            return letter.lower()
        name = letter.lower() if size > 1 else next(singles)
        replicated.setdefault(name)
        return name

    def mapping(name: str, shape: Shape) -> str:
        return " ".join(map(factor, letters[name], shape)) if shape else ""

    # Dictionaries are flattened by sorted name.
    left, right = (", ".join(mapping(*item) for item in sorted(x.items())) for x in (inputs, results))
    options: dict[str, Any] = {"need_replication_factors": tuple(replicated)}
    if len(heads) > 1:
        options["g"] = query_heads // key_heads
    return f"{left} -> {right}", options


@dataclasses.dataclass(frozen=True)
class Shards:
    """How sequences are partitioned: evenly, in order."""

    axes: MeshAxes  # in the mesh's order, which `ppermute` asks for
    shard_of: tuple[int, ...]  # the shard that is at each place on these axes
    keys: bool  # whether keys are too; if not, each device has all of them
    strategy: Strategy  # how a device sees the keys of the others

    @property
    def count(self) -> int:
        return len(self.shard_of)

    @staticmethod
    def over(axes: MeshAxes, mesh: dict[str, int], keys: bool, strategy: Strategy) -> "Shards":
        """The shards of an axis that is partitioned over `axes`, the major one first."""
        numbers = np.arange(_size(mesh, axes)).reshape([mesh[name] for name in axes])
        in_order = sorted(axes, key=list(mesh).index)
        numbers = numbers.transpose([axes.index(name) for name in in_order])
        return Shards(tuple(in_order), tuple(map(int, numbers.flat)), keys, strategy)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh axes that one call is partitioned over."""

    mesh: dict[str, int]  # sizes of the mesh axes
    batch: tuple[MeshAxes, ...]  # that partition each batch axis
    key_heads: MeshAxes  # that partition the key heads, and the query heads with them
    group: MeshAxes  # that partition the query heads of each key head
    query_heads_per_key_head: int
    letters: Letters
    takes_key_heads: bool
    queries: MeshAxes = ()  # that partition the sequence of queries
    keys: MeshAxes = ()  # and of keys: the same or none
    strategy: Strategy | None = None  # of sequences that are partitioned

    @staticmethod
    def of(
        mesh: dict[str, int],
        letters: Letters,
        inputs: Arrays,
        specs: Specs,
        queries: MeshAxes = (),
        keys: MeshAxes = (),
        takes_key_heads: bool = True,
    ) -> "Layout":
        """The layout that the inputs suggest, query's shardings before the others'.

        Mesh axes that don't divide an axis evenly are left out, and those on an axis that is not
        partitioned: along them all devices do the same work.

        Args:
          queries: the mesh axes that partition the sequence of queries.
          keys: and that of keys.
          takes_key_heads: whether a device may take some of its key heads, in copies. A cache that is
            changed in place has to stay whole.
        """
        query, key = inputs["query"].shape, inputs["key"].shape
        taken: set[str] = set(queries)

        def choose(size: int, candidates: list[tuple[str, int]]) -> MeshAxes:
            for name, axis in candidates:
                if inputs[name].shape[axis] == 1:
                    continue
                axes = mesh_axes(specs[name], axis)
                if axes and not taken.intersection(axes) and size % math.prod(map(mesh.get, axes)) == 0:
                    taken.update(axes)
                    return axes
            return ()

        order = ["query", *(name for name in inputs if name != "query")]

        def with_letter(letter: str) -> list[tuple[str, int]]:
            return [(name, letters[name].index(letter)) for name in order if letter in letters[name]]

        batch_axes = [with_letter(letter) for letter in letters["query"] if letter.startswith("b")]
        batch = tuple(choose(max(inputs[name].shape[i] for name, i in axes), axes) for axes in batch_axes)
        heads = choose(query[-2], [*with_letter("N"), *with_letter("K")])
        # Keys and values keep the sharding that they have as far as query heads share it. They could be
        # partitioned further at no cost, but then their gradients would have to be gathered.
        given = mesh_axes(specs["key"], len(key) - 2)
        key_heads = heads
        while key_heads and (given[: len(key_heads)] != key_heads or key[-2] % _size(mesh, key_heads)):
            key_heads = key_heads[:-1]
        group = heads[len(key_heads) :]
        layout = Layout(
            mesh, batch, key_heads, group, query[-2] // key[-2], letters, takes_key_heads, queries, keys
        )
        return layout if layout._has_its_key_heads(key[-2]) else dataclasses.replace(layout, group=())

    def over_more(self, mesh: dict[str, int], inputs: Arrays) -> "Layout":
        """The layout that partitions the call over more mesh axes, on which it isn't known how arrays lie.

        The last axis of `mesh` partitions heads and the others the batch, as most meshes are ordered. An axis
        that doesn't divide its first choice takes the other one. If it divides neither, it is not used.
        """
        batch_sizes = inputs["query"].shape[: len(self.batch)]
        query_heads, key_heads = inputs["query"].shape[-2], inputs["key"].shape[-2]
        sizes = self.mesh | mesh
        layout = dataclasses.replace(self, mesh=sizes)

        def divides(size: int, axes: MeshAxes) -> bool:
            return size % _size(sizes, axes) == 0

        exchanged = self.queries if self.strategy == "ulysses" else ()

        def by_heads(layout: Layout, name: str) -> Layout | None:
            if not divides(query_heads, layout.key_heads + layout.group + (name, *exchanged)):
                return None
            if not layout.group and divides(key_heads, (*layout.key_heads, name)):
                return dataclasses.replace(layout, key_heads=(*layout.key_heads, name))
            split = dataclasses.replace(layout, group=(*layout.group, name))
            return split if split._has_its_key_heads(key_heads) else None

        def by_batch(layout: Layout, name: str) -> Layout | None:
            for i, (size, axes) in enumerate(zip(batch_sizes, layout.batch, strict=True)):
                if divides(size, (*axes, name)):
                    batch = (*layout.batch[:i], (*axes, name), *layout.batch[i + 1 :])
                    return dataclasses.replace(layout, batch=batch)
            return None

        for i, name in enumerate(mesh):
            first, second = (by_heads, by_batch) if i == len(mesh) - 1 else (by_batch, by_heads)
            layout = first(layout, name) or second(layout, name) or layout
        return layout

    def _has_its_key_heads(self, key_heads: int) -> bool:
        """Whether each device has the key heads that its query heads attend to, or may take copies of them.

        `key_heads` are those of the whole call.
        """
        return self.takes_key_heads or not self.group or key_heads == _size(self.mesh, self.key_heads)

    @property
    def used(self) -> frozenset[str]:
        return frozenset(itertools.chain(*self.batch, self.key_heads, self.group, self.queries))

    @property
    def shards(self) -> Shards | None:
        """How sequences are partitioned; None where they are whole."""
        if self.strategy is None:
            return None
        return Shards.over(self.queries, self.mesh, bool(self.keys), self.strategy)

    def spec(self, name: str, shape: Shape) -> PartitionSpec:
        """How the array of that name and (whole) shape is partitioned."""
        by_letter = {f"b{i}": axes for i, axes in enumerate(self.batch)}
        by_letter |= {"N": self.key_heads + self.group, "K": self.key_heads}
        by_letter |= {"T": self.queries, "S": self.keys}
        axes = [by_letter.get(letter, ()) for letter in self.letters[name]]
        return PartitionSpec(*(a if a and size > 1 else None for a, size in zip(axes, shape, strict=True)))

    def local_shapes(self, shapes: Shapes) -> Shapes:
        """The shapes that `run` gives to the computation of one device, by those of whole arrays."""
        local: Shapes = {}
        for name, shape in shapes.items():
            spec = self.spec(name, shape)
            parts = (_size(self.mesh, mesh_axes(spec, axis)) for axis in range(len(shape)))
            local[name] = tuple(size // n for size, n in zip(shape, parts, strict=True))
        heads = self._key_heads_taken(local["query"][-2], local["key"][-2])
        if heads is not None:
            of_heads = self._with_key_heads(shapes)
            local |= {name: (*local[name][:-2], heads, local[name][-1]) for name in of_heads}
        return local

    def type_of(self, name: str, shape: Shape, inputs: Specs) -> PartitionSpec:
        """How a result is sharded by its type: a gradient as its operand, and others as query along `T`.

        So the types of a model don't depend on whether a call takes shards of the sequences.
        """
        if name in inputs:
            return inputs[name]
        along_queries = mesh_axes(inputs["query"], self.letters["query"].index("T"))
        if self.used.intersection(along_queries):
            return self.spec(name, shape)
        return dataclasses.replace(self, queries=along_queries).spec(name, shape)

    def run(self, local: Callable[[Arrays, Shards | None], Arrays], inputs: Arrays, specs: Specs) -> Arrays:
        """Runs `local` on one device's part of the inputs, with the mesh axes in use manual.

        `specs` are those of the (whole) inputs. A result under an input's name is its gradient.
        """
        key_heads = inputs["key"].shape[-2]
        heads = self._key_heads_needed(inputs["query"].shape[-2], key_heads)
        if heads is not None:
            of_heads = self._with_key_heads(inputs)
            inputs = inputs | {name: jnp.take(inputs[name], heads, axis=-2) for name in of_heads}
        results = local(inputs, self.shards)
        # In the results' order: all processes of a program must enter its collectives in the same order.
        for name, x in results.items():
            if name not in inputs:
                continue
            if heads is not None and name in ("key", "value"):
                whole = jnp.zeros((*x.shape[:-2], key_heads, x.shape[-1]), x.dtype)
                x = whole.at[..., heads, :].add(x)
            partitioned = set(itertools.chain(*(mesh_axes(specs[name], i) for i in range(len(specs[name])))))
            lacking = tuple(sorted(self.used - partitioned))
            if lacking:
                x = jax.lax.psum(x.astype(jnp.promote_types(x.dtype, jnp.float32)), lacking)
            results[name] = x.astype(inputs[name].dtype)
        return results

    def _with_key_heads(self, names: Iterable[str]) -> list[str]:
        """Those of the inputs that have an axis of key heads. It is the last but one."""
        return [name for name in names if self.letters[name][-2:-1] == ("K",)]

    def _key_heads_needed(self, query_heads: int, key_heads: int) -> jax.Array | None:
        """Which of its key heads a device takes; None for all of them, each with a whole group."""
        count = self._key_heads_taken(query_heads, key_heads)
        if count is None:
            return None
        first = jax.lax.axis_index(self.group) * query_heads
        return (first + query_heads // count * jnp.arange(count)) // self.query_heads_per_key_head

    def _key_heads_taken(self, query_heads: int, key_heads: int) -> int | None:
        """How many of its key heads a device takes; None for all of them.

        If a device's query heads are neither whole groups nor part of one group, key heads are repeated
        for each query head.
        """
        if not self.group or key_heads == 1:
            return None
        group = self.query_heads_per_key_head
        if query_heads % group == 0:
            return query_heads // group
        return 1 if group % query_heads == 0 else query_heads


def mesh_axes(spec: PartitionSpec, axis: int) -> MeshAxes:
    """The mesh axes that partition an axis of an array; none where that is up to the compiler."""
    axes = spec[axis] if axis < len(spec) else None
    if axes is None or axes is PartitionSpec.UNCONSTRAINED:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _size(mesh: dict[str, int], axes: MeshAxes) -> int:
    return math.prod(mesh[name] for name in axes)
