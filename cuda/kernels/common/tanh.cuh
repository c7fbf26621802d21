// The tangent of the soft cap.
#pragma once
#include "ptx/math.cuh"
#include "common/constants.cuh"

// tanh with an absolute error of about 1e-7, which the instruction tanh.approx does not reach. Near zero the series makes
// the relative error small too, because the log-sum-exp of small logits can be as small as they are.
__device__ __forceinline__ float tanh_of(float x) {
    const float near_zero = x * (1 - x * x * (1.f / 3));
    const float far = 1 - 2 * reciprocal_approx(exp2_approx(x * (2 * log2_e)) + 1);
    return fabsf(x) < 0.03f ? near_zero : far;
}
