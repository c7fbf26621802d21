// Which elements are finite: neither NaN nor an infinity.
#pragma once
#include "ptx/types.cuh"

// Bits of infinity, whose exponent is that of NaN.
template <class Element>
constexpr uint32_t infinity_bits = is_same<Element, bfloat16> ? 0x7f80 : 0x7c00;

// All bits of those halves of a pair of 16-bit elements that are finite.
template <class Element>
__device__ __forceinline__ uint32_t finite_halves(uint32_t pair) {
    constexpr uint32_t exponent = infinity_bits<Element>;
    const uint32_t low = (pair & exponent) != exponent ? 0xffffu : 0;
    const uint32_t high = (pair & exponent << 16) != exponent << 16 ? 0xffff0000u : 0;
    return low | high;
}
constexpr uint32_t all_finite = 0xffffffff;
constexpr uint16_t nan_bits = 0x7fff;  // NaN in bfloat16 and in float16
