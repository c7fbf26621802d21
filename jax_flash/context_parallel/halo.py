"""What a narrow window reaches of other devices' keys: the last of the one before, the first of the next.

An all-gather for such a window sends these rows alone. A device's queries then see one piece of the sequence:

    device 0           device 1           device 2
    K0 K0 K0 k1 ·      k0 K1 K1 K1 k2     · k1 K2 K2 K2

All devices' pieces are equally long. At the ends of the sequence a device lacks a neighbour. The rows in that
place (·) are 0, and no query of the device sees them.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jax_flash._spec import functions_of
from jax_flash.context_parallel.load_balance import Chunk
from jax_flash.context_parallel.sharded import Sharded


@dataclasses.dataclass(frozen=True)
class Halo:
    """How many keys a piece has of the device before, of the device itself, and of the next one."""

    before: int
    own: int
    after: int

    @property
    def length(self) -> int:
        return self.before + self.own + self.after

    def chunk(self, of: Sharded) -> Chunk:
        """Which keys this device's piece has."""
        start = of.device() * self.own - self.before
        return Chunk(jnp.clip(start, 0, of.keys - self.length), 1, self.length)


def halo_of(of: Sharded) -> Halo | None:
    """The keys that a call's window reaches; None if they may be more than the neighbours'."""
    window, own = of.window, of.keys // of.order.shards
    # With lengths, how queries and keys are aligned is data.
    is_moved = of.order.kind is not None or of.has_lengths or of.queries != of.keys
    if window.left is None or window.right is None or is_moved or functions_of(of.spec) is not None:
        return None
    halo = Halo(max(window.left, 0), own, max(window.right, 0))
    is_narrow = max(halo.before, halo.after) <= own and halo.length < of.keys
    return halo if is_narrow else None


def reached(of: Sharded, halo: Halo, axis: int, x: jax.Array) -> jax.Array:
    """This device's piece of an array that is sharded as keys are: `halo.length` rows along `axis`."""
    exchange = _reached if jnp.issubdtype(x.dtype, jnp.floating) else _exchanged
    return exchange(of, halo, axis, x)


def _exchanged(of: Sharded, halo: Halo, axis: int, x: jax.Array) -> jax.Array:
    def rows(start: int, count: int) -> jax.Array:
        return jax.lax.slice_in_dim(x, start, start + count, axis=axis)

    before = _passed_on(of, rows(halo.own - halo.before, halo.before), 1)
    after = _passed_on(of, rows(0, halo.after), -1)
    shape = (*x.shape[:axis], halo.length, *x.shape[axis + 1 :])
    piece = jnp.zeros_like(x, shape=shape)
    own = _own_start(of, halo)
    # Where a neighbour isn't there, its rows are put over others; so the device's own come last.
    for part, start in ((before, own - halo.before), (after, own + halo.own), (x, own)):
        piece = jax.lax.dynamic_update_slice_in_dim(piece, part, start, axis)
    return piece


_reached = jax.custom_vjp(_exchanged, nondiff_argnums=(0, 1, 2))


def _reached_forward(of: Sharded, halo: Halo, axis: int, x: jax.Array) -> tuple[jax.Array, None]:
    return _exchanged(of, halo, axis, x), None


def _reached_backward(of: Sharded, halo: Halo, axis: int, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    """Gradients of neighbours' rows go back to these devices, which add them in float32."""
    wide = cotangent.astype(jnp.promote_types(cotangent.dtype, jnp.float32))
    own = _own_start(of, halo)

    def rows(start: jax.Array, count: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(wide, start, count, axis)

    # What lies in place of a neighbour that isn't there is sent to nobody.
    of_last = _passed_on(of, rows(own - halo.before, halo.before), -1)
    of_first = _passed_on(of, rows(own + halo.own, halo.after), 1)
    summed = rows(own, halo.own)
    at = (slice(None),) * axis
    summed = summed.at[*at, halo.own - halo.before :].add(of_last)
    summed = summed.at[*at, : halo.after].add(of_first)
    return (summed.astype(cotangent.dtype),)


_reached.defvjp(_reached_forward, _reached_backward)


def _own_start(of: Sharded, halo: Halo) -> jax.Array:
    """Where a device's own rows are in its piece."""
    return of.device() * halo.own - halo.chunk(of).first


def _passed_on(of: Sharded, x: jax.Array, places: int) -> jax.Array:
    """An array as the device so many places before this one has it; zeros where there is none."""
    place_of = of.place_of
    pairs = [(i, i + places) for i in range(len(place_of)) if 0 <= i + places < len(place_of)]
    sends = [(place_of[i], place_of[j]) for i, j in pairs]
    return jax.lax.ppermute(x, of.axis_name, sends)
