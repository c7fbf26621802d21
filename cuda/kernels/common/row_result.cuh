// How a row's results follow from the maximum of its logits and the sum of their exponentials relative to it. Logits
// are natural, or in base 2.
#pragma once
#include "ptx/math.cuh"
#include "common/constants.cuh"

// The exponential of a difference of logits.
template <bool natural>
__device__ __forceinline__ float exponential(float difference) {
    return exp2_approx(natural ? difference * log2_e : difference);
}

// The maximum of a row that has seen no key. Finite, so that logits of -inf give 0 and not NaN.
constexpr float initial_max = lowest_float;

// Gives the factor that normalises a row's output, and the row's natural log-sum-exp. They are 0 and -inf for a row
// that saw no key, and NaN where a logit was. Where huge logits left nothing after rounding, the factor is 0, and the
// log-sum-exp is their maximum.
//
// `row_sum` and the output may be larger than they should be: by 2^exponent_offset, which is known at compile time, and
// by the inverse of `correction`. `sink` is a natural logit, read only if `has_sink`; -inf has no effect. `row_max` is
// a reference because with a copy the forward kernel's instructions are in another order.
template <bool natural, bool has_sink = true, int exponent_offset = 0>
__device__ __forceinline__ void finish_row(const float& row_max, float row_sum, float sink, float correction,
                                           float& factor, float& lse) {
    static_assert(!natural || exponent_offset == 0, "the offset is one of an exponent of 2");
    constexpr float least_sum = 0x1p-126f;  // the inverse of a smaller one is not finite
    constexpr float to_natural = natural ? 1 : ln_2;
    const bool has_sum = !(row_sum < least_sum);  // true for NaN
    float max = row_max, rescale = correction;
    float total = row_sum * rescale;
    if constexpr (has_sink) {
        const float logit = sink * (natural ? 1 : log2_e);
        max = fmaxf(row_max, logit);
        rescale *= exponential<natural>(row_max - max);
        const float difference = exponent_offset != 0 ? logit - max + exponent_offset : logit - max;
        total = row_sum * rescale + exponential<natural>(difference);
    }
    factor = has_sum ? rescale * reciprocal_approx(total) : 0;
    const float log_of_total = (log2_approx(total < least_sum ? least_sum : total) - exponent_offset) * ln_2;
    const bool saw_key = has_sum || row_max > initial_max;
    lse = saw_key ? max * to_natural + log_of_total : -infinity;
}

// What `finish_row` gives for a row, as a struct.
template <bool natural>
struct RowResult {
    float factor, lse;

    __device__ __forceinline__ RowResult(float row_max, float row_sum, float sink) {
        finish_row<natural>(row_max, row_sum, sink, 1, factor, lse);
    }
};
