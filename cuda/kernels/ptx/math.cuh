// Arithmetic instructions that CUDA C++ has no operator for, and reductions over lanes.
#pragma once
#include "types.cuh"

// 2^x on the special-function unit; 2^-inf is 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// a / b, with an error of two units in the last place at most.
__device__ __forceinline__ float divide_full(float a, float b) {
    float quotient;
    asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
    return quotient;
}

// The larger of two numbers, NaN if one of them is.
__device__ __forceinline__ float max_with_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// Converts two floats to a pair of 16-bit elements, rounding to nearest. `low` comes at the lower address.
template <class Element>
__device__ __forceinline__ uint32_t convert(float low, float high) {
    uint32_t pair;
    if constexpr (is_same<Element, bfloat16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    } else {
        static_assert(is_same<Element, float16>, "elements are bfloat16 or float16");
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    }
    return pair;
}

// Converts four floats to e4m3 elements, rounding to nearest, and to 448 where they exceed it. `a` comes at the lowest
// address.
__device__ __forceinline__ uint32_t convert_to_e4m3(float a, float b, float c, float d) {
    uint32_t four;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}\n"
        : "=r"(four)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return four;
}

// Converts a pair of 16-bit elements to floats, exactly.
template <class Element>
__device__ __forceinline__ float2 to_floats(uint32_t pair) {
    float2 values;
    if constexpr (is_same<Element, bfloat16>) {
        values.x = __uint_as_float(pair << 16);
        values.y = __uint_as_float(pair & 0xffff0000u);
    } else {
        static_assert(is_same<Element, float16>, "elements are bfloat16 or float16");
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
            : "=f"(values.x), "=f"(values.y)
            : "r"(pair));
    }
    return values;
}

// Converts the pair of e4m3 elements in the lower 16 bits to 16-bit elements, exactly.
template <class Element>
__device__ __forceinline__ uint32_t widen_e4m3(uint32_t pair) {
    uint32_t wide;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}\n"
        : "=r"(wide)
        : "r"(pair));
    if constexpr (is_same<Element, float16>) return wide;
    const float2 values = to_floats<float16>(wide);
    return convert<Element>(values.x, values.y);
}

// The bytes of two words that a selector names, its lowest digit first: 0 to 3 are those of `low`, 4 to 7 those of
// `high`.
template <uint32_t selector>
__device__ __forceinline__ uint32_t byte_permute(uint32_t low, uint32_t high) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "n"(selector));
    return bytes;
}

// The upper 16 bits of two words. Those of `low` come at the lower address.
__device__ __forceinline__ uint32_t upper_halves(uint32_t low, uint32_t high) {
    uint32_t halves;
    asm("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(halves) : "r"(low), "r"(high));
    return halves;
}

// A byte of each half of two words, the lower one. Those of `low` come at the lower address.
__device__ __forceinline__ uint32_t bytes_of_halves(uint32_t low, uint32_t high) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, 0x6420;" : "=r"(bytes) : "r"(low), "r"(high));
    return bytes;
}

// Compares the lower 15 bits of each half of `x` with that half of `limit`, which is at most 0x7c00, and sets all bits
// of the halves that are less. The instruction compares magnitudes of float16, which are ordered as their bits are.
// Bits above 0x7c00, which is infinity, are NaN: they compare as not less, as they should.
__device__ __forceinline__ uint32_t halves_below(uint32_t x, uint32_t limit) {
    uint32_t below;
    asm("{\n.reg .b32 magnitude;\nabs.f16x2 magnitude, %1;\nset.lt.u32.f16x2 %0, magnitude, %2;\n}\n"
        : "=r"(below)
        : "r"(x), "r"(limit));
    return below;
}

// Adds pairs of 16-bit elements.
template <class Element>
__device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b) {
    uint32_t sums;
    if constexpr (is_same<Element, bfloat16>) {
        asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sums) : "r"(a), "r"(b));
    } else {
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sums) : "r"(a), "r"(b));
    }
    return sums;
}

// Multiplies pairs of 16-bit elements.
template <class Element>
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
    uint32_t products;
    if constexpr (is_same<Element, bfloat16>) {
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(products) : "r"(a), "r"(b));
    } else {
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(products) : "r"(a), "r"(b));
    }
    return products;
}

// Sets those of two 16-bit elements to 0 whose sign is set. NaN stays NaN.
template <class Element>
__device__ __forceinline__ uint32_t without_negatives(uint32_t packed) {
    uint32_t positive;
    if constexpr (is_same<Element, bfloat16>) {
        asm("{\n.reg .b32 zero;\nmov.b32 zero, 0;\nmax.NaN.bf16x2 %0, %1, zero;\n}\n" : "=r"(positive) : "r"(packed));
    } else {
        asm("{\n.reg .b32 zero;\nmov.b32 zero, 0;\nmax.NaN.f16x2 %0, %1, zero;\n}\n" : "=r"(positive) : "r"(packed));
    }
    return positive;
}

// Reductions over the four lanes that share a row of a wgmma accumulator.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(all_lanes, x, 1));
    return fmaxf(x, __shfl_xor_sync(all_lanes, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(all_lanes, x, 1);
    return x + __shfl_xor_sync(all_lanes, x, 2);
}
// Reductions over all lanes of a warp.
__device__ __forceinline__ float warp_max(float x) {
    x = quad_max(x);
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) x = fmaxf(x, __shfl_xor_sync(all_lanes, x, distance));
    return x;
}
__device__ __forceinline__ float warp_sum(float x) {
    x = quad_sum(x);
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) x += __shfl_xor_sync(all_lanes, x, distance);
    return x;
}
