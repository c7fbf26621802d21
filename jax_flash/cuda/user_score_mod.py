"""A user's score_mod in the kernels: a header that is written for it, and the parameters that it reads.

UserRow (cuda/kernels/common/user_row.cuh) calls it for each score. The header's text depends on what the
function computes alone, so calls with equal functions share kernels.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_flash._spec import AttentionSpec, Operands
from jax_flash.cuda import exact_sum, functions, user_function
from jax_flash.cuda.launch_plan import Arguments, Buffer, Pointer
from jax_flash.cuda.parameters import Struct, struct
from jax_flash.functions.derivative import Derivative
from jax_flash.functions.graph import CONSTANT, reachable
from jax_flash.functions.static import StaticFunction

Shapes = Operands[jax.ShapeDtypeStruct]

HEADER_NAME = "user_score_mod.cuh"
_FEW_OPERATIONS = 64  # constants and what is known of a score count, too
_NAMESPACE, _OPERANDS, _GRADIENTS = "user_score_mod", "UserScoreMod", "UserScoreModGradients"


@functools.cache
def unsupported(function: StaticFunction, added_exactly: int) -> str | None:
    """Why the kernels can't run a score_mod, or None.

    Args:
      added_exactly: how many scores there are, if gradients of captured arrays are exact sums; else 0.
    """
    if (reason := user_function.unsupported(function)) is not None:
        return reason
    terms = added_exactly * len(_derivative(function).gathers)
    if terms > exact_sum.MOST_TERMS:
        what = f"gradients of arrays that {function.passed_as} captures, of {terms} terms"
        return f"{what}, more than {exact_sum.MOST_TERMS}, have no exact sums (deterministic=True)"
    return None


def defines(spec: AttentionSpec, backward: bool) -> tuple[tuple[str, int | str], ...]:
    """SCORE_MOD: 0 without a function, 1 with one, 2 with its derivative by the score, which is not 1;
    SCORE_MOD_GRADIENTS: whether captured arrays have gradients, 2 where these depend on the score."""
    if spec.score_mod is None:
        return NO_DEFINES
    derivative = _derivative(spec.score_mod)
    return (
        ("SCORE_MOD", 2 if backward and has_score_grad(spec) else 1),
        ("SCORE_MOD_GRADIENTS", _kind_of_gradients(derivative) if backward else 0),
    )


NO_DEFINES = (("SCORE_MOD", 0), ("SCORE_MOD_GRADIENTS", 0))


def _kind_of_gradients(derivative: Derivative) -> int:
    nodes = [node for gather in derivative.gathers for node in (gather.index, gather.d_value)]
    return 2 if any("score" in node.inputs for node in nodes) else int(bool(nodes))


def has_score_grad(spec: AttentionSpec) -> bool:
    """Whether the function's derivative by the score is a factor of dS."""
    if spec.score_mod is None:
        return False
    d_score = _derivative(spec.score_mod).d_score
    return not (d_score.operation == CONSTANT and d_score.value == 1)


def has_gradients(spec: AttentionSpec) -> bool:
    """Whether arrays that the function captures have gradients."""
    return spec.score_mod is not None and bool(_derivative(spec.score_mod).gathers)


def looks_scores_up(spec: AttentionSpec) -> bool:
    """Whether the function looks an array up for each score."""
    return spec.score_mod is not None and spec.score_mod.looks_up_each_score


def is_light(function: StaticFunction) -> bool:
    """Whether it needs few registers: it looks nothing up for each score, captures nothing that has a
    gradient, and has few operations with its derivative."""
    derivative = _derivative(function)
    if derivative.gathers or function.looks_up_each_score:
        return False
    return len(reachable([derivative.value, derivative.d_score])) <= _FEW_OPERATIONS


def unit(function: StaticFunction) -> float:
    """What kernels may multiply what they compute of a function by, to have its value (`functions.unit`)."""
    assert function.value is not None
    return functions.unit(function.value)[0]


def headers(spec: AttentionSpec, backward: bool, in_units: bool = False) -> tuple[tuple[str, str], ...]:
    """What a kernel that calls the function includes, as `Kernel.headers`.

    Args:
      in_units: whether the kernel multiplies by `unit`.
    """
    if spec.score_mod is None:
        return ()
    return ((HEADER_NAME, _text(spec.score_mod, backward, in_units)),)


