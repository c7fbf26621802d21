"""A user's function as what is static about a call: without the arrays that it captures, and hashable.

Two functions are equal if they compute the same from arrays of the same shapes, whatever they are named and
wherever they were defined. So a closure that is made anew for each call is compiled once.

Portable code computes them here: from their graphs where they have one, else from the jaxpr, which may hold
anything that JAX runs.
"""

import dataclasses
import hashlib
import math
import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from jax_flash._gradients import sum_to
from jax_flash.functions import function as tracing
from jax_flash.functions.derivative import Derivative, differentiate
from jax_flash.functions.errors import GraphTooLargeError, UnsupportedPrimitiveError
from jax_flash.functions.evaluation import evaluate, text
from jax_flash.functions.function import Traced
from jax_flash.functions.graph import CONSTANT, DTYPES, FLOAT32, INPUT, LOAD, Node, Unsupported, reachable
from jax_flash.functions.scopes import Scope, scope

Arrays = Sequence[jax.Array]
"""What a function captures, flat: `(B|1, elements)` each, with a row for each batch row or one for all."""

Inputs = Mapping[str, jax.Array]
"""The function's arguments by name, of shapes that broadcast, with the batch as their first axis."""


@dataclasses.dataclass(frozen=True, eq=False)
class StaticFunction:
    """A `score_mod` or a `mask_mod`.

    Attributes:
      name: the name that the user gave it.
      passed_as: the argument of a call that it came by, for errors.
      key: equal for functions that compute the same, in every process.
      jaxpr: the function as JAX traced it, with captured arrays as `constvars`.
      shapes: shapes and dtypes of the captured arrays.
      arguments: the names of its arguments, in order.
      result: the dtype of its result, float32 or bool.
      value: its result as a graph; None if it has no graph.
      derivative: its derivative as graphs; None if that has no graph, or there is no score.
      refusal: why it has no graph, or none of its derivative, as a clause that names `passed_as`; None where
        it has both.
    """

    name: str
    passed_as: str
    key: str
    jaxpr: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    arguments: tuple[str, ...]
    result: np.dtype
    value: Node | None
    derivative: Derivative | None
    refusal: str | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticFunction) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"{self.name}:{self.key}"

    def __deepcopy__(self, memo: Any) -> "StaticFunction":
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self.name}, a function that JAX has traced, can't be pickled, nor can a BlockMask that has "
            "it: make the mask anew from what the function captures"
        )

    @property
    def inputs(self) -> frozenset[str]:
        """The arguments that it depends on, or may."""
        if self.value is not None:
            return self.value.inputs
        needed = set(self.jaxpr.outvars)
        for equation in reversed(self.jaxpr.eqns):
            if not needed.isdisjoint(equation.outvars):
                needed.update(x for x in equation.invars if not isinstance(x, Literal))
        names = zip(self.arguments, self.jaxpr.invars, strict=True)
        return frozenset(name for name, variable in names if variable in needed)

    @property
    def changes_nothing(self) -> bool:
        """Whether a call with it is one without: its value is the score, and so is its tangent that of the
        score. `stop_gradient` and rules of custom derivatives have the same value and another tangent."""
        if self.value is None or self.derivative is None or self.derivative.gathers:
            return False
        d_score = self.derivative.d_score
        is_score = self.value.operation == INPUT and self.value.detail == "score"
        return is_score and d_score.operation == CONSTANT and d_score.value == 1

    @property
    def looks_up_each_score(self) -> bool:
        """Whether it looks an array up for each score, or each pair of a query and a key."""
        return self.lookups_of_a_score > 0

    @property
    def lookups_of_a_score(self) -> int:
        """How many elements of arrays it looks up for each score, or each pair of a query and a key."""
        nodes = [] if self.value is None else reachable([self.value])
        return sum(node.operation == LOAD and scope(node) == Scope.ELEMENT for node in nodes)

    def limit_of_order(self) -> str | None:
        """Why kernels that add atomically can't have the same bits each time, backward; or None."""
        if self.derivative is None or not self.derivative.gathers:
            return None
        what = f"gradients of arrays that {self.passed_as} captures"
        return f"{what} are summed in no fixed order (deterministic=True)"

    def limit(self, unsupported: Unsupported, loadable: Sequence[np.dtype] = DTYPES) -> str | None:
        """Why code that can't have some primitives can't compute it, or its derivative; or None.

        Args:
          unsupported: says which primitives the code can't have.
          loadable: dtypes of captured arrays that the code reads.
        """
        for shape in self.shapes:
            if (reason := tracing.limit_of_captured(shape, loadable)) is not None:
                return f"{self.passed_as} {reason}"
        if self.refusal is not None:
            return self.refusal
        closed = ClosedJaxpr(self.jaxpr, self.shapes)
        traced = Traced(closed, self.arguments, self.name, self.passed_as, self.result)
        try:
            tracing.as_graph(traced, unsupported)
        except UnsupportedPrimitiveError as error:
            return f"{self.passed_as} has {error}"
        for node in [] if self.derivative is None else reachable(self.derivative.outputs):
            if node.operation not in (CONSTANT, INPUT, LOAD):
                reason = unsupported(node.operation, [x.dtype for x in node.arguments], node.dtype)
                if reason is not None:
                    return f"{self.passed_as}'s derivative has {node.operation}: {reason}"
        return None

    def __call__(self, inputs: Inputs, captured: Arrays) -> jax.Array:
        """Its values: an array that broadcasts to the shape of all inputs."""
        if self.value is None:
            return self.by_jax(inputs, captured)
        (value,) = evaluate([self.value], self._converted(inputs), lambda *at: _load(captured, *at))
        return value

    def by_jax(self, inputs: Inputs, captured: Arrays) -> jax.Array:
        """The same values by JAX's own evaluation, which has each derivative that JAX knows."""
        inputs = self._converted(inputs)
        # Captured arrays may have a row for each batch row: arguments are broadcast to as many.
        rows = [jnp.zeros((x.shape[0], *(1,) * (inputs["query"].ndim - 1)), bool) for x in captured]
        arguments = jnp.broadcast_arrays(*(inputs[name] for name in self.arguments), *rows)
        arguments = arguments[: len(self.arguments)]
        is_own = [x.shape[0] != 1 for x in captured]

        def of_row(arguments: list[jax.Array], captured: list[jax.Array]) -> jax.Array:
            consts = [x.reshape(shape.shape) for x, shape in zip(captured, self.shapes, strict=True)]
            run = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, consts))
            values = jax.vmap(lambda *scalars: run(*scalars)[0])(*(x.reshape(-1) for x in arguments))
            return values.reshape(arguments[0].shape).astype(self.result)

        own = [x if mapped else x[0] for x, mapped in zip(captured, is_own, strict=True)]
        return jax.vmap(of_row, (0, [0 if mapped else None for mapped in is_own]))(list(arguments), own)

    def pullback(
        self, inputs: Inputs, captured: Arrays, d_value: jax.Array, masked: Callable[[jax.Array], jax.Array]
    ) -> tuple[jax.Array, dict[int, jax.Array]]:
        """The gradient of the score, and those of captured floats by their number, in their flat shapes.

        Args:
          d_value: of the shape of all inputs.
          masked: its argument, with 0 where gradients are 0 whatever the function's derivative is.
        """
        if self.derivative is None:
            return self._pullback_by_jax(inputs, captured, d_value, masked)
        gathers = self.derivative.gathers
        outputs = self.derivative.outputs
        d_score, *rest = evaluate(outputs, self._converted(inputs), lambda *at: _load(captured, *at))
        sums = {
            number: jnp.zeros(captured[number].shape, d_value.dtype) for number in self.derivative.operands
        }
        for gather, index, factor in zip(gathers, rest[::2], rest[1::2], strict=True):
            share = masked(d_value * factor.astype(d_value.dtype))
            sums[gather.operand] = _add_at(sums[gather.operand], index, share)
        return masked(d_value * d_score.astype(d_value.dtype)), sums

    def _pullback_by_jax(self, inputs, captured, d_value, masked):
        floats = [i for i, x in enumerate(captured) if jnp.issubdtype(x.dtype, jnp.floating)]

        def value(score, own):
            arrays = [own.get(i, x) for i, x in enumerate(captured)]
            return masked(self.by_jax({**inputs, "score": score}, arrays).astype(d_value.dtype))

        # Where gradients are 0, the score is 0 too, as 0 times a derivative that isn't finite is NaN.
        _, vjp = jax.vjp(value, masked(inputs["score"]), {i: captured[i] for i in floats})
        d_score, sums = vjp(d_value)
        return masked(d_score), {i: x.astype(d_value.dtype) for i, x in sums.items()}

    def _converted(self, inputs: Inputs) -> dict[str, jax.Array]:
        dtypes = {x: FLOAT32 if x == "score" else jnp.int32 for x in self.arguments}
        return {name: inputs[name].astype(dtype) for name, dtype in dtypes.items()}


