// The soft cap where it is the only score modification, in place of ScoreRow::capped: it takes fewer instructions.
#pragma once
#include "parameters.cuh"
#include "ptx/wgmma.cuh"
#include "common/score_mod.cuh"
#include "common/tanh.cuh"

// Scores, twelvefold, become logits in units of the cap. Where tanh takes many registers, they do so one after another.
template <TanhRange range, int count>
__device__ __forceinline__ void cap_twelvefold(float (&scores)[count]) {
    constexpr bool one_by_one = range != TanhRange::sixth;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        float x[1] = {scores[i]};
        if constexpr (one_by_one) wgmma::pin(x);
        const float tanh = tanh_in<range, 12>(x[0]);
        // tanh of an infinite score is finite. This makes it NaN, as in ScoreRow::capped.
        x[0] = ISOLATES && range == TanhRange::all ? tanh + 0.0f * x[0] : tanh;
        if constexpr (one_by_one) wgmma::pin(x);
        scores[i] = x[0];
    }
}

// Scores become logits in units of the cap. Most are small beside the cap, and if all of a warp's are, tanh takes fewer
// instructions.
template <int count>
__device__ __forceinline__ void cap_scores(float (&scores)[count], const ScoreOperands& operands) {
    // Bit 30, the exponent's highest, is set in numbers from 2 on, in infinities and in NaN: where |x| is 1/6 or more.
    const float factor = 12 * operands.scale;
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        scores[i] *= factor;
        bits |= __float_as_uint(scores[i]);
    }
    if (!__any_sync(all_lanes, bits >> 30 & 1)) return cap_twelvefold<TanhRange::sixth>(scores);

    float largest = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) largest = fmaxf(largest, fabsf(scores[i]));
    if (!__any_sync(all_lanes, largest >= 12)) return cap_twelvefold<TanhRange::one>(scores);
    cap_twelvefold<TanhRange::all>(scores);
}
