// The five products of a block as wgmmas, and what happens to accumulators between them.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/backward/traits.cuh"

using wgmma::Major;
using wgmma::Wgmma;

constexpr int score_count = Traits::queries / 2;      // accumulators a thread holds of Sᵀ or dPᵀ, for 64 keys
constexpr int d_key_count = Traits::head_dim / 2;     // … of dK, for 64 keys
constexpr int d_value_count = Traits::value_dim / 2;  // … of dV
constexpr int query_steps = Traits::queries / 16;     // k16 steps of a contraction over queries
constexpr int key_steps = Traits::head_dim / 16;      // … over columns of K and Q
constexpr int value_steps = Traits::value_dim / 16;   // … of V and dO

// Sᵀ = K Qᵀ or dPᵀ = V dOᵀ for 64 keys, or some steps of it, issued and committed as one group.
template <int first_step, int last_step>
__device__ __forceinline__ void issue_scores(float (&scores)[score_count], uint32_t key_rows, uint32_t query_block) {
    const uint64_t a = descriptor::k_major(key_rows), b = descriptor::k_major(query_block);
    wgmma::pin(scores);
    wgmma::fence();
#pragma unroll
    for (int step = first_step; step < last_step; ++step) {
        Wgmma<Traits::queries>::issue<Traits::Element, Major::K, Major::K>(
            scores, descriptor::advance(a, descriptor::k_major_offset(step, Traits::cta_keys)),
            descriptor::advance(b, descriptor::k_major_offset(step, Traits::queries)), step > 0);
    }
    wgmma::commit();
    wgmma::pin(scores);
}

// dV += Pᵀ dO or dK += dSᵀ Q for 64 keys, issued and committed as one group.
template <int count>
__device__ __forceinline__ void issue_gradient(float (&gradient)[count], const uint32_t (&transposed)[query_steps][4],
                                               uint32_t query_block) {
    const uint64_t b = descriptor::mn_major(query_block, Traits::queries);
    wgmma::pin(gradient);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < query_steps; ++step) {
        Wgmma<2 * count>::template issue<Traits::Element, Major::MN>(
            gradient, transposed[step], descriptor::advance(b, descriptor::mn_major_offset(step)), 1);
    }
    wgmma::commit();
    wgmma::pin(gradient);
}

// A tile of dQ (+)= dS K, issued and committed as one group: 64 queries and K's columns from address `key_columns` on.
template <int columns>
__device__ __forceinline__ void issue_d_query(float (&d_query)[columns / 2], uint32_t d_scores_panel,
                                              uint32_t key_columns, bool accumulate = false) {
    const uint64_t a = descriptor::mn_major(d_scores_panel, Traits::cta_keys);
    const uint64_t b = descriptor::mn_major(key_columns, Traits::cta_keys);
    wgmma::pin(d_query);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < Traits::cta_keys / 16; ++step) {
        Wgmma<columns>::template issue<Traits::Element, Major::MN, Major::MN>(
            d_query, descriptor::advance(a, descriptor::mn_major_offset(step)),
            descriptor::advance(b, descriptor::mn_major_offset(step)), accumulate || step > 0);
    }
    wgmma::commit();
    wgmma::pin(d_query);
}

// Eight accumulators' columns are four queries: those of the first four, then of the last four.
__device__ __forceinline__ float of_column(float4 queries, int accumulator) {
    const float2 pair = accumulator % 8 < 4 ? float2{queries.x, queries.y} : float2{queries.z, queries.w};
    return accumulator % 2 == 0 ? pair.x : pair.y;
}

// Sᵀ becomes Pᵀ.
__device__ __forceinline__ void exponentiate(float (&scores)[score_count], const float4* lse, float scale_log2) {
#pragma unroll
    for (int i = 0; i < score_count; i += 8) {
        const float4 queries = lse[i / 2 + threadIdx.x % 4];
#pragma unroll
        for (int j = 0; j < 8; ++j) scores[i + j] = exp2_approx(scores[i + j] * scale_log2 - of_column(queries, j));
    }
}

// dS of elements of P and of dP, and their query's delta. With dropout P is negative where it is dropped, and dP and
// delta are yet to be divided by the share that is kept.
__device__ __forceinline__ float differential(float p, float d_p, float delta) {
    if constexpr (Traits::dropout) return fmaxf(p, 0) * d_p - fabsf(p) * delta;
    return p * (d_p - delta);
}

// dPᵀ becomes dSᵀ = Pᵀ ∘ (dPᵀ − delta); the scale comes in with dK and dQ. `probabilities(i)` gives elements i … i+3.
template <class Probabilities>
__device__ __forceinline__ void differentiate(float (&d_scores)[score_count], const float4* delta,
                                              Probabilities probabilities) {
#pragma unroll
    for (int i = 0; i < score_count; i += 8) {
        const float4 queries = delta[i / 2 + threadIdx.x % 4];
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
            const float4 p = probabilities(i + j);
            d_scores[i + j] = differential(p.x, d_scores[i + j], of_column(queries, j));
            d_scores[i + j + 1] = differential(p.y, d_scores[i + j + 1], of_column(queries, j + 1));
            d_scores[i + j + 2] = differential(p.z, d_scores[i + j + 2], of_column(queries, j + 2));
            d_scores[i + j + 3] = differential(p.w, d_scores[i + j + 3], of_column(queries, j + 3));
        }
    }
}

