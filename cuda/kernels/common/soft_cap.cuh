// The soft cap where it is the only score modification, in place of ScoreRow::capped: it takes fewer instructions.
#pragma once
#include "parameters.cuh"
#include "common/score_mod.cuh"
#include "common/tanh.cuh"

// Multiplies scores, and gives the OR of their bits for `are_small`.
template <int count>
__device__ __forceinline__ uint32_t scale_scores(float (&scores)[count], float factor) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        scores[i] *= factor;
        bits |= __float_as_uint(scores[i]);
    }
    return bits;
}

// Scores become logits in units of the cap. Most are small beside the cap, and if all of a warp's are, tanh takes fewer
// instructions.
template <int count>
__device__ __forceinline__ void cap_scores(float (&scores)[count], const ScoreOperands& operands) {
    if (are_small(scale_scores(scores, 10 * operands.scale))) {
#pragma unroll
        for (int i = 0; i < count; ++i) scores[i] = tanh_within_fifth<true>(scores[i]);
    } else if (are_small(scale_scores(scores, 2.f / 10))) {
#pragma unroll
        for (int i = 0; i < count; ++i) scores[i] = tanh_within_one<true>(scores[i]);
    } else {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            // tanh of an infinite score is finite. This makes it NaN, as in ScoreRow::capped.
            const float tanh = tanh_of(0.5f * scores[i]);
            scores[i] = ISOLATES ? tanh + 0.0f * scores[i] : tanh;
        }
    }
}
