// A sum of floats that is exact, so that it is the same bits in whatever order CTAs add their terms.
// jax_flash/cuda/exact_sum.py has the layout, and makes a float of it.
#pragma once
#include "ptx/types.cuh"

struct ExactSum {
    static constexpr int bits = 24, words = 12;
    static constexpr uint64_t positive_infinity = 1, negative_infinity = 2, nan = 4;

    uint64_t word[words];  // word i counts 2^(24 i - 149)
    uint64_t not_finite;   // which of the three above were added

    __device__ __forceinline__ void add(float term) {
        const uint32_t pattern = __float_as_uint(term), exponent = pattern >> 23 & 0xff, fraction = pattern & 0x7fffff;
        const bool negative = pattern >> 31;
        if (exponent == 0xff) {
            atomicOr(&not_finite, fraction ? nan : negative ? negative_infinity : positive_infinity);
            return;
        }
        // The term is `mantissa` times 2^(place - 149).
        const uint32_t place = exponent == 0 ? 0 : exponent - 1;
        const uint64_t mantissa = exponent == 0 ? fraction : fraction | 0x800000;
        const uint64_t shifted = mantissa << place % bits;
        add_to(word[place / bits], shifted & 0xffffff, negative);
        add_to(word[place / bits + 1], shifted >> bits, negative);
    }

private:
    __device__ static __forceinline__ void add_to(uint64_t& sum, uint64_t digits, bool negative) {
        if (digits) atomicAdd(&sum, negative ? 0 - digits : digits);
    }
};