def static_score_mod(function: Callable[..., Any]) -> tuple[StaticFunction, tuple[Any, ...]]:
    """A score_mod and the arrays that it captures. Raises as `functions.traced_score_mod`."""
    return _static(tracing.traced_score_mod(function))


def static_mask_mod(function: Callable[..., Any]) -> tuple[StaticFunction, tuple[Any, ...]]:
    """A mask_mod and the arrays that it captures. Raises as `functions.traced_mask_mod`."""
    return _static(tracing.traced_mask_mod(function))


def static_masked_score(
    score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any]
) -> tuple[StaticFunction, tuple[Any, ...]]:
    """`functions.traced_masked_score`, which is a score_mod, and the arrays that it captures."""
    return _static(tracing.traced_masked_score(score_mod, mask_mod))


def _static(traced: Traced) -> tuple[StaticFunction, tuple[Any, ...]]:
    value = derivative = refusal = None
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in map(jax.typeof, traced.jaxpr.consts))
    # Without graphs of value and derivative a function equals itself alone: jaxprs can't be compared.
    key = uuid.uuid4().hex
    try:
        scalar = tracing.as_graph(traced)
        value = scalar.output
        described = [repr((traced.arguments, [(x.shape, x.dtype.name) for x in shapes])), text([value])]
        if "score" in traced.arguments:
            derivative = differentiate(scalar)
            described += [text(derivative.outputs)]
            described += [repr([gather.operand for gather in derivative.gathers]), derivative.program]
        key = hashlib.sha256("\n".join(described).encode()).hexdigest()[:32]
    except GraphTooLargeError as error:
        refusal = f"{traced.passed_as} has {error}"
        if value is not None:
            refusal = f"{traced.passed_as}'s derivative has {error.primitive}: {error.reason}"
    except UnsupportedPrimitiveError as error:
        refusal = f"{traced.passed_as} has {error}"  # which, unlike the error, keeps nothing alive
    except TypeError as error:
        refusal = str(error)
    found = StaticFunction(
        traced.name,
        traced.passed_as,
        key,
        without_arrays(traced.jaxpr.jaxpr, shapes),
        shapes,
        traced.arguments,
        traced.result,
        value,
        derivative,
        refusal,
    )
    return found, tuple(traced.jaxpr.consts)


