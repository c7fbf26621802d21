// Scores that become logits by more than the scale (score_mod.cuh), in the backward pass's orientation, keys down and
// queries across; and the gradients of bias, slopes and arrays that the user's function captures.
#pragma once
#include "ptx/math.cuh"
#include "common/exact_sum.cuh"
#include "common/score_mod.cuh"
#include "common/soft_cap.cuh"
#include "sm90/backward/call.cuh"
#include "sm90/backward/products.cuh"

// Of element i of an accumulator: its query, from the block's first on, and its row, 8 keys below the thread's first or
// not.
__device__ __forceinline__ int query_of(int i) { return threadIdx.x % 4 * 2 + i / 4 * 8 + i % 2; }
__device__ constexpr int key_row_of(int i) { return i / 2 % 2; }
// Both as positions. `key` is the thread's first.
__device__ __forceinline__ Position query_position(int block, int i, const Shape& shape) {
    const int first = block * Traits::queries + threadIdx.x % 4 * 2;
    return {first, i / 4 * 8 + i % 2, shape.queries - 1};
}
__device__ __forceinline__ Position key_position(int key, int i, const Shape& shape) {
    return {key, 8 * key_row_of(i), shape.keys - 1};
}

// Whether the call's boolean mask lets the row's query see a key.
__device__ __forceinline__ bool lets_see(const ScoreRow& row, Position key) {
    return global::read_only(row.operands.mask + row.mask + key.index() * row.operands.mask_strides.key) != 0;
}

// Derivatives of logits by scores, converted as P will be, of eight elements of a thread.
__device__ __forceinline__ void convert_score_grad(uint32_t (&converted)[4], const float (&derivatives)[8]) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        converted[j / 2] = convert<Traits::Element>(derivatives[j], derivatives[j + 1]);
    }
}

// `exponentiate_logits` where the only modification is a soft cap.
__device__ __forceinline__ void exponentiate_capped(float (&scores)[score_count],
                                                    uint32_t (&score_grad)[query_steps][4],
                                                    const ScoreOperands& operands, const float4* lse) {
    cap_scores(scores, operands);
    const float cap = operands.soft_cap * log2_e;
#pragma unroll
    for (int i = 0; i < score_count; i += 8) {
        const float4 queries = lse[i / 2 + threadIdx.x % 4];
        float derivatives[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            derivatives[j] = softcap_grad_of(scores[i + j]);
            scores[i + j] = exp2_approx(scores[i + j] * cap - of_column(queries, j));
        }
        convert_score_grad(score_grad[i / 8], derivatives);
    }
}

// `exponentiate_logits`, given the range of what the user's function has in a tanh.
template <TanhRange range>
__device__ __forceinline__ void exponentiate_modified(float (&scores)[score_count],
                                                      uint32_t (&score_grad)[query_steps][4], const Call& call,
                                                      int batch, int head, int block, int key, const float4* lse) {
    const Shape& shape = call.shape;
#pragma unroll
    for (int i = 0; i < score_count; i += 8) {
        const float4 queries = lse[i / 2 + threadIdx.x % 4];
        float derivatives[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const Position own_key = key_position(key, i + j, shape);
            const ScoreRow row(call.scores, batch, head, query_position(block, i + j, shape), shape.queries,
                               shape.keys);
            const float logit = row.logit<range>(scores[i + j], own_key, derivatives[j]);
            scores[i + j] = exp2_approx(logit * log2_e - of_column(queries, j));
            // Its logit is -inf, which is no less than a lse of NaN (isolation.cuh).
            if constexpr (Traits::isolates && ScoreTraits::mask) {
                if (!lets_see(row, own_key)) scores[i + j] = 0;
            }
        }
        if constexpr (ScoreTraits::score_grad) convert_score_grad(score_grad[i / 8], derivatives);
    }
}

// The range of what the user's function has in a tanh, for all scores of a warp (common/tanh.cuh).
__device__ __forceinline__ TanhRange range_in_tanh(const float (&scores)[score_count], const Call& call, int batch,
                                                   int head, int block, int key) {
    if constexpr (!ScoreRow::has_tanh) return TanhRange::unasked;
    const Shape& shape = call.shape;
    float largest = 0;
#pragma unroll
    for (int i = 0; i < score_count; ++i) {
        const ScoreRow row(call.scores, batch, head, query_position(block, i, shape), shape.queries, shape.keys);
        largest = fmaxf(largest, row.largest_in_tanh(scores[i], key_position(key, i, shape)));
    }
    return tanh_range(largest);
}

