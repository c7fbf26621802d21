// The tangent of the soft cap.
#pragma once
#include "ptx/math.cuh"
#include "common/constants.cuh"

// tanh with an absolute error of about 1e-7, which the instruction tanh.approx does not reach. Near zero the series
// makes the relative error small too, because the log-sum-exp of small logits can be as small as they are.
__device__ __forceinline__ float tanh_of(float x) {
    const float near_zero = x * (1 - x * x * (1.f / 3));
    const float far = 1 - 2 * reciprocal_approx(exp2_approx(x * (2 * log2_e)) + 1);
    return fabsf(x) < 0.03f ? near_zero : far;
}

// tanh of x, |x| < 1, from 2x: a polynomial with a relative error of 1.7e-7 at most. It takes fewer instructions, and
// none of the special-function unit, which the exponentials keep busy.
__device__ __forceinline__ float tanh_within_one(float doubled) {
    const float square = doubled * doubled;
    float sum = 1.2707795e-7f;
    sum = __fmaf_rn(sum, square, -3.0289937e-6f);
    sum = __fmaf_rn(sum, square, 3.9628867e-5f);
    sum = __fmaf_rn(sum, square, -4.1763304e-4f);
    sum = __fmaf_rn(sum, square, 4.1641262e-3f);
    sum = __fmaf_rn(sum, square, -4.166605e-2f);
    sum = __fmaf_rn(sum, square, 0.49999997f);
    return doubled * sum;
}

// Whether |x| < 1 for all numbers of a warp, given as 2x. For what isn't finite it is not: from 2 on, the exponent's
// highest bit is set.
template <int count>
__device__ __forceinline__ bool are_within_one(const float (&doubled)[count]) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) bits |= __float_as_uint(doubled[i]);
    return !__any_sync(all_lanes, bits >> 30 & 1);
}
