// The online softmax of the decode kernel, over the rows of a wgmma accumulator (Milakov and Gimelshein,
// arXiv:1805.02867). Logits are in base 2, but natural where a score modification makes them: the lowest float, which
// is what users add to hide keys, would not be finite in base 2. Of natural logits, differences are converted.
#pragma once
#include "common/accumulator.cuh"
#include "common/row_result.cuh"
#include "sm90/decode/traits.cuh"

struct OnlineSoftmax {
    float row_max[2] = {initial_max, initial_max};
    float row_sum[2] = {0.0f, 0.0f};  // over this thread's columns

    // A block's logits become probabilities relative to the rows' maxima so far. Returns by what to multiply earlier
    // ones.
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
            rescale[r] = exponential<Traits::natural>(previous - row_max[r]);
            row_sum[r] *= rescale[r];
        }
#pragma unroll
        for (int i = 0; i < count; ++i) {
            logits[i] = exponential<Traits::natural>(logits[i] - row_max[row_of(i)]);
            row_sum[row_of(i)] += logits[i];
        }
        return {rescale[0], rescale[1]};
    }
};
