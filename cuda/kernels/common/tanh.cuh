// The hyperbolic tangent, of a soft cap and in users' functions.
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

// tanh of x, |x| < 1, from x or from 2x: a polynomial with a relative error of 1.7e-7 at most. It takes fewer
// instructions, and none of the special-function unit, which the exponentials keep busy.
template <bool doubled>
__device__ __forceinline__ float tanh_within_one(float x) {
    // Of (2x)^(2i+1). Scaled by powers of 2 for x, so that both give the same bits.
    constexpr float coefficients[] = {0.49999997f,   -4.166605e-2f,  4.1641262e-3f, -4.1763304e-4f,
                                      3.9628867e-5f, -3.0289937e-6f, 1.2707795e-7f};
    constexpr float factor = doubled ? 1 : 4;
    float power = doubled ? 1 : 1 << 13;
    const float square = x * x;
    float sum = power * coefficients[6];
#pragma unroll
    for (int i = 5; i >= 0; --i) {
        power *= 1 / factor;
        sum = __fmaf_rn(sum, square, power * coefficients[i]);
    }
    return x * sum;
}

// The bits by which `are_small` tells |x| < 1 from 2x.
__device__ __forceinline__ uint32_t bits_of_doubled(float x) { return __float_as_uint(2 * x); }

// Whether |x| < 1 for all numbers of a warp, given the OR of the bits of 2x of each. For what isn't finite it is not:
// from 2 on, the exponent's highest bit is set.
__device__ __forceinline__ bool are_small(uint32_t bits) { return !__any_sync(all_lanes, bits >> 30 & 1); }

// tanh of x. small: |x| < 1.
template <bool small>
__device__ __forceinline__ float tanh_of(float x) {
    if constexpr (small) return tanh_within_one<false>(x);
    return tanh_of(x);
}
