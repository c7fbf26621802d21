// The hyperbolic tangent, of a soft cap and in users' functions.
//
// tanh has three forms: for |x| below 1/6, from there to 1, and beyond. Which one a number takes is decided by that
// number alone, so that what lies beside it in a tile does not change its bits. What is known of all numbers of a warp
// leaves out the code of forms that none of them takes: most scores are small, and the first form is the shortest.
#pragma once
#include "ptx/math.cuh"
#include "common/constants.cuh"

// What is known of the arguments of every tanh of a warp's scores: that |x| < 1/6, that |x| < 1, or nothing.
enum class TanhRange { sixth, one, all };

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

// tanh of x / units, which is known to lie in the range. Below 1 it is an odd polynomial, whose relative error is 1e-7
// beside roundings: three terms below 1/6 and seven from there on, the first two the same. It takes nothing of the
// special-function unit, which the exponentials keep busy. Beyond 1 the absolute error is about 1e-7, which the
// instruction tanh.approx does not reach.
template <TanhRange range = TanhRange::all, int units = 1>
__device__ __forceinline__ float tanh_of(float x) {
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
    const float within_one = __fmul_rn(x, __fmaf_rn(__fmaf_rn(sum, square, second), square, first));
    if constexpr (range != TanhRange::all) return within_one;
    const float beyond = 1 - 2 * reciprocal_approx(exp2_approx(x * (2 * log2_e / units)) + 1);
    return fabsf(x) < units ? within_one : beyond;
}
