// Scalar operations with the results that JAX gives. Code that is generated from users' functions calls them
// (jax_flash/cuda/functions). C++ leaves some of these undefined, as overflow of signed integers, or defines them
// otherwise, as the maximum of NaN and a number.
#pragma once
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "common/tanh.cuh"

namespace scalar {

// Elements of arrays. Those of 16-bit floats become float, bytes and halves int.
template <class Element>
__device__ __forceinline__ Element load(const Element* address) {
    return global::read_only(address);
}
template <class Element>
__device__ __forceinline__ float load_16_bits(const Element* address) {
    return to_floats<Element>(global::read_only(&address->bits)).x;
}
__device__ __forceinline__ float load(const bfloat16* address) { return load_16_bits(address); }
__device__ __forceinline__ float load(const float16* address) { return load_16_bits(address); }

// A float, rounded to 16 bits and back.
template <class Element>
__device__ __forceinline__ float rounded(float x) {
    return to_floats<Element>(convert<Element>(x, 0.0f)).x;
}

__device__ __forceinline__ uint32_t bits(int x) { return static_cast<uint32_t>(x); }

// Sums and products of integers wrap around.
__device__ __forceinline__ int add(int a, int b) { return static_cast<int>(bits(a) + bits(b)); }
__device__ __forceinline__ int subtract(int a, int b) { return static_cast<int>(bits(a) - bits(b)); }
__device__ __forceinline__ int multiply(int a, int b) { return static_cast<int>(bits(a) * bits(b)); }
__device__ __forceinline__ int negate(int x) { return static_cast<int>(0u - bits(x)); }
__device__ __forceinline__ int absolute(int x) { return x < 0 ? negate(x) : x; }
__device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) { return a + b; }
__device__ __forceinline__ uint32_t subtract(uint32_t a, uint32_t b) { return a - b; }
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) { return a * b; }
__device__ __forceinline__ uint32_t negate(uint32_t x) { return 0u - x; }
__device__ __forceinline__ float multiply(float a, float b) { return a * b; }

// Floats are divided as XLA divides them on a GPU, without the operator's branch for numbers out of its range.
__device__ __forceinline__ float divide(float a, float b) { return divide_full(a, b); }

// A quotient by 0 has all bits set, and the remainder is the dividend.
__device__ __forceinline__ int divide(int a, int b) { return b == 0 ? -1 : b == -1 ? negate(a) : a / b; }
__device__ __forceinline__ int remainder(int a, int b) { return b == 0 ? a : b == -1 ? 0 : a % b; }
__device__ __forceinline__ uint32_t divide(uint32_t a, uint32_t b) { return b == 0 ? 0xffffffffu : a / b; }
__device__ __forceinline__ uint32_t remainder(uint32_t a, uint32_t b) { return b == 0 ? a : a % b; }

// Shifts by the width and beyond leave zeros or copies of the sign. A negative distance is beyond.
__device__ __forceinline__ uint32_t shift_left(uint32_t x, uint32_t distance) {
    return distance < 32 ? x << distance : 0;
}
__device__ __forceinline__ int shift_left(int x, int distance) {
    return static_cast<int>(shift_left(bits(x), bits(distance)));
}
__device__ __forceinline__ uint32_t shift_right_logical(uint32_t x, uint32_t distance) {
    return distance < 32 ? x >> distance : 0;
}
__device__ __forceinline__ int shift_right_logical(int x, int distance) {
    return static_cast<int>(shift_right_logical(bits(x), bits(distance)));
}
__device__ __forceinline__ int shift_right_arithmetic(int x, int distance) {
    return x >> (bits(distance) < 32 ? distance : 31);
}
__device__ __forceinline__ uint32_t shift_right_arithmetic(uint32_t x, uint32_t distance) {
    return static_cast<uint32_t>(shift_right_arithmetic(static_cast<int>(x), static_cast<int>(distance)));
}

__device__ __forceinline__ uint32_t population_count(uint32_t x) {
    x -= (x >> 1) & 0x55555555u;
    x = (x & 0x33333333u) + ((x >> 2) & 0x33333333u);
    return (((x + (x >> 4)) & 0x0f0f0f0fu) * 0x01010101u) >> 24;
}
__device__ __forceinline__ int population_count(int x) { return static_cast<int>(population_count(bits(x))); }
__device__ __forceinline__ uint32_t leading_zeros(uint32_t x) {
    for (int distance = 1; distance < 32; distance *= 2) x |= x >> distance;
    return 32 - population_count(x);
}
__device__ __forceinline__ int leading_zeros(int x) { return static_cast<int>(leading_zeros(bits(x))); }

// Of NaN and a number these are NaN, whereas fmaxf and fminf are the number.
__device__ __forceinline__ float maximum(float a, float b) { return a > b || a != a ? a : b; }
__device__ __forceinline__ float minimum(float a, float b) { return a < b || a != a ? a : b; }
__device__ __forceinline__ int maximum(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int minimum(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ uint32_t maximum(uint32_t a, uint32_t b) { return a > b ? a : b; }
__device__ __forceinline__ uint32_t minimum(uint32_t a, uint32_t b) { return a < b ? a : b; }

// The sign of a zero is that zero, the sign of NaN is NaN.
__device__ __forceinline__ float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }
__device__ __forceinline__ int sign(int x) { return (x > 0) - (x < 0); }
__device__ __forceinline__ uint32_t sign(uint32_t x) { return x > 0; }

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= 0x1.fffffep127f; }
__device__ __forceinline__ float logistic(float x) { return divide(1.0f, 1.0f + expf(-x)); }

// x to a power that is at least 1, by squaring.
template <int power, class Number>
__device__ __forceinline__ Number integer_power(Number x) {
    if constexpr (power == 1) {
        return x;
    } else {
        const Number root = integer_power<power / 2>(x), square = multiply(root, root);
        if constexpr (power % 2 == 0) return square;
        return multiply(square, x);
    }
}

// A float rounded towards zero. Out of the integers' range it becomes the nearest of them; NaN becomes 0.
__device__ __forceinline__ int to_int(float x) {
    if (x != x) return 0;
    return x >= 0x1p31f ? 0x7fffffff : x < -0x1p31f ? -0x7fffffff - 1 : static_cast<int>(x);
}
__device__ __forceinline__ uint32_t to_unsigned(float x) {
    if (!(x > 0)) return 0;
    return x >= 0x1p32f ? 0xffffffffu : static_cast<uint32_t>(x);
}

template <class To, class From>
__device__ __forceinline__ To bit_pattern(From x) {
    return __builtin_bit_cast(To, x);
}

}  // namespace scalar
