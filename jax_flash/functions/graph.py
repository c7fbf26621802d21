"""Scalar computations as a graph of nodes, each once.

A node is made by a `Graph`, which returns the node it has if an equal one is asked for, and a constant where
all arguments are. Nodes are numbered as they are made, arguments ahead of what is computed from them.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import lax

BFLOAT16, FLOAT16, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
INT32, UINT32, BOOL = np.dtype(np.int32), np.dtype(np.uint32), np.dtype(np.bool_)
NARROW = tuple(np.dtype(name) for name in ("int8", "uint8", "int16", "uint16"))
"""Integers that arrays may have, and that few operations take."""
FLOATS = (BFLOAT16, FLOAT16, FLOAT32)
DTYPES = (*FLOATS, INT32, UINT32, BOOL, *NARROW)

INPUT, CONSTANT, LOAD = "input", "constant", "load"
"""Operations that aren't primitives: an argument of the function, a number, and an element of an operand."""


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """A scalar. Two nodes of one graph are equal only if they are the same object."""

    number: int
    operation: str  # a primitive's name, or one of the above
    dtype: np.dtype
    arguments: tuple["Node", ...] = dataclasses.field(repr=False)
    detail: (
        Hashable  # the name of an input, the bytes of a constant, which operand, or a primitive's parameters
    )
    inputs: frozenset[str]  # the arguments of the function that it depends on
    bind: Callable[..., Any] | None = dataclasses.field(repr=False, default=None)  # the primitive in JAX

    @property
    def selects_branch(self) -> bool:
        """Whether `Graph.select_branch` made it."""
        return self.operation == "select_n" and self.detail != ()

    @property
    def value(self) -> np.generic:
        """The number that a constant is."""
        assert isinstance(self.detail, bytes)
        return np.frombuffer(self.detail, self.dtype)[0]


# Parameters of primitives that decide what a scalar is, where code is written for these.
_PARAMETERS = {
    "integer_pow": ("y",),
    "round": ("rounding_method",),
}
# Parameters that don't decide, or that the result's dtype says.
_WITHOUT_MEANING = ("accuracy", "new_dtype", "weak_type", "sharding", "out_sharding", "axes", "name")

_SAME_ARGUMENT = ("copy", "copy_p", "stop_gradient", "optimization_barrier", "pvary", "name", "reshard")


ELEMENTWISE = frozenset(
    (
        *_SAME_ARGUMENT,
        *"add add_any sub mul div rem neg abs sign max min clamp square integer_pow pow sqrt rsqrt".split(),
        *"exp exp2 expm1 log log2 log1p logistic tanh sin cos tan asin acos atan atan2 sinh cosh".split(),
        *"asinh acosh atanh erf erfc erf_inv lgamma digamma floor ceil round nextafter is_finite".split(),
        *"lt le gt ge eq ne and or xor not shift_left shift_right_logical shift_right_arithmetic".split(),
        *"population_count clz select_n convert_element_type bitcast_convert_type reduce_precision".split(),
        *"one_minus_square polynomial cbrt".split(),
    )
)
"""Elementwise primitives that a graph may have."""

Unsupported = Callable[[str, Sequence[np.dtype], np.dtype], str | None]
"""Why a primitive of that name, with arguments and a result of these types, can't be in a graph; or None."""


def nothing(name: str, arguments: Sequence[np.dtype], result: np.dtype) -> str | None:
    """Every primitive may be in a graph."""
    return None


