"""A call whose sequences are sharded, and how parts of it become ordinary calls.

A device has a shard of the queries and one of the keys, in one chunk or two (`load_balance.py`). An ordinary
call takes a chunk of queries and some keys, and gets told where they lie in the whole sequences: the operand
`diagonal` holds how they are aligned, lengths become those of the chunks, and functions get where these start
(`functions.py`).
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_flash._axes import axes_of, axis_of, batch_shape
from jax_flash._mask import Index, PositionMask, Window
from jax_flash._spec import AttentionSpec, Gradients, Operands, functions_of
from jax_flash.context_parallel import functions
from jax_flash.context_parallel.load_balance import Chunk, Order, local_mask
from jax_flash.transforms.lowering import PlannedCall
from jax_flash.transforms.varying import vary_over, varying_axes

Spans = dict[str, tuple[jax.Array | int, int]]
"""A part of an array, by letters of its axes (`_axes.axes_of`): where it starts and how long it is."""

AxisName = str | tuple[str, ...]
"""A mesh axis; or several, in the mesh's order."""


class Passes(NamedTuple):
    """The functions that run an ordinary call: those of `lowering.py`, or of a transform above it."""

    forward: Callable[[PlannedCall, Operands], tuple[jax.Array, jax.Array]]
    backward: Callable[..., Gradients]


LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")


@dataclasses.dataclass(frozen=True)
class Sharded:
    """Everything static about a call on shards.

    The window is in the spec, normalised for the whole sequences.
    """

    spec: AttentionSpec
    axis_name: AxisName
    order: Order
    queries: int  # of the whole sequence
    keys: int
    has_alibi: bool
    lengths: tuple[str, ...]
    """Which of the operands that are lengths there are."""
    own_rows: frozenset[str] = frozenset()
    """Which of bias and mask have one row for all queries of a device, but may differ between devices."""
    shard_of: tuple[int, ...] | None = None
    """The shard that is at each place on the mesh axes. None: places are numbered as shards are."""
    automatic: tuple[str, ...] = ()
    """The Auto mesh axes that the `shard_map` leaves, along which the compiler communicates anywhere."""

    @property
    def window(self) -> Window:
        return Window(self.spec.left, self.spec.right)

    @property
    def has_lengths(self) -> bool:
        return bool(self.lengths)

    @property
    def has_diagonal(self) -> bool:
        """Whether attention depends on how queries and keys are aligned."""
        return self.has_alibi or not self.window.unbounded

    @property
    def is_positional(self) -> bool:
        """Whether attention depends on where queries and keys lie."""
        return self.has_diagonal or functions_of(self.spec) is not None

    @property
    def chunks(self) -> int:
        """How many chunks a shard is taken in. One where tokens in any order give the same."""
        return self.order.chunks_per_device if self.is_positional or self.has_lengths else 1

    @property
    def queries_per_chunk(self) -> int:
        return self.queries // (self.order.shards * self.chunks)

    @property
    def keys_per_chunk(self) -> int:
        return self.keys // (self.order.shards * self.chunks)

    @property
    def local_spec(self) -> AttentionSpec:
        """The spec of a call on chunks."""
        left, right = self.order.local_window(self.window)
        spec = dataclasses.replace(self.spec, left=left, right=right)
        return functions.local_spec(spec, self.order.stride)

    def own_shard(self) -> jax.Array:
        """The number of the shards that this device has, int32."""
        place = jax.lax.axis_index(self.axis_name)
        return place if self.shard_of is None else jnp.asarray(self.shard_of, jnp.int32)[place]

    @property
    def place_of(self) -> list[int]:
        """The place on the mesh axes of each shard."""
        shards = range(self.order.shards)
        return sorted(shards, key=lambda place: place if self.shard_of is None else self.shard_of[place])

    def by_shard(self, x: jax.Array, axis: int) -> jax.Array:
        """Parts along an axis, one for each place on the mesh axes, in the order of the shards."""
        return _rearranged(x, axis, self.place_of)

    def by_place(self, x: jax.Array, axis: int) -> jax.Array:
        """The inverse of `by_shard`."""
        return x if self.shard_of is None else _rearranged(x, axis, list(self.shard_of))

    def passed_on(self, x: Any, count: int = 1, *, wraps: bool = True) -> Any:
        """Arrays of the shard that is `count` before this one; without `wraps`, zeros past either end."""
        n, place_of = self.order.shards, self.place_of
        pairs = [(i, (i + count) % n) for i in range(n) if wraps or 0 <= i + count < n]
        sends = [(place_of[i], place_of[j]) for i, j in pairs]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis_name, sends), x)

    def placed(self, operands: Operands, queries: Chunk, keys: Chunk) -> tuple[Operands, PositionMask]:
        """The operands of a call on chunks; and what is visible by causality, the window and lengths.

        Args:
          operands: of the chunks, but with lengths and block mask of the whole sequences.
        """
        given = [getattr(operands, name) for name in LENGTHS]
        lengths = (n if x is None else x for n, x in zip((self.queries, self.keys), given, strict=True))
        mask = local_mask(self.window, queries, keys, *lengths)
        if given[0] is not None:
            operands = operands.replace(query_seq_lengths=mask.rows)
        if given[1] is not None:
            operands = operands.replace(key_value_seq_lengths=mask.columns)
        if self.has_diagonal:
            operands = operands.replace(diagonal=_diagonals(operands, [mask.shift]))
        return functions.placed(self.spec, operands, queries, keys), mask

    @property
    def joins_chunks(self) -> bool:
        """Whether a call may have all chunks of a device's queries, with a diagonal for each.

        Lengths, and what functions capture, are a chunk's own.
        """
        return self.chunks > 1 and not self.has_lengths and functions_of(self.spec) is None

    def placed_together(self, operands: Operands, queries: list[Chunk], keys: Chunk) -> Operands:
        """The operands of a call on all chunks of a device's queries, if `joins_chunks`."""
        shifts = [local_mask(self.window, chunk, keys, self.queries, self.keys).shift for chunk in queries]
        # A chunk's own call is aligned at its last query, this one at the last of all.
        behind = [sum(later.length for later in queries[i + 1 :]) for i in range(len(queries))]
        diagonals = [shift + tokens for shift, tokens in zip(shifts, behind, strict=True)]
        return operands.replace(diagonal=_diagonals(operands, diagonals))

    def refusal_of_functions(self, keys_are_whole: bool) -> str | None:
        """Why calls on chunks can't have the call's block mask, or None.

        Args:
          keys_are_whole: a call has all keys, and a chunk of the queries alone.
        """
        # The first shard's chunk starts with a block, whatever its length is.
        shard = min(1, self.order.shards - 1)
        lengths = self.queries_per_chunk, self.keys_per_chunk
        queries, keys = (self.order.chunk(shard, 0, length) for length in lengths)
        return functions.refusal(self.spec, queries, Chunk(0, 1, self.keys) if keys_are_whole else keys)

    def may_be_skipped(self) -> bool:
        """Whether there may be chunks of which no query sees a key, by their positions."""
        return self.has_lengths or not self.window.unbounded


