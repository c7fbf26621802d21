// The online softmax over the rows of a wgmma accumulator (Milakov and Gimelshein, arXiv:1805.02867), in
// base 2, and the places where features hook into the scores.
#pragma once
#include "../ptx/math.cuh"
#include "tile.cuh"

constexpr float infinity = __builtin_bit_cast(float, 0x7f800000);

// Element i of an accumulator lies in row `row_of(i)` (0 or 1) of the two that a thread holds, 8 apart.
__device__ constexpr int row_of(int i) { return i / 2 % 2; }
// Its column, less the 2·(lane % 4) of the thread.
__device__ constexpr int column_of(int i) { return i / 4 * 8 + i % 2; }

// Score transform: what becomes of a block's scores before the mask.
template <int count>
__device__ __forceinline__ void transform_scores(float (&scores)[count]) {
    if constexpr (Traits::score_sign != 1) {
#pragma unroll
        for (int i = 0; i < count; ++i) scores[i] *= static_cast<float>(Traits::score_sign);
    }
}

// Mask: -inf where the thread's rows do not see a key of the block at `first_key`.
template <int count>
__device__ __forceinline__ void mask_scores(float (&scores)[count], int row, int first_key, const Shape& shape) {
    const int column = first_key + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int end = right_end(row + 8 * r, shape) - column;
        const int begin = left_begin(row + 8 * r, shape) - column;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if (row_of(i) != r) continue;
            if (column_of(i) >= end || (Traits::has_left && column_of(i) < begin)) scores[i] = -infinity;
        }
    }
}

struct OnlineSoftmax {
    float row_max[2] = {-infinity, -infinity};  // of the scores, before the scale
    float row_sum[2] = {0.0f, 0.0f};            // over this thread's columns alone until `finish`

    // Replaces scores by probabilities relative to the new maximum; `rescale` is what earlier
    // probabilities, and the output so far, have to be multiplied by.
    template <int count>
    __device__ __forceinline__ void update(float (&scores)[count], float (&rescale)[2], float scale_log2) {
        float offset[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float block_max = scores[2 * r];
#pragma unroll
            for (int i = 0; i < count; ++i) {
                if (row_of(i) == r) block_max = fmaxf(block_max, scores[i]);
            }
            const float new_max = fmaxf(row_max[r], quad_max(block_max));
            // A row that has seen no key yet has maximum -inf; any finite offset gives it zeros, no NaN. Rounded
            // up, so that no exponent is positive however large the logits are.
            offset[r] = new_max == -infinity ? 0.0f : __fmul_ru(new_max, scale_log2);
            rescale[r] = exp2_approx(row_max[r] * scale_log2 - offset[r]);
            row_max[r] = new_max;
            row_sum[r] *= rescale[r];
        }
#pragma unroll
        for (int i = 0; i < count; ++i) {
            scores[i] = exp2_approx(scores[i] * scale_log2 - offset[row_of(i)]);
            row_sum[row_of(i)] += scores[i];
        }
    }

    // Sums over the row's lanes. Gives the factor that normalises the output and the row's natural
    // log-sum-exp: 0 and -inf for a row that saw no key, or none that rounding of its huge logits left.
    __device__ __forceinline__ void finish(float (&normalise)[2], float (&lse)[2], float scale_log2) {
        constexpr float ln2 = 0.69314718055994531f;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = quad_sum(row_sum[r]);
            const bool seen = sum >= 0x1p-126f;  // the inverse of less is not finite
            normalise[r] = seen ? 1.0f / sum : 0.0f;
            lse[r] = seen ? (__fmul_ru(row_max[r], scale_log2) + log2_approx(sum)) * ln2 : -infinity;
        }
    }
};