__device__ __forceinline__ void convert_operand(uint32_t (&operand)[query_steps][4],
                                                const float (&values)[score_count]) {
#pragma unroll
    for (int i = 0; i < score_count / 2; ++i) {
        operand[i / 4][i % 4] = convert<Traits::Element>(values[2 * i], values[2 * i + 1]);
    }
}

// Elements i … i+3 of an operand, as floats.
__device__ __forceinline__ float4 operand_floats(const uint32_t (&operand)[query_steps][4], int i) {
    const float2 low = to_floats<Traits::Element>(operand[i / 8][i / 2 % 4]);
    const float2 high = to_floats<Traits::Element>(operand[i / 8][i / 2 % 4 + 1]);
    return {low.x, low.y, high.x, high.y};
}

// Dropout's hashes of a thread's two keys, of which `key` is the first.
__device__ __forceinline__ void load_key_hashes(uint32_t (&hashes)[2], const Dropout& dropout, const Shape& shape,
                                               int batch, int key) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const uint32_t* row = dropout.columns + static_cast<int64_t>(batch) * shape.keys;
        hashes[r] = global::read_only(row + min(key + 8 * r, shape.keys - 1));
    }
}

// What is kept of P, whose dropped elements have a sign.
__device__ __forceinline__ void take_kept(uint32_t (&kept)[query_steps][4],
                                          const uint32_t (&marked)[query_steps][4]) {
#pragma unroll
    for (int i = 0; i < 4 * query_steps; ++i) {
        kept[i / 4][i % 4] = without_negatives<Traits::Element>(marked[i / 4][i % 4]);
    }
}

// dSᵀ of 64 keys from row `first_row` of the buffer on. Lanes address the rows of four 8×8 matrices: keys
// and keys + 8 of eight queries, then of the next eight.
__device__ __forceinline__ void store_d_scores(const uint32_t (&operand)[query_steps][4], uint32_t buffer,
                                               int first_row) {
    const int row = first_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
    const int half = threadIdx.x / 16 % 2;
#pragma unroll
    for (int step = 0; step < query_steps; ++step) {
        const uint32_t panel = buffer + step / 4 * descriptor::panel_bytes(Traits::cta_keys);
        store_matrix_x4(panel + descriptor::swizzled_offset(row, step % 4 * 2 + half), operand[step][0],
                        operand[step][1], operand[step][2], operand[step][3]);
    }
}

// Hands dSᵀ of 64 keys to the warpgroup that computes dQ. All of one warpgroup's threads call it.
__device__ __forceinline__ void hand_over_d_scores(const SharedMemory& shared, DScoresSlot& slot,
                                                   const uint32_t (&operand)[query_steps][4], int first_row) {
    mbarrier::wait(shared.d_scores_empty(slot.stage), slot.parity ^ 1);
    store_d_scores(operand, shared.d_scores_buffer(slot.stage), first_row);
    fence_shared_for_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier::arrive(shared.d_scores_full(slot.stage));
    slot.advance();
}

// Writes dK or dV of a warpgroup's 64 keys by TMA, which clips rows and columns that are not there, from `staging`,
// which is in use until `wait_for_stores`. All of the warpgroup's threads call it, and `barrier` is for them.
template <int count>
__device__ __forceinline__ void store_gradient(const float (&gradient)[count], float factor, const TensorMap& map,
                                               uint32_t staging, int barrier, int head, int first_key, int batch) {
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16, half = threadIdx.x / 16 % 2;
#pragma unroll
    for (int i = 0; i < count; i += 8) {
        const int chunk = i / 4 + half;
        const uint32_t panel = staging + chunk / 8 * descriptor::panel_bytes(Traits::gradient_panel_rows);
        store_matrix_x4(panel + descriptor::swizzled_offset(row, chunk % 8),
                        convert<Traits::Element>(gradient[i] * factor, gradient[i + 1] * factor),
                        convert<Traits::Element>(gradient[i + 2] * factor, gradient[i + 3] * factor),
                        convert<Traits::Element>(gradient[i + 4] * factor, gradient[i + 5] * factor),
                        convert<Traits::Element>(gradient[i + 6] * factor, gradient[i + 7] * factor));
    }
    fence_shared_for_async();
    named_barrier_sync(barrier, 128);
    if (threadIdx.x % 128 == 0) {
#pragma unroll
        for (int panel = 0; panel < ceil_div(2 * count, descriptor::panel_columns); ++panel) {
            tma::store(map, staging + panel * descriptor::panel_bytes(Traits::gradient_panel_rows),
                       panel * descriptor::panel_columns, head, first_key, batch);
        }
        tma::commit_group();
    }
}

// Waits until what the warpgroup has stored is read from shared memory.
__device__ __forceinline__ void wait_for_stores(int barrier) {
    if (threadIdx.x % 128 == 0) tma::wait_group_read<0>();
    named_barrier_sync(barrier, 128);
}