def without_arrays(jaxpr: Any, shapes: Sequence[jax.ShapeDtypeStruct]) -> Any:
    """A jaxpr whose `constvars` are of these shapes. From JAX 0.12 on it would hold their values."""
    return ClosedJaxpr(jaxpr, shapes).jaxpr


def flat(x: Any) -> jax.Array:
    """A captured array as operands hold it. One of NumPy is sent to the device explicitly, which a transfer
    guard allows: masks of `jax_flash.masks` hold such."""
    x = jax.device_put(x) if isinstance(x, np.ndarray) else jnp.asarray(x)
    return x.reshape(1, math.prod(x.shape))


def _load(captured: Arrays, operand: Hashable, index: jax.Array) -> jax.Array:
    assert isinstance(operand, int)
    x = captured[operand]
    if x.shape[0] == 1:
        return x[0].at[index].get(mode="promise_in_bounds")
    return x.at[_rows(x, index), index].get(mode="promise_in_bounds")


def _add_at(sums: jax.Array, index: jax.Array, share: jax.Array) -> jax.Array:
    """`sums (B|1, elements)` with each share added at its index."""
    if sums.shape[0] == 1:
        share = sum_to(share, index.shape)
        return sums.at[0, index].add(share, mode="promise_in_bounds")
    rows = _rows(sums, index)
    share = sum_to(share, np.broadcast_shapes(rows.shape, index.shape))
    return sums.at[rows, index].add(share, mode="promise_in_bounds")


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """The batch row of each index."""
    return jnp.arange(x.shape[0], dtype=jnp.int32).reshape(-1, *(1,) * (index.ndim - 1))
