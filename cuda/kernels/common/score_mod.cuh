// Score modifications: soft cap, bias, ALiBi and the boolean mask, in this order. Both passes use this code, so that they
// compute the same logits. ScoreOperands, a part of the kernel's parameters, is described in jax_flash/cuda/score_mod.py.
#pragma once
#include "parameters.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "common/constants.cuh"
#include "common/score_traits.cuh"
#include "common/tanh.cuh"

__device__ __forceinline__ float load_float(const float* element) { return global::read_only(element); }
template <class Element>
__device__ __forceinline__ float load_float(const Element* element) {
    return to_floats<Element>(global::read_only(&element->bits)).x;
}
template <class Element>
__device__ __forceinline__ float bias_at(const void* bias, int64_t index) {
    return load_float(static_cast<const Element*>(bias) + index);
}

// A row of scores: one query of a head. Queries and keys beyond the last use the operands of the last.
struct ScoreRow {
    const ScoreOperands& operands;
    int64_t bias, mask;  // offsets, in elements, at which the row starts
    float slope;
    int diagonal;  // the key on the query's diagonal
    int last_key;

    __device__ __forceinline__ ScoreRow(const ScoreOperands& operands, int batch, int head, int query, int queries,
                                        int keys)
        : operands(operands), bias(0), mask(0), slope(0), diagonal(query + keys - queries), last_key(keys - 1) {
        const int own_query = min(query, queries - 1);
        auto start = [&](const Strides& strides) {
            return batch * strides.batch + head * strides.head + own_query * strides.query;
        };
        if constexpr (ScoreTraits::bias) bias = start(operands.bias_strides);
        if constexpr (ScoreTraits::mask) mask = start(operands.mask_strides);
        if constexpr (ScoreTraits::alibi) slope = global::read_only(operands.slopes + batch * operands.slopes_stride + head);
        if constexpr (ScoreTraits::diagonals) {
            diagonal = global::read_only(operands.diagonals + static_cast<int64_t>(batch) * queries + own_query);
        }
    }

    __device__ __forceinline__ float distance(int key) const { return static_cast<float>(abs(diagonal - key)); }

    // The logit of a score. With a soft cap, sets `tanh` to the tangent that it computes.
    __device__ __forceinline__ float logit(float score, int key, float& tanh) const {
        const int own_key = min(key, last_key);
        float x = score * operands.scale;
        if constexpr (ScoreTraits::soft_cap) {
            x = operands.soft_cap * (tanh = tanh_of(x));
            // Of an infinite score the tangent is finite. Its logit is NaN, so that the log-sum-exp tells which queries
            // see what isn't finite.
            if constexpr (ISOLATES) x += 0.0f * score;
        }
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
