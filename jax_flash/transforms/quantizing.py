"""Rounding of rows to e4m3 by a kernel, through the same steps as attention: `vmap`, then sharded arrays.

Batch, heads and rows are partitioned, rows only if each device has whole blocks of 128. The heads of a group
share their descales. Devices that have parts of a group exchange the largest magnitudes, and round by plain
JAX.

What plain JAX rounds everywhere needs no such steps: XLA maps and partitions it.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

from jax_flash import _device, _float8, _settings
from jax_flash._quantize_spec import QuantizeOperands, QuantizeSpec
from jax_flash.transforms import debugging, lowering, partitioning
from jax_flash.transforms.batching import of_no_calls, spread_over
from jax_flash.transforms.layout import (
    Arrays,
    Layout,
    Letters,
    MeshAxes,
    Shapes,
    Shards,
    Specs,
    mesh_axes,
    sharding_rule,
)
from jax_flash.transforms.lowering import PlannedCall
from jax_flash.transforms.varying import vary_alike
from jax_flash.xla import quantizing

Results = tuple[jax.Array, jax.Array]
"""The rows in e4m3, and their descales `(*B, K, blocks)`."""


def quantize(spec: QuantizeSpec, implementation: tuple[str, ...], operands: QuantizeOperands) -> Results:
    """Runs a checked call, `rows (*B, rows, heads, D)`; `implementation` as in `autodiff.attend`."""
    call = PlannedCall(spec, implementation, _device.current())
    return debugging.checked(jax_flash_quantize, call, vary_alike(operands))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)
def jax_flash_quantize(call: PlannedCall[QuantizeSpec], operands: QuantizeOperands) -> Results:
    return _mappable(call, operands)


@jax_flash_quantize.defjvp
def _jvp(call: PlannedCall[QuantizeSpec], primals: Any, tangents: Any) -> Any:
    definition = functools.partial(by_definition, call.spec)
    return jax_flash_quantize(call, *primals), jax.jvp(definition, primals, tangents)[1]


@_settings.as_written
def by_definition(spec: QuantizeSpec, operands: QuantizeOperands) -> Results:
    """The results by plain JAX."""
    batch = operands.rows.shape[:-3]
    return _unfolded(quantizing.forward(spec, _folded(operands)), batch)


def _mappable(call: PlannedCall[QuantizeSpec], operands: QuantizeOperands) -> Results:
    @custom_vmap
    def mappable(operands: QuantizeOperands) -> Results:
        return _partitioned(call, operands)

    @mappable.def_vmap
    def rule(size: int, in_batched: Any, operands: QuantizeOperands) -> Any:
        (is_mapped,) = in_batched
        if size == 0:
            return of_no_calls(functools.partial(_mappable, call), in_batched, operands), (True, True)
        spread = spread_over(size, (operands,), in_batched)
        arrays = {
            name: x if getattr(is_mapped, name) else (spread(x) if name == "rows" else x[None])
            for name, x in operands.present().items()
        }
        return _mappable(call, QuantizeOperands(**arrays)), (True, True)

    return mappable(operands)


def _partitioned(call: PlannedCall[QuantizeSpec], operands: QuantizeOperands) -> Results:
    def run(inputs: Arrays, _shards: Shards | None) -> Arrays:
        return _of_device(call, inputs)

    *batch, rows, heads, _ = operands.rows.shape
    key_heads = heads // call.spec.group
    results = {"quantized": operands.rows.shape, "descale": (*batch, key_heads, _float8.descales_of(rows))}
    inputs = operands.present()
    inputs["query"] = inputs.pop("rows")  # what is partitioned as queries are
    computation = _Rows(run, call, _letters(len(batch)), results, key_heads=key_heads)
    found = partitioning.partitioned(computation, inputs)
    return found["quantized"], found["descale"]


def _letters(batch_axes: int) -> Letters:
    """Those of all arrays, and of the keys that `_Rows` makes up."""
    batch = tuple(f"b{i}" for i in range(batch_axes))
    return {
        "query": (*batch, "T", "N", "H"),
        "key": (*batch, "S", "K", "H"),
        "signs": (*batch, "H"),
        "lengths": batch,
        "quantized": (*batch, "T", "N", "H"),
        "descale": (*batch, "K", "C"),
    }


@dataclasses.dataclass(frozen=True)
class _Rows(partitioning.Computation):
    """A call on rows, as one of attention to keys that have no elements."""

    key_heads: int = 1

    def layout(self, mesh: dict[str, int], inputs: Arrays, specs: Specs) -> Layout:
        *batch, rows, _, _ = inputs["query"].shape
        spec = specs["query"]
        axes = mesh_axes(spec, len(batch))
        if rows % (_float8.ROWS_PER_DESCALE * math.prod(mesh[name] for name in axes)):
            axes = ()
        of_heads = mesh_axes(spec, len(batch) + 1)
        specs = specs | {"key": PartitionSpec(*[None] * (len(batch) + 1), of_heads or None, None)}
        return Layout.of(mesh, self.letters, self._with_keys(inputs), specs, queries=axes)

    def over_more(self, layout: Layout, mesh: dict[str, int], inputs: Arrays) -> Layout:
        return layout.over_more(mesh, self._with_keys(inputs))

    def sharding_rule(self, mesh: dict[str, int], letters: Letters, inputs: Shapes) -> tuple[str, dict]:
        return sharding_rule(mesh, letters, inputs, self.results, sequences=True, key_heads=self.key_heads)

    def run_on_device(self, layout: Layout, inputs: Arrays, specs: Specs) -> Arrays:
        return _of_device(self.call, inputs, layout)

    def _with_keys(self, inputs: Arrays) -> Arrays:
        *batch, _, _, _ = inputs["query"].shape
        return inputs | {"key": jax.ShapeDtypeStruct((*batch, 1, self.key_heads, 0), jnp.float32)}


@_settings.as_written
def _of_device(call: PlannedCall[QuantizeSpec], inputs: Arrays, layout: Layout | None = None) -> Arrays:
    """What a device rounds; without a layout, all of the call."""
    rest = {name: x for name, x in inputs.items() if name != "query"}
    operands = QuantizeOperands(inputs["query"], **rest)
    *batch, rows, _, _ = operands.rows.shape
    if layout is not None and layout.queries and operands.lengths is not None:
        first = jax.lax.axis_index(layout.queries) * rows
        operands = dataclasses.replace(operands, lengths=operands.lengths - first)
    operands = _folded(vary_alike(operands))
    if layout is not None and layout.group:
        results = _of_shared_groups(call.spec, layout, operands)
    else:
        results = lowering.run(call, "forward", operands)
    quantized, descale = _unfolded(results, tuple(batch))
    if layout is not None and layout.queries:
        descale = _gathered(layout, layout.queries, descale, -1)
    return {"quantized": quantized, "descale": descale}


def _of_shared_groups(spec: QuantizeSpec, layout: Layout, operands: QuantizeOperands) -> Results:
    """Where devices along `layout.group` have heads of the same groups: by plain JAX."""
    x = quantizing.rotated(operands).astype(jnp.float32)
    batch, rows, heads, _ = x.shape
    own = _float8.largest_of_blocks(x, quantizing.valid(operands))
    of_heads = _gathered(layout, layout.group, own, 1)
    largest = of_heads.reshape(batch, -1, spec.group, own.shape[-1]).max(2)
    descales = _float8.power_of_two_above(largest)
    first = jax.lax.axis_index(layout.group) * heads
    of_own = jax.lax.dynamic_slice_in_dim(jnp.repeat(descales, spec.group, axis=1), first, heads, axis=1)
    return _float8.converted(x / _float8.of_rows(of_own, rows, heads)), descales


def _gathered(layout: Layout, axes: MeshAxes, x: jax.Array, axis: int) -> jax.Array:
    """The whole array, alike on the devices along `axes`, of which each has a part. It is small.

    A sum, as its type says that devices have the same; that of an all-gather doesn't.
    """
    size, axis = x.shape[axis], axis % x.ndim
    count = math.prod(layout.mesh[name] for name in axes)
    whole = jnp.zeros((*x.shape[:axis], count * size, *x.shape[axis + 1 :]), x.dtype)
    whole, x, place = vary_alike((whole, x, jax.lax.axis_index(axes)))
    whole = jax.lax.dynamic_update_slice_in_dim(whole, x, place * size, axis)
    return jax.lax.psum(whole, axes)


def _folded(operands: QuantizeOperands) -> QuantizeOperands:
    """With the batch axes as one. Signs may be the same for all rows of it."""
    batch = operands.rows.shape[:-3]

    def fold(name: str, x: jax.Array) -> jax.Array:
        leading, core = x.shape[: len(batch)], x.shape[len(batch) :]
        if name == "signs" and math.prod(leading) == 1:
            return x.reshape(1, *core)
        if leading != batch:
            x = jnp.broadcast_to(x, (*batch, *core))
        return x.reshape(math.prod(batch), *core)

    return QuantizeOperands(**{name: fold(name, x) for name, x in operands.present().items()})


def _unfolded(results: Results, batch: tuple[int, ...]) -> Results:
    quantized, descale = (x.reshape(*batch, *x.shape[1:]) for x in results)
    return quantized, descale
