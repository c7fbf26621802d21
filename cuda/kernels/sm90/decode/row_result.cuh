// What a row's results follow from: the maximum of its logits, and the sum of their exponentials relative to it. Logits
// are natural, or in base 2.
#pragma once
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "common/constants.cuh"

// The exponential of a difference of logits.
template <bool natural>
__device__ __forceinline__ float exponential(float difference) {
    return exp2_approx(natural ? difference * log2_e : difference);
}

// The maximum of a row that has seen no key. Finite, so that logits of -inf give 0 and not NaN.
constexpr float initial_max = lowest_float;

// The natural logit of a head's sink, -inf if heads have none.
__device__ __forceinline__ float sink_of(const float* sinks, int head) {
    return sinks ? global::read_only(sinks + head) : -infinity;
}

// The factor that normalises a row's output, and its natural log-sum-exp. They are 0 and -inf for a row that saw no
// key, and NaN where a logit was.
template <bool natural>
struct RowResult {
    float factor, lse;

    __device__ __forceinline__ RowResult(float row_max, float row_sum, float sink) {
        constexpr float least_sum = 0x1p-126f;  // the inverse of a smaller one is not finite
        constexpr float to_natural = natural ? 1 : ln_2;
        const bool is_left = !(row_sum < least_sum);  // NaN is
        const float logit = sink * (natural ? 1 : log2_e);
        const float max = fmaxf(row_max, logit);
        const float rescale = exponential<natural>(row_max - max);
        const float total = row_sum * rescale + exponential<natural>(logit - max);
        factor = is_left ? rescale * reciprocal_approx(total) : 0;
        const float log_of_total = log2_approx(total < least_sum ? least_sum : total) * ln_2;
        const bool saw_key = is_left || row_max > initial_max;
        lse = saw_key ? max * to_natural + log_of_total : -infinity;
    }
};