class Graph:
    """Makes the nodes of one graph, each once.

    Attributes:
      unsupported: says why a primitive can't be in this graph, or None.
    """

    def __init__(self, unsupported: Unsupported = nothing):
        self.unsupported = unsupported
        self._nodes: dict[Hashable, Node] = {}

    @property
    def size(self) -> int:
        """How many nodes have been made."""
        return len(self._nodes)

    def input(self, name: str, dtype: np.dtype) -> Node:
        return self._node(INPUT, np.dtype(dtype), (), name, frozenset([name]))

    def constant(self, value: Any, dtype: np.dtype) -> Node:
        dtype = np.dtype(dtype)
        return self._node(CONSTANT, dtype, (), np.asarray(value).astype(dtype).tobytes(), frozenset())

    def integer(self, value: int) -> Node:
        return self.constant(value, INT32)

    def load(self, operand: Hashable, index: Node, dtype: np.dtype) -> Node:
        """The element of an operand at a flat index, which must be in range."""
        return self._node(LOAD, np.dtype(dtype), (index,), operand, index.inputs)

    def apply(
        self,
        name: str,
        arguments: Iterable[Node],
        dtype: np.dtype,
        bind: Callable[..., Any],
        params: Mapping[str, Any] | None = None,
    ) -> Node:
        """A primitive of scalars.

        Args:
          name: the primitive's.
          dtype: that of the result.
          bind: the primitive in JAX, with its parameters.
          params: its parameters.
        """
        arguments, dtype = tuple(arguments), np.dtype(dtype)
        same = _simplified(name, arguments, dtype)
        if same is not None:
            return same
        if all(argument.operation == CONSTANT for argument in arguments):
            return self.constant(_evaluated(name, bind, arguments), dtype)
        detail = _detail(name, params or {})
        inputs = frozenset().union(*(argument.inputs for argument in arguments))
        return self._node(name, dtype, arguments, detail, inputs, bind)

    def add(self, a: Node, b: Node) -> Node:
        return self.apply("add", (a, b), a.dtype, lax.add)

    def product(self, a: Node, b: Node) -> Node:
        return self.apply("mul", (a, b), a.dtype, lax.mul)

    def minimum(self, a: Node, b: Node) -> Node:
        return self.apply("min", (a, b), a.dtype, lax.min)

    def multiply(self, a: Node, by: int) -> Node:
        return self.product(a, self.integer(by))

    def divide(self, a: Node, by: int) -> Node:
        return a if by == 1 else self.apply("div", (a, self.integer(by)), INT32, lax.div)

    def remainder(self, a: Node, by: int) -> Node:
        return self.integer(0) if by == 1 else self.apply("rem", (a, self.integer(by)), INT32, lax.rem)

    def clip(self, a: Node, last: int) -> Node:
        """An index, moved into 0…last."""
        if last == 0:
            return self.integer(0)
        at_least_0 = self.apply("max", (a, self.integer(0)), INT32, lax.max)
        return self.minimum(at_least_0, self.integer(last))

    def at_least(self, a: Node, least: int) -> Node:
        return self.apply("ge", (a, self.integer(least)), BOOL, lax.ge)

    def is_within(self, a: Node, last: int) -> Node:
        """Whether an index is in 0…last."""
        return self.both(self.at_least(a, 0), self.apply("le", (a, self.integer(last)), BOOL, lax.le))

    def both(self, a: Node, b: Node) -> Node:
        return self.apply("and", (a, b), BOOL, lax.bitwise_and)

    def select(self, predicate: Node, if_false: Node, if_true: Node) -> Node:
        return self.apply("select_n", (predicate, if_false, if_true), if_true.dtype, lax.select_n)

    def select_branch(self, predicate: Node, if_false: Node, if_true: Node) -> Node:
        """`select` of what the branches of a `cond` give: the derivative is that of the one that is taken."""
        arguments = predicate, if_false, if_true
        return self.apply("select_n", arguments, if_true.dtype, lax.select_n, {"of_branches": True})

    def convert(self, a: Node, dtype: np.dtype) -> Node:
        bind = functools.partial(lax.convert_element_type, new_dtype=np.dtype(dtype))
        return self.apply("convert_element_type", (a,), dtype, bind)

    def scalar(
        self,
        operation: str,
        arguments: Iterable[Node],
        dtype: np.dtype,
        detail: Hashable,
        inputs: frozenset[str],
    ) -> Node:
        """A node of an operation that is no primitive of JAX, which depends on `inputs` of the function."""
        return self._node(operation, np.dtype(dtype), tuple(arguments), detail, inputs)

    def copied(self, node: Node, arguments: Iterable[Node]) -> Node:
        """A node of another graph, computed from arguments in this one."""
        arguments = tuple(arguments)
        inputs = frozenset().union(*(x.inputs for x in arguments)) if arguments else node.inputs
        return self._node(node.operation, node.dtype, arguments, node.detail, inputs, node.bind)

    def _node(self, operation, dtype, arguments, detail, inputs, bind=None) -> Node:
        key = operation, dtype, tuple(argument.number for argument in arguments), detail
        if key not in self._nodes:
            number = len(self._nodes)
            self._nodes[key] = Node(number, operation, dtype, arguments, detail, inputs, bind)
        return self._nodes[key]


