// The online softmax of the decode kernel, over the rows of a wgmma accumulator (Milakov and Gimelshein, arXiv:1805.02867).
// Logits are in base 2, but natural where a score modification makes them: the lowest float, which is what users add to
// hide keys, would not be finite in base 2. Of natural logits, differences are converted.
#pragma once
#include "ptx/math.cuh"
#include "common/constants.cuh"
#include "sm90/decode/traits.cuh"

// Element i of a thread's accumulator lies in row `row_of(i)` of the thread's two rows, which are 8 apart …
__device__ constexpr int row_of(int i) { return i / 2 % 2; }
// … and in this column, to which a thread adds 2·(lane % 4).
__device__ constexpr int column_of(int i) { return i / 4 * 8 + i % 2; }

// The exponential of a difference of logits.
__device__ __forceinline__ float exponential(float difference) {
    return exp2_approx(Traits::natural ? difference * log2_e : difference);
}

// The maximum of a row that has seen no key. Finite, so that logits of -inf give 0 and not NaN.
constexpr float initial_max = lowest_float;

struct OnlineSoftmax {
    float row_max[2] = {initial_max, initial_max};
    float row_sum[2] = {0.0f, 0.0f};  // over this thread's columns

    // A block's logits become probabilities relative to the rows' maxima so far. Returns by what to multiply earlier ones.
    template <int count>
    __device__ __forceinline__ float2 update(float (&logits)[count]) {
        float rescale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float block_max = -infinity;
#pragma unroll
            for (int i = 0; i < count; ++i) {
                if (row_of(i) == r) block_max = fmaxf(block_max, logits[i]);
            }
            const float previous = row_max[r];
            row_max[r] = fmaxf(previous, quad_max(block_max));
            rescale[r] = exponential(previous - row_max[r]);
            row_sum[r] *= rescale[r];
        }
#pragma unroll
        for (int i = 0; i < count; ++i) {
            logits[i] = exponential(logits[i] - row_max[row_of(i)]);
            row_sum[row_of(i)] += logits[i];
        }
        return {rescale[0], rescale[1]};
    }
};

// What a row's results follow from: the factor that normalises its output, and its natural log-sum-exp. They are 0 and -inf
// for a row that saw no key, and NaN where a logit was.
struct RowResult {
    float factor, lse;

    // `sink` is the natural logit of the row's sink, -inf if it has none.
    __device__ __forceinline__ RowResult(float row_max, float row_sum, float sink) {
        constexpr float least_sum = 0x1p-126f;  // the inverse of a smaller one is not finite
        constexpr float to_natural = Traits::natural ? 1 : ln_2;
        const bool is_left = !(row_sum < least_sum);  // NaN is
        const float logit = sink * (Traits::natural ? 1 : log2_e);
        const float max = fmaxf(row_max, logit);
        const float rescale = exponential(row_max - max);
        const float total = row_sum * rescale + exponential(logit - max);
        factor = is_left ? rescale * reciprocal_approx(total) : 0;
        const float log_of_total = log2_approx(total < least_sum ? least_sum : total) * ln_2;
        const bool saw_key = is_left || row_max > initial_max;
        lse = saw_key ? max * to_natural + log_of_total : -infinity;
    }
};