// Sᵀ becomes Pᵀ. `score_grad` becomes the derivative of logits by scores, converted as P will be. `key` is the thread's
// first.
__device__ __forceinline__ void exponentiate_logits(float (&scores)[score_count],
                                                    uint32_t (&score_grad)[query_steps][4], const Call& call, int batch,
                                                    int head, int block, int key, const float4* lse) {
    if constexpr (ScoreTraits::soft_cap_alone) {
        exponentiate_capped(scores, score_grad, call.scores, lse);
    } else {
        const TanhRange range = range_in_tanh(scores, call, batch, head, block, key);
        if (range == TanhRange::sixth) {
            exponentiate_modified<TanhRange::sixth>(scores, score_grad, call, batch, head, block, key, lse);
        } else if (range == TanhRange::one) {
            exponentiate_modified<TanhRange::one>(scores, score_grad, call, batch, head, block, key, lse);
        } else {
            exponentiate_modified<ScoreRow::whole_range>(scores, score_grad, call, batch, head, block, key, lse);
        }
    }
    // What a function makes of queries beyond the last may not be finite.
    const int beyond = call.shape.queries - block * Traits::queries;
    if (ScoreTraits::user && beyond < Traits::queries) {
#pragma unroll
        for (int i = 0; i < score_count; ++i) {
            if (query_of(i) >= beyond) scores[i] = 0;
        }
    }
}

// Zeroes elements of Pᵀ of pairs that the block mask hides. `key` is the thread's first.
template <int count>
__device__ __forceinline__ void mask_by_function(float (&probabilities)[count], const Call& call, int batch, int head,
                                                 int block, int key) {
#if BLOCK_MASK
    const Shape& shape = call.shape;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const MaskRow row(shape.block_mask, batch, head, query_position(block, i, shape));
        if (!row.sees(key_position(key, i, shape))) probabilities[i] = 0;
    }
#endif
}

// P or dS times the derivative of logits by scores. Those of pairs that don't see each other are 0, and stay so: what a
// user's function has for a derivative there may not be finite.
__device__ __forceinline__ float times_score_grad(float x, float derivative) {
    return SCORE_MOD == 2 && x == 0 ? 0 : x * derivative;
}
// Of pairs of 16-bit elements.
__device__ __forceinline__ uint32_t times_score_grad(uint32_t pair, uint32_t derivatives) {
    if constexpr (SCORE_MOD != 2) return multiply_pairs<Traits::Element>(pair, derivatives);
    const float2 x = to_floats<Traits::Element>(pair), factor = to_floats<Traits::Element>(derivatives);
    return convert<Traits::Element>(times_score_grad(x.x, factor.x), times_score_grad(x.y, factor.y));
}

// Derivatives of logits by scores become their products with P.
__device__ __forceinline__ void multiply_by_score_grad(uint32_t (&derivatives)[query_steps][4],
                                                       const uint32_t (&probabilities)[query_steps][4]) {
#pragma unroll
    for (int i = 0; i < 4 * query_steps; ++i) {
        uint32_t& factor = derivatives[i / 4][i % 4];
        factor = times_score_grad(probabilities[i / 4][i % 4], factor);
    }
}

// Adds to a sum of many CTAs: of floats; of terms times `factor` as integers, or exactly, where the order doesn't
// matter.
__device__ __forceinline__ void add_term(float* sum, float term, float) { atomicAdd(sum, term); }
__device__ __forceinline__ void add_term(uint64_t* sum, float term, float factor) {
    atomicAdd(sum, static_cast<uint64_t>(__float2ll_rn(term * factor)));
}
__device__ __forceinline__ void add_term(ExactSum* sum, float term, float) { sum->add(term); }

// Adds dS of the thread's keys and the block's queries to the bias's gradient, over whatever axes the bias is the same.
__device__ __forceinline__ void add_bias_gradient(const float (&d_scores)[score_count], const Call& call, int batch,
                                                  int head, int block, int key) {
    const Strides& strides = call.scores.bias_strides;
    using Sum = Traits::BiasSum;
    Sum* const of_head = call.d_bias + batch * strides.batch + head * strides.head;
    const int lane = threadIdx.x % 32, first_query = block * Traits::queries;
    const float factor = is_same<Sum, float> ? 1 : *call.bias_factor;
    auto add = [&](int query, int row, float sum) {
        const int at = key + 8 * row;
        if (query < call.shape.queries && at < call.shape.keys) {
            add_term(of_head + query * strides.query + static_cast<int64_t>(at) * strides.key, sum, factor);
        }
    };
    if (strides.query == 0) {
        float sums[2] = {};  // of the thread's rows
#pragma unroll
        for (int i = 0; i < score_count; ++i) sums[key_row_of(i)] += d_scores[i];
        if (strides.key == 0) {
            const float sum = warp_sum(sums[0] + sums[1]);
            if (lane == 0) add_term(of_head, sum, factor);
        } else {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const float sum = quad_sum(sums[row]);
                if (lane % 4 == 0) add(first_query, row, sum);
            }
        }
    } else if (strides.key == 0) {
#pragma unroll
        for (int i = 0; i < score_count; ++i) {
            if (key_row_of(i) == 1) continue;
            float sum = d_scores[i] + d_scores[i + 2];
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(all_lanes, sum, distance);
            if (lane < 4) add(first_query + query_of(i), 0, sum);
        }
    } else {
#pragma unroll
        for (int i = 0; i < score_count; ++i) add(first_query + query_of(i), key_row_of(i), d_scores[i]);
    }
}

