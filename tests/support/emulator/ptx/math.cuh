// Emulation of cuda/kernels/ptx/math.cuh.
#pragma once
#include <cmath>

#include "types.cuh"

inline float exp2_approx(float x) { return exp2f(x); }
inline float reciprocal_approx(float x) { return 1 / x; }
inline float divide_full(float a, float b) { return a / b; }
inline float log2_approx(float x) { return log2f(x); }
inline float max_with_nan(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }

// Rounds `x` to nearest even at a multiple of 2^`exponent`.
inline float round_at(float x, int exponent) { return ldexpf(nearbyintf(ldexpf(x, -exponent)), exponent); }

template <class Element>
uint16_t narrow(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    if constexpr (is_same<Element, bfloat16>) {
        if (std::isnan(x)) return 0x7fff;
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    } else {
        const uint16_t sign = bits >> 16 & 0x8000;
        if (std::isnan(x)) return 0x7fff;
        int exponent = 0;
        if (x != 0 && !std::isinf(x)) exponent = std::max(std::ilogb(x), -14);
        const float magnitude = fabsf(std::isinf(x) ? x : round_at(x, exponent - 10));
        if (magnitude >= 65520) return sign | 0x7c00;
        if (magnitude < 0x1p-14f) return sign | static_cast<int>(ldexpf(magnitude, 24));  // subnormals
        exponent = std::ilogb(magnitude);
        return sign | ((exponent + 15) << 10) + (static_cast<int>(ldexpf(magnitude, 10 - exponent)) - 1024);
    }
}

template <class Element>
float widen(uint16_t bits) {
    if constexpr (is_same<Element, bfloat16>) {
        return bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    } else {
        const int exponent = bits >> 10 & 31, fraction = bits & 1023;
        float magnitude = exponent == 0 ? ldexpf(fraction, -24) : ldexpf(1024 + fraction, exponent - 25);
        if (exponent == 31) magnitude = fraction ? NAN : INFINITY;
        return bits & 0x8000 ? -magnitude : magnitude;
    }
}

inline uint32_t narrow_to_e4m3(float x) {
    const uint32_t sign = bit_cast<uint32_t>(x) >> 24 & 0x80;
    if (std::isnan(x)) return 0x7f;
    const float clipped = std::min(fabsf(x), 448.0f);
    const int exponent = clipped == 0 ? -6 : std::max(std::ilogb(clipped), -6);
    const float magnitude = round_at(clipped, exponent - 3);
    if (magnitude < 0x1p-6f) return sign | static_cast<uint32_t>(ldexpf(magnitude, 9));  // subnormals
    const int rounded = std::ilogb(magnitude);
    return sign | ((rounded + 7) << 3) + (static_cast<int>(ldexpf(magnitude, 3 - rounded)) - 8);
}
inline uint32_t convert_to_e4m3(float a, float b, float c, float d) {
    return narrow_to_e4m3(a) | narrow_to_e4m3(b) << 8 | narrow_to_e4m3(c) << 16 | narrow_to_e4m3(d) << 24;
}
inline float widen_e4m3(unsigned char bits) {
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    float magnitude = exponent == 0 ? ldexpf(fraction, -9) : ldexpf(8 + fraction, exponent - 10);
    if ((bits & 0x7f) == 0x7f) magnitude = NAN;
    return bits & 0x80 ? -magnitude : magnitude;
}

template <class Element>
uint32_t convert(float low, float high) {
    return narrow<Element>(low) | static_cast<uint32_t>(narrow<Element>(high)) << 16;
}
template <class Element>
float2 to_floats(uint32_t pair) {
    return {widen<Element>(pair), widen<Element>(pair >> 16)};
}

template <class Element>
uint32_t widen_e4m3(uint32_t pair) {
    const auto low = static_cast<unsigned char>(pair), high = static_cast<unsigned char>(pair >> 8);
    return convert<Element>(widen_e4m3(low), widen_e4m3(high));
}

template <uint32_t selector>
uint32_t byte_permute(uint32_t low, uint32_t high) {
    const uint64_t both = low | static_cast<uint64_t>(high) << 32;
    uint32_t bytes = 0;
    for (int i = 0; i < 4; ++i) bytes |= (both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return bytes;
}
inline uint32_t upper_halves(uint32_t low, uint32_t high) { return low >> 16 | (high & 0xffff0000u); }
inline uint32_t bytes_of_halves(uint32_t low, uint32_t high) {
    return low & 0xff | low >> 8 & 0xff00 | (high & 0xff) << 16 | (high & 0xff0000) << 8;
}

inline uint32_t halves_below(uint32_t x, uint32_t limit) {
    const bool low = (x & 0x7fff) < (limit & 0xffff), high = (x >> 16 & 0x7fff) < limit >> 16;
    return (low ? 0xffffu : 0) | (high ? 0xffff0000u : 0);
}

template <class Element>
uint32_t without_negatives(uint32_t packed) {
    auto one = [](uint16_t bits) -> uint32_t {
        if (std::isnan(widen<Element>(bits))) return 0x7fff;
        return bits & 0x8000 ? 0 : bits;
    };
    return one(packed) | one(packed >> 16) << 16;
}

template <class Element>
uint32_t add_pairs(uint32_t a, uint32_t b) {
    const float2 x = to_floats<Element>(a), y = to_floats<Element>(b);
    return convert<Element>(x.x + y.x, x.y + y.y);
}

template <class Element>
uint32_t multiply_pairs(uint32_t a, uint32_t b) {
    const float2 x = to_floats<Element>(a), y = to_floats<Element>(b);
    return convert<Element>(x.x * y.x, x.y * y.y);
}

inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(all_lanes, x, 1));
    return fmaxf(x, __shfl_xor_sync(all_lanes, x, 2));
}
inline float quad_sum(float x) {
    x += __shfl_xor_sync(all_lanes, x, 1);
    return x + __shfl_xor_sync(all_lanes, x, 2);
}
inline float warp_max(float x) {
    x = quad_max(x);
    for (int distance = 4; distance < 32; distance *= 2) x = fmaxf(x, __shfl_xor_sync(all_lanes, x, distance));
    return x;
}
inline float warp_sum(float x) {
    x = quad_sum(x);
    for (int distance = 4; distance < 32; distance *= 2) x += __shfl_xor_sync(all_lanes, x, distance);
    return x;
}