def reachable(outputs: Iterable[Node]) -> list[Node]:
    """The nodes that `outputs` are computed from, and these, arguments first."""
    found: dict[int, Node] = {}
    pending = list(outputs)
    while pending:
        node = pending.pop()
        if node.number not in found:
            found[node.number] = node
            pending += node.arguments
    return [found[number] for number in sorted(found)]


def substituted(graph: Graph, outputs: Sequence[Node], given: Mapping[str, Node]) -> list[Node]:
    """`outputs` of another graph, in this one, with its nodes in the place of inputs of these names."""
    found: dict[int, Node] = {}
    for node in reachable(outputs):
        own = given.get(str(node.detail)) if node.operation == INPUT else None
        arguments = (found[argument.number] for argument in node.arguments)
        found[node.number] = graph.copied(node, arguments) if own is None else own
    return [found[node.number] for node in outputs]


def _detail(name: str, params: Mapping[str, Any]) -> Hashable:
    """The parameters that tell one primitive from another of that name."""
    if name in _PARAMETERS:
        return tuple(int(params[key]) for key in _PARAMETERS[name])
    given = (key for key in sorted(params) if key not in _WITHOUT_MEANING and params[key] is not None)
    return tuple((key, repr(params[key])) for key in given)


def _simplified(name: str, arguments: tuple[Node, ...], dtype: np.dtype) -> Node | None:
    """An argument that the result equals, whatever the arguments are. None if there is none."""
    first, *others = arguments
    if name in _SAME_ARGUMENT or (name == "convert_element_type" and first.dtype == dtype):
        return first
    if name == "select_n":
        if all(case is others[0] for case in others):
            return others[0]
        if first.operation == CONSTANT:
            return others[int(np.clip(int(first.value), 0, len(others) - 1))]
    if name in ("max", "min", "and", "or") and first is others[0]:
        return first
    if name in ("and", "or") and dtype == BOOL:
        for kept, other in ((first, others[0]), (others[0], first)):
            if other.operation == CONSTANT:
                return kept if bool(other.value) == (name == "and") else other
    if name in ("add", "add_any", "sub", "mul"):
        for kept, other in ((first, others[0]), (others[0], first)):
            if other.operation == CONSTANT and not (name == "sub" and kept is others[0]):
                number, is_float = other.value, dtype in FLOATS
                if name == "mul" and number == 1:
                    return kept
                if name == "mul" and number == 0 and not is_float:
                    return other
                # Of floats only what keeps -0.0: x + -0.0 and x - 0.0.
                negative = np.signbit(np.float32(number)) if is_float else False
                if name != "mul" and number == 0 and (not is_float or negative == (name != "sub")):
                    return kept
    return None


_QUICK = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "and": np.bitwise_and,
}
"""Integer operations by NumPy, as most of them are of indices, and JAX takes milliseconds for its first of a
kind."""


def _evaluated(name: str, bind: Callable[..., Any], arguments: tuple[Node, ...]) -> Any:
    values = [argument.value for argument in arguments]
    if name in _QUICK and all(value.dtype in (INT32, BOOL) for value in values):
        with np.errstate(over="ignore"):
            return _QUICK[name](*values)

    is_wide = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]

    def evaluate() -> np.ndarray:
        with _on_the_cpu(), jax.enable_x64(is_wide):  # a context belongs to a thread, too
            return np.asarray(bind(*(jax.numpy.asarray(value) for value in values)))

    # Transformations that the caller is within, as `shard_map`, belong to its thread, and would trace this.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(evaluate).result()


def _on_the_cpu() -> contextlib.AbstractContextManager[Any]:
    """Where there is a GPU, a number isn't worth a kernel on it."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX was told to use other platforms alone
        return contextlib.nullcontext()
