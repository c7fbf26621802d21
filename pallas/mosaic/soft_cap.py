"""tanh in Mosaic GPU kernels, for the soft cap of scores: a logit is `cap * tanh(score / cap)`.

JAX's tanh would become the instruction tanh.approx, whose error of 5e-4 a cap multiplies. This one computes
the same as `accurate_tanh` of `triton/scores.py`, with an error of about 1e-7.

It is not written in JAX, because all exponentials would be computed before the first division, and a division
that rounds correctly takes some ten instructions. Here a pair of numbers is done before the next begins, so
registers hold the exponentials of one pair only.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from .. import compat
from ..constants import LOG2_E
from .registers import ACCUMULATOR, element, like


def tanh(x: jax.Array) -> jax.Array:
    """tanh of an accumulator's numbers, with an error of about 1e-7, relative near 0."""
    if compat.interpreting():
        return jnp.tanh(x)

    @plgpu.inline_mgpu(
        arg_types=(ACCUMULATOR,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, ACCUMULATOR)
    )
    def compute(_, x) -> Any:
        return like(x, [_tanh(pair) for pair in x.registers.flat])

    return compute(x)


def _tanh(x: ir.Value) -> ir.Value:
    """tanh of a pair of numbers."""

    def constant(value: float) -> ir.Value:
        number = ir.FloatAttr.get(ir.F32Type.get(), value)
        return arith.constant(x.type, ir.DenseElementsAttr.get_splat(x.type, number))

    one = constant(1.0)
    near_zero = arith.mulf(x, math.fma(arith.mulf(x, x), constant(-1 / 3), one))
    power = _approximate("ex2.approx.ftz.f32", arith.mulf(x, constant(2.0 * LOG2_E)))
    far = math.fma(_approximate("rcp.approx.ftz.f32", arith.addf(power, one)), constant(-2.0), one)
    is_near = arith.cmpf(arith.CmpFPredicate.OLT, math.absf(x), constant(0.03))
    return arith.select(is_near, near_zero, far)


def _approximate(instruction: str, x: ir.Value) -> ir.Value:
    """An instruction of the special-function unit, of both numbers."""
    f32, line = ir.F32Type.get(), f"{instruction} $0, $1;"
    found = [llvm.inline_asm(f32, [element(x, i)], line, "=f,f", asm_dialect=0) for i in range(2)]
    return vector.from_elements(x.type, found)