@dataclasses.dataclass(frozen=True)
class Calls:
    """Everything static about a call on shards that becomes several ordinary calls, and what runs these."""

    sharded: Sharded
    call: PlannedCall  # of an ordinary call
    passes: Passes

    def wide_call(self, which: str = "all") -> PlannedCall:
        """The ordinary call with those results float32 that `AttentionSpec.wide_results` says."""
        return dataclasses.replace(self.call, spec=self.call.spec.wide(which))


def _diagonals(operands: Operands, of_parts: list[Index]) -> jax.Array:
    """The operand `diagonal`, from that of each part of the queries: a number, or numbers `(*B,)`."""
    diagonals = jnp.stack([jnp.asarray(shift, jnp.int32) for shift in of_parts], -1)
    batch = len(batch_shape(operands))
    return diagonals if diagonals.ndim == batch + 1 else diagonals.reshape((1,) * batch + (-1,))


def goes_with_keys(name: str) -> bool:
    """Whether the operand goes with the keys: sharded along them, and along nothing else."""
    return "S" in axes_of(name) and "T" not in axes_of(name)


def key_side(operands: Operands) -> dict[str, jax.Array]:
    """The operands that go with the keys: key, value, segment ids, dropout's hashes."""
    return {name: x for name, x in operands.present().items() if goes_with_keys(name)}


def _rearranged(x: jax.Array, axis: int, order: list[int]) -> jax.Array:
    """`x`, which has one part for each number along `axis`, with its parts in that order."""
    if order == sorted(order):
        return x
    parts = jnp.split(x, len(order), axis)
    return jnp.concatenate([parts[i] for i in order], axis)


def take(name: str, x: jax.Array, spans: Spans) -> jax.Array:
    """A part of an array."""
    for axis, start, length in _axes(name, x, spans):
        x = jax.lax.dynamic_slice_in_dim(x, start, length, axis)
    return x


def take_of(index: int, name: str, stacked: jax.Array, spans: Spans) -> jax.Array:
    """`take` of one of several arrays that are stacked along a first axis, as one slice."""
    starts, sizes = [jnp.int32(0)] * stacked.ndim, list(stacked.shape)
    starts[0], sizes[0] = jnp.int32(index), 1
    for axis, start, length in _axes(name, jax.eval_shape(lambda x: x[0], stacked), spans):
        starts[axis + 1], sizes[axis + 1] = jnp.asarray(start, jnp.int32), length
    return jax.lax.dynamic_slice(stacked, starts, sizes)[0]


def put(name: str, x: jax.Array, part: jax.Array, spans: Spans) -> jax.Array:
    """`x` with `part` where `take` would take it from."""
    if part.shape == x.shape:
        return part
    starts = [jnp.int32(0)] * x.ndim
    for axis, start, _ in _axes(name, x, spans):
        starts[axis] = jnp.asarray(start, jnp.int32)
    return jax.lax.dynamic_update_slice(x, part, starts)


def zeros_like(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Zeros that vary over the mesh as the arrays do."""
    return {name: vary_over(jnp.zeros(x.shape, x.dtype), varying_axes(x)) for name, x in arrays.items()}


def add(name: str, x: jax.Array, part: jax.Array, spans: Spans) -> jax.Array:
    """`x` with `part` added where `take` would take it from."""
    return put(name, x, take(name, x, spans) + part.astype(x.dtype), spans)


def _axes(name: str, x: jax.Array, spans: Spans) -> Iterator[tuple[int, jax.Array | int, int]]:
    """The axes of `x` to slice, with start and length.

    Left whole: an axis of size 1, which stands for all positions, and one that is as long as the span.
    """
    for letter, (start, length) in spans.items():
        if letter in axes_of(name) and x.shape[axis_of(name, x, letter)] not in (1, length):
            yield axis_of(name, x, letter), start, length
