// Score modifications: soft cap, the user's function, bias, ALiBi and the boolean mask, in this order. Both passes use
// this code, so that they compute the same logits, but for roundings of a soft cap alone. ScoreOperands, a part of the
// kernel's parameters, is described in jax_flash/cuda/score_mod.py.
#pragma once
#include "parameters.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "common/constants.cuh"
#include "common/position.cuh"
#include "common/score_traits.cuh"
#include "common/tanh.cuh"
#include "common/user_row.cuh"

__device__ __forceinline__ float load_float(const float* element) { return global::read_only(element); }
template <class Element>
__device__ __forceinline__ float load_float(const Element* element) {
    return to_floats<Element>(global::read_only(&element->bits)).x;
}
template <class Element>
__device__ __forceinline__ float bias_at(const void* bias, int64_t index) {
    return load_float(static_cast<const Element*>(bias) + index);
}

// The derivative of the soft cap. Zero for NaN, which masked pairs may have. Where NaN is to be seen, P itself is NaN.
__device__ __forceinline__ float softcap_grad_of(float tanh) {
    const float derivative = 1 - tanh * tanh;
    return ISOLATES ? fmaxf(derivative, 0) : derivative;
}

// A row of scores: one query of a head. Queries and keys beyond the last use the operands of the last.
struct ScoreRow {
    const ScoreOperands& operands;
    int64_t bias, mask;  // offsets, in elements, at which the row starts
    float slope;
    int diagonal, offset;  // the key on the query's diagonal is their sum; the offset is that of the query's position
    UserRow user;

    __device__ __forceinline__ ScoreRow(const ScoreOperands& operands, int batch, int head, Position query,
                                        int queries, int keys)
        : operands(operands), bias(0), mask(0), slope(0), diagonal(query.base + keys - queries), offset(query.offset),
#if SCORE_MOD
          user(operands.user, batch, head, query) {
#else
          user(0, 0, 0, 0) {
#endif
        const int own_query = query.index();
        auto start = [&](const Strides& strides) {
            return batch * strides.batch + head * strides.head + own_query * strides.query;
        };
        if constexpr (ScoreTraits::bias) bias = start(operands.bias_strides);
        if constexpr (ScoreTraits::mask) mask = start(operands.mask_strides);
        if constexpr (ScoreTraits::alibi) {
            slope = global::read_only(operands.slopes + batch * operands.slopes_stride + head);
        }
        if constexpr (ScoreTraits::diagonals) {
            diagonal = global::read_only(operands.diagonals + static_cast<int64_t>(batch) * queries + own_query);
            offset = 0;
        }
    }

    // A key's distance from the diagonal. The integer that is converted is the same for many elements; each adds a
    // constant. Exact below 2^24, as in jax_flash/cuda/functions/positions.py.
    __device__ __forceinline__ float distance(Position key) const {
        return fabsf(static_cast<float>(diagonal - key.base) + static_cast<float>(offset - key.offset));
    }

    // A score scaled and capped, and its derivative by the scaled score.
    __device__ __forceinline__ float capped(float score, float& derivative) const {
        float x = score * operands.scale;
        derivative = 1;
        if constexpr (ScoreTraits::soft_cap) {
            const float tanh = tanh_of(x);
            x = operands.soft_cap * tanh;
            derivative = softcap_grad_of(tanh);
            // tanh of an infinite score is finite. This makes its logit NaN, so that the log-sum-exp tells which
            // queries see what isn't finite.
            if constexpr (ISOLATES) x += 0.0f * score;
        }
        return x;
    }

    // Whether the user's function has a tanh that `logit` computes faster where all of a warp's arguments are small
    // (common/tanh.cuh). Not beside a bias or a mask: with several forms of `logit`, the compiler computes the
    // addresses of all elements ahead of them, and they spill.
    static constexpr bool has_tanh =
        UserRow::has_tanh && !(ScoreTraits::soft_cap || ScoreTraits::bias || ScoreTraits::mask);
    static constexpr TanhRange whole_range = has_tanh ? TanhRange::all : TanhRange::unasked;
    // The largest |argument| of a tanh in the function of this score.
    __device__ __forceinline__ float largest_in_tanh(float score, Position key) const {
#if SCORE_MOD
        return user.largest_in_tanh({score, operands.scale}, key);
#else
        return 0;
#endif
    }

#if SCORE_MOD
    // What the user's function makes of a score, and the soft cap's derivative.
    template <TanhRange range>
    __device__ __forceinline__ user_score_mod::Element user_element(float score, Position key,
                                                                    float& derivative) const {
        const float x = capped(score, derivative);
        const ScaledScore taken = ScoreTraits::soft_cap ? ScaledScore{x, 1} : ScaledScore{score, operands.scale};
        return user.element<range>(taken, key);
    }
#endif

    // The logit of a score, and the derivative by the scaled score, where ScoreTraits has one.
    template <TanhRange range>
    __device__ __forceinline__ float logit(float score, Position key, float& derivative) const {
        const int own_key = key.index();
#if SCORE_MOD
        const user_score_mod::Element element = user_element<range>(score, key, derivative);
        float x = element.value;
#if SCORE_MOD == 2
        derivative *= element.d_score;
#endif
#else
        float x = capped(score, derivative);
#endif
        if constexpr (ScoreTraits::bias) {
            x += bias_at<ScoreTraits::Bias>(operands.bias, bias + own_key * operands.bias_strides.key);
        }
        if constexpr (ScoreTraits::alibi) x -= slope * distance(key);
        if constexpr (ScoreTraits::mask) {
            const unsigned char* seen = operands.mask + mask + own_key * operands.mask_strides.key;
            if (global::read_only(seen) == 0) x = -infinity;
        }
        return x;
    }
};
