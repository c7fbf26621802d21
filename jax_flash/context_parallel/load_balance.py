"""Which tokens of a sharded sequence each device has.

Under a causal mask the last queries see the most keys. With consecutive tokens on each device, the last
device has nearly twice the mean work and the first one nearly none. Two other orders even that out. Of 8
chunks, or of 16 tokens, on 4 devices:

    None       device 0: 0 1   device 1: 2 3   device 2: 4 5   device 3: 6 7      chunks in order
    zigzag     device 0: 0 7   device 1: 1 6   device 2: 2 5   device 3: 3 4      an early and a late chunk
    striped    device 0: 0 4 8 12   device 1: 1 5 9 13   …                        every fourth token

Zigzag is the order of Llama 3's training (https://arxiv.org/abs/2407.21783), striped that of Striped
Attention (https://arxiv.org/abs/2311.09431).
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_flash import _validate
from jax_flash._mask import Index, PositionMask, Window, clip, position_mask

LoadBalance = Literal["zigzag", "striped"]
ZIGZAG: LoadBalance = "zigzag"
STRIPED: LoadBalance = "striped"
KINDS = (ZIGZAG, STRIPED)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The tokens `first + stride * i` of a sequence, for `i < length`."""

    first: Index
    stride: int
    length: int

    @property
    def positions(self) -> jax.Array:
        """int32 `(length,)`."""
        return self.first + self.stride * jnp.arange(self.length, dtype=jnp.int32)

    def count_before(self, end: Index) -> Index:
        """How many of the chunk's tokens lie before token `end`.

        It is the chunk's length, where `end` is that of the sequence.
        """
        return clip((end - self.first + self.stride - 1) // self.stride, 0, self.length)


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of a sequence's tokens on `shards` devices."""

    kind: LoadBalance | None
    shards: int

    @property
    def chunks_per_device(self) -> int:
        return 2 if self.kind == ZIGZAG else 1

    @property
    def stride(self) -> int:
        """From one token of a chunk to the next one."""
        return self.shards if self.kind == STRIPED else 1

    def chunk(self, shard: Index, index: Index, length: int) -> Chunk:
        """Chunk `index` of a shard, of `length` tokens."""
        if self.kind == STRIPED:
            return Chunk(shard, self.stride, length)
        return Chunk(self.number(shard, index) * length, 1, length)

    def number(self, shard: Index, index: Index) -> Index:
        """Of a shard's chunk, among all chunks of the sequence in its own order. Not for stripes."""
        # The second one of zigzag is as far from the end as the first is from the beginning.
        return shard + index * (2 * self.shards - 1 - 2 * shard)

    def holder(self, number: jax.Array) -> tuple[jax.Array, Index]:
        """The shard that has the chunk of that number, and the chunk's index there."""
        if self.chunks_per_device == 1:
            return number, 0
        is_late = number >= self.shards
        return jnp.where(is_late, 2 * self.shards - 1 - number, number), is_late.astype(jnp.int32)

    def positions(self, shard: Index, tokens: int) -> jax.Array:
        """The places that a shard's tokens have in the sequence, int32 `(tokens,)`."""
        length = tokens // self.chunks_per_device
        chunks = (self.chunk(shard, i, length) for i in range(self.chunks_per_device))
        return jnp.concatenate([chunk.positions for chunk in chunks])

    def local_window(self, window: Window) -> Window:
        """The window of a call on two chunks, `window` being that of the sequence.

        Chunks of stripes have a stride. `local_mask` rounds the one side of their window to whole strides and
        moves it into the diagonal, so it is 0 here. Two sides would need two diagonals: `strategy.py` refuses
        them.
        """
        if self.kind != STRIPED:
            return window
        assert window.left is None or window.right is None, window
        return Window(*(None if side is None else 0 for side in window))


def local_mask(
    window: Window, queries: Chunk, keys: Chunk, query_length: Index, key_length: Index
) -> PositionMask:
    """Which keys of a chunk the queries of another see: rows and columns are their tokens.

    Args:
      window: of the whole sequences.
      query_length: how many queries there are, in all chunks; the last one is aligned with the last key. An
        int if none of them is padding.
      key_length: likewise.
    """
    rows, columns = (
        chunk.length if isinstance(length, int) else chunk.count_before(length)
        for chunk, length in ((queries, query_length), (keys, key_length))
    )
    # Query i sees key j if -left <= distance <= right, distance = stride * (j - i) - moved.
    moved = queries.first - keys.first + (key_length - query_length)
    stride = queries.stride
    if stride != 1 and window.right is not None:
        moved, window = (moved + window.right) // stride, Window(None, 0)
    elif stride != 1 and window.left is not None:
        moved, window = -((window.left - moved) // stride), Window(0, None)
    return position_mask(window, rows, columns, shift=moved - (columns - rows))


def reorder_for_load_balance(x: Any, axis: int, shards: int, kind: LoadBalance) -> jax.Array:
    """Tokens in the order in which `context_parallel_attention` with `load_balance=kind` has them.

    Sharded evenly over `shards` devices along `axis`, the result gives each device its tokens. Everything
    that has an axis of tokens is reordered alike: tokens, positions (which embeddings need), segment ids,
    labels; a bias or mask along its queries and along its keys. Lengths stay as they are, as they count
    tokens of the sequence in its own order.

    Args:
      x: an array of any dtype.
      axis: of the tokens.
      shards: how many devices the tokens will be sharded over.
      kind: "zigzag" or "striped".

    Returns:
      An array of x's shape and dtype. `restore_order` is the inverse.

    Raises:
      TypeError: x is not an array.
      ValueError: kind is another one, x has no such axis, or the devices (zigzag: two chunks of each) don't
        divide its size.
    """
    return _permuted(x, axis, shards, kind, _reordered)


def restore_order(x: Any, axis: int, shards: int, kind: LoadBalance) -> jax.Array:
    """The inverse of `reorder_for_load_balance`, with the same arguments and errors."""
    return _permuted(x, axis, shards, kind, _restored)


def _permuted(x: Any, axis: int, shards: int, kind: LoadBalance, permute: Any) -> jax.Array:
    x = _validate.array("x", x, "any")
    _validate.one_of("kind", kind, KINDS)
    shards, axis = _validate.integer("shards", shards), _validate.integer("axis", axis)
    if shards < 1:
        raise ValueError(f"shards must be at least 1; got {shards}")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be one of x, {_validate.described(x)}; got {axis}")
    order = Order(kind, shards)
    check_divides(f"axis {axis} of x", x.shape[axis], order)
    return permute(x, axis % x.ndim, order)


def check_divides(what: str, tokens: int, order: Order) -> None:
    """Raises an error that says what to pad to, if the chunks of all devices don't divide `tokens`."""
    count = order.shards * order.chunks_per_device
    if tokens % count:
        chunks = f"{count} chunks, two for each of {order.shards} devices"
        parts = chunks if order.kind == ZIGZAG else f"{order.shards} devices"
        padded = -(-tokens // count) * count
        raise ValueError(
            f"{what} must be divisible by {parts}; got {tokens} tokens: pad them to {padded} (lengths or "
            "segment ids hide padding)"
        )


def reordered(x: jax.Array, axis: int, order: Order) -> jax.Array:
    return x if order.kind is None else _reordered(x, axis, order)


def restored(x: jax.Array, axis: int, order: Order) -> jax.Array:
    return x if order.kind is None else _restored(x, axis, order)


def restored_slices(x: jax.Array, axis: int, order: Order) -> jax.Array:
    """`restored` of an array that a device has whole, by a slice for each chunk.

    XLA moves slices nearly twice as fast (docs/tuning/scale-out.md). It might gather an array that is sharded
    along `axis`.
    """
    if order.kind != ZIGZAG:
        return restored(x, axis, order)
    per_device = order.chunks_per_device
    length = x.shape[axis] // (per_device * order.shards)
    places = sorted(
        range(per_device * order.shards), key=lambda place: order.number(*divmod(place, per_device))
    )
    slices = [jax.lax.slice_in_dim(x, place * length, (place + 1) * length, axis=axis) for place in places]
    return jnp.concatenate(slices, axis)


# In a `jit`, as the indices of a gather are constants, which a transfer guard refuses outside of one.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _reordered(x: jax.Array, axis: int, order: Order) -> jax.Array:
    n, shape = order.shards, x.shape
    if order.kind == STRIPED:
        return _split(x, axis, (shape[axis] // n, n)).swapaxes(axis, axis + 1).reshape(shape)
    chunks = _split(x, axis, (2, n, shape[axis] // (2 * n)))
    early, late = (jax.lax.index_in_dim(chunks, i, axis, keepdims=False) for i in range(2))
    return jnp.stack([early, jnp.flip(late, axis)], axis + 1).reshape(shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _restored(x: jax.Array, axis: int, order: Order) -> jax.Array:
    n, shape = order.shards, x.shape
    if order.kind == STRIPED:
        return _split(x, axis, (n, shape[axis] // n)).swapaxes(axis, axis + 1).reshape(shape)
    chunks = _split(x, axis, (n, 2, shape[axis] // (2 * n)))
    early, late = (jax.lax.index_in_dim(chunks, i, axis + 1, keepdims=False) for i in range(2))
    return jnp.stack([early, jnp.flip(late, axis)], axis).reshape(shape)


def _split(x: jax.Array, axis: int, sizes: tuple[int, ...]) -> jax.Array:
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])
