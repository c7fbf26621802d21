// What happens to a block's scores between QK^T and the softmax: score modifications, then the mask.
#pragma once
#include "ptx/global.cuh"
#include "ptx/wgmma.cuh"
#include "common/score_mod.cuh"
#include "common/soft_cap.cuh"
#include "sm90/forward/mask_metadata.cuh"
#include "sm90/forward/softmax.cuh"
#include "sm90/forward/tile_scheduler.cuh"

// More keys than any sequence has. Keys of a cache are counted from its `KeyPlace`, which may lie before the first one,
// so their indices can exceed the number of keys. No operand of such a call has an axis of keys.
constexpr int any_key = 1 << 30;

// Logits of one of the thread's two rows, in place of its scores.
template <TanhRange range, int count, class KeyOf>
__device__ __forceinline__ void make_logits(float (&scores)[count], int r, const ScoreRow& score_row, KeyOf key_of) {
    float derivative;  // which no one reads
#pragma unroll
    for (int i = 0; i < count; ++i) {
        if (row_of(i) != r) continue;
        float logit[1] = {score_row.logit<range>(scores[i], key_of(i), derivative)};
        // One after another: operands of several at once have no room in registers.
        if constexpr (ScoreTraits::all_operands) wgmma::pin(logit);
        scores[i] = logit[0];
    }
}

// Soft cap, the user's function, bias, ALiBi and the boolean mask (common/score_mod.cuh). `row` is the upper of the
// thread's two rows.
template <int count>
__device__ __forceinline__ void apply_score_mod(float (&scores)[count], const ScoreOperands& operands,
                                                const Tile& tile, int row, int first_key, const Shape& shape) {
    if constexpr (ScoreTraits::soft_cap_alone) {
        cap_scores(scores, operands);
    } else if constexpr (ScoreTraits::has_score_mod) {
        const int column = first_key + 2 * (threadIdx.x % 4);
        const int keys = Traits::cache ? any_key : shape.keys;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Position query = position_of(row + 8 * r, shape);
            const int head = head_of(row + 8 * r, tile);
            const ScoreRow score_row(operands, tile.batch, head, query, shape.queries, keys);
            auto key_of = [&](int i) { return Position{column, column_of(i), keys - 1}; };
            TanhRange range = TanhRange::unasked;
            if constexpr (ScoreRow::has_tanh) {
                float largest = 0;
#pragma unroll
                for (int i = 0; i < count; ++i) {
                    if (row_of(i) == r) largest = fmaxf(largest, score_row.largest_in_tanh(scores[i], key_of(i)));
                }
                range = tanh_range(largest);
            }
            if (range == TanhRange::sixth) {
                make_logits<TanhRange::sixth>(scores, r, score_row, key_of);
            } else if (range == TanhRange::one) {
                make_logits<TanhRange::one>(scores, r, score_row, key_of);
            } else {
                make_logits<ScoreRow::whole_range>(scores, r, score_row, key_of);
            }
        }
    } else if constexpr (Traits::score_sign != 1) {
#pragma unroll
        for (int i = 0; i < count; ++i) scores[i] *= static_cast<float>(Traits::score_sign);
    }
}

// The low bits of a word, one for each of a thread's elements of a row that lie before `columns`. The k-th element of
// a row is in column k/2·8 + k%2.
__device__ __forceinline__ uint32_t elements_before(int columns) {
    const int count = columns <= 0 ? 0 : columns / 8 * 2 + min(columns % 8, 2);
    return count >= 32 ? 0xffffffff : (1u << count) - 1;
}

// Sets the scores of keys that a row does not see to -inf, on the sides that are asked for. Elements are picked by the
// bits of a word, as 32 comparisons take longer.
template <int count>
__device__ __forceinline__ void mask_scores(float (&scores)[count], int row, int first_key, bool right, bool left,
                                            const Shape& shape, const RowMask& row_mask) {
    const int column = first_key + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        auto end = [&]() { return Traits::mask_metadata ? row_mask.end(r) : right_end(row + 8 * r, shape); };
        auto begin = [&]() { return Traits::mask_metadata ? row_mask.begin(r) : left_begin(row + 8 * r, shape); };
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
    if constexpr (Traits::segments) row_mask.mask_segments(scores, column, shape);
}

// Sets the scores of keys that a row does not see by the block mask to -inf.
template <int count>
__device__ __forceinline__ void mask_by_function(float (&scores)[count], const Tile& tile, int row, int first_key,
                                                 const Shape& shape) {
#if BLOCK_MASK
    const int column = first_key + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const MaskRow mask_row(shape.block_mask, tile.batch, head_of(row + 8 * r, tile),
                               position_of(row + 8 * r, shape));
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if (row_of(i) != r) continue;
            if (!mask_row.sees({column, column_of(i), shape.keys - 1})) scores[i] = -infinity;
        }
    }
#endif
}

// Attention sinks: each head has a logit that takes part in the softmax and has no value.
struct Sinks {
    const float* logits;  // (B | 1, N)
    int64_t stride;       // from batch row to batch row

    __device__ __forceinline__ float of_row(const Tile& tile, int row) const {
        return global::read_only(logits + tile.batch * stride + head_of(row, tile));
    }
};
