// What makes logits of scores, beyond the scale: soft cap, bias, ALiBi and mask, in the order of the definition. Both
// passes go through the same arithmetic, so that they see the same logits.
//
// Defines, all set by jax_flash/cuda/score_mod.py:
//   SOFT_CAP, ALIBI, MASK   1: the call has it
//   BIAS                    the bias's element type; void: there is none
// and MASK_METADATA: which key a query is aligned with is data then.
#pragma once
#include "ptx/math.cuh"
#include "common/constants.cuh"

struct ScoreTraits {
    using Bias = BIAS;
    static constexpr bool soft_cap = SOFT_CAP, alibi = ALIBI, mask = MASK;
    static constexpr bool bias = !is_same<Bias, void>;
    // Whether there is anything to do; if not, the scale is part of the softmax's own arithmetic.
    static constexpr bool has_score_mod = soft_cap || bias || alibi || mask;
    static constexpr bool diagonals = alibi && MASK_METADATA;
};

// From element to element of a (B | 1, N | 1, T | 1, S | 1) array along each axis, 0 where all share one.
struct Strides {
    int64_t batch, head, query;
    int key;
};

struct ScoreOperands {
    float scale;  // over the soft cap, where there is one
    float soft_cap;
    const void* bias;
    Strides bias_strides;
    const unsigned char* mask;
    Strides mask_strides;
    const float* slopes;    // (B | 1, N)
    int64_t slopes_stride;  // from batch row to batch row
    const int* diagonals;   // (B, T): the key that each query is aligned with, where that is data
};

// The same as a kernel's parameters, in the order of jax_flash/cuda/score_mod.py; those that a call has none of are null.
#define SCORE_PARAMETERS                                                                                       \
    float score_scale, float soft_cap, const void *__restrict__ bias, int64_t bias_batch, int64_t bias_head,   \
        int64_t bias_query, int bias_key, const unsigned char *__restrict__ mask, int64_t mask_batch,      \
        int64_t mask_head, int64_t mask_query, int mask_key, const float *__restrict__ slopes,             \
        int64_t slopes_batch, const int *__restrict__ diagonals
#define SCORE_OPERANDS                                                                                         \
    {                                                                                                          \
        score_scale, soft_cap, bias, {bias_batch, bias_head, bias_query, bias_key}, mask,                      \
            {mask_batch, mask_head, mask_query, mask_key}, slopes, slopes_batch, diagonals                     \
    }

// tanh to within some 1e-7 of 1, which an instruction of its own does not give; and where it is small, of itself, by its
// series, as the log-sum-exp of small logits can be as small as they are.
__device__ __forceinline__ float tanh_of(float x) {
    const float near_zero = x * (1 - x * x * (1.f / 3));
    const float far = 1 - 2 * reciprocal_approx(exp2_approx(x * (2 * log2_e)) + 1);
    return fabsf(x) < 0.03f ? near_zero : far;
}

__device__ __forceinline__ float widened(const float* element) { return *element; }
template <class Element>
__device__ __forceinline__ float widened(const Element* element) {
    return to_floats<Element>(element->bits).x;
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
        if constexpr (ScoreTraits::alibi) slope = operands.slopes[batch * operands.slopes_stride + head];
        if constexpr (ScoreTraits::diagonals) {
            diagonal = operands.diagonals[static_cast<int64_t>(batch) * queries + there];
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
            if (operands.mask[mask + there * operands.mask_strides.key] == 0) x = -infinity;
        }
        return x;
    }
};
