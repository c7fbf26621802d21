"""Score modifications: soft cap, score_mod, bias, ALiBi and mask (cuda/kernels/common/score_mod.cuh)."""

import enum
import math
from collections.abc import Mapping

import jax

from jax_flash import _gradients
from jax_flash._spec import AttentionSpec, Operands, sizes
from jax_flash.cuda import block_mask, dropout, fixed_point, mask_metadata, user_score_mod
from jax_flash.cuda.launch_plan import Arguments, Buffer, Pointer
from jax_flash.cuda.parameters import Struct, struct

OPERANDS = ("bias", "mask", "alibi_slopes")
_C_TYPES = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float"}

Shapes = Operands[jax.ShapeDtypeStruct]

_STRIDES = struct(
    # Strides, in elements, of a (B | 1, N | 1, T | 1, S | 1) array; 0 along axes that broadcast.
    "Strides",
    batch="int64_t",
    head="int64_t",
    query="int64_t",
    key="int32_t",
)

PARAMETERS = struct(
    "ScoreOperands",
    scale="float",  # divided by the soft cap, if there is one
    soft_cap="float",
    bias="const void*",
    bias_strides=_STRIDES,
    mask="const unsigned char*",
    mask_strides=_STRIDES,
    slopes="const float*",  # (B | 1, N)
    slopes_stride="int64_t",  # from batch row to batch row
    diagonals="const int*",  # (B, T): the key on each query's diagonal, with mask metadata
)


def unsupported(spec: AttentionSpec, shapes: Shapes) -> str | None:
    """Why the kernels can't take these operands, or None."""
    reason = None if spec.block_mask is None else block_mask.unsupported(spec.block_mask, shapes)
    if reason is not None:
        return reason
    if spec.score_mod is not None:
        n = sizes(shapes)
        seen = n.S if spec.max_key_value_length is None else spec.max_key_value_length  # by a query, at most
        added_exactly = n.B * n.N * n.T * seen if spec.deterministic else 0
        if (reason := user_score_mod.unsupported(spec.score_mod, added_exactly)) is not None:
            return reason
    if shapes.bias is not None and shapes.bias.dtype.name not in _C_TYPES:
        return f"bias's dtype is {shapes.bias.dtype.name}; it may be {', '.join(_C_TYPES)}"
    return None


def count(spec: AttentionSpec, shapes: Shapes) -> int:
    """How many of soft cap, score_mod, bias, mask and ALiBi the call has."""
    operands = [name for name in OPERANDS if getattr(shapes, name) is not None]
    return len(operands) + (spec.logits_soft_cap is not None) + (spec.score_mod is not None)


def has_score_mod(spec: AttentionSpec, shapes: Shapes) -> bool:
    """Whether the call modifies scores beyond the scale."""
    return count(spec, shapes) > 0


class Modification(enum.Enum):
    """What becomes of scores, by what it leaves of the backward kernels' registers."""

    NONE = enum.auto()
    LIGHT = enum.auto()  # a soft cap, ALiBi or a small function alone: none looks anything up for each score
    HEAVY = enum.auto()


def modification(spec: AttentionSpec, shapes: Shapes) -> Modification:
    if not has_score_mod(spec, shapes):
        return Modification.NONE
    is_light = (
        spec.logits_soft_cap is not None
        or shapes.alibi_slopes is not None
        or (spec.score_mod is not None and user_score_mod.is_light(spec.score_mod))
    )
    return Modification.LIGHT if is_light and count(spec, shapes) == 1 else Modification.HEAVY


def logit_unit(spec: AttentionSpec, shapes: Shapes) -> float:
    """What the forward pass's softmax multiplies by: the scale if there are no modifications; a soft cap or
    the unit of a user's function if that is the only one; else 1."""
    modifications = count(spec, shapes)
    if modifications == 0:
        return abs(spec.scale)
    if modifications > 1:
        return 1.0
    if spec.score_mod is not None:
        return user_score_mod.unit(spec.score_mod)
    return spec.logits_soft_cap or 1.0


def loaded_operand(spec: AttentionSpec, shapes: Shapes) -> str | None:
    """The array that a score is looked up in: "bias" (with a mask or without), "mask" alone, or None.

    One that a user's function looks up counts as a bias.
    """
    return (
        "bias"
        if shapes.bias is not None or user_score_mod.looks_scores_up(spec)
        else "mask"
        if shapes.mask is not None
        else None
    )


def needs_score_grad(spec: AttentionSpec, shapes: Shapes) -> bool:
    """Whether the backward kernel keeps the derivative of logits by scores beside P.

    Bias and ALiBi are added after the cap and the user's function, and arrays that this captures have
    gradients of its value, so their gradients don't have that factor.
    """
    is_factor = spec.logits_soft_cap is not None or user_score_mod.has_score_grad(spec)
    others = shapes.bias is not None or shapes.alibi_slopes is not None or user_score_mod.has_gradients(spec)
    return is_factor and others


