// The exponential without the special-function unit.
#pragma once
#include "ptx/math.cuh"

// 2^x for x up to 127, with an error of 1.1e-4 of it at most; 2^-inf is 0. The source: FlashAttention-4's exponential.
//
// x is a whole number and a fraction between -1/2 and 1/2. Of the fraction the exponential is a polynomial, found by
// minimising the largest relative error among those that give 1 at 0.
__device__ __forceinline__ float exp2_by_fma(float x) {
    constexpr float in_units = 0x1.8p23f;  // a sum with it has the whole number in its lowest bits
    x = max_or_nan(x, -127);               // where the power of two below is 0
    const float sum = __fadd_rn(x, in_units);
    const float fraction = __fadd_rn(x, -__fadd_rn(sum, -in_units));
    const float polynomial =
        __fmaf_rn(__fmaf_rn(__fmaf_rn(0x1.c2a218p-5f, fraction, 0x1.f00c4cp-3f), fraction, 0x1.62f5fap-1f), fraction, 1);
    return polynomial * __uint_as_float((__float_as_uint(sum) << 23) + 0x3f800000u);
}
