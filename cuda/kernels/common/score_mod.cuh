// What makes logits of scores, beyond the scale: soft cap, bias, ALiBi and mask, in the order of the definition. Both
// passes go through the same arithmetic, so that they see the same logits. ScoreOperands, of the kernel's parameters, is
// described in jax_flash/cuda/score_mod.py.
#pragma once
#include "parameters.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "common/constants.cuh"
#include "common/score_traits.cuh"

// tanh to within some 1e-7 of 1, which an instruction of its own does not give; and where it is small, of itself, by its
// series, as the log-sum-exp of small logits can be as small as they are.
__device__ __forceinline__ float tanh_of(float x) {
    const float near_zero = x * (1 - x * x * (1.f / 3));
    const float far = 1 - 2 * reciprocal_approx(exp2_approx(x * (2 * log2_e)) + 1);
    return fabsf(x) < 0.03f ? near_zero : far;
}

__device__ __forceinline__ float widened(const float* element) { return global::read_only(element); }
template <class Element>
__device__ __forceinline__ float widened(const Element* element) {
    return to_floats<Element>(global::read_only(&element->bits)).x;
}
template <class Element>
__device__ __forceinline__ float bias_at(const void* bias, int64_t index) {
    return widened(static_cast<const Element*>(bias) + index);
}

// One row of scores, a query of a head. Queries and keys that are not there take some other's operands.
struct ScoreRow {
    const ScoreOperands& operands;
    int64_t bias, mask;  // where the row starts
    float slope;
    int diagonal;  // the key that the query is aligned with
    int last_key;

    __device__ __forceinline__ ScoreRow(const ScoreOperands& operands, int batch, int head, int query, int queries,
                                        int keys)
        : operands(operands), bias(0), mask(0), slope(0), diagonal(query + keys - queries), last_key(keys - 1) {
        const int there = min(query, queries - 1);
        auto start = [&](const Strides& strides) {
            return batch * strides.batch + head * strides.head + there * strides.query;
        };
        if constexpr (ScoreTraits::bias) bias = start(operands.bias_strides);
        if constexpr (ScoreTraits::mask) mask = start(operands.mask_strides);
        if constexpr (ScoreTraits::alibi) slope = global::read_only(operands.slopes + batch * operands.slopes_stride + head);
        if constexpr (ScoreTraits::diagonals) {
            diagonal = global::read_only(operands.diagonals + static_cast<int64_t>(batch) * queries + there);
        }
    }

    __device__ __forceinline__ float distance(int key) const { return static_cast<float>(abs(diagonal - key)); }

    // In base 2. `tanh` is left as it is without a soft cap.
    __device__ __forceinline__ float logit(float score, int key, float& tanh) const {
        const int there = min(key, last_key);
        float x = score * operands.scale;
        if constexpr (ScoreTraits::soft_cap) x = operands.soft_cap * (tanh = tanh_of(x));
        if constexpr (ScoreTraits::bias) {
            x += bias_at<ScoreTraits::Bias>(operands.bias, bias + there * operands.bias_strides.key);
        }
        if constexpr (ScoreTraits::alibi) x -= slope * distance(key);
        x *= log2_e;
        if constexpr (ScoreTraits::mask) {
            const unsigned char* seen = operands.mask + mask + there * operands.mask_strides.key;
            if (global::read_only(seen) == 0) x = -infinity;
        }
        return x;
    }
};
