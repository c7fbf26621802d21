"""What all masks have in common, and how they combine."""

import abc
import dataclasses
import functools
import operator
from collections.abc import Hashable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._block_kinds import MaskMod
from jax_flash._validate import short
from jax_flash.masks.arguments import check_axis


class Mask(abc.ABC):
    """A mask function: an immutable object called as `(batch, head, query_index, key_index) -> bool`.

    Subclasses are frozen dataclasses. Masks of one class are equal if all of their fields are: NumPy arrays
    by what they hold, JAX arrays if they are the same array. So a mask can be a static argument of a `jit`.
    """

    _of_rows: ClassVar[tuple[str, ...]] = ()  # fields that may be arrays (B,)

    def __call__(self, batch: Any, head: Any, query_index: Any, key_index: Any) -> jax.Array:
        """Whether the query attends to the key: a bool scalar, of int32 scalars."""
        indices = (jnp.asarray(x, jnp.int32) for x in (batch, head, query_index, key_index))
        return self._sees(*indices)

    @abc.abstractmethod
    def _sees(self, batch: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
        """`__call__` of int32 scalars."""

    def check_sizes(self, B: int | None, N: int | None, T: int, S: int) -> None:
        """Raises ValueError if the mask holds arrays of other sizes than a call of B batch rows, N query
        heads, T queries and S keys has. Without this check, indices outside of an array are clipped. B or N
        is None where the mask must be the same for all batch rows or heads."""
        for name in self._of_rows:
            check_axis(name, getattr(self, name), -1, "B", B)

    def __and__(self, other: Any) -> "Mask":
        return and_masks(self, other) if callable(other) else NotImplemented

    def __rand__(self, other: Any) -> "Mask":
        return and_masks(other, self) if callable(other) else NotImplemented

    def __or__(self, other: Any) -> "Mask":
        return or_masks(self, other) if callable(other) else NotImplemented

    def __ror__(self, other: Any) -> "Mask":
        return or_masks(other, self) if callable(other) else NotImplemented

    def __invert__(self) -> "Mask":
        return _Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: combine masks by &, | and ~, not by and, or and not")

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Mask) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    @functools.cached_property
    def _key(self) -> Hashable:
        """What is compared. The mask keeps its arrays, so no other array has the id of one."""
        compared = (x for x in dataclasses.fields(self) if x.compare)  # pyright: ignore[reportArgumentType]
        return type(self), *(_hashable(getattr(self, x.name)) for x in compared)

    def __getstate__(self) -> dict[str, Any]:
        """Copies have arrays of their own."""
        return {name: value for name, value in vars(self).items() if name != "_key"}

    def __repr__(self) -> str:
        shown = (x.name for x in dataclasses.fields(self) if x.repr)  # pyright: ignore[reportArgumentType]
        fields = ", ".join(f"{name}={_described(getattr(self, name))}" for name in shown)
        return f"{type(self).__name__}({fields})"

    def _set(self, **fields: Any) -> None:
        """Sets fields while a frozen dataclass is initialised."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)


def _hashable(value: Any) -> Hashable:
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, value.tobytes()
    return ("array", id(value)) if isinstance(value, jax.Array) else value


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray | jax.Array):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)


def and_masks(*masks: MaskMod) -> Mask:
    """The pairs that all masks let be seen; all pairs without any mask.

    Args:
      masks: of this module, or any function `(batch, head, query_index, key_index) -> bool`.

    Raises:
      TypeError: one can't be called; when called, its result isn't a bool.
    """
    return _And(_checked("and_masks", masks))


def or_masks(*masks: MaskMod) -> Mask:
    """The pairs that any mask lets be seen; none without any mask. Arguments and errors as `and_masks`."""
    return _Or(_checked("or_masks", masks))


def _checked(name: str, masks: tuple[Any, ...]) -> tuple[MaskMod, ...]:
    for mask in masks:
        if not callable(mask):
            raise TypeError(
                f"{name} takes functions (batch, head, query_index, key_index); got {short(mask)}"
            )
    return masks


def value_of(mask: MaskMod, *indices: jax.Array) -> jax.Array:
    """The value of any mask function, which must be bool."""
    value = mask(*indices)
    if isinstance(value, bool | np.bool_):
        return jnp.asarray(value)
    if getattr(value, "dtype", None) != jnp.bool_:
        raise TypeError(f"a mask function must return a bool; {short(mask)} returned {short(value)}")
    return value


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Combined(Mask):
    masks: tuple[MaskMod, ...]

    def check_sizes(self, B: int | None, N: int | None, T: int, S: int) -> None:
        for mask in self.masks:
            check_sizes(mask, B, N, T, S)


def check_sizes(mask: MaskMod | None, B: int | None, N: int | None, T: int, S: int) -> None:
    """`Mask.check_sizes`, which other functions don't have."""
    if isinstance(mask, Mask):
        mask.check_sizes(B, N, T, S)


class _And(_Combined):
    def _sees(self, *indices: jax.Array) -> jax.Array:
        return functools.reduce(operator.and_, (value_of(x, *indices) for x in self.masks), jnp.asarray(True))

    def __repr__(self) -> str:
        return f"and_masks({', '.join(map(repr, self.masks))})"


class _Or(_Combined):
    def _sees(self, *indices: jax.Array) -> jax.Array:
        return functools.reduce(operator.or_, (value_of(x, *indices) for x in self.masks), jnp.asarray(False))

    def __repr__(self) -> str:
        return f"or_masks({', '.join(map(repr, self.masks))})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Not(Mask):
    mask: Mask

    def _sees(self, *indices: jax.Array) -> jax.Array:
        return ~self.mask(*indices)

    def __invert__(self) -> Mask:
        return self.mask

    def check_sizes(self, B: int | None, N: int | None, T: int, S: int) -> None:
        self.mask.check_sizes(B, N, T, S)

    def __repr__(self) -> str:
        return f"~{self.mask!r}"