// Adds to the warp's own share of the slope's gradient, so that no order but its own decides on the sum. The
// warpgroup's 64 keys are those from `first_key` on.
__device__ __forceinline__ void add_slope_gradient(const float (&d_scores)[score_count], const Call& call,
                                                   const KeyTile& tile, int first_key, int head, int block, int key) {
    const Shape& shape = call.shape;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < score_count; ++i) {
        const ScoreRow row(call.scores, tile.batch, head, query_position(block, i, shape), shape.queries, shape.keys);
        sum -= d_scores[i] * row.distance(key_position(key, i, shape));
    }
    sum = warp_sum(sum);
    const int64_t shares = ceil_div(shape.keys, Traits::keys) * (Traits::keys / 64);
    const int64_t share = call.head_index(tile, head) * shares + first_key / 64;
    if (threadIdx.x % 32 == 0) atomicAdd(call.d_slopes + share * 4 + threadIdx.x / 32 % 4, sum);
}

// Terms that a thread adds to the same element of an array, one after another. Many do: those of a head's slope, and of
// pairs farther apart than a table goes. Atomic additions to one address take turns.
struct GradientRun {
    static constexpr int none = -1;
    int index = none;
    float sum = 0;

    template <class Sum>
    __device__ __forceinline__ void add(Sum* sums, int at, float term) {
        if (at != index) {
            if (index != none) add_term(sums + index, sum, 1);
            index = at, sum = 0;
        }
        sum += term;
    }
    // By all lanes of a warp.
    template <class Sum>
    __device__ __forceinline__ void finish(Sum* sums) {
        const int common = __reduce_max_sync(all_lanes, index);
        if (__any_sync(all_lanes, index != none && index != common)) {
            if (index != none) add_term(sums + index, sum, 1);
        } else {
            const float of_warp = warp_sum(sum);
            if (threadIdx.x % 32 == 0 && common != none) add_term(sums + common, of_warp, 1);
        }
    }
};

#if SCORE_MOD_GRADIENTS
// Terms of elements that are the same for all scores of a head, as a head's slope is: a thread adds them up over all
// blocks of a query head.
struct HeadSums {
    float of_gather[user_score_mod::gathers] = {};

    __device__ static constexpr bool have_all() {
        for (int gather = 0; gather < user_score_mod::gathers; ++gather) {
            if (!user_score_mod::is_of_head(gather)) return false;
        }
        return true;
    }
    __device__ __forceinline__ void add(int gather, float d_score, float term) {
        of_gather[gather] += user_score_mod::is_finite(gather) || d_score != 0 ? term : 0;
    }
    // Adds them to the gradients, and starts anew. By all lanes of a warp.
    __device__ __forceinline__ void finish(const Call& call, int batch, int head) {
        const UserScoreModGradients sums = user_score_mod::of_batch_row(call.user_gradients, batch);
        const UserRow row(call.scores.user, batch, head, 0);
        using Sum = decltype(user_score_mod::sums_of(sums, 0));
        user_score_mod::add_gradients(sums, row.element({0, 1}, 0), 0, [&](int gather, Sum sum, int index, float) {
            if (!user_score_mod::is_of_head(gather)) return;
            const float of_warp = warp_sum(of_gather[gather]);
            if (threadIdx.x % 32 == 0) add_term(sum + index, of_warp, 1);
            of_gather[gather] = 0;
        });
    }
};

// Adds dS of the thread's keys and the block's queries to the gradients of what the user's function captures. A pair
// that doesn't see each other has dS = 0, whatever the function makes of it. `scores` are theirs if the gradients need
// them.
__device__ __forceinline__ void add_user_gradients(const float (&d_scores)[score_count],
                                                   const float (&scores)[score_count], HeadSums& head_sums,
                                                   const Call& call, int batch, int head, int block, int key) {
    const Shape& shape = call.shape;
    const UserScoreModGradients sums = user_score_mod::of_batch_row(call.user_gradients, batch);
    using Sum = decltype(user_score_mod::sums_of(sums, 0));
    GradientRun runs[user_score_mod::gathers];
#pragma unroll
    for (int i = 0; i < score_count; ++i) {
        const ScoreRow row(call.scores, batch, head, query_position(block, i, shape), shape.queries, shape.keys);
        if (!HeadSums::have_all() && d_scores[i] == 0) continue;
        const float score = ScoreTraits::user_gradients_need_scores ? scores[i] : 0;
        float derivative;  // which no one reads
        user_score_mod::add_gradients(
            sums, row.user_element<TanhRange::unasked>(score, key_position(key, i, shape), derivative), d_scores[i],
            [&](int gather, Sum sum, int index, float term) {
                if (user_score_mod::is_of_head(gather)) {
                    head_sums.add(gather, d_scores[i], term);
                } else {
                    runs[gather].add(sum, index, term);
                }
            });
    }
#pragma unroll
    for (int gather = 0; gather < user_score_mod::gathers; ++gather) {
        if (!user_score_mod::is_of_head(gather)) runs[gather].finish(user_score_mod::sums_of(sums, gather));
    }
}
#endif
