// The online softmax over the rows of a wgmma accumulator (Milakov and Gimelshein, arXiv:1805.02867), in
// base 2, and the places where features hook into the scores.
#pragma once
#include "ptx/math.cuh"
#include "common/constants.cuh"
#include "common/score_mod.cuh"
#include "sm90/forward/tile_scheduler.cuh"

// Element i of an accumulator lies in row `row_of(i)` (0 or 1) of the two that a thread holds, 8 apart.
__device__ constexpr int row_of(int i) { return i / 2 % 2; }
// Its column, less the 2·(lane % 4) of the thread.
__device__ constexpr int column_of(int i) { return i / 4 * 8 + i % 2; }

// Score transform: what becomes of a block's scores before the window's mask. `row` is the upper of the thread's two.
template <int count>
__device__ __forceinline__ void transform_scores(float (&scores)[count], const ScoreOperands& operands,
                                                 const Tile& tile, int row, int first_key, const Shape& shape) {
    if constexpr (ScoreTraits::has_score_mod) {
        const int column = first_key + 2 * (threadIdx.x % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int query = (row + 8 * r) / Traits::pack, head = tile.head + (row + 8 * r) % Traits::pack;
            const ScoreRow of_row(operands, tile.batch, head, query, shape.queries, shape.keys);
            float tanh;
#pragma unroll
            for (int i = 0; i < count; ++i) {
                if (row_of(i) == r) scores[i] = of_row.logit(scores[i], column + column_of(i), tanh);
            }
        }
    } else if constexpr (Traits::score_sign != 1) {
#pragma unroll
        for (int i = 0; i < count; ++i) scores[i] *= static_cast<float>(Traits::score_sign);
    }
}

// Bit k is set where a row's k-th element of a thread, in column k/2·8 + k%2, lies before `columns`.
__device__ __forceinline__ uint32_t elements_before(int columns) {
    const int count = columns <= 0 ? 0 : columns / 8 * 2 + min(columns % 8, 2);
    return count >= 32 ? 0xffffffff : (1u << count) - 1;
}

// Mask: -inf where the thread's rows do not see a key of the block at `first_key`, on the sides that are asked for.
// A row's elements are picked by the bits of a word: 32 comparisons cost more.
template <int count>
__device__ __forceinline__ void mask_scores(float (&scores)[count], int row, int first_key, bool right, bool left,
                                            const Shape& shape, const RowBounds& seen_by) {
    const int column = first_key + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        auto end = [&]() { return Traits::bounds ? seen_by.end[r] : right_end(row + 8 * r, shape); };
        auto begin = [&]() { return Traits::bounds ? seen_by.begin[r] : left_begin(row + 8 * r, shape); };
#pragma unroll
        for (int word = 0; word < count / 2; word += 32) {
            const int first_column = column + word * 4;
            uint32_t seen = 0xffffffff;
            if (right) seen = elements_before(end() - first_column);
            if (Traits::has_left && left) seen &= ~elements_before(begin() - first_column);
#pragma unroll
            for (int k = 0; k < min(32, count / 2 - word); ++k) {
                float& score = scores[(word + k) / 2 * 4 + 2 * r + k % 2];
                score = seen >> k & 1 ? score : -infinity;
            }
        }
    }
    if constexpr (Traits::segments) seen_by.mask_segments(scores, column, shape);
}

// A logit that each row has beside those of its keys, and that takes its share of the sum.
struct Sinks {
    const float* logits;  // (B | 1, N)
    int64_t stride;       // from batch row to batch row

    __device__ __forceinline__ float of_row(const Tile& tile, int row) const {
        return global::read_only(logits + tile.batch * stride + tile.head + row % Traits::pack);
    }
};

struct OnlineSoftmax {
    // Probabilities are relative to a maximum that may lag behind the row's by this much: they stay below 2^8, and
    // the output is hardly ever rescaled. Exact all the same, as the sum that normalises has the same factor (the
    // conditional rescaling of FlashAttention-4).
    static constexpr float slack = 8.0f;
    // Finite, so that scores of -inf give zeros and no NaN where a row has seen no key yet.
    static constexpr float no_key = -1e30f;

    float row_max[2] = {no_key, no_key};  // in base 2
    float row_sum[2] = {0.0f, 0.0f};      // over this thread's columns alone until `finish`
    float rescale[2];  // what earlier probabilities, and the output so far, have to be multiplied by

    // Takes the maximum of one of the thread's rows over a block. Whether its `rescale` is other than 1. The
    // comparisons start from `least`: -inf, from where the caller wants them to wait for it.
    template <int r, int count>
    __device__ __forceinline__ bool take_maximum(const float (&scores)[count], float scale_log2, float least) {
        float block_max = fmaxf(scores[2 * r], least);
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if (row_of(i) == r) block_max = fmaxf(block_max, scores[i]);
        }
        // Rounded up, and the sum below down, so that no exponent exceeds the slack however large the logits are.
        const float top = __fmul_ru(quad_max(block_max), scale_log2);
        const bool grows = top > __fadd_rd(row_max[r], slack);
        const float before = row_max[r];
        row_max[r] = grows ? top : before;
        rescale[r] = exp2_approx(before - row_max[r]);
        row_sum[r] *= rescale[r];
        return grows;
    }

    // Scores [begin, end) become probabilities relative to the maxima.
    template <int begin, int end, int count>
    __device__ __forceinline__ void exponentiate(float (&scores)[count], float scale_log2) {
#pragma unroll
        for (int i = begin; i < end; ++i) {
            scores[i] = exp2_approx(scores[i] * scale_log2 - row_max[row_of(i)]);
            row_sum[row_of(i)] += scores[i];
        }
    }

    // Sums over the row's lanes. Gives the factor that normalises the output and the row's natural
    // log-sum-exp: 0 and -inf for a row that saw no key, or none that rounding of its huge logits left. `sink(r)` is
    // the logit that a row has beside those of its keys, -inf for none.
    template <class Sink>
    __device__ __forceinline__ void finish(float (&normalise)[2], float (&lse)[2], Sink sink) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = quad_sum(row_sum[r]);
            const bool seen = sum >= 0x1p-126f;  // the inverse of less is not finite
            float top = row_max[r], factor = 1, total = sum;
            if constexpr (Traits::sinks) {
                const float logit = sink(r) * log2_e;
                top = fmaxf(top, logit);
                factor = exp2_approx(row_max[r] - top);
                total = sum * factor + exp2_approx(logit - top);
            }
            normalise[r] = seen ? factor * reciprocal_approx(total) : 0.0f;
            lse[r] = seen ? (top + log2_approx(total)) * ln_2 : -infinity;
        }
    }
};
