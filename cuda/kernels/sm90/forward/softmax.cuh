// The online softmax over the rows of a wgmma accumulator (Milakov and Gimelshein, arXiv:1805.02867).
//
// It is in base 2. The scale of scores, or the unit of the only modification, converts them, so that one instruction
// makes an exponent of a score. The logits that other modifications make are natural: the lowest float,
// which users add to scores to hide keys, would not be finite in base 2.
#pragma once
#include "ptx/math.cuh"
#include "common/accumulator.cuh"
#include "common/constants.cuh"
#include "common/row_result.cuh"
#include "common/score_traits.cuh"
#include "sm90/forward/traits.cuh"

struct OnlineSoftmax {
    static constexpr bool natural = ScoreTraits::natural_logits;
    // The maximum that probabilities are relative to is raised only when the row's maximum exceeds it by more than
    // this. Probabilities then stay below 2^8, and the output is hardly ever rescaled. The result is exact all the
    // same: the sum that normalises it has the same factor (FlashAttention-4's conditional rescaling).
    //
    // In e4m3, probabilities between 2^-6 and 2^8 keep all their bits. So those of the maximum are at 2^6 to 2^8.
    static constexpr float exponent_offset = Traits::is_float8 ? 6 : 0;
    static constexpr float rescale_threshold = (natural ? ln_2 : 1) * (8 - exponent_offset);

    float row_max[2] = {initial_max, initial_max};  // of scaled scores, or of logits
    float row_sum[2] = {0.0f, 0.0f};                // over this thread's columns; `finalize` adds the other lanes'
    float rescale[2];  // factor of earlier probabilities, and of the output so far

    // The exponent of a natural logit x is (x − base(row_max)) · log2(e) − shift(row_max). Where the maximum is
    // moderate, the base is 0, and the exponent takes one instruction. The shift of a large maximum would be rounded to
    // whole numbers or coarser.
    __device__ static __forceinline__ bool is_moderate(float max) { return fabsf(max) < 0x1p16f; }
    __device__ static __forceinline__ float base(float max) { return is_moderate(max) ? 0 : max; }
    __device__ static __forceinline__ float shift(float max) {
        return is_moderate(max) ? __fmaf_rn(max, log2_e, -exponent_offset) : -exponent_offset;
    }
    // The exponent of the maximum itself: exponent_offset, and the rounding error of the shift.
    __device__ static __forceinline__ float max_exponent(float max) {
        return is_moderate(max) ? __fmaf_rn(max, log2_e, -shift(max)) : exponent_offset;
    }

    // The factor of probabilities relative to one maximum that makes them relative to another.
    __device__ static __forceinline__ float change_of_max(float from, float to) {
        if constexpr (!natural) return exp2_approx(from - to);
        return exp2_approx(__fmaf_rn(from - to, log2_e, max_exponent(to) - max_exponent(from)));
    }

    // Updates the maximum of the thread's row `r` from a block's scores, and returns whether it was raised. The
    // comparisons start from `least`, which is -inf: a caller that loads it late delays them until then.
    template <int r, int count>
    __device__ __forceinline__ bool update_max(const float (&scores)[count], float scale, float least) {
        float block_max = fmaxf(scores[2 * r], least);
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if (row_of(i) == r) block_max = fmaxf(block_max, scores[i]);
        }
        // One is rounded up and the other down, so that no exponent exceeds the threshold however large logits are.
        const float scaled_max = __fmul_ru(quad_max(block_max), scale);
        const bool raised = scaled_max > __fadd_rd(row_max[r], rescale_threshold);
        const float previous = row_max[r];
        row_max[r] = raised ? scaled_max : previous;
        rescale[r] = change_of_max(previous, row_max[r]);
        row_sum[r] *= rescale[r];
        return raised;
    }

    // Scores [begin, end) become probabilities relative to the maxima, times 2^exponent_offset.
    template <int begin, int end, int count>
    __device__ __forceinline__ void exponentiate(float (&scores)[count], float scale) {
        if constexpr (natural) {
            exponentiate_logits<begin, end>(scores);
        } else {
#pragma unroll
            for (int i = begin; i < end; ++i) {
                const float max = Traits::is_float8 ? row_max[row_of(i)] - exponent_offset : row_max[row_of(i)];
                scores[i] = exponential<natural>(scores[i] * scale - max);
                row_sum[row_of(i)] += scores[i];
            }
        }
    }
    // `exponentiate` for natural logits. A row gets the same bits in both branches, so they don't depend on other rows.
    template <int begin, int end, int count>
    __device__ __forceinline__ void exponentiate_logits(float (&scores)[count]) {
        const float shifts[2] = {shift(row_max[0]), shift(row_max[1])};
        if (!__any_sync(all_lanes, !is_moderate(row_max[0]) || !is_moderate(row_max[1]))) {
#pragma unroll
            for (int i = begin; i < end; ++i) {
                scores[i] = exp2_approx(__fmaf_rn(scores[i], log2_e, -shifts[row_of(i)]));
            }
        } else {
            const float bases[2] = {base(row_max[0]), base(row_max[1])};
#pragma unroll
            for (int i = begin; i < end; ++i) {
                scores[i] = exp2_approx(__fmaf_rn(scores[i] - bases[row_of(i)], log2_e, -shifts[row_of(i)]));
            }
        }
#pragma unroll
        for (int i = begin; i < end; ++i) row_sum[row_of(i)] += scores[i];
    }

    // Gives the factor that normalises the output, and the row's natural log-sum-exp (finish_row). `sink` gives the
    // natural logit of a row's sink.
    template <class Sink>
    __device__ __forceinline__ void finalize(float (&normalise)[2], float (&lse)[2], Sink sink) {
        constexpr int offset = natural ? 0 : static_cast<int>(exponent_offset);  // that sums of probabilities have here
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = quad_sum(row_sum[r]);
            float correction = 1, logit = -infinity;
            if constexpr (natural) correction = exp2_approx(-max_exponent(row_max[r]));
            if constexpr (Traits::sinks) logit = sink(r);
            finish_row<natural, Traits::sinks, offset>(row_max[r], sum, logit, correction, normalise[r], lse[r]);
        }
    }
};