def parameters(spec: AttentionSpec) -> Struct:
    """The struct of operands: `PARAMETERS`, and what the user's function reads."""
    return user_score_mod.parameters(spec, PARAMETERS)


def defines(spec: AttentionSpec, shapes: Shapes, backward: bool = False) -> tuple[tuple[str, int | str], ...]:
    return (
        *user_score_mod.defines(spec, backward),
        ("LOGIT_UNIT", int(not backward and has_score_mod(spec, shapes) and logit_unit(spec, shapes) != 1)),
        ("SOFT_CAP", int(spec.logits_soft_cap is not None)),
        ("BIAS", "void" if shapes.bias is None else _C_TYPES[shapes.bias.dtype.name]),
        ("ALIBI", int(shapes.alibi_slopes is not None)),
        ("MASK", int(shapes.mask is not None)),
    )


NO_DEFINES = (
    *user_score_mod.NO_DEFINES,
    *(("LOGIT_UNIT", 0), ("SOFT_CAP", 0), ("BIAS", "void"), ("ALIBI", 0), ("MASK", 0)),
)
"""Defines of kernels that compute no scores."""


def buffers(shapes: Shapes, names: tuple[str, ...] = OPERANDS) -> tuple[Buffer, ...]:
    """Buffers of those of the operands `names` that the call has."""
    found = ((name, getattr(shapes, name)) for name in names)
    return tuple(Buffer(name, x.shape, x.dtype.name) for name, x in found if x is not None)


def arguments(spec: AttentionSpec, shapes: Shapes) -> Arguments:
    """Arguments of `PARAMETERS`; null for operands that the call lacks."""
    cap, slopes = spec.logits_soft_cap, shapes.alibi_slopes
    return {
        "scale": spec.scale if cap is None else spec.scale / cap,
        "soft_cap": cap or 0.0,
        "bias": pointer("bias", shapes.bias),
        "bias_strides": _named_strides(shapes.bias),
        "mask": pointer("mask", shapes.mask),
        "mask_strides": _named_strides(shapes.mask),
        "slopes": pointer("alibi_slopes", slopes),
        "slopes_stride": batch_stride(slopes),
        "diagonals": pointer("diagonals", slopes if mask_metadata.is_needed(shapes) else None),
        **user_score_mod.arguments(spec, shapes),
    }


def pointer(name: str, x: jax.ShapeDtypeStruct | None) -> Pointer | None:
    """A pointer to an operand's buffer; null if the call lacks it."""
    return None if x is None else Pointer(name)


def batch_stride(x: jax.ShapeDtypeStruct | None) -> int:
    """The stride, in elements, between batch rows of a (B | 1, N) operand; 0 if the call lacks it."""
    return 0 if x is None else strides(x.shape)[0]


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense array, in elements; 0 along axes of length 1, which broadcast."""
    return tuple(0 if size == 1 else math.prod(shape[axis + 1 :]) for axis, size in enumerate(shape))


def _named_strides(x: jax.ShapeDtypeStruct | None) -> Arguments:
    """Arguments of `_STRIDES` for a (B | 1, N | 1, T | 1, S | 1) operand; zeros if the call lacks it."""
    steps = (0, 0, 0, 0) if x is None else strides(x.shape)
    return dict(zip(("batch", "head", "query", "key"), steps, strict=True))


def gradients(
    spec: AttentionSpec,
    operands: Operands,
    results: Mapping[str, jax.Array],
    bias_factor: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """The gradients of bias, alibi_slopes, sinks and captured arrays, of those that the call has, by name.

    Args:
      results: the backward plan's results, by name.
      bias_factor: the operand of that name that the backward plan was given, if any (fixed_point.py).
    """
    factor = dropout.factor(spec)  # dS and delta come from the kernels without it
    found = user_score_mod.gradients(spec, operands, results, factor)
    if operands.bias is not None:
        d_bias = results["d_bias"]
        if bias_factor is not None:
            d_bias = fixed_point.to_float32(d_bias, bias_factor)
        found["bias"] = (d_bias * factor).astype(spec.result_dtype("bias", operands.bias.dtype))
    if operands.alibi_slopes is not None:
        d_slopes = results["d_slopes"].sum((2, 3)) * factor
        d_slopes = _gradients.sum_to(d_slopes, operands.alibi_slopes.shape)
        found["alibi_slopes"] = d_slopes.astype(operands.alibi_slopes.dtype)
    if operands.sinks is not None:
        # The preprocess kernel has made lse, in base 2, and delta for the main kernel, by blocks of queries.
        B, N, *_ = results["lse_delta"].shape
        lse, delta = (results["lse_delta"][:, :, :, i].reshape(B, N, -1) for i in (0, -1))
        found["sinks"] = _gradients.of_sinks(operands.sinks, lse * math.log(2), delta * factor)
    return found