@functools.cache
def _text(function: StaticFunction, backward: bool, in_units: bool) -> str:
    of_rows = [user_function.of_batch_row(_OPERANDS, user_function.operand_strides(function))]
    if backward:
        derivative, with_gradients = _derivative(function), _with_gradients(function)
        gradients = _GRADIENTS if with_gradients else None
        text = functions.derivative_text(derivative, _NAMESPACE, _OPERANDS, gradients)
        if with_gradients:
            strides = {f"d_operand{n}": f"stride{n}" for n in with_gradients}
            of_rows.append(user_function.of_batch_row(_GRADIENTS, strides))
    else:
        assert function.value is not None
        value = functions.unit(function.value)[1] if in_units else function.value
        text = functions.value_text(value, True, _NAMESPACE, _OPERANDS)
    return "\n".join([text, user_function.in_namespace(_NAMESPACE, *of_rows)])


def parameters(spec: AttentionSpec, others: Struct) -> Struct:
    """`others`, and a part for the function, if there is one."""
    if spec.score_mod is None:
        return others
    part = user_function.parameters(_OPERANDS, spec.score_mod)
    return Struct(others.name, (*others.fields, ("user", part)))


def arguments(spec: AttentionSpec, shapes: Shapes) -> Arguments:
    """Arguments of the part that `parameters` adds."""
    if spec.score_mod is None:
        return {}
    return {"user": user_function.arguments(_captured(spec.score_mod), shapes)}


def gradient_parameters(spec: AttentionSpec) -> dict[str, Struct]:
    """A further field of the backward kernel's parameters, if captured arrays have gradients."""
    if not has_gradients(spec):
        return {}
    assert spec.score_mod is not None
    numbers = _with_gradients(spec.score_mod)
    sum_type = "ExactSum*" if spec.deterministic else "float*"
    fields = {f"d_operand{n}": sum_type for n in numbers} | {f"stride{n}": "int64_t" for n in numbers}
    return {"user_gradients": struct(_GRADIENTS, **fields)}


def gradient_arguments(spec: AttentionSpec, shapes: Shapes) -> Arguments:
    """Arguments of that field."""
    if not has_gradients(spec):
        return {}
    assert spec.score_mod is not None
    names, numbers = _captured(spec.score_mod), _with_gradients(spec.score_mod)
    return {
        "user_gradients": {
            **{f"d_operand{n}": Pointer(f"d_{names[n]}") for n in numbers},
            **{f"stride{n}": user_function.stride(shapes.captured[names[n]]) for n in numbers},
        }
    }


def buffers(spec: AttentionSpec, shapes: Shapes) -> tuple[Buffer, ...]:
    """The arrays that the function captures."""
    if spec.score_mod is None:
        return ()
    return user_function.buffers(_captured(spec.score_mod), shapes)


def gradient_buffers(spec: AttentionSpec, shapes: Shapes) -> tuple[Buffer, ...]:
    """Sums that the backward kernel adds to: zeros at first. In float32, or exact ones (exact_sum.py)."""
    if not has_gradients(spec):
        return ()
    assert spec.score_mod is not None
    names = _captured(spec.score_mod)
    found = {f"d_{names[n]}": shapes.captured[names[n]].shape for n in _with_gradients(spec.score_mod)}
    if spec.deterministic:
        return tuple(Buffer(name, exact_sum.shape_of_sums(x), "uint32") for name, x in found.items())
    return tuple(Buffer(name, x, "float32") for name, x in found.items())


def gradients(
    spec: AttentionSpec, operands: Operands, results: Mapping[str, jax.Array], factor: float
) -> dict[str, jax.Array]:
    """The gradients of captured arrays by name, from the backward plan's results, times `factor`."""
    found = {}
    for name, x in operands.differentiable().items():
        if name not in operands.captured:
            continue
        sums = results.get(f"d_{name}")
        if sums is None:  # the value depends on none of its elements
            sums = jnp.zeros(x.shape, jnp.float32)
        elif spec.deterministic:
            sums = exact_sum.to_float32(sums)
        found[name] = (sums * factor).astype(spec.result_dtype(name, x.dtype))
    return found


def _derivative(function: StaticFunction) -> Derivative:
    assert function.derivative is not None, "`unsupported` was asked"
    return function.derivative


def _captured(function: StaticFunction) -> list[str]:
    return user_function.captured("score_mod", function)


def _with_gradients(function: StaticFunction) -> list[int]:
    return _derivative(function).operands
