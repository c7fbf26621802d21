// The hyperbolic tangent, of a soft cap and in users' functions.
#pragma once
#include "ptx/math.cuh"
#include "common/constants.cuh"

// tanh with an absolute error of about 1e-7, which the instruction tanh.approx does not reach.
__device__ __forceinline__ float tanh_by_exp(float x) {
    return 1 - 2 * reciprocal_approx(exp2_approx(x * (2 * log2_e)) + 1);
}

// tanh of any number. Near zero the series makes the relative error small too, because the log-sum-exp of small logits
// can be as small as they are.
__device__ __forceinline__ float tanh_of(float x) {
    const float near_zero = x * (1 - x * x * (1.f / 3)), far = tanh_by_exp(x);
    return fabsf(x) < 0.03f ? near_zero : far;
}

// What is known of the arguments of every tanh of a warp's scores: that |x| < 1/6, that |x| < 1, or nothing. `unasked`:
// in kernels that do not ask.
enum class TanhRange { sixth, one, all, unasked };

// The range of a warp's arguments, given the largest |x| of each thread. That may leave out NaN: every form of tanh
// gives NaN for it.
__device__ __forceinline__ TanhRange tanh_range(float largest) {
    if (!__any_sync(all_lanes, largest >= 1.f / 6)) return TanhRange::sixth;
    return __any_sync(all_lanes, largest >= 1) ? TanhRange::all : TanhRange::one;
}

// The coefficient of x^power, for a polynomial of units · x.
__device__ constexpr float coefficient_in_units(double coefficient, int power, int units) {
    for (int i = 0; i < power; ++i) coefficient /= units;
    return static_cast<float>(coefficient);
}

// tanh of x / units below 1, by a polynomial with a relative error of 1e-7 beside roundings: three terms below 1/6,
// seven from there on, the first two the same. It takes nothing of the special-function unit, which the exponentials
// keep busy.
template <TanhRange range, int units>
__device__ __forceinline__ float tanh_within_one(float x) {
    constexpr float first = coefficient_in_units(1.00000008, 1, units);
    constexpr float second = coefficient_in_units(-0.333332161, 3, units);
    constexpr float third_of_three = coefficient_in_units(0.131808049, 5, units);
    constexpr float third_to_seventh[] = {
        coefficient_in_units(0.133279639, 5, units),      coefficient_in_units(-0.0535391961, 7, units),
        coefficient_in_units(0.0204039, 9, units),        coefficient_in_units(-0.00627547145, 11, units),
        coefficient_in_units(0.00105731899, 13, units),
    };
    const float square = x * x;
    float sum = third_of_three;
    if constexpr (range != TanhRange::sixth) {
        float further = third_to_seventh[4];
#pragma unroll
        for (int i = 3; i >= 0; --i) further = __fmaf_rn(further, square, third_to_seventh[i]);
        if (fabsf(x) >= units / 6.f) sum = further;
    }
    // Not fused with an addition to the result, which one form would be and another not.
    return __fmul_rn(x, __fmaf_rn(__fmaf_rn(sum, square, second), square, first));
}

// tanh of x / units, which is known to lie in the range. It has three forms: polynomials of three and of seven terms,
// and one by an exponential. The number alone decides which one it takes, so that what lies beside it in a tile does
// not change its bits. The range leaves out the code of forms that none of a warp takes: most scores are small.
template <TanhRange range, int units = 1>
__device__ __forceinline__ float tanh_in(float x) {
    if constexpr (range == TanhRange::unasked) {
        return tanh_of(x);
    } else if constexpr (range == TanhRange::all) {
        // A branch: few numbers are as large, and to compute both forms takes registers.
        return fabsf(x) < units ? tanh_within_one<range, units>(x) : tanh_by_exp(x * (1.f / units));
    } else {
        return tanh_within_one<range, units>(x);
    }
}
