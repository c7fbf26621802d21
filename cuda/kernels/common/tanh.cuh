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

// x times the polynomial of x² with these coefficients, of the terms x, x³, and so on.
template <int terms>
__device__ __forceinline__ float odd_polynomial(float x, const float (&coefficients)[terms]) {
    const float square = x * x;
    float sum = coefficients[terms - 1];
#pragma unroll
    for (int i = terms - 2; i >= 0; --i) sum = __fmaf_rn(sum, square, coefficients[i]);
    return x * sum;
}

// tanh of x, |x| < 1, from x or from 2x: a polynomial with a relative error of 1.7e-7 at most. It takes fewer
// instructions, and none of the special-function unit, which the exponentials keep busy.
template <bool doubled>
__device__ __forceinline__ float tanh_within_one(float x) {
    // Coefficients for x are those for 2x times powers of 2, so that both forms give the same bits.
    constexpr float factor = doubled ? 1 : 4, first = doubled ? 1 : 2;
    constexpr float of_doubled[] = {0.49999997f,   -4.166605e-2f,  4.1641262e-3f, -4.1763304e-4f,
                                    3.9628867e-5f, -3.0289937e-6f, 1.2707795e-7f};
    float coefficients[7];
    float power = first;
#pragma unroll
    for (int i = 0; i < 7; ++i) {
        coefficients[i] = power * of_doubled[i];
        power *= factor;
    }
    return odd_polynomial(x, coefficients);
}

// tanh of x, |x| < 0.2, from x or from 10x: four terms fewer, with a relative error of 2.5e-7 at most.
template <bool tenfold>
__device__ __forceinline__ float tanh_within_fifth(float x) {
    constexpr float of_tenfold[] = {0.099999994f, -3.3329056e-4f, 1.3024778e-6f};
    float coefficients[3];
    float power = tenfold ? 1 : 10;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        coefficients[i] = power * of_tenfold[i];
        power *= tenfold ? 1 : 100;
    }
    return odd_polynomial(x, coefficients);
}

// Whether |x| < 1 for all numbers of a warp, given the OR of the bits of each 2x; or |x| < 0.2, given that of each 10x.
// Bit 30, the exponent's highest, is set in numbers from 2 on, in infinities and in NaN.
__device__ __forceinline__ bool are_small(uint32_t bits) { return !__any_sync(all_lanes, bits >> 30 & 1); }

// What is known of the arguments of every tanh of a warp's scores: that |x| < 0.2, that |x| < 1, or nothing.
enum class TanhRange { fifth, one, all };

// The range of a warp's arguments, given the largest |x| of each thread. That may leave out NaN: every form of tanh
// gives NaN for it.
__device__ __forceinline__ TanhRange tanh_range(float largest) {
    if (!__any_sync(all_lanes, largest >= 0.2f)) return TanhRange::fifth;
    return __any_sync(all_lanes, largest >= 1) ? TanhRange::all : TanhRange::one;
}

template <TanhRange range>
__device__ __forceinline__ float tanh_of(float x) {
    if constexpr (range == TanhRange::fifth) return tanh_within_fifth<false>(x);
    if constexpr (range == TanhRange::one) return tanh_within_one<false>(x);
    return tanh_of(x);
}
